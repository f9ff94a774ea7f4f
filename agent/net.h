/* The guest's network: names, connections and proxies, each a stream on the wire. What may be
   reached is the daemon's to decide; nothing here knows a rule. */
#ifndef FORKYARD_NET_H
#define FORKYARD_NET_H

#include "agent.h"

enum {
    MAX_CONNS = 256,
    MAX_QUESTIONS = 64,
    MAX_NAMES = 4096,
    MAX_PORTS = 16,
    MAX_NAME = 253,
};
enum { NET_PROXY = 1 }; /* flags of IDENTIFY and EGRESS: the proxies are open */
enum via { VIA_NAME, VIA_HTTP, VIA_SOCKS, VIA_DAEMON };

/* ---- net.c: descriptors that are waited for, names and their addresses */
struct watch {
    void (*ready)(struct watch *, uint32_t events);
    int fd;
};
bool watch_add(struct watch *, int fd, uint32_t events);
void watch_close(struct watch *);
int net_fd(void);      /* readable when something is ready; -1: nothing is waited for */
void net_ready(void);
void net_sweep(void);  /* frees what ended; nobody may hold a connection across it */
void net_attached(void); /* a new epoch has begun */
void net_configure(uint32_t flags, uint32_t generation);
void net_ports(const char *spec); /* "dns,http,socks": other ports than the usual, for --plain */
uint32_t net_stream(void); /* the number of a new stream of ours */
int net_listen(uint32_t addr, uint16_t port, int type);
/* The address of an allowed name, with a listener on each of its ports. 0: no room. */
uint32_t name_address(const char *name, const uint16_t *ports, size_t n);
void op_egress(uint32_t stream, struct in *);

/* ---- dns.c */
bool dns_start(uint16_t port);
void dns_attached(void);

/* ---- conn.c: one TCP connection, spliced to a stream */
enum conn_state { CONN_HEAD, CONN_CONNECTING, CONN_OPENING, CONN_OPEN };
struct conn {
    struct watch w;
    struct conn *next;
    uint32_t stream; /* 0: none (yet) */
    enum via via;
    enum conn_state state;
    bool readable;  /* since the last EAGAIN there may be more to read */
    bool eof;       /* the daemon said that no more comes */
    bool shut;      /* and the program was told */
    bool sent_eof;  /* the program said so, and the daemon was told */
    bool clean;     /* close without a reset */
    bool dead;
    uint16_t port;
    int step;       /* of a proxy's greeting */
    bool whole;     /* a proxy's request that was not CONNECT */
    struct ring in; /* to the program */
    uint64_t in_seen, acked, out_off;
    uint8_t *head;  /* read already: a proxy's greeting, or what followed it */
    size_t headlen;
};
/* Takes fd over. NULL: no room; fd is closed. */
struct conn *conn_accepted(int fd, enum via via);
void conn_open(struct conn *, const char *host, size_t n, uint16_t port);
void conn_say(struct conn *, const void *, size_t); /* to the program, behind what waits */
void conn_finish(struct conn *);                    /* close once all is said */
void conn_drop(struct conn *);
void op_connect(uint32_t stream, struct in *);

/* ---- proxy.c */
bool proxy_start(enum via via, uint16_t port, struct watch *);
void proxy_head(struct conn *);              /* more of the greeting was read */
void proxy_opened(struct conn *);            /* the daemon connected */
void proxy_refused(struct conn *, int err);  /* it did not */

#endif
