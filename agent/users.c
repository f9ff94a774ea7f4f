/* Users and groups, from /etc/passwd and /etc/group alone: a static program has no NSS. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A whole file in memory, read again when its size, time or inode says so. */
struct text {
    const char *path;
    char *p;
    struct timespec mtime;
    off_t size;
    ino_t ino;
};
static struct text passwd = {.path = "/etc/passwd"}, group = {.path = "/etc/group"};

static const char *load(struct text *t) {
    struct stat st;
    if (stat(t->path, &st) < 0) return "";
    if (t->p && t->size == st.st_size && t->ino == st.st_ino && t->mtime.tv_sec == st.st_mtim.tv_sec &&
        t->mtime.tv_nsec == st.st_mtim.tv_nsec)
        return t->p;
    if (!S_ISREG(st.st_mode) || st.st_size > (4 << 20)) return "";
    int fd = open(t->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return "";
    char *p = malloc((size_t)st.st_size + 1);
    ssize_t n = p ? read(fd, p, (size_t)st.st_size) : -1;
    close(fd);
    if (n < 0) {
        free(p);
        return "";
    }
    p[n] = 0;
    free(t->p);
    t->p = p;
    t->mtime = st.st_mtim;
    t->size = st.st_size;
    t->ino = st.st_ino;
    return p;
}

/* Splits one line at colons into at most n fields; the rest are empty. Returns the next line. */
static const char *split(const char *line, char *copy, size_t size, char **field, int n) {
    size_t len = strcspn(line, "\n");
    size_t keep = len < size - 1 ? len : size - 1;
    memcpy(copy, line, keep);
    copy[keep] = 0;
    char *p = copy;
    for (int i = 0; i < n; i++) {
        field[i] = p;
        char *colon = i < n - 1 ? strchr(p, ':') : NULL;
        if (colon) {
            *colon = 0;
            p = colon + 1;
        } else {
            p += strlen(p);
        }
    }
    return line[len] ? line + len + 1 : NULL;
}

static bool number(const char *s, uint32_t *out) {
    if (*s < '0' || *s > '9') return false;
    char *end;
    errno = 0;
    unsigned long v = strtoul(s, &end, 10);
    if (errno || *end || v > 0xFFFFFFFEul) return false;
    *out = (uint32_t)v;
    return true;
}

static bool find_passwd(const char *name, bool by_uid, uid_t uid, struct user *u) {
    static char line[4096];
    char *f[7];
    for (const char *p = load(&passwd); p && *p;) {
        p = split(p, line, sizeof line, f, 7);
        uint32_t id, gid;
        if (!number(f[2], &id) || !number(f[3], &gid)) continue;
        if (by_uid ? id != uid : strcmp(f[0], name) != 0) continue;
        u->uid = id;
        u->gid = gid;
        snprintf(u->name, sizeof u->name, "%s", f[0]);
        snprintf(u->home, sizeof u->home, "%s", *f[5] ? f[5] : "/");
        snprintf(u->shell, sizeof u->shell, "%s", *f[6] ? f[6] : "/bin/sh");
        return true;
    }
    return false;
}

static void find_groups(struct user *u) {
    static char line[16384];
    char *f[4];
    u->ngroups = 0;
    for (const char *p = load(&group); p && *p && u->ngroups < MAX_GROUPS;) {
        p = split(p, line, sizeof line, f, 4);
        uint32_t gid;
        if (!number(f[2], &gid)) continue;
        bool in = gid == u->gid;
        for (char *save, *m = strtok_r(f[3], ",", &save); m && !in; m = strtok_r(NULL, ",", &save))
            in = !strcmp(m, u->name);
        if (in) u->groups[u->ngroups++] = gid;
    }
    if (!u->ngroups) u->groups[u->ngroups++] = u->gid;
}

static int find_group(const char *name, gid_t *gid) {
    static char line[16384];
    char *f[4];
    if (number(name, gid)) return 0;
    for (const char *p = load(&group); p && *p;) {
        p = split(p, line, sizeof line, f, 4);
        if (!strcmp(f[0], name) && number(f[2], gid)) return 0;
    }
    return ENOENT;
}

int user_find(const char *spec, struct user *u) {
    char copy[128];
    if (strlen(spec) >= sizeof copy) return ENAMETOOLONG;
    strcpy(copy, *spec ? spec : "root");
    char *gid = strchr(copy, ':');
    if (gid) *gid++ = 0;
    uint32_t uid;
    memset(u, 0, sizeof *u);
    if (!find_passwd(copy, false, 0, u)) {
        if (!strcmp(copy, "root")) {
            strcpy(u->name, "root"); /* an image without /etc/passwd still has root */
            strcpy(u->home, "/root");
            strcpy(u->shell, "/bin/sh");
        } else if (!number(copy, &uid)) {
            return ENOENT;
        } else if (!find_passwd(NULL, true, uid, u)) {
            u->uid = uid;
            u->gid = gid ? 0 : uid;
            snprintf(u->name, sizeof u->name, "%u", uid);
            strcpy(u->home, "/");
            strcpy(u->shell, "/bin/sh");
        }
    }
    if (gid && *gid) {
        if (find_group(gid, &u->gid)) return ENOENT;
        u->ngroups = 1;
        u->groups[0] = u->gid;
    } else {
        find_groups(u);
    }
    return 0;
}

void user_name(uid_t uid, char *out, size_t n) {
    static struct user u;
    if (find_passwd(NULL, true, uid, &u))
        snprintf(out, n, "%s", u.name);
    else
        snprintf(out, n, "%u", uid);
}

/* Raw calls: libc's would look for other threads each time. */
int user_become(const struct user *u) {
    if (!privileged) return u->uid == geteuid() ? 0 : EPERM;
    if (!u->uid && !u->gid && u->ngroups <= 1) return 0;
    if (syscall(SYS_setgroups, u->ngroups, u->groups) < 0) return errno;
    if (syscall(SYS_setresgid, -1, u->gid, -1) < 0 || (u->uid && syscall(SYS_setresuid, -1, u->uid, -1) < 0)) {
        int e = errno;
        user_restore();
        return e;
    }
    return 0;
}

void user_restore(void) {
    if (!privileged) return;
    int e = errno;
    syscall(SYS_setresuid, -1, 0, -1);
    syscall(SYS_setresgid, -1, 0, -1);
    syscall(SYS_setgroups, 0, NULL);
    errno = e;
}
