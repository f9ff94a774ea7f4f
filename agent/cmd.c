/* Commands: from the request to the acknowledged exit status. */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

struct cmd *cmds;
static unsigned count;

/* Far above any memory size, so that the mark limits nothing, and not "unlimited". Our own pid keeps
   agents apart that share a machine (--plain). */
#define MARK_BASE 0x0F59000000000000ull
uint64_t cmd_mark(const struct cmd *c) { return MARK_BASE | (uint64_t)getpid() << 24 | (c->id & 0xFFFFFF); }

bool cmd_marked(uint64_t mark) { return mark >> 48 == MARK_BASE >> 48; }

struct cmd *cmd_by_mark(uint64_t mark) {
    for (struct cmd *c = cmds; c; c = c->next)
        if (cmd_mark(c) == mark) return c;
    return NULL;
}

static struct cmd *cmd_new(void) {
    /* Ended ones that nobody fetches are part of every image: the oldest make room. */
    struct cmd *old = NULL;
    unsigned idle = 0;
    for (struct cmd *c = cmds; c; c = c->next)
        if (c->drained && !c->stream && !c->done) old = c, idle++;
    if (idle >= MAX_ENDED || (count >= MAX_CMDS && old)) cmd_free(old);
    if (count >= MAX_CMDS) return NULL;
    struct cmd *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->id = ++cmd_serial;
    c->in = c->out = c->err = -1;
    c->next = cmds;
    cmds = c;
    count++;
    return c;
}

void cmd_free(struct cmd *c) {
    for (struct cmd **at = &cmds; *at; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            count--;
            break;
        }
    cmd_close_stdin(c);
    if (c->out >= 0) discard_add(c->out);
    if (c->err >= 0) discard_add(c->err);
    ring_free(&c->ring[0]);
    ring_free(&c->ring[1]);
    free(c);
}

static void closep(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static void pipe_for(int ours_reads, int *ours, int *theirs) {
    int p[2];
    if (*theirs >= 0 || pipe2(p, O_CLOEXEC) < 0) return;
    *ours = p[ours_reads ? 0 : 1];
    *theirs = p[ours_reads ? 1 : 0];
    fcntl(*ours, F_SETFL, O_NONBLOCK | (ours_reads ? O_RDONLY : O_WRONLY));
}

/* 0 and a running command (or one that has failed to start and says so on its stderr), or an errno. */
static int start(struct cmd *c, struct plan *p, int rows, int cols, const char **what) {
    char slave[32];
    int theirs[3] = {-1, -1, -1};
    *what = "cannot make a pipe";
    if (c->flags & C_PTY) {
        c->out = c->in = pty_open(rows, cols, slave, sizeof slave);
        if (c->out < 0) {
            *what = "cannot open a terminal";
            return errno;
        }
        p->tty = slave;
    } else {
        if (c->flags & C_STDIN) pipe_for(0, &c->in, &theirs[0]);
        pipe_for(1, &c->out, &theirs[1]);
        if (!(c->flags & C_MERGE)) pipe_for(1, &c->err, &theirs[2]);
        if (theirs[1] < 0 || (c->flags & C_STDIN && theirs[0] < 0) || (!(c->flags & C_MERGE) && theirs[2] < 0)) {
            int e = errno ? errno : EMFILE;
            for (int i = 0; i < 3; i++) closep(&theirs[i]);
            closep(&c->in), closep(&c->out), closep(&c->err);
            return e;
        }
        p->fd[0] = c->flags & C_STDIN ? theirs[0] : null_fd;
        p->fd[1] = theirs[1];
        p->fd[2] = c->flags & C_MERGE ? theirs[1] : theirs[2];
    }
    p->mark = cmd_mark(c);
    c->started_ms = now_ms();
    c->pid = spawn_plan(p);
    int e = errno;
    for (int i = 0; i < 3; i++) closep(&theirs[i]);
    if (c->pid < 0 || (p->error && p->stage != STAGE_EXEC)) {
        static const char *const why[] = {"cannot start a process", "cannot set up the process",
                                          "cannot change to the user", "cannot change to the working directory"};
        *what = why[c->pid < 0 ? 0 : p->stage];
        if (c->pid > 0) {
            waitpid(c->pid, NULL, 0);
            e = p->error;
        }
        if (c->in == c->out) c->in = -1;
        closep(&c->in), closep(&c->out), closep(&c->err);
        return e;
    }
    if (p->error) {
        char line[600];
        int n = snprintf(line, sizeof line, "%.400s: %s\n", p->argv[0],
                         p->error == ENOENT ? "not found" : strerror(p->error));
        ring_add(&c->ring[c->flags & (C_MERGE | C_PTY) ? 0 : 1], line, (size_t)n);
        c->code = p->error == ENOENT ? 127 : 126;
    }
    return 0;
}

void op_spawn(uint32_t stream, struct in *in) {
    uint32_t flags = get32(in);
    int rows = get16(in), cols = get16(in);
    struct plan p = {.nofile = get32(in)};
    char *user = getstr(in, 128), *cwd = getstr(in, MAX_PATH);
    size_t taglen = 0;
    const uint8_t *tag = getbytes(in, 64, &taglen);
    char **argv = NULL, **env = NULL;
    static struct user u;
    const char *what = "malformed request";
    struct cmd *c = NULL;
    int err = EINVAL;
    uint32_t argc = get32(in);
    if (argc > 65536 || !argc) in->bad = true;
    if (!in->bad) argv = calloc(argc + 1, sizeof *argv);
    for (uint32_t i = 0; i < argc && argv && !in->bad; i++) argv[i] = getstr(in, MAX_REQUEST);
    uint32_t envc = get32(in);
    if (envc > 65536) in->bad = true;
    if (!in->bad) env = calloc(envc + 1, sizeof *env);
    for (uint32_t i = 0; i < envc && env && !in->bad; i++) env[i] = getstr(in, MAX_REQUEST);
    if (in->bad || !argv || !env) goto out;
    what = "no such user";
    err = user_find(user, &u);
    if (err) goto out;
    char **full = spawn_env(env, envc, &u, flags & C_PTY);
    if (full) {
        free(env);
        env = full;
    }
    what = "too many commands";
    err = EAGAIN;
    c = cmd_new();
    if (!c) goto out;
    c->flags = flags & (C_PTY | C_MERGE | C_STDIN | C_DETACHED);
    c->taglen = taglen;
    memcpy(c->tag, tag, taglen);
    p.argv = argv;
    p.envp = env;
    p.paths = spawn_paths(argv[0], env);
    p.user = &u;
    if (*cwd && *cwd != '/') { /* a relative one starts at the home, as file paths do */
        char *whole = NULL;
        if (asprintf(&whole, "%s/%s", u.home, cwd) >= 0) {
            free(cwd);
            cwd = whole;
        }
    }
    p.cwd = *cwd ? cwd : u.home;
    err = start(c, &p, rows, cols, &what);
    if (err == ENOENT && !*cwd && p.stage == STAGE_CWD) { /* a home that does not exist is no reason to fail */
        p.cwd = "/";
        err = start(c, &p, rows, cols, &what);
    }
    if (err) goto out;
    struct stream *s = stream_new(stream, &cmd_stream, c);
    if (s) c->stream = stream;
    uint32_t reply[2] = {(uint32_t)c->pid, c->id};
    emit(T_OPENED, OP_SPAWN, stream, reply, sizeof reply);
out:
    if (err) {
        stream_end(stream, err, what, NULL);
        if (c) cmd_free(c);
    }
    strv_free(p.paths);
    strv_free(argv);
    strv_free(env);
    free(user);
    free(cwd);
}

struct cmd *cmd_internal(char **argv, char **env, void (*done)(struct cmd *, void *), void *ctx) {
    struct plan p = {.argv = argv, .envp = env, .cwd = "/", .paths = spawn_paths(argv[0], env)};
    const char *what;
    struct cmd *c = cmd_new();
    if (c) {
        c->flags = C_MERGE;
        c->drop = true;
        c->done = done;
        c->done_ctx = ctx;
        if (start(c, &p, 0, 0, &what)) {
            cmd_free(c);
            c = NULL;
        }
    }
    strv_free(p.paths);
    return c;
}

void cmd_reaped(pid_t pid, int status, uint64_t cpu_us, uint64_t rss_kb) {
    struct cmd *c = cmds;
    while (c && (c->pid != pid || c->exited)) c = c->next;
    if (!c) return;
    c->exited = true;
    c->cpu_us = cpu_us;
    c->rss_kb = rss_kb;
    if (WIFSIGNALED(status)) {
        c->sig = WTERMSIG(status);
        /* A group that we stopped is hung up by the kernel when its last parent goes. */
        if (c->sig == SIGHUP && !c->kill_until && stood_still_ms && now_ms() < stood_still_ms + 2000) c->crowded = true;
        if (c->sig == SIGHUP && (c->kill_until || c->crowded)) c->sig = SIGKILL;
        if (c->sig == SIGKILL && microvm && memory_ran_out()) c->oom = true;
        c->code = 128 + c->sig;
    } else if (!c->code) {
        c->code = WEXITSTATUS(status);
    }
    c->gap_at = now_ms() + 200; /* more than the later gaps: what holds the pipe may just be starting */
    c->cut_at = now_ms() + 500;
    for (int i = 0; i < 2; i++) {
        int fd = i ? c->err : c->out, n = 0;
        if (fd >= 0 && !(c->flags & C_PTY) && ioctl(fd, FIONREAD, &n) == 0) c->must[i] = c->ring[i].end + (uint64_t)n;
        cmd_read(c, i); /* mostly the end of file, which settles it at once */
        if (fd >= 0 && (i ? c->err : c->out) >= 0 && c->ring[i].end >= c->must[i]) cmd_read(c, i);
    }
    cmd_settle(c);
}

void cmd_kill_tree(struct cmd *c) {
    if (!c->kill_until) c->kill_until = now_ms() + 2000;
    c->killing = procs_kill_tree(c) > 0;
}

/* ---- the stream's side */

static void on_data(struct stream *s, uint16_t chan, uint64_t off, const uint8_t *p, size_t n) {
    struct cmd *c = s->ctx;
    if (chan || off > c->stdin_seen) return;
    size_t skip = (size_t)(c->stdin_seen - off);
    if (skip >= n) return;
    p += skip, n -= skip;
    c->stdin_seen += n;
    if (c->in < 0 || c->stdin_eof || ring_used(&c->stdin_) + n > 2 * RING_MAX) {
        c->stdin_.start = c->stdin_.end = c->stdin_seen; /* nobody reads it: swallowed */
        emit_ack(0, s->id, c->stdin_seen, c->stdin_seen + WINDOW);
        return;
    }
    ring_add(&c->stdin_, p, n);
    cmd_write(c);
}

static void on_eof(struct stream *s, uint16_t chan) {
    struct cmd *c = s->ctx;
    if (chan) return;
    c->stdin_eof = true;
    cmd_write(c);
}

static void on_ack(struct stream *s, uint16_t chan, uint64_t delivered) {
    struct cmd *c = s->ctx;
    if (chan == 1 || chan == 2) {
        struct ring *r = &c->ring[chan - 1];
        ring_ack(r, delivered > r->sent ? r->sent : delivered);
    }
}

static void on_control(struct stream *s, uint8_t type, struct in *in) {
    struct cmd *c = s->ctx;
    if (type == T_RESIZE) {
        int rows = get16(in), cols = get16(in);
        if (!(c->flags & C_PTY) || c->out < 0) return;
        pty_resize(c->out, rows, cols);
        procs_winch(c);
    } else if (type == T_SIGNAL) {
        int sig = (int)get32(in), scope = get8(in);
        if (in->bad || sig < 0 || sig > 64) return;
        if (scope == 3)
            cmd_kill_tree(c);
        else if (!c->exited)
            kill(scope == 0 ? c->pid : -c->pid, sig);
    } else if (type == T_RELEASE && c->exited) {
        stream_drop(s);
        cmd_free(c);
    } else if (type == T_RELEASE) { /* the daemon lets go of it: it runs on and never blocks on its output */
        c->flags |= C_DETACHED;
        c->drop = true;
        stream_drop(s);
    }
}

static bool pump(struct stream *s) {
    struct cmd *c = s->ctx;
    for (int i = 0; i < 2; i++) {
        struct ring *r = &c->ring[i];
        if (r->sent == r->end || r->sent >= s->limit[i + 1]) continue;
        /* Several frames leave in one write. */
        for (int k = 0; k < 4 && r->sent < r->end && r->sent < s->limit[i + 1]; k++) {
            size_t n = (size_t)(s->limit[i + 1] - r->sent);
            if (n > MAX_DATA) n = MAX_DATA;
            n = ring_copy(r, r->sent, emit_begin(), n);
            emit_data((uint16_t)(i + 1), s->id, r->sent, n);
            r->sent += n;
        }
        return true;
    }
    /* After what could be sent, so that the end of a short command comes last; what a slow reader has
       yet to ask for follows it, up to the lengths named here. */
    if (c->exited && c->drained && !c->killing && !c->exit_sent) {
        struct buf b = {0};
        put32(&b, (uint32_t)c->code);
        put32(&b, (uint32_t)c->sig);
        put32(&b, (c->oom ? 1 : 0) | (c->crowded ? 2 : 0));
        put64(&b, c->cpu_us);
        put64(&b, c->rss_kb);
        put64(&b, c->ring[0].end);
        put64(&b, c->ring[1].end);
        emit(T_EXIT, 0, s->id, b.p, b.len);
        buf_free(&b);
        c->exit_sent = true;
    }
    return false;
}

static void on_close(struct stream *s) {
    struct cmd *c = s->ctx;
    if (c->stream == s->id) c->stream = 0;
}

const struct stream_ops cmd_stream = {on_data, on_eof, on_ack, on_control, pump, on_close};
