/* A byte stream's recent part, addressed by offsets since its start. */
#include "agent.h"

#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

/* Grown on demand and given back when released: rings are part of every memory image. */
enum { RING_MIN = 16 << 10, RING_KEPT = 256 << 10 };

size_t ring_used(const struct ring *r) { return (size_t)(r->end - r->start); }

static bool grow(struct ring *r, size_t need) {
    uint32_t cap = r->cap ? r->cap : RING_MIN;
    while (cap < need) cap *= 2;
    if (cap == r->cap) return true;
    uint8_t *p = malloc(cap);
    if (!p) return false;
    for (uint64_t o = r->start; o < r->end;) {
        size_t from = o & (r->cap - 1), to = o & (cap - 1), n = (size_t)(r->end - o);
        if (n > r->cap - from) n = r->cap - from;
        if (n > cap - to) n = cap - to;
        memcpy(p + to, r->p + from, n);
        o += n;
    }
    free(r->p);
    r->p = p;
    r->cap = cap;
    return true;
}

ssize_t ring_fill(struct ring *r, int fd, bool drop, bool *lost) {
    size_t used = ring_used(r), max = drop ? RING_MAX / 4 : RING_MAX;
    if (r->keep && r->cap < RING_KEPT) grow(r, RING_KEPT);
    if (used >= r->cap && r->cap < max && !grow(r, r->cap ? r->cap * 2 : RING_MIN) && !r->cap) return -2;
    size_t room = r->cap - used;
    if (!room) {
        if (!drop) return -2;
        room = r->cap / 4;
        r->start += room;
        if (r->sent < r->start) r->sent = r->start;
        *lost = true;
    }
    size_t at = r->end & (r->cap - 1), first = r->cap - at;
    if (first > room) first = room;
    struct iovec v[2] = {{r->p + at, first}, {r->p, room - first}};
    ssize_t n = readv(fd, v, room > first ? 2 : 1);
    if (n > 0) r->end += (uint64_t)n;
    return n;
}

void ring_add(struct ring *r, const void *data, size_t n) {
    if (!grow(r, ring_used(r) + n)) return;
    const uint8_t *p = data;
    while (n) {
        size_t at = r->end & (r->cap - 1), k = r->cap - at < n ? r->cap - at : n;
        memcpy(r->p + at, p, k);
        p += k;
        n -= k;
        r->end += k;
    }
}

size_t ring_copy(const struct ring *r, uint64_t off, uint8_t *to, size_t n) {
    size_t done = 0;
    if (n > r->end - off) n = (size_t)(r->end - off);
    while (done < n) {
        size_t at = (off + done) & (r->cap - 1), k = r->cap - at < n - done ? r->cap - at : n - done;
        memcpy(to + done, r->p + at, k);
        done += k;
    }
    return n;
}

ssize_t ring_drain(struct ring *r, int fd) {
    size_t at = r->start & (r->cap - 1), n = ring_used(r), first = r->cap - at;
    if (first > n) first = n;
    struct iovec v[2] = {{r->p + at, first}, {r->p, n - first}};
    ssize_t w = writev(fd, v, n > first ? 2 : 1);
    if (w > 0) ring_ack(r, r->start + (uint64_t)w);
    return w;
}

void ring_ack(struct ring *r, uint64_t off) {
    if (off > r->end) off = r->end;
    if (off > r->start) r->start = off;
    if (r->sent < r->start) r->sent = r->start;
    if (r->cap > RING_MIN && !r->keep) ring_trim(r);
}

void ring_trim(struct ring *r) {
    if (r->start == r->end) ring_free(r);
}

/* A heap shrinks at its end alone, and what a flood or a transfer used would be in every image from then on.
   Pieces that are mapped one by one would go back by themselves, and cost a busy connection a third of its pace. */
static bool used_much;

void memory_trim(bool much) {
#ifdef __GLIBC__
    if (used_much || much) malloc_trim(0);
#endif
    used_much = false;
}

void ring_free(struct ring *r) {
    if (r->cap >= RING_KEPT) used_much = true;
    free(r->p);
    r->p = NULL;
    r->cap = 0;
}
