/* What runs in this machine, from /proc, and how to end it without starting anything. */
#define _GNU_SOURCE
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_PROCS = 65536, SLOW_SCAN_MS = 150, SLOW_SCAN_PROCS = 64 };

static ssize_t slurp(int dir, const char *pid, const char *name, char *out, size_t n) {
    char path[64];
    snprintf(path, sizeof path, "%.16s/%s", pid, name);
    int fd = openat(dir, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t r = read(fd, out, n - 1);
    close(fd);
    out[r > 0 ? r : 0] = 0;
    return r;
}

/* The fields after the name, which may itself hold spaces and brackets. */
static bool parse_stat(const char *text, struct proc *p) {
    const char *end = strrchr(text, ')');
    unsigned long ut, st;
    long cut, cst, rss;
    int ppid, pgrp, session;
    if (!end || sscanf(end + 1, " %c %d %d %d %*d %*d %*u %*u %*u %*u %*u %lu %lu %ld %ld %*d %*d %*d %*d %*u %*u %ld",
                       &p->state, &ppid, &pgrp, &session, &ut, &st, &cut, &cst, &rss) != 9)
        return false;
    p->ppid = ppid;
    p->pgrp = pgrp;
    p->session = session;
    long hz = sysconf(_SC_CLK_TCK);
    p->cpu_ms = (ut + st) * 1000 / (unsigned long)hz;
    p->children_ms = (uint64_t)(cut + cst) * 1000 / (uint64_t)hz;
    p->rss_kb = (uint64_t)(rss > 0 ? rss : 0) * (uint64_t)(getpagesize() / 1024);
    return true;
}

uint64_t stood_still_ms;

/* Among hundreds of busy processes each of our thousands of calls waits for its turn. One call stops
   them all, and where the machine is ours alone that is nobody else's harm. */
static void stand_still(struct procs *l) {
    if (l->stopped || plain || getpid() != 1) return;
    l->stopped = kill(-1, SIGSTOP) == 0;
    stood_still_ms = now_ms();
}

bool procs_scan(struct procs *l, bool marks) {
    uint64_t begun = now_ms();
    l->n = 0;
    DIR *d = opendir("/proc");
    if (!d) return false;
    char text[1024];
    for (struct dirent *e; (e = readdir(d)) && l->n < MAX_PROCS;) {
        if (e->d_name[0] < '1' || e->d_name[0] > '9') continue;
        if (l->n >= SLOW_SCAN_PROCS && now_ms() - begun > SLOW_SCAN_MS) stand_still(l);
        if (l->n == l->cap) {
            size_t cap = l->cap ? l->cap * 2 : 64;
            struct proc *v = realloc(l->v, cap * sizeof *v);
            if (!v) break;
            l->v = v;
            l->cap = cap;
        }
        struct proc *p = &l->v[l->n];
        memset(p, 0, sizeof *p);
        p->pid = (pid_t)strtol(e->d_name, NULL, 10);
        if (p->pid == getpid()) continue;
        if (slurp(dirfd(d), e->d_name, "stat", text, sizeof text) <= 0 || !parse_stat(text, p)) continue;
        if (microvm && (p->pid == 2 || p->ppid == 2)) continue; /* the kernel's own threads */
        struct rlimit r;
        if (marks && prlimit(p->pid, RLIMIT_RSS, NULL, &r) == 0) p->mark = r.rlim_cur;
        l->n++;
    }
    closedir(d);
    return true;
}

void procs_free(struct procs *l) {
    if (l->stopped) kill(-1, SIGCONT);
    free(l->v);
    memset(l, 0, sizeof *l);
}

/* Adds every descendant of what is already hit. */
static void spread(struct procs *l) {
    for (bool more = true; more;) {
        more = false;
        for (size_t i = 0; i < l->n; i++) {
            if (l->v[i].hit || l->v[i].ppid <= 1) continue;
            for (size_t k = 0; k < l->n; k++)
                if (l->v[k].hit && l->v[k].pid == l->v[i].ppid) {
                    l->v[i].hit = more = true;
                    break;
                }
        }
    }
}

static int strike(struct procs *l, int sig) {
    int alive = 0;
    for (size_t i = 0; i < l->n; i++) {
        if (!l->v[i].hit || l->v[i].state == 'Z' || l->v[i].state == 'X') continue;
        alive++;
        kill(l->v[i].pid, sig);
    }
    return alive;
}

/* Three ways to know a descendant, for each can be lost: the command's mark (an unlimited program may
   set its own limits), its session or group (setsid leaves them), its parents (a double fork does). */
static void match(struct procs *l, const struct cmd *c) {
    uint64_t mark = cmd_mark(c);
    for (size_t i = 0; i < l->n; i++) {
        struct proc *p = &l->v[i];
        p->hit = p->mark == mark || p->session == c->pid || p->pgrp == c->pid || (p->pid == c->pid && !c->exited);
    }
    spread(l);
}

/* Whole groups, each by one call: nothing that is in one has the time to fork. Only those of the
   command's own session, where nothing else can be. */
static void strike_groups(const struct procs *l, const struct cmd *c, int sig) {
    pid_t last = 0;
    for (size_t i = 0; i < l->n; i++) {
        const struct proc *p = &l->v[i];
        if (!p->hit || p->session != c->pid || p->pgrp <= 1 || p->pgrp == last) continue;
        kill(-p->pgrp, sig);
        last = p->pgrp;
    }
}

int procs_kill_tree(struct cmd *c) {
    struct procs l = {0};
    int alive = 0;
    /* Stopped first: what is stopped starts nothing new while the rest is looked for, and leaves us the
       CPU to look. Its own group at once, before the first of many names in /proc. */
    if (!c->exited) kill(-c->pid, SIGSTOP);
    for (int round = 0, before = 0; round < 8; round++) {
        if (!procs_scan(&l, true)) break;
        match(&l, c);
        strike_groups(&l, c, round ? SIGKILL : SIGSTOP);
        alive = strike(&l, round ? SIGKILL : SIGSTOP);
        if (!alive || (round > 1 && alive <= before)) break;
        before = alive;
    }
    procs_free(&l);
    return alive;
}

/* gVisor's release of July 2024 tells nobody. Who does not
   care ignores the signal by default; a kernel that has told already makes it two. */
void procs_winch(const struct cmd *c) {
    struct procs l = {0};
    pid_t last = 0;
    procs_scan(&l, false);
    for (size_t i = 0; i < l.n; i++) {
        pid_t group = l.v[i].session == c->pid ? l.v[i].pgrp : 0;
        if (group > 1 && group != last) kill(-group, SIGWINCH);
        if (group > 1) last = group;
    }
    procs_free(&l);
}

int procs_kill_pid_tree(pid_t root, int sig) {
    struct procs l = {0};
    int n = 0;
    if (procs_scan(&l, false)) {
        for (size_t i = 0; i < l.n; i++) l.v[i].hit = l.v[i].pid == root || l.v[i].session == root;
        spread(&l);
        n = strike(&l, sig);
    }
    procs_free(&l);
    return n;
}

void op_kill(uint32_t stream, struct in *in) {
    int pid = (int)get32(in), sig = (int)get32(in), scope = get8(in);
    int err = in->bad || sig < 0 || sig > 64 || pid == 0 || pid == 1 || pid == getpid() ? EINVAL : 0;
    if (!err && plain && pid < 0) err = EINVAL;
    if (!err && scope == 3)
        err = procs_kill_pid_tree(pid, sig) ? 0 : ESRCH;
    else if (!err && kill(scope ? -pid : pid, sig) < 0)
        err = errno;
    stream_end(stream, err, err ? "cannot signal the process" : NULL, NULL);
}

/* One of those with whom most others share the command's mark or, for want of one, the session. */
static const struct proc *most_crowded(const struct procs *l, size_t least, size_t *most) {
    const struct proc *worst = NULL;
    *most = 0;
    for (size_t i = 0; i < l->n; i++) {
        const struct proc *p = &l->v[i];
        if (p->state == 'Z' || (plain && !cmd_by_mark(p->mark))) continue;
        bool marked = cmd_marked(p->mark), first = true;
        size_t n = 0;
        for (size_t k = 0; k < l->n && first; k++) {
            const struct proc *q = &l->v[k];
            if (q->state == 'Z' || (marked ? q->mark != p->mark : q->session != p->session)) continue;
            if (k < i) first = false; /* counted when its turn was */
            n++;
        }
        if (first && n > *most) *most = n, worst = p;
    }
    return *most < least ? NULL : worst;
}

/* A one-shot command ends whole. Of a terminal or a session fed by a pipe, and of what an ended command left
   behind, all but the command itself goes. */
static void clear_crowd(struct procs *l, const struct proc *of, struct cmd *c) {
    bool marked = cmd_marked(of->mark);
    uint64_t mark = of->mark;
    pid_t session = of->session;
    for (int round = 0; round < 8; round++) {
        for (size_t i = 0; i < l->n; i++) {
            struct proc *p = &l->v[i];
            p->hit = (marked ? p->mark == mark : p->session == session) && !(c && p->pid == c->pid);
        }
        if (!strike(l, SIGKILL) || !procs_scan(l, true)) return;
    }
}

/* The process with the largest memory, or (1) what has the most processes; (2) the daemon knows that there
   are so many that all have to stop before we look. Where the process belongs to
   a one-shot command, the command ends whole (thirty small hogs are one command); a terminal or a session fed
   by a pipe loses the process only. */
void op_kill_largest(uint32_t stream, struct in *in) {
    uint8_t how = in->left ? get8(in) : 0;
    bool crowd = how & 1;
    size_t least = crowd ? get32(in) : 0;
    struct procs l = {0};
    const struct proc *worst = NULL;
    struct cmd *c = NULL;
    size_t count = 0;
    if (how & 2) stand_still(&l);
    if (!procs_scan(&l, true))
        ;
    else if (crowd)
        worst = most_crowded(&l, least, &count);
    else
        for (size_t i = 0; i < l.n; i++)
            if (l.v[i].state != 'Z' && (!plain || cmd_by_mark(l.v[i].mark)) && (!worst || l.v[i].rss_kb > worst->rss_kb)) worst = &l.v[i];
    struct buf b = {0};
    put32(&b, worst ? (uint32_t)worst->pid : 0);
    put64(&b, worst ? worst->rss_kb : 0);
    if (worst) {
        if (!crowd) kill(worst->pid, SIGKILL);
        c = cmd_by_mark(worst->mark);
        if (c && (c->exited || c->done)) c = NULL;
        bool whole = c && !(c->flags & (C_PTY | C_STDIN));
        if (c) *(crowd ? &c->crowded : &c->oom) = true;
        if (crowd && !whole) clear_crowd(&l, worst, c);
        if (whole) cmd_kill_tree(c);
    }
    put32(&b, c ? (uint32_t)c->pid : 0);
    put32(&b, (uint32_t)count);
    procs_free(&l);
    stream_end(stream, 0, NULL, &b);
    buf_free(&b);
}

void op_activity(uint32_t stream, struct in *in) {
    (void)in;
    struct procs l = {0};
    struct rusage r;
    getrusage(RUSAGE_CHILDREN, &r);
    uint64_t ms = (uint64_t)(r.ru_utime.tv_sec + r.ru_stime.tv_sec) * 1000 +
                  (uint64_t)(r.ru_utime.tv_usec + r.ru_stime.tv_usec) / 1000;
    uint32_t alive = 0;
    if (procs_scan(&l, plain))
        for (size_t i = 0; i < l.n; i++) {
            if (plain && !cmd_by_mark(l.v[i].mark)) continue; /* the rest of a host is not ours */
            ms += l.v[i].cpu_ms + l.v[i].children_ms;
            alive += l.v[i].state != 'Z';
        }
    procs_free(&l);
    struct buf b = {0};
    put64(&b, ms);
    put32(&b, alive);
    stream_end(stream, 0, NULL, &b);
    buf_free(&b);
}

void op_procs(uint32_t stream, struct in *in) {
    (void)in;
    struct procs l = {0};
    struct buf b = {0};
    char pid[16], line[513], user[64];
    int dir = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    procs_scan(&l, true);
    put32(&b, 0);
    uint32_t n = 0;
    for (size_t i = 0; i < l.n && b.len < MAX_REQUEST / 2; i++) {
        struct proc *p = &l.v[i];
        struct stat st;
        snprintf(pid, sizeof pid, "%d", p->pid);
        if (fstatat(dir, pid, &st, 0) < 0) continue;
        ssize_t len = slurp(dir, pid, "cmdline", line, sizeof line);
        if (len <= 0) { /* a zombie, or it erased it */
            len = slurp(dir, pid, "comm", line, sizeof line);
            if (len > 0 && line[len - 1] == '\n') len--;
        }
        while (len > 0 && !line[len - 1]) len--;
        for (ssize_t k = 0; k < len; k++)
            if (!line[k]) line[k] = ' ';
        user_name(st.st_uid, user, sizeof user);
        struct cmd *c = cmd_by_mark(p->mark);
        put32(&b, (uint32_t)p->pid);
        put32(&b, (uint32_t)p->ppid);
        put32(&b, st.st_uid);
        put8(&b, (uint8_t)p->state);
        put64(&b, p->cpu_ms);
        put64(&b, p->rss_kb);
        put32(&b, c && !c->done ? (uint32_t)c->pid : 0);
        put8(&b, c && c->flags & C_DETACHED ? 1 : 0);
        putbytes(&b, user, strlen(user));
        putbytes(&b, line, len > 0 ? (size_t)len : 0);
        n++;
    }
    if (dir >= 0) close(dir);
    memcpy(b.p, &n, 4);
    procs_free(&l);
    stream_end(stream, 0, NULL, &b);
    buf_free(&b);
}
