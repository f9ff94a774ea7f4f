/* Commands across epochs: what a new reader finds, and where it goes on. */
#include "agent.h"

#include <errno.h>

void op_adopt(uint32_t stream, struct in *in) {
    uint32_t pid = get32(in);
    uint64_t off[2] = {get64(in), get64(in)};
    struct cmd *c = cmds; /* the newest first, should a number have come round again */
    while (c && ((uint32_t)c->pid != pid || c->done)) c = c->next;
    if (in->bad || !c) {
        stream_end(stream, in->bad ? EINVAL : ESRCH, "no such command", NULL);
        return;
    }
    struct stream *old = c->stream ? stream_find(c->stream) : NULL;
    if (old) { /* a second reader takes over */
        c->stream = 0;
        emit(T_RESET, 0, old->id, NULL, 0);
        stream_drop(old);
    }
    struct stream *s = stream_new(stream, &cmd_stream, c);
    if (!s) {
        stream_end(stream, EAGAIN, "too many streams", NULL);
        return;
    }
    c->stream = stream;
    c->drop = false;
    c->exit_sent = false;
    struct buf b = {0};
    put32(&b, (uint32_t)c->pid);
    put32(&b, c->id);
    put32(&b, c->flags);
    for (int i = 0; i < 2; i++) {
        struct ring *r = &c->ring[i];
        if (off[i] > r->end) off[i] = r->end;
        ring_ack(r, off[i]);
        r->sent = r->start;
        s->limit[i + 1] = r->start + WINDOW;
        put64(&b, r->start);
    }
    put64(&b, c->stdin_seen);
    s->limit[0] = 0;
    emit(T_OPENED, OP_ADOPT, stream, b.p, b.len);
    emit_ack(0, stream, c->stdin_.start, c->stdin_.start + WINDOW);
    buf_free(&b);
}

void cmds_table(struct buf *b) {
    uint32_t n = 0;
    for (struct cmd *c = cmds; c; c = c->next) n += !c->done;
    put32(b, n);
    for (struct cmd *c = cmds; c; c = c->next) {
        if (c->done) continue;
        put32(b, (uint32_t)c->pid);
        put32(b, c->id);
        put32(b, c->flags | (c->exited ? 256u : 0) | (c->oom ? 512u : 0) | (c->lost ? 1024u : 0));
        for (int i = 0; i < 2; i++) {
            put64(b, c->ring[i].start);
            put64(b, c->ring[i].end);
        }
        put64(b, c->stdin_seen);
        put32(b, (uint32_t)c->code);
        put32(b, (uint32_t)c->sig);
        putbytes(b, c->tag, c->taglen);
    }
}

void cmd_detach_all(void) {
    for (struct cmd *c = cmds; c; c = c->next) {
        c->stream = 0;
        for (int i = 0; i < 2; i++) c->ring[i].sent = c->ring[i].start;
    }
}
