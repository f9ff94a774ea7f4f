/* Which request is handled where. */
#include "net.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void op_lookup(uint32_t stream, struct in *in) {
    static struct user u;
    char *name = getstr(in, 128);
    int err = name ? user_find(name, &u) : EINVAL;
    struct buf b = {0};
    if (!err) {
        put32(&b, u.uid);
        put32(&b, u.gid);
        putbytes(&b, u.name, strlen(u.name));
        putbytes(&b, u.home, strlen(u.home));
        putbytes(&b, u.shell, strlen(u.shell));
    }
    stream_end(stream, err, err ? "no such user" : NULL, &b);
    buf_free(&b);
    free(name);
}

void op_open(uint32_t stream, uint16_t op, struct in *in) {
    switch (op) {
    case OP_SPAWN: op_spawn(stream, in); return;
    case OP_ADOPT: op_adopt(stream, in); return;
    case OP_IDENTIFY: op_identify(stream, in); return;
    case OP_PROCS: op_procs(stream, in); return;
    case OP_KILL_LARGEST: op_kill_largest(stream, in); return;
    case OP_ACTIVITY: op_activity(stream, in); return;
    case OP_LOOKUP: op_lookup(stream, in); return;
    case OP_KILL: op_kill(stream, in); return;
    case OP_DELETED: op_deleted(stream, in); return;
    case OP_CONNECT: op_connect(stream, in); return;
    case OP_EGRESS: op_egress(stream, in); return;
    }
    if (op >= OP_STAT && op <= OP_UTIME)
        op_file(stream, op, in);
    else
        stream_end(stream, ENOSYS, "unknown request", NULL);
}
