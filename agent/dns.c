/* A name server on 127.0.0.1. Each question is the daemon's to answer; only the machine's own
   names and what is malformed are answered here. */
#define _GNU_SOURCE
#include "net.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED, BADVERS = 16 };
enum { TYPE_A = 1, TYPE_AAAA = 28, TYPE_OPT = 41, TYPE_AXFR = 252, TYPE_ANY = 255 };
enum { MAX_TCP = 16, MAX_MESSAGE = 4096, MAX_ANSWER = 600 };

struct client { /* a TCP connection */
    struct watch w;
    bool used, busy;
    uint32_t serial;
    uint64_t since;
    size_t len;
    uint8_t buf[2 + MAX_MESSAGE];
};
struct question {
    bool used;
    uint32_t stream, serial;
    struct client *tcp;
    struct sockaddr_in peer;
    uint16_t id, flags, type;
    bool edns;
    size_t qlen;
    uint8_t q[MAX_NAME + 2 + 4]; /* the question as it was asked, letter case and all */
    char name[MAX_NAME + 2];
};

static struct watch udp = {.fd = -1}, tcp = {.fd = -1};
static struct client clients[MAX_TCP];
static struct question *questions; /* MAX_QUESTIONS of them, once there was one */
static uint32_t serial;

static void put_be(uint8_t **p, uint32_t v, int n) {
    while (n--) *(*p)++ = (uint8_t)(v >> 8 * n);
}

static void client_close(struct client *c) {
    watch_close(&c->w);
    c->used = false;
    for (size_t i = 0; questions && i < MAX_QUESTIONS; i++)
        if (questions[i].tcp == c && questions[i].serial == c->serial) questions[i].used = false;
}

static void client_next(struct client *c);

/* addr: an IPv4 address to answer with, v6: that of the loopback instead; neither: no data. */
static void respond(struct question *q, int rcode, uint32_t addr, bool v6) {
    uint8_t out[2 + MAX_ANSWER], *p = out + 2;
    bool answer = addr || v6;
    put_be(&p, q->id, 2);
    put_be(&p, 0x8080u | (q->flags & 0x7900) | (rcode & 15), 2); /* an answer, recursion available */
    put_be(&p, q->qlen ? 1 : 0, 2);
    put_be(&p, answer, 2);
    put_be(&p, 0, 2);
    put_be(&p, q->edns, 2);
    memcpy(p, q->q, q->qlen);
    p += q->qlen;
    if (answer) {
        put_be(&p, 0xC00C, 2);
        put_be(&p, v6 ? TYPE_AAAA : TYPE_A, 2);
        put_be(&p, 1, 2);
        put_be(&p, 1, 4); /* one second: the daemon's word may change */
        put_be(&p, v6 ? 16 : 4, 2);
        if (v6) {
            memset(p, 0, 15);
            p += 15;
            *p++ = 1;
        } else {
            put_be(&p, addr, 4);
        }
    }
    if (q->edns) {
        put_be(&p, 0, 1);
        put_be(&p, TYPE_OPT, 2);
        put_be(&p, 1232, 2);
        put_be(&p, (uint32_t)rcode >> 4 << 24, 4);
        put_be(&p, 0, 2);
    }
    size_t n = (size_t)(p - out) - 2;
    q->used = false;
    if (!q->tcp) {
        sendto(udp.fd, out + 2, n, MSG_NOSIGNAL, (struct sockaddr *)&q->peer, sizeof q->peer);
        return;
    }
    struct client *c = q->tcp;
    if (!c->used || c->serial != q->serial) return;
    out[0] = (uint8_t)(n >> 8), out[1] = (uint8_t)n;
    if (send(c->w.fd, out, n + 2, MSG_NOSIGNAL) != (ssize_t)n + 2) {
        client_close(c);
        return;
    }
    c->busy = false;
}

/* ---- to the daemon and back */

static void on_answer(struct stream *s, uint8_t type, struct in *in) {
    struct question *q = s->ctx;
    if (type != T_END) return;
    if (!q->used || q->stream != s->id) { /* whoever asked has gone, and somebody else has the slot */
        stream_drop(s);
        return;
    }
    uint16_t ports[MAX_PORTS];
    size_t n;
    int err = (int)get32(in);
    getbytes(in, 1024, &n);
    size_t count = err ? 0 : get32(in);
    if (count > MAX_PORTS) count = MAX_PORTS;
    for (size_t i = 0; i < count; i++) ports[i] = get16(in);
    uint32_t addr = 0;
    int rcode = in->bad ? SERVFAIL : err == ENOENT ? NXDOMAIN : err ? SERVFAIL : NOERROR;
    if (!rcode && (q->type == TYPE_A || q->type == TYPE_ANY)) {
        addr = name_address(q->name, ports, count);
        if (!addr) rcode = SERVFAIL;
    }
    struct client *c = q->tcp;
    respond(q, rcode, addr, false);
    stream_drop(s);
    if (c && c->used) client_next(c);
}

static void on_close(struct stream *s) {
    struct question *q = s->ctx;
    if (q->stream == s->id) q->stream = 0; /* still in use: it is asked again in the next epoch */
}

static const struct stream_ops question_ops = {.control = on_answer, .close = on_close};

static void ask(struct question *q) {
    struct buf b = {0};
    q->stream = net_stream();
    if (!stream_new(q->stream, &question_ops, q)) {
        respond(q, SERVFAIL, 0, false);
        return;
    }
    putbytes(&b, q->name, strlen(q->name));
    put16(&b, q->type);
    emit(T_OPEN, OP_RESOLVE, q->stream, b.p, b.len);
    buf_free(&b);
}

void dns_attached(void) {
    for (size_t i = 0; questions && i < MAX_QUESTIONS; i++)
        if (questions[i].used && !questions[i].stream) ask(&questions[i]);
}

/* ---- from the programs */

/* Reads a name into q: as dotted text in lower case, and as it stood there. */
static bool read_name(struct question *q, const uint8_t *p, size_t n, size_t *at) {
    size_t len = 0, start = *at;
    while (*at < n && p[*at]) {
        size_t label = p[(*at)++];
        if (label > 63 || *at + label > n || len + label + 1 > MAX_NAME + 1) return false;
        for (size_t i = 0; i < label; i++) {
            uint8_t ch = p[(*at)++];
            /* A dot or a blank inside a label must not look like another name. */
            q->name[len++] = isalnum(ch) || ch == '-' || ch == '_' ? (char)tolower(ch) : '?';
        }
        q->name[len++] = '.';
    }
    if (*at + 5 > n) return false;
    ++*at;
    if (len) len--;
    q->name[len] = 0;
    q->type = (uint16_t)(p[*at] << 8 | p[*at + 1]);
    *at += 4;
    q->qlen = *at - start;
    memcpy(q->q, p + start, q->qlen);
    return true;
}

static bool ends_with(const char *s, const char *end) {
    size_t n = strlen(s), k = strlen(end);
    return n >= k && !strcmp(s + n - k, end) && (n == k || s[n - k - 1] == '.');
}

static bool own_name(struct question *q) {
    char host[256] = "";
    bool local = ends_with(q->name, "localhost");
    if (!local) {
        gethostname(host, sizeof host - 1);
        if (!*host || strcasecmp(host, q->name)) return false;
    }
    bool a = q->type == TYPE_A || q->type == TYPE_ANY;
    respond(q, NOERROR, a ? local ? INADDR_LOOPBACK : INADDR_LOOPBACK + 0x100 : 0, local && q->type == TYPE_AAAA);
    return true;
}

static void message(const uint8_t *p, size_t n, struct client *c, const struct sockaddr_in *peer) {
    if (n < 12 || p[2] & 0x80) { /* too short to be answered, or an answer itself */
        if (c) client_close(c);
        return;
    }
    if (!questions) questions = calloc(MAX_QUESTIONS, sizeof *questions);
    struct question full = {0}, *q = &full;
    for (size_t i = 0; questions && i < MAX_QUESTIONS && q == &full; i++)
        if (!questions[i].used) q = &questions[i];
    *q = (struct question){.used = true, .tcp = c, .serial = c ? c->serial : 0};
    if (peer) q->peer = *peer;
    if (c) c->busy = true;
    q->id = (uint16_t)(p[0] << 8 | p[1]);
    q->flags = (uint16_t)(p[2] << 8 | p[3]);
    size_t at = 12, counts[4];
    for (int i = 0; i < 4; i++) counts[i] = (size_t)(p[4 + 2 * i] << 8 | p[5 + 2 * i]);
    int rcode = NOERROR;
    if (q->flags & 0x7800)
        rcode = NOTIMP;
    else if (counts[0] != 1 || counts[1] || counts[2] || !read_name(q, p, n, &at)) {
        rcode = FORMERR;
        q->qlen = 0;
    }
    for (size_t i = 0; !rcode && i < counts[3]; i++) { /* what may follow: an OPT, or a signature */
        while (at < n && p[at] && p[at] < 64) at += p[at] + 1u;
        if (at < n) at += p[at] ? 2 : 1;
        if (at + 10 > n) {
            rcode = FORMERR;
            break;
        }
        if ((p[at] << 8 | p[at + 1]) == TYPE_OPT) {
            q->edns = true;
            if (p[at + 5]) rcode = BADVERS;
        }
        at += 10u + (size_t)(p[at + 8] << 8 | p[at + 9]);
    }
    uint8_t klass = q->qlen ? q->q[q->qlen - 1] : 1;
    if (!rcode && ((klass != 1 && klass != 255) || q->q[q->qlen - 2] || q->type == TYPE_AXFR || q->type == 251))
        rcode = REFUSED;
    if (!rcode && q == &full) rcode = SERVFAIL;
    if (rcode)
        respond(q, rcode, 0, false);
    else if (!*q->name) /* the root: some resolvers ask for it to see whether anybody is there */
        respond(q, NOERROR, 0, false);
    else if (ends_with(q->name, "arpa"))
        respond(q, NXDOMAIN, 0, false);
    else if (!own_name(q))
        ask(q);
}

static void on_udp(struct watch *w, uint32_t events) {
    static uint8_t p[MAX_MESSAGE];
    for (int i = 0; i < 32; i++) {
        struct sockaddr_in peer;
        socklen_t len = sizeof peer;
        ssize_t n = recvfrom(w->fd, p, sizeof p, 0, (struct sockaddr *)&peer, &len);
        if (n < 0) return;
        message(p, (size_t)n, NULL, &peer);
    }
}

/* One question at a time: a client that asks more gets its answers in order. */
static void client_next(struct client *c) {
    while (c->used && !c->busy && c->len >= 2) {
        size_t n = (size_t)(c->buf[0] << 8 | c->buf[1]);
        if (n > MAX_MESSAGE) {
            client_close(c);
            return;
        }
        if (c->len < n + 2) return;
        static uint8_t copy[MAX_MESSAGE];
        memcpy(copy, c->buf + 2, n);
        c->len -= n + 2;
        memmove(c->buf, c->buf + 2 + n, c->len);
        message(copy, n, c, NULL);
    }
}

static void on_client(struct watch *w, uint32_t events) {
    struct client *c = (struct client *)w;
    if (c->len == sizeof c->buf) { /* more than one message while one is being answered */
        client_close(c);
        return;
    }
    ssize_t n = recv(w->fd, c->buf + c->len, sizeof c->buf - c->len, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
        client_close(c);
        return;
    }
    c->len += (size_t)n;
    client_next(c);
}

static void on_tcp(struct watch *w, uint32_t events) {
    int fd = accept4(w->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    struct client *c = &clients[0];
    for (size_t i = 0; i < MAX_TCP && c->used; i++)
        if (!clients[i].used || clients[i].since < c->since) c = &clients[i];
    if (c->used) client_close(c); /* the oldest has to go */
    c->used = true;
    c->busy = false;
    c->len = 0;
    c->serial = ++serial;
    c->since = now_ms();
    c->w.ready = on_client;
    if (!watch_add(&c->w, fd, EPOLLIN)) client_close(c);
}

bool dns_start(uint16_t port) {
    int u = net_listen(INADDR_LOOPBACK, port, SOCK_DGRAM), t = net_listen(INADDR_LOOPBACK, port, SOCK_STREAM);
    udp.ready = on_udp;
    tcp.ready = on_tcp;
    if (u >= 0 && t >= 0 && watch_add(&udp, u, EPOLLIN) && watch_add(&tcp, t, EPOLLIN)) return true;
    if (u >= 0) close(u);
    if (t >= 0) close(t);
    udp.fd = tcp.fd = -1;
    return false;
}
