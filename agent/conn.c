/* One TCP connection inside, spliced to one stream: out to what a program wants to reach, or in
   from the daemon to a port that was exposed. */
#define _GNU_SOURCE
#include "net.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { ACK_EVERY = WINDOW / 4 };

static struct conn *conns;
static size_t count;
static const struct stream_ops conn_ops;

/* A whole window fits: a frame that is taken in pieces costs a copy and a wake-up for each. */
static void widen(int fd) {
    int yes = 1, size = 2 * WINDOW;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
}

static struct conn *conn_new(int fd, enum via via) {
    struct conn *c = count < MAX_CONNS ? calloc(1, sizeof *c) : NULL;
    if (!c) return NULL;
    if (fd >= 0) widen(fd);
    c->via = via;
    c->w.fd = fd;
    c->next = conns;
    conns = c;
    count++;
    return c;
}

static void close_fd(struct conn *c) {
    if (c->w.fd < 0) return;
    struct linger now = {1, 0};
    if (!c->clean) setsockopt(c->w.fd, SOL_SOCKET, SO_LINGER, &now, sizeof now); /* a reset, not an end */
    watch_close(&c->w);
}

/* The connection is over; it is freed by the sweep. The stream, if any, is not told. */
void conn_drop(struct conn *c) {
    if (c->dead) return;
    c->dead = true;
    close_fd(c);
    ring_free(&c->in);
    struct stream *s = c->stream ? stream_find(c->stream) : NULL;
    c->stream = 0;
    if (s) stream_drop(s);
}

void net_sweep(void) {
    for (struct conn **at = &conns; *at;) {
        struct conn *c = *at;
        if (c->dead) {
            *at = c->next;
            free(c->head);
            free(c);
            count--;
        } else {
            at = &c->next;
        }
    }
}

/* The program, or the machine, broke it off. */
static void give_up(struct conn *c) {
    if (c->stream) emit(T_RESET, 0, c->stream, NULL, 0);
    conn_drop(c);
}

static void settle(struct conn *c) {
    if (c->dead || !c->sent_eof || !c->shut) return;
    c->clean = true;
    close_fd(c);
    if (c->via == VIA_DAEMON) stream_end(c->stream, 0, NULL, NULL); /* whoever was asked says the end */
}

static void flush(struct conn *c) {
    while (c->w.fd >= 0 && ring_used(&c->in)) {
        ssize_t n = ring_drain(&c->in, c->w.fd);
        if (n > 0) continue;
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) break;
        give_up(c);
        return;
    }
    if (c->dead) return;
    /* What a proxy said itself may wait there too: then a little less counts as delivered. */
    uint64_t waiting = ring_used(&c->in), delivered = c->in_seen > waiting ? c->in_seen - waiting : 0;
    if (c->stream && delivered >= c->acked + ACK_EVERY) {
        c->acked = delivered;
        emit_ack(0, c->stream, delivered, delivered + WINDOW);
    }
    if (c->eof && !c->shut && !ring_used(&c->in)) {
        c->shut = true;
        if (c->w.fd >= 0) shutdown(c->w.fd, SHUT_WR);
        settle(c);
    }
}

void conn_say(struct conn *c, const void *p, size_t n) {
    ring_add(&c->in, p, n);
    flush(c);
}

/* What the program still sends is thrown away: closing over it would reset the last words. */
void conn_finish(struct conn *c) {
    static uint8_t sink[4096];
    for (int i = 0; i < 16 && c->w.fd >= 0 && recv(c->w.fd, sink, sizeof sink, 0) > 0; i++) {}
    c->clean = true;
    conn_drop(c);
}

static bool dial(struct conn *c, int family);

static void on_ready(struct watch *w, uint32_t events) {
    struct conn *c = (struct conn *)w;
    if (c->state == CONN_CONNECTING) {
        int err = 0;
        socklen_t len = sizeof err;
        if (!(events & (EPOLLOUT | EPOLLERR | EPOLLHUP))) return;
        getsockopt(w->fd, SOL_SOCKET, SO_ERROR, &err, &len);
        if (err && !c->step && dial(c, AF_INET6)) return;
        if (err) {
            stream_end(c->stream, err, strerror(err), NULL);
            return;
        }
        c->state = CONN_OPEN;
        emit(T_OPENED, OP_CONNECT, c->stream, NULL, 0);
    }
    if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) c->readable = true;
    if (events & EPOLLOUT) flush(c);
    if (c->dead) return;
    if (c->state == CONN_HEAD) {
        proxy_head(c);
    } else if (events & (EPOLLERR | EPOLLHUP) && (c->sent_eof || c->state == CONN_OPENING)) {
        /* Nothing will be read that would say so. */
        int err = 0;
        socklen_t len = sizeof err;
        getsockopt(w->fd, SOL_SOCKET, SO_ERROR, &err, &len);
        if (err || !c->shut) give_up(c);
    }
}

/* Edge-triggered: one registration for life, however the wire's credit comes and goes. */
static bool conn_watch(struct conn *c) {
    c->w.ready = on_ready;
    return watch_add(&c->w, c->w.fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
}

struct conn *conn_accepted(int fd, enum via via) {
    struct conn *c = conn_new(fd, via);
    if (!c) {
        close(fd);
        return NULL;
    }
    if (!conn_watch(c)) {
        conn_drop(c);
        return NULL;
    }
    return c;
}

void conn_open(struct conn *c, const char *host, size_t n, uint16_t port) {
    struct buf b = {0};
    c->state = CONN_OPENING;
    c->port = port;
    c->stream = net_stream();
    if (!stream_new(c->stream, &conn_ops, c)) {
        c->stream = 0;
        conn_drop(c);
        return;
    }
    putbytes(&b, host, n);
    put16(&b, port);
    put8(&b, (uint8_t)c->via);
    emit(T_OPEN, OP_CONNECT, c->stream, b.p, b.len);
    buf_free(&b);
}

/* ---- a port inside, for the daemon */

/* By IPv4 first; a server of IPv6 alone is found when that is refused. */
static bool dial(struct conn *c, int family) {
    struct sockaddr_in a4 = {.sin_family = AF_INET, .sin_port = htons(c->port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in6 a6 = {.sin6_family = AF_INET6, .sin6_port = htons(c->port), .sin6_addr = in6addr_loopback};
    struct sockaddr *a = family == AF_INET ? (struct sockaddr *)&a4 : (struct sockaddr *)&a6;
    c->step = family == AF_INET6;
    watch_close(&c->w);
    int fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return false;
    widen(fd);
    if (connect(fd, a, family == AF_INET ? sizeof a4 : sizeof a6) == 0 || errno == EINPROGRESS) {
        c->w.fd = fd;
        return conn_watch(c);
    }
    close(fd);
    return false;
}

void op_connect(uint32_t stream, struct in *in) {
    uint16_t port = get16(in);
    int err = in->bad || !port ? EINVAL : 0;
    struct conn *c = err ? NULL : conn_new(-1, VIA_DAEMON);
    if (!c && !err) err = EAGAIN;
    if (!err) {
        c->port = port;
        c->state = CONN_CONNECTING;
        if (!dial(c, AF_INET) && !dial(c, AF_INET6)) err = ECONNREFUSED;
    }
    if (!err && stream_new(stream, &conn_ops, c)) {
        c->stream = stream;
        return;
    }
    if (c) conn_drop(c);
    stream_end(stream, err ? err : EAGAIN, strerror(err ? err : EAGAIN), NULL);
}

/* ---- the stream's side */

static void on_data(struct stream *s, uint16_t chan, uint64_t off, const uint8_t *p, size_t n) {
    struct conn *c = s->ctx;
    if (chan || off != c->in_seen || c->eof || ring_used(&c->in) + n > 2 * WINDOW + MAX_DATA) {
        give_up(c);
        return;
    }
    c->in_seen += n;
    if (n && !ring_used(&c->in) && c->w.fd >= 0) {
        ssize_t k = send(c->w.fd, p, n, MSG_NOSIGNAL);
        if (k > 0) {
            p += k;
            n -= (size_t)k;
        } else if (errno != EAGAIN && errno != EINTR) {
            give_up(c);
            return;
        }
    }
    if (n) ring_add(&c->in, p, n);
    flush(c);
}

static void on_eof(struct stream *s, uint16_t chan) {
    struct conn *c = s->ctx;
    if (chan) return;
    c->eof = true;
    flush(c);
}

static void on_control(struct stream *s, uint8_t type, struct in *in) {
    struct conn *c = s->ctx;
    if (type == T_OPENED && c->state == CONN_OPENING) {
        c->state = CONN_OPEN;
        if (c->via == VIA_HTTP || c->via == VIA_SOCKS) proxy_opened(c);
    } else if (type == T_END) {
        int err = (int)get32(in);
        c->stream = 0;
        if (err && c->state == CONN_OPENING && (c->via == VIA_HTTP || c->via == VIA_SOCKS)) {
            proxy_refused(c, err);
        } else {
            c->clean = !err;
            conn_drop(c);
        }
        stream_drop(s);
    }
}

static bool pump(struct stream *s) {
    struct conn *c = s->ctx;
    if (c->dead || c->sent_eof || c->state == CONN_CONNECTING) return false;
    if (c->state == CONN_OPENING && c->via != VIA_NAME) return false;
    if (c->out_off >= s->limit[1] || (!c->readable && !c->headlen)) return false;
    size_t room = (size_t)(s->limit[1] - c->out_off);
    if (room > MAX_DATA) room = MAX_DATA;
    uint8_t *to = emit_begin();
    ssize_t n;
    if (c->headlen) {
        n = (ssize_t)(c->headlen < room ? c->headlen : room);
        memcpy(to, c->head, (size_t)n);
        c->headlen -= (size_t)n;
        memmove(c->head, c->head + n, c->headlen);
    } else {
        n = recv(c->w.fd, to, room, 0);
    }
    if (n > 0) {
        emit_data(1, s->id, c->out_off, (size_t)n);
        c->out_off += (uint64_t)n;
        return true;
    }
    if (n < 0 && errno == EINTR) return true;
    c->readable = false;
    if (n < 0) {
        if (errno != EAGAIN) give_up(c);
        return false;
    }
    c->sent_eof = true;
    emit(T_EOF, 1, s->id, NULL, 0);
    settle(c);
    return false;
}

static void on_close(struct stream *s) {
    struct conn *c = s->ctx;
    if (c->stream == s->id) c->stream = 0;
    conn_drop(c);
}

static const struct stream_ops conn_ops = {on_data, on_eof, NULL, on_control, pump, on_close};
