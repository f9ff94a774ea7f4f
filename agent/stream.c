/* The streams of the present epoch. */
#include "agent.h"

#include <stdlib.h>
#include <string.h>

static struct stream *head;
static unsigned count;
static uint32_t turn; /* id of the stream that was served last */

struct stream *stream_new(uint32_t id, const struct stream_ops *ops, void *ctx) {
    if (count >= MAX_STREAMS) return NULL;
    struct stream *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->id = id;
    s->ops = ops;
    s->ctx = ctx;
    for (int i = 0; i < 3; i++) s->limit[i] = WINDOW;
    struct stream **at = &head; /* kept in the order they were opened */
    while (*at) at = &(*at)->next;
    *at = s;
    count++;
    return s;
}

struct stream *stream_find(uint32_t id) {
    for (struct stream *s = head; s; s = s->next)
        if (s->id == id && !s->dead) return s;
    return NULL;
}

unsigned streams_count(void) { return count; }

void stream_drop(struct stream *s) {
    if (s->dead) return;
    s->dead = true; /* freed by the sweep: callers may be walking the list */
    if (s->ops->close) s->ops->close(s);
}

void streams_drop_all(void) {
    for (struct stream *s = head; s; s = s->next) stream_drop(s);
}

void streams_sweep(void) {
    for (struct stream **at = &head; *at;) {
        struct stream *s = *at;
        if (s->dead) {
            *at = s->next;
            free(s);
            count--;
        } else {
            at = &s->next;
        }
    }
}

/* Serve the streams in turn, from the one after the last served, while the channel has room. */
bool streams_pump(void) {
    bool more = false;
    struct stream *first = head;
    while (first && first->id != turn) first = first->next;
    first = first && first->next ? first->next : head;
    for (struct stream *s = first; s && !quiesced;) {
        if (!channel_has_room()) return true; /* goes on when the pipe is writable */
        uint32_t id = s->id;
        if (!s->dead && s->ops->pump && s->ops->pump(s)) more = true;
        turn = id;
        s = s->next ? s->next : head;
        if (s == first) break;
    }
    return more && !quiesced;
}

void stream_end(uint32_t id, int err, const char *what, const struct buf *payload) {
    struct buf b = {0};
    put32(&b, (uint32_t)err);
    size_t n = what ? strlen(what) : 0;
    putbytes(&b, what, n > 512 ? 512 : n);
    if (payload) putraw(&b, payload->p, payload->len);
    emit(T_END, 0, id, b.p, b.len);
    buf_free(&b);
    struct stream *s = stream_find(id);
    if (s) stream_drop(s);
}
