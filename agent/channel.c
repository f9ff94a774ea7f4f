/* The wire's guest end: parse what comes in, queue what goes out, follow epochs. */
#include "net.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

/* What one read takes at most. Bulk data uses all of it; between transfers the first part is kept. */
enum { KEPT = 256 << 10, PAGE = 4096, IBUF = (16 * MAX_FRAME + PAGE - 1) / PAGE * PAGE };
static uint8_t ibuf[IBUF] __attribute__((aligned(PAGE))); /* whole pages: what follows is not given back */
static size_t ilen, itouched;
static uint32_t epoch;
static struct buf obuf; /* [opos, len) is still to be written */
static size_t opos;
/* Of a quiesce: asked for, its acknowledgement is on the way, nothing more may leave. */
static enum { Q_NONE, Q_ASKED, Q_ACKING, Q_HELD } quiesce;
static struct buf assembly; /* a request that came in several frames */
static uint32_t assembly_stream;

enum { CONTROL_BACKLOG = 1 << 20 };

void channel_init(void) {
    for (int fd = 0; fd < 2; fd++) {
        int fl = fcntl(fd, F_GETFL);
        fcntl(fd, F_SETFL, fl | O_NONBLOCK);
        fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
}

static size_t pending(void) { return obuf.len - opos; }
bool channel_wants_write(void) { return quiesce == Q_ASKED || (pending() > 0 && quiesce != Q_HELD); }
/* Replies pile up if the daemon asks and does not read: stop listening until it does. */
bool channel_wants_read(void) { return pending() < CONTROL_BACKLOG; }
bool channel_has_room(void) { return pending() < 8192; }

static uint8_t *frame_room(size_t payload) {
    if (opos == obuf.len) opos = obuf.len = 0;
    if (opos > (1u << 20)) {
        memmove(obuf.p, obuf.p + opos, pending());
        obuf.len -= opos;
        opos = 0;
    }
    return buf_room(&obuf, HDR + payload);
}

static void emit_flags(uint8_t type, uint8_t flags, uint16_t chan, uint32_t stream, const void *p, size_t n) {
    uint8_t *f = frame_room(n);
    header_write(f, type, flags, chan, stream, (uint32_t)n, epoch);
    if (n) memcpy(f + HDR, p, n);
    frame_seal(f);
    obuf.len += HDR + n;
}

void emit(uint8_t type, uint16_t chan, uint32_t stream, const void *payload, size_t n) {
    if (!epoch) return; /* nobody has attached yet */
    const uint8_t *p = payload;
    for (; n > MAX_DATA; p += MAX_DATA, n -= MAX_DATA) emit_flags(type, F_MORE, chan, stream, p, MAX_DATA);
    emit_flags(type, 0, chan, stream, p, n);
}

uint8_t *emit_begin(void) { return frame_room(MAX_PAYLOAD) + HDR + 8; }

int emit_parts(struct iovec *parts, size_t n) {
    int count = (int)((n + MAX_DATA - 1) / MAX_DATA);
    uint8_t *at = frame_room((size_t)count * MAX_FRAME) + HDR + 8;
    for (int i = 0; i < count; i++, at += MAX_FRAME, n -= MAX_DATA)
        parts[i] = (struct iovec){at, n > MAX_DATA ? MAX_DATA : n};
    return count;
}

void emit_data(uint16_t chan, uint32_t stream, uint64_t off, size_t n) {
    uint8_t *f = obuf.p + obuf.len;
    header_write(f, T_DATA, 0, chan, stream, (uint32_t)n + 8, epoch);
    memcpy(f + HDR, &off, 8);
    frame_seal(f);
    obuf.len += HDR + 8 + n;
}

void emit_ack(uint16_t chan, uint32_t stream, uint64_t delivered, uint64_t limit) {
    uint64_t v[2] = {delivered, limit};
    emit(T_ACK, chan, stream, v, sizeof v);
}

static void error_reply(uint32_t stream, int err, const char *what) {
    struct buf b = {0};
    put32(&b, (uint32_t)err);
    putbytes(&b, what, strlen(what));
    emit(T_ERROR, 0, stream, b.p, b.len);
    buf_free(&b);
}

bool channel_flush(void) {
    for (;;) {
        if (quiesce == Q_HELD) return true;
        while (pending()) {
            ssize_t n = write(1, obuf.p + opos, pending());
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) return errno == EAGAIN;
            opos += (size_t)n;
        }
        opos = obuf.len = 0;
        if (obuf.cap > CONTROL_BACKLOG) buf_free(&obuf);
        if (quiesce == Q_ASKED)
            emit(T_QUIESCED, 0, 0, NULL, 0);
        else if (quiesce == Q_NONE)
            return true;
        quiesce++; /* once the acknowledgement is written, nothing follows it */
    }
}

static void set_quiesce(bool on) {
    if (on != quiesced) quiesce = on ? Q_ASKED : Q_NONE;
    if (on) cmds_trim();
    quiesced = on;
}

static void attach(const struct header *h, struct in *in) {
    uint16_t min = get16(in), max = get16(in);
    const uint8_t *nonce = in->left >= 16 ? in->p : NULL;
    if (!nonce || !h->epoch) return;
    opos = obuf.len = 0; /* a half-written frame: the daemon looks for the nonce only */
    buf_free(&assembly);
    set_quiesce(false);
    epoch = h->epoch;
    streams_drop_all();
    cmd_detach_all();
    struct buf b = {0};
    putraw(&b, nonce, 16);
    bool ok = min <= WIRE_VERSION && max >= WIRE_VERSION_MIN;
    put16(&b, ok ? WIRE_VERSION : 0);
    put64(&b, FEATURE_NET | FEATURE_CROWDS);
    putbytes(&b, BUILD_ID, strlen(BUILD_ID));
    put32(&b, (uint32_t)getpid());
    put64(&b, now_ms());
    putbytes(&b, fork_id, strlen(fork_id));
    cmds_table(&b);
    emit(T_HELLO, 0, 0, b.p, b.len);
    buf_free(&b);
    net_attached();
}

static void data_frame(struct stream *s, uint16_t chan, struct in *in) {
    uint64_t off = get64(in);
    if (in->bad) return;
    if (s->ops->data) s->ops->data(s, chan, off, in->p, in->left);
}

static void open_frame(const struct header *h, struct in *in) {
    if (h->flags & F_MORE || assembly.len) {
        if (assembly.len && assembly_stream != h->stream) {
            buf_free(&assembly);
            error_reply(h->stream, EPROTO, "a request in parts was interrupted");
            return;
        }
        if (assembly.len + in->left > MAX_REQUEST) {
            buf_free(&assembly);
            stream_end(h->stream, E2BIG, "the request is too long", NULL);
            return;
        }
        assembly_stream = h->stream;
        putraw(&assembly, in->p, in->left);
        if (h->flags & F_MORE) return;
        struct in whole = {assembly.p, assembly.len, false};
        struct buf held = assembly;
        memset(&assembly, 0, sizeof assembly);
        op_open(h->stream, h->chan, &whole);
        buf_free(&held);
        return;
    }
    op_open(h->stream, h->chan, in);
}

static void frame(const struct header *h, struct in *in) {
    if (h->type == T_ATTACH) {
        attach(h, in);
        return;
    }
    if (!epoch || h->epoch != epoch) return;
    switch (h->type) {
    case T_PING:
        emit(T_PONG, 0, h->stream, in->p, in->left > MAX_CONTROL ? MAX_CONTROL : in->left);
        return;
    case T_QUIESCE:
        if (get8(in) & 1) sync();
        set_quiesce(true);
        return;
    case T_UNQUIESCE:
        set_quiesce(false);
        return;
    case T_OPEN:
        if (!(h->stream & 1) || stream_find(h->stream))
            error_reply(h->stream, EINVAL, "the stream is in use or not yours to open");
        else
            open_frame(h, in);
        return;
    }
    struct stream *s = stream_find(h->stream);
    switch (h->type) {
    case T_DATA:
        if (s) data_frame(s, h->chan, in); /* late data of a stream that ended is no error */
        return;
    case T_EOF:
        if (s && s->ops->eof) s->ops->eof(s, h->chan);
        return;
    case T_ACK: {
        uint64_t delivered = get64(in), limit = get64(in);
        if (!s || in->bad || h->chan > 2) return;
        if (limit > s->limit[h->chan]) s->limit[h->chan] = limit;
        if (s->ops->ack) s->ops->ack(s, h->chan, delivered);
        return;
    }
    case T_RESET:
        if (s) stream_drop(s);
        return;
    case T_OPENED: /* of a stream that we opened */
    case T_END:
    case T_RELEASE:
    case T_SIGNAL:
    case T_RESIZE:
        if (s && s->ops->control) s->ops->control(s, h->type, in);
        return;
    }
    error_reply(h->stream, ENOSYS, "unknown frame type");
}

static void parse(void) {
    size_t pos = 0;
    while (pos < ilen) {
        if (!ibuf[pos]) { /* the zeros before an attach */
            pos++;
            continue;
        }
        struct header h;
        if (ilen - pos < HDR) {
            /* Fewer bytes than a header may still be torn ones: judge what is there. */
            uint32_t magic = MAGIC;
            size_t n = ilen - pos < 4 ? ilen - pos : 4;
            if (!memcmp(ibuf + pos, &magic, n)) break;
            pos++;
            continue;
        }
        if (!header_read(ibuf + pos, &h)) {
            pos++;
            continue;
        }
        if (ilen - pos < HDR + h.length) break;
        if (frame_check(ibuf + pos)) {
            struct in in = {ibuf + pos + HDR, h.length, false};
            frame(&h, &in);
        } else if (epoch && h.epoch == epoch) {
            struct stream *s = stream_find(h.stream);
            if (s) {
                stream_drop(s);
                emit(T_RESET, 0, h.stream, NULL, 0);
            }
            error_reply(h.stream, EBADMSG, "checksum mismatch");
        }
        pos += HDR + h.length;
    }
    write_gathered();
    memmove(ibuf, ibuf + pos, ilen - pos);
    ilen -= pos;
}

bool channel_read(void) {
    ssize_t n = read(0, ibuf + ilen, sizeof ibuf - ilen);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    if (!n) return false;
    ilen += (size_t)n;
    if (ilen > itouched) itouched = ilen;
    parse();
    return true;
}

/* Nothing is under way: what transfers used would be in every image of this machine. */
void channel_trim(void) {
    bool much = !pending() && obuf.cap > KEPT;
    if (much) {
        opos = 0;
        buf_free(&obuf);
    }
    if (itouched > KEPT && ilen <= KEPT) {
        madvise(ibuf + KEPT, sizeof ibuf - KEPT, MADV_DONTNEED);
        itouched = KEPT;
    }
    memory_trim(much);
}
