/* A command's pipes and terminal. */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

/* Read ends that only a detached child still writes to. Closing them would end it by SIGPIPE. */
enum { MAX_DISCARD = 256 };
static int discard[MAX_DISCARD];
static size_t discards;

void discard_add(int fd) {
    if (discards == MAX_DISCARD) { /* the oldest has to go */
        close(discard[0]);
        memmove(discard, discard + 1, (MAX_DISCARD - 1) * sizeof *discard);
        discards--;
    }
    discard[discards++] = fd;
}

size_t discard_poll(struct pollfd *v, size_t max) {
    size_t n = 0;
    for (size_t i = 0; i < discards && n < max; i++) v[n++] = (struct pollfd){discard[i], POLLIN, 0};
    return n;
}

bool discard_ready(const struct pollfd *v) {
    static char sink[65536];
    for (size_t i = 0; i < discards; i++) {
        if (discard[i] != v->fd) continue;
        ssize_t n = read(v->fd, sink, sizeof sink);
        if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR))) return true;
        close(v->fd);
        memmove(discard + i, discard + i + 1, (--discards - i) * sizeof *discard);
        return true;
    }
    return false;
}

void cmd_close_stdin(struct cmd *c) {
    if (c->in >= 0 && c->in != c->out) close(c->in);
    c->in = -1;
    ring_free(&c->stdin_);
    c->stdin_.start = c->stdin_.end = c->stdin_seen;
}

static void close_out(struct cmd *c, int which) {
    int *fd = which ? &c->err : &c->out;
    if (c->in == *fd) c->in = -1;
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* Much output in small pieces costs a turn of ours, and a frame, for each. So the pipe of a command that
   floods gets room, and is then looked at once a millisecond unless it gives much at a time. */
enum { FLOOD = 256 << 10, PAUSE_MS = 20, MUCH = 128 << 10, REST_MS = 1, WIDE = 512 << 10 };

static void flows(struct cmd *c, int which, int fd, size_t n) {
    struct flow *f = &c->flow[which];
    struct ring *r = &c->ring[which];
    uint64_t now = now_ms();
    if (now - f->last_ms > PAUSE_MS) f->bytes = 0;
    f->last_ms = now;
    f->bytes += n;
    r->keep = f->bytes > FLOOD;
    if (!r->keep || c->flags & C_PTY) return; /* a terminal holds 4 KB */
    if (!f->wide) f->wide = fcntl(fd, F_SETPIPE_SZ, WIDE) >= WIDE;
    if (f->wide && n < MUCH) f->rest_until = now + REST_MS;
}

void cmds_trim(void) {
    for (struct cmd *c = cmds; c; c = c->next)
        for (int i = 0; i < 2; i++) {
            c->ring[i].keep = false;
            ring_trim(&c->ring[i]);
        }
}

void cmd_read(struct cmd *c, int which) {
    int fd = which ? c->err : c->out;
    if (fd < 0) return;
    ssize_t n = ring_fill(&c->ring[which], fd, c->drop, &c->lost);
    if (n > 0) {
        flows(c, which, fd, (size_t)n);
        if (c->exited) c->gap_at = now_ms() + 100;
    } else if (n == -1 && errno == EIO && !c->exited) {
        /* Nobody holds the terminal just now. Closing our end would hang it up on a command that is
           still ending, or that opens /dev/tty again: look again in a moment. */
        c->idle_until = now_ms() + 20;
    } else if (n == 0 || (n == -1 && errno != EAGAIN && errno != EINTR)) {
        close_out(c, which);
    }
}

/* Once the command's own process has ended: go on reading what is there and what follows within
   100 ms gaps, for 500 ms at most. What was in the pipe at the exit is never cut off. */
void cmd_settle(struct cmd *c) {
    if (!c->exited || c->drained) return;
    uint64_t now = now_ms();
    bool open = c->out >= 0 || c->err >= 0, full = false;
    for (int i = 0; i < 2; i++) {
        int fd = i ? c->err : c->out;
        if (fd < 0) continue;
        if (!c->drop && ring_used(&c->ring[i]) >= RING_MAX) full = true;
        if (c->ring[i].end < c->must[i]) full = true;
    }
    if (full) { /* the reader holds it up, not the command: time does not count */
        c->gap_at = now + 100;
        c->cut_at = now + 500;
        return;
    }
    if (open && now < c->gap_at && now < c->cut_at) return;
    c->drained = true;
    cmd_close_stdin(c);
    for (int i = 0; i < 2; i++) {
        int *fd = i ? &c->err : &c->out;
        if (*fd >= 0) discard_add(*fd);
        *fd = -1;
    }
}

void cmd_write(struct cmd *c) {
    struct ring *r = &c->stdin_;
    uint64_t before = r->start;
    while (c->in >= 0 && ring_used(r)) {
        ssize_t n = ring_drain(r, c->in);
        if (n > 0) continue;
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) break;
        cmd_close_stdin(c); /* nobody reads it any more */
        if (c->stream) emit(T_EOF, 0, c->stream, NULL, 0);
        return;
    }
    if (c->in >= 0 && c->stdin_eof && !ring_used(r)) {
        if (c->flags & C_PTY) {
            char eot = 4;
            if (write(c->in, &eot, 1) < 0 && errno == EAGAIN) return;
            c->in = -1;
        } else {
            cmd_close_stdin(c);
        }
    }
    if (c->stream && r->start - before > 0) emit_ack(0, c->stream, r->start, r->start + WINDOW);
}

int pty_open(int rows, int cols, char *slave, size_t n) {
    int fd = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC), no = 0;
    if (fd < 0) return -1;
    if (ioctl(fd, TIOCSPTLCK, &no) < 0 || ioctl(fd, TIOCGPTN, &no) < 0) {
        int e = errno;
        close(fd);
        errno = e;
        return -1;
    }
    snprintf(slave, n, "/dev/pts/%d", no);
    pty_resize(fd, rows, cols);
    return fd;
}

int pty_resize(int fd, int rows, int cols) {
    struct winsize w = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)cols};
    return ioctl(fd, TIOCSWINSZ, &w);
}
