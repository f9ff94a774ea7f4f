/* The commands' part of the event loop. */
#include "agent.h"

#include <poll.h>

static struct cmd *owner[3 * MAX_CMDS];
static uint8_t role[3 * MAX_CMDS];

static size_t add(struct pollfd *v, size_t n, int fd, short events, struct cmd *c, int what) {
    v[n] = (struct pollfd){fd, events, 0};
    owner[n] = c;
    role[n] = (uint8_t)what;
    return n + 1;
}

size_t cmds_poll(struct pollfd *v, size_t max) {
    size_t n = 0;
    uint64_t now = now_ms();
    if (max > 3 * MAX_CMDS) max = 3 * MAX_CMDS;
    for (struct cmd *c = cmds; c && n + 3 <= max; c = c->next) {
        if (c->idle_until) continue;
        bool room[2];
        for (int i = 0; i < 2; i++) {
            uint64_t *rest = &c->flow[i].rest_until;
            if (now >= *rest) *rest = 0; /* here alone: cmds_timeout has to see what was left out */
            room[i] = !*rest && (c->drop || ring_used(&c->ring[i]) < RING_MAX);
        }
        bool in = c->in >= 0 && (ring_used(&c->stdin_) || c->stdin_eof);
        if (c->out >= 0 && c->out == c->in) {
            if (room[0] || in) n = add(v, n, c->out, (room[0] ? POLLIN : 0) | (in ? POLLOUT : 0), c, 3);
        } else {
            if (c->out >= 0 && room[0]) n = add(v, n, c->out, POLLIN, c, 0);
            if (in) n = add(v, n, c->in, POLLOUT, c, 2);
        }
        if (c->err >= 0 && room[1]) n = add(v, n, c->err, POLLIN, c, 1);
    }
    return n;
}

void cmds_ready(const struct pollfd *v, size_t n) {
    /* Nothing here frees a command; frames, which do, are handled before and re-poll after. */
    for (size_t i = 0; i < n; i++) {
        if (!v[i].revents) continue;
        struct cmd *c = cmds;
        while (c && c != owner[i]) c = c->next;
        if (!c) continue;
        switch (role[i]) {
        case 0: if (c->out == v[i].fd) cmd_read(c, 0); break;
        case 1: if (c->err == v[i].fd) cmd_read(c, 1); break;
        case 2: if (c->in == v[i].fd) cmd_write(c); break;
        case 3:
            if (v[i].revents & POLLOUT && c->in == v[i].fd) cmd_write(c);
            if (v[i].revents & ~POLLOUT && c->out == v[i].fd) cmd_read(c, 0);
            break;
        }
    }
}

int cmds_timeout(int timeout) {
    uint64_t now = now_ms();
    for (struct cmd *c = cmds, *next; c; c = next) {
        next = c->next;
        uint64_t at = 0;
        if (c->killing) {
            if (now >= c->kill_at) {
                c->killing = procs_kill_tree(c) > 0 && now < c->kill_until;
                c->kill_at = now + 10;
            }
            if (c->killing) at = c->kill_at;
        }
        if (c->idle_until) {
            if (now >= c->idle_until || c->exited)
                c->idle_until = 0;
            else if (!at || c->idle_until < at)
                at = c->idle_until;
        }
        for (int i = 0; i < 2; i++) {
            uint64_t rest = (i ? c->err : c->out) >= 0 ? c->flow[i].rest_until : 0;
            if (rest && (!at || rest < at)) at = rest;
        }
        cmd_settle(c);
        if (c->exited && !c->drained) {
            uint64_t due = c->gap_at < c->cut_at ? c->gap_at : c->cut_at;
            if (!at || due < at) at = due;
        }
        if (c->done && c->drained && !c->killing) {
            c->done(c, c->done_ctx); /* may start the next one, and so drop others */
            cmd_free(c);
            next = cmds;
            continue;
        }
        if (at) {
            int wait = at > now ? (int)(at - now) : 1;
            if (timeout < 0 || wait < timeout) timeout = wait;
        }
    }
    return timeout;
}
