/* One epoll for all of the guest's network, and the addresses that stand for allowed names. */
#define _GNU_SOURCE
#include "net.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

/* 127.64.0.0/10: all of 127/8 is local, and nobody else uses this part. */
enum { FIRST = 0x7F400000, COUNT = 1 << 22, BUCKETS = 1024 };

static int ep = -1;
static uint32_t last_stream;
static uint16_t dns_port = 53, http_port = 3128, socks_port = 1080;
static bool started;
static struct watch http_listener = {.fd = -1}, socks_listener = {.fd = -1};

bool watch_add(struct watch *w, int fd, uint32_t events) {
    struct epoll_event e = {.events = events, .data.ptr = w};
    w->fd = fd;
    if (ep < 0) ep = epoll_create1(EPOLL_CLOEXEC);
    return ep >= 0 && epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e) == 0;
}

void watch_close(struct watch *w) {
    if (w->fd < 0) return;
    epoll_ctl(ep, EPOLL_CTL_DEL, w->fd, NULL);
    close(w->fd);
    w->fd = -1;
}

int net_fd(void) { return ep; }

void net_ready(void) {
    struct epoll_event v[64];
    int n = epoll_wait(ep, v, 64, 0);
    for (int i = 0; i < n; i++) {
        struct watch *w = v[i].data.ptr;
        if (w->fd >= 0) w->ready(w, v[i].events);
    }
}

uint32_t net_stream(void) { return last_stream += 2; }

void net_attached(void) {
    last_stream = 0;
    dns_attached();
}

int net_listen(uint32_t addr, uint16_t port, int type) {
    int fd = socket(AF_INET, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), yes = 1;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(addr)};
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(fd, (struct sockaddr *)&a, sizeof a) < 0 || (type == SOCK_STREAM && listen(fd, 128) < 0)) {
        close(fd);
        return -1;
    }
    return fd;
}

/* ---- names */

struct name;
struct port { struct watch w; struct name *name; uint16_t port; };
struct name {
    struct name *next;
    uint32_t addr;
    uint64_t used;
    size_t n;
    struct port *ports[MAX_PORTS];
    char text[MAX_NAME + 1];
};
static struct name *buckets[BUCKETS];
static size_t names;
static uint32_t given; /* addresses handed out so far; none is handed out twice */
static uint64_t clock_;

static struct name **bucket(const char *s) {
    uint32_t h = 2166136261u;
    for (; *s; s++) h = (h ^ (uint8_t)*s) * 16777619u;
    return &buckets[h % BUCKETS];
}

static void forget_oldest(void) {
    struct name **oldest = NULL;
    for (size_t i = 0; i < BUCKETS; i++)
        for (struct name **at = &buckets[i]; *at; at = &(*at)->next)
            if (!oldest || (*at)->used < (*oldest)->used) oldest = at;
    if (!oldest) return;
    struct name *m = *oldest;
    *oldest = m->next;
    for (size_t i = 0; i < m->n; i++) {
        watch_close(&m->ports[i]->w);
        free(m->ports[i]);
    }
    free(m);
    names--;
}

static void on_accept(struct watch *w, uint32_t events) {
    struct port *p = (struct port *)w;
    for (int i = 0; i < 16; i++) {
        int fd = accept4(w->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) return;
        struct conn *c = conn_accepted(fd, VIA_NAME);
        if (c) conn_open(c, p->name->text, strlen(p->name->text), p->port);
    }
}

static bool add_port(struct name *m, uint16_t port) {
    for (size_t i = 0; i < m->n; i++)
        if (m->ports[i]->port == port) return true;
    if (m->n == MAX_PORTS) return false;
    int fd = net_listen(m->addr, port, SOCK_STREAM);
    struct port *p = fd < 0 ? NULL : calloc(1, sizeof *p);
    if (!p) {
        if (fd >= 0) close(fd);
        return false;
    }
    *p = (struct port){{on_accept, -1}, m, port};
    m->ports[m->n++] = p;
    return watch_add(&p->w, fd, EPOLLIN);
}

uint32_t name_address(const char *text, const uint16_t *ports, size_t n) {
    struct name *m = *bucket(text);
    while (m && strcmp(m->text, text)) m = m->next;
    if (!m) {
        if (given >= COUNT - 2) return 0;
        if (names >= MAX_NAMES) forget_oldest();
        m = calloc(1, sizeof *m);
        if (!m) return 0;
        m->addr = (uint32_t)FIRST + ++given;
        strcpy(m->text, text);
        struct name **at = bucket(text);
        m->next = *at;
        *at = m;
        names++;
    }
    m->used = ++clock_;
    bool any = false;
    for (size_t i = 0; i < n; i++) any |= add_port(m, ports[i]);
    return any ? m->addr : 0;
}

/* ---- settings */

void net_ports(const char *spec) {
    unsigned d, h, s;
    if (sscanf(spec, "%u,%u,%u", &d, &h, &s) != 3) return;
    dns_port = (uint16_t)d;
    http_port = (uint16_t)h;
    socks_port = (uint16_t)s;
}

/* In an ordinary process nothing is served unless ports for it were named: those of the host are its own.

   A machine that came out of an image may have handed out addresses after it was saved: each
   generation has its own part of the range for as long as there are parts. */
void net_configure(uint32_t flags, uint32_t generation) {
    uint32_t part = COUNT / 64 * (generation < 64 ? generation : 63);
    if (given < part) given = part;
    if (plain && dns_port == 53) return;
    if (!started) started = dns_start(dns_port);
    if (flags & NET_PROXY) {
        if (http_listener.fd < 0) proxy_start(VIA_HTTP, http_port, &http_listener);
        if (socks_listener.fd < 0) proxy_start(VIA_SOCKS, socks_port, &socks_listener);
    } else {
        watch_close(&http_listener);
        watch_close(&socks_listener);
    }
}

void op_egress(uint32_t stream, struct in *in) {
    uint32_t flags = get32(in);
    if (!in->bad) net_configure(flags, 0);
    stream_end(stream, in->bad ? EINVAL : 0, NULL, NULL);
}
