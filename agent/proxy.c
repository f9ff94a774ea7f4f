/* Proxies on 127.0.0.1, for programs that speak no other way out and for addresses, which have no
   name to be resolved: HTTP (CONNECT, and requests for an http:// URL) and SOCKS5. */
#define _GNU_SOURCE
#include "net.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_HEAD = 16384 };

static void on_accept(struct watch *w, enum via via) {
    for (int i = 0; i < 16; i++) {
        int fd = accept4(w->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) return;
        conn_accepted(fd, via);
    }
}

static void on_http(struct watch *w, uint32_t events) { on_accept(w, VIA_HTTP); }
static void on_socks(struct watch *w, uint32_t events) { on_accept(w, VIA_SOCKS); }

bool proxy_start(enum via via, uint16_t port, struct watch *w) {
    int fd = net_listen(INADDR_LOOPBACK, port, SOCK_STREAM);
    if (fd < 0) return false; /* a program of the user's has the port */
    w->ready = via == VIA_HTTP ? on_http : on_socks;
    if (watch_add(w, fd, EPOLLIN)) return true;
    watch_close(w);
    return false;
}

static void refuse(struct conn *c, const char *status, const char *why) {
    char text[512];
    int n = snprintf(text, sizeof text,
                     "HTTP/1.1 %s\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n%s\n",
                     status, strlen(why) + 1, why);
    conn_say(c, text, (size_t)n);
    if (!c->dead) conn_finish(c);
}

/* host[:port] or [host][:port] up to end. False: malformed. */
static bool authority(const char *p, const char *end, uint16_t port, const char **host, size_t *n, uint16_t *found) {
    const char *at = memchr(p, '@', (size_t)(end - p));
    if (at) p = at + 1;
    const char *colon;
    *host = p;
    if (p < end && *p == '[') {
        const char *close = memchr(p, ']', (size_t)(end - p));
        if (!close) return false;
        *host = p + 1;
        *n = (size_t)(close - p - 1);
        colon = close + 1 < end ? close + 1 : NULL;
        if (colon && *colon != ':') return false;
    } else {
        colon = memrchr(p, ':', (size_t)(end - p));
        *n = (size_t)((colon ? colon : end) - p);
    }
    *found = port;
    if (colon) {
        unsigned long v = 0;
        if (colon + 1 == end) return false;
        for (const char *d = colon + 1; d < end; d++) {
            if (*d < '0' || *d > '9' || (v = v * 10 + (unsigned)(*d - '0')) > 65535) return false;
        }
        *found = (uint16_t)v;
    }
    return *n > 0 && *n <= MAX_NAME && *found;
}

/* A request for an http:// URL, as its server wants it: by path, and the last on its connection. */
static void rewrite(struct conn *c, size_t headlen, const char *path, size_t pathlen) {
    const char *head = (const char *)c->head, *end = head + headlen;
    const char *method = memchr(head, ' ', headlen), *version = memmem(head, headlen, "\r\n", 2);
    struct buf b = {0};
    putraw(&b, head, (size_t)(method - head) + 1);
    if (!pathlen || *path != '/') putraw(&b, "/", 1);
    putraw(&b, path, pathlen);
    putraw(&b, " HTTP/1.1", 9);
    for (const char *line = version; line && line + 2 < end - 2;) {
        const char *next = memmem(line + 2, (size_t)(end - line - 2), "\r\n", 2);
        const char *name = line + 2;
        size_t n = (size_t)(next - name);
        if (!(n >= 6 && !strncasecmp(name, "proxy-", 6)) && !(n >= 11 && !strncasecmp(name, "connection:", 11)) &&
            !(n >= 11 && !strncasecmp(name, "keep-alive:", 11))) {
            putraw(&b, "\r\n", 2);
            putraw(&b, name, n);
        }
        line = next;
    }
    putraw(&b, "\r\nConnection: close\r\n\r\n", 23);
    putraw(&b, c->head + headlen, c->headlen - headlen);
    free(c->head);
    c->head = b.p;
    c->headlen = b.len;
}

static void http_head(struct conn *c) {
    const char *head = (const char *)c->head;
    const char *end = memmem(head, c->headlen, "\r\n\r\n", 4);
    if (!end) {
        if (c->headlen >= MAX_HEAD) refuse(c, "431 Request Header Fields Too Large", "forkyard: too long a head");
        return;
    }
    size_t headlen = (size_t)(end - head) + 4;
    const char *line = memmem(head, headlen, "\r\n", 2), *target = memchr(head, ' ', (size_t)(line - head));
    const char *stop = target ? memchr(target + 1, ' ', (size_t)(line - target - 1)) : NULL, *host;
    uint16_t port;
    size_t n;
    if (!stop || (size_t)(line - stop) < 6 || memcmp(stop, " HTTP/", 6)) {
        refuse(c, "400 Bad Request", "forkyard: this is an HTTP proxy");
        return;
    }
    target++;
    bool connect = target - head == 8 && !memcmp(head, "CONNECT ", 8);
    const char *from = target, *path = stop;
    if (!connect) {
        if (stop - target < 8 || strncasecmp(target, "http://", 7)) {
            refuse(c, "400 Bad Request", "forkyard: this is a proxy for CONNECT and http:// URLs");
            return;
        }
        from = target + 7;
        for (path = from; path < stop && *path != '/' && *path != '?';) path++;
    }
    if (!authority(from, connect ? stop : path, connect ? 0 : 80, &host, &n, &port)) {
        refuse(c, "400 Bad Request", "forkyard: no host and port");
        return;
    }
    char name[MAX_NAME + 1];
    memcpy(name, host, n);
    if (connect) {
        c->headlen -= headlen;
        memmove(c->head, c->head + headlen, c->headlen);
    } else {
        c->whole = true;
        rewrite(c, headlen, path, (size_t)(stop - path));
    }
    conn_open(c, name, n, port);
}

static void socks_reply(struct conn *c, uint8_t code) {
    uint8_t reply[10] = {5, code, 0, 1};
    conn_say(c, reply, sizeof reply);
}

static void socks_head(struct conn *c) {
    const uint8_t *p = c->head;
    if (c->headlen < 2 || c->headlen < 2u + p[1]) {
        if (c->headlen && p[0] != 5) conn_drop(c);
        return;
    }
    size_t used = 0;
    if (!c->step) {
        bool open = p[0] == 5 && memchr(p + 2, 0, p[1]);
        uint8_t reply[2] = {5, open ? 0 : 0xFF};
        used = 2u + p[1];
        conn_say(c, reply, 2);
        if (!c->dead && !open) conn_finish(c);
        if (c->dead) return;
        c->step = 1;
        c->headlen -= used;
        memmove(c->head, c->head + used, c->headlen);
    }
    if (c->headlen < 5) return;
    size_t n = p[3] == 1 ? 4 : p[3] == 4 ? 16 : p[3] == 3 ? 1u + p[4] : 0;
    if (p[0] != 5 || p[1] != 1 || !n) {
        socks_reply(c, p[1] != 1 ? 7 : 8);
        if (!c->dead) conn_finish(c);
        return;
    }
    used = 4 + n + 2;
    if (c->headlen < used) return;
    char name[256];
    if (p[3] == 3) {
        memcpy(name, p + 5, p[4]);
        n = p[4];
    } else {
        inet_ntop(p[3] == 1 ? AF_INET : AF_INET6, p + 4, name, sizeof name);
        n = strlen(name);
    }
    uint16_t port = (uint16_t)(p[used - 2] << 8 | p[used - 1]);
    c->headlen -= used;
    memmove(c->head, c->head + used, c->headlen);
    conn_open(c, name, n, port);
}

void proxy_head(struct conn *c) {
    while (c->readable && c->state == CONN_HEAD && !c->dead) {
        if (!c->head) c->head = malloc(MAX_HEAD);
        ssize_t n = c->head ? recv(c->w.fd, c->head + c->headlen, MAX_HEAD - c->headlen, 0) : 0;
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            c->readable = false;
            if (!n || errno != EAGAIN) conn_drop(c);
            return;
        }
        c->headlen += (size_t)n;
        if (c->via == VIA_HTTP)
            http_head(c);
        else
            socks_head(c);
    }
}

void proxy_opened(struct conn *c) {
    static const char ok[] = "HTTP/1.1 200 Connection established\r\n\r\n";
    if (c->via == VIA_SOCKS)
        socks_reply(c, 0);
    else if (!c->whole)
        conn_say(c, ok, sizeof ok - 1);
}

void proxy_refused(struct conn *c, int err) {
    if (c->via == VIA_HTTP) {
        if (err == EACCES)
            refuse(c, "403 Forbidden", "forkyard: this sandbox may not connect there");
        else
            refuse(c, err == ETIMEDOUT ? "504 Gateway Timeout" : "502 Bad Gateway", strerror(err));
        return;
    }
    socks_reply(c, err == EACCES ? 2 : err == ENETUNREACH ? 3 : err == ECONNREFUSED ? 5 : err == ENOSYS ? 7 : 4);
    if (!c->dead) conn_finish(c);
}
