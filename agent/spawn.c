/* Starting a program, without a copy of the agent's memory. */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Runs in the child, which shares the parent's memory: system calls only. */
__attribute__((noreturn)) static void child(struct plan *p) {
    static char *sh[4096];
    p->stage = STAGE_SETUP;
    syscall(SYS_setsid);
    if (p->tty) {
        int fd = open(p->tty, O_RDWR);
        if (fd < 0 || ioctl(fd, TIOCSCTTY, 0) < 0) goto fail;
        for (int i = 0; i < 3; i++)
            if (dup2(fd, i) < 0) goto fail;
        if (fd > 2) close(fd);
    } else {
        for (int i = 0; i < 3; i++)
            if (dup2(p->fd[i], i) < 0) goto fail;
    }
    /* The command's mark: inherited by fork, exec, setsid and su alike, limits nothing. */
    struct rlimit r = {p->mark, RLIM_INFINITY};
    if (p->mark) setrlimit(RLIMIT_RSS, &r);
    getrlimit(RLIMIT_NOFILE, &r);
    if (p->nofile && p->nofile <= r.rlim_max)
        r.rlim_cur = r.rlim_max = p->nofile;
    else
        r.rlim_cur = nofile_soft < r.rlim_max ? nofile_soft : r.rlim_max;
    setrlimit(RLIMIT_NOFILE, &r);
    p->stage = STAGE_USER;
    if (p->user && privileged) {
        const struct user *u = p->user;
        if (syscall(SYS_setgroups, u->ngroups, u->groups) < 0 || syscall(SYS_setresgid, u->gid, u->gid, u->gid) < 0 ||
            syscall(SYS_setresuid, u->uid, u->uid, u->uid) < 0)
            goto fail;
    }
    p->stage = STAGE_CWD;
    if (p->cwd && chdir(p->cwd) < 0) goto fail;
    p->stage = STAGE_EXEC;
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    int worst = ENOENT;
    for (char **path = p->paths; *path; path++) {
        execve(*path, p->argv, p->envp);
        if (errno == ENOEXEC) { /* a script without #!, as the shells treat it */
            size_t n = 0;
            while (p->argv[n]) n++;
            if (n > 4000) break;
            sh[0] = "/bin/sh";
            sh[1] = *path;
            for (size_t i = 1; i <= n; i++) sh[i + 1] = p->argv[i];
            execve(sh[0], sh, p->envp);
            worst = ENOEXEC;
            break;
        }
        if (errno != ENOENT && errno != ENOTDIR) worst = errno;
        if (errno != ENOENT && errno != ENOTDIR && errno != EACCES) break;
    }
    errno = worst;
fail:
    p->error = errno;
    _exit(127);
}

/* All signals are blocked in the agent, so no handler runs while memory is shared. */
pid_t spawn_plan(struct plan *p) {
    p->error = 0;
    pid_t pid = vfork();
    if (!pid) child(p);
    return pid;
}

static const char *value(char **envp, const char *name) {
    size_t n = strlen(name);
    for (; *envp; envp++)
        if (!strncmp(*envp, name, n) && (*envp)[n] == '=') return *envp + n + 1;
    return NULL;
}

void strv_free(char **v) {
    for (char **p = v; p && *p; p++) free(*p);
    free(v);
}

/* Where execve is to look for file, in order. */
char **spawn_paths(const char *file, char **envp) {
    char **v = calloc(130, sizeof *v);
    if (!v) return NULL;
    if (strchr(file, '/') || !*file) {
        v[0] = strdup(file);
        return v;
    }
    const char *path = value(envp, "PATH");
    size_t n = 0;
    for (const char *p = path ? path : "/usr/local/bin:/usr/bin:/bin"; n < 128;) {
        size_t len = strcspn(p, ":");
        char *s = NULL;
        if (asprintf(&s, "%.*s%s%s", (int)len, p, len ? "/" : "", file) < 0) break;
        v[n++] = s;
        if (!p[len]) break;
        p += len + 1;
    }
    return v;
}

static void add(char **v, size_t *n, const char *name, const char *val) {
    if (!val || value(v, name)) return;
    char *s = NULL;
    if (asprintf(&s, "%s=%s", name, val) >= 0) v[(*n)++] = s;
}

/* The given entries (now owned by the result) and what a login would have set. */
char **spawn_env(char **given, size_t n, const struct user *u, bool pty) {
    char **v = calloc(n + 10, sizeof *v);
    if (!v) return NULL;
    memcpy(v, given, n * sizeof *v);
    add(v, &n, "PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    add(v, &n, "HOME", u->home);
    add(v, &n, "USER", u->name);
    add(v, &n, "LOGNAME", u->name);
    add(v, &n, "SHELL", u->shell);
    if (*fork_id) add(v, &n, "FORKYARD_FORK_ID", fork_id);
    if (pty) add(v, &n, "TERM", "xterm-256color");
    return v;
}
