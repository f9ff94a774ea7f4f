/* Frames and payloads: bytes in, bytes out, nothing else. */
#include "agent.h"

#include <stdlib.h>
#include <string.h>

static uint32_t table[8][256];

void crc32_init(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
        table[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int t = 1; t < 8; t++) table[t][i] = table[0][table[t - 1][i] & 255] ^ (table[t - 1][i] >> 8);
}

/* Eight bytes a step: a bytewise loop would be the slowest part of a file transfer. */
__attribute__((optimize("O3"))) uint32_t crc32_of(uint32_t crc, const void *data, size_t n) {
    const uint8_t *p = data;
    uint32_t c = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint32_t a, b;
        memcpy(&a, p, 4);
        memcpy(&b, p + 4, 4);
        a ^= c;
        c = table[7][a & 255] ^ table[6][a >> 8 & 255] ^ table[5][a >> 16 & 255] ^ table[4][a >> 24] ^
            table[3][b & 255] ^ table[2][b >> 8 & 255] ^ table[1][b >> 16 & 255] ^ table[0][b >> 24];
    }
    while (n--) c = table[0][(c ^ *p++) & 255] ^ (c >> 8);
    return ~c;
}

static const uint8_t *take(struct in *in, size_t n) {
    if (in->bad || in->left < n) {
        in->bad = true;
        return NULL;
    }
    const uint8_t *p = in->p;
    in->p += n;
    in->left -= n;
    return p;
}

#define GETTER(name, type)                                                                                        \
    type name(struct in *in) {                                                                                    \
        type v = 0;                                                                                               \
        const uint8_t *p = take(in, sizeof v);                                                                    \
        if (p) memcpy(&v, p, sizeof v);                                                                           \
        return v;                                                                                                 \
    }
GETTER(get8, uint8_t)
GETTER(get16, uint16_t)
GETTER(get32, uint32_t)
GETTER(get64, uint64_t)

const uint8_t *getbytes(struct in *in, size_t max, size_t *len) {
    uint32_t n = get32(in);
    if (n > max) in->bad = true;
    const uint8_t *p = take(in, n);
    *len = p ? n : 0;
    return p;
}

char *getstr(struct in *in, size_t max) {
    size_t n;
    const uint8_t *p = getbytes(in, max, &n);
    if (!p || memchr(p, 0, n)) {
        in->bad = true;
        return NULL;
    }
    char *s = malloc(n + 1);
    if (!s) {
        in->bad = true;
        return NULL;
    }
    memcpy(s, p, n);
    s[n] = 0;
    return s;
}

uint8_t *buf_room(struct buf *b, size_t n) {
    if (b->cap - b->len < n) {
        size_t cap = b->cap ? b->cap : 256;
        while (cap - b->len < n) cap *= 2;
        uint8_t *p = realloc(b->p, cap);
        if (!p) abort();
        b->p = p;
        b->cap = cap;
    }
    return b->p + b->len;
}

void putraw(struct buf *b, const void *p, size_t n) {
    if (n) memcpy(buf_room(b, n), p, n);
    b->len += n;
}
void put8(struct buf *b, uint8_t v) { putraw(b, &v, sizeof v); }
void put16(struct buf *b, uint16_t v) { putraw(b, &v, sizeof v); }
void put32(struct buf *b, uint32_t v) { putraw(b, &v, sizeof v); }
void put64(struct buf *b, uint64_t v) { putraw(b, &v, sizeof v); }
void putbytes(struct buf *b, const void *p, size_t n) {
    put32(b, (uint32_t)n);
    putraw(b, p, n);
}
void buf_free(struct buf *b) {
    free(b->p);
    memset(b, 0, sizeof *b);
}

bool header_read(const uint8_t *p, struct header *h) {
    struct in in = {p, HDR, false};
    if (get32(&in) != MAGIC) return false;
    h->type = get8(&in);
    h->flags = get8(&in);
    h->chan = get16(&in);
    h->stream = get32(&in);
    h->length = get32(&in);
    h->epoch = get32(&in);
    h->crc = get32(&in);
    return h->length <= MAX_PAYLOAD;
}

void header_write(uint8_t *p, uint8_t type, uint8_t flags, uint16_t chan, uint32_t stream, uint32_t length,
                  uint32_t epoch) {
    uint32_t magic = MAGIC;
    memcpy(p, &magic, 4);
    p[4] = type;
    p[5] = flags;
    memcpy(p + 6, &chan, 2);
    memcpy(p + 8, &stream, 4);
    memcpy(p + 12, &length, 4);
    memcpy(p + 16, &epoch, 4);
    memset(p + 20, 0, 4);
}

static uint32_t frame_crc(const uint8_t *frame) {
    uint32_t n;
    memcpy(&n, frame + 12, 4);
    return crc32_of(crc32_of(0, frame, HDR - 4), frame + HDR, n);
}

void frame_seal(uint8_t *frame) {
    uint32_t c = frame_crc(frame);
    memcpy(frame + 20, &c, 4);
}

bool frame_check(const uint8_t *frame) {
    uint32_t c;
    memcpy(&c, frame + 20, 4);
    return c == frame_crc(frame);
}
