/* One file's content, out of the guest or into it, at the pace of the other side. */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* Frames that one system call fills or empties: in gVisor a call costs more than a frame's bytes. */
enum { UPLOAD_WINDOW = 2 << 20, BATCH = 8, NO_MODE = -1 };

struct reading { int fd; uint64_t off, left; };

static bool read_pump(struct stream *s) {
    struct reading *r = s->ctx;
    if (r->off >= s->limit[1] && r->left) return false;
    size_t n = r->left > BATCH * MAX_DATA ? BATCH * MAX_DATA : (size_t)r->left;
    if (n > s->limit[1] - r->off) n = (size_t)(s->limit[1] - r->off);
    struct iovec parts[BATCH];
    ssize_t got = n ? readv(r->fd, parts, emit_parts(parts, n)) : 0;
    if (got <= 0) {
        stream_end(s->id, got < 0 ? errno : 0, got < 0 ? strerror(errno) : NULL, NULL);
        return false;
    }
    for (size_t left = (size_t)got; left;) {
        size_t part = left > MAX_DATA ? MAX_DATA : left;
        emit_data(1, s->id, r->off, part);
        r->off += part;
        left -= part;
    }
    r->left -= (uint64_t)got;
    return true;
}

static void read_close(struct stream *s) {
    struct reading *r = s->ctx;
    close(r->fd);
    free(r);
}

static const struct stream_ops reading_ops = {.pump = read_pump, .close = read_close};

void op_read(uint32_t stream, const struct user *u, const char *path, struct in *in) {
    uint64_t off = get64(in), len = get64(in);
    struct stat st;
    int err = in->bad ? EINVAL : user_become(u), fd = -1;
    if (!err) {
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
        err = fd < 0 ? errno : 0;
        user_restore();
    }
    if (!err && fstat(fd, &st) < 0) err = errno;
    if (!err && !S_ISREG(st.st_mode)) err = S_ISDIR(st.st_mode) ? EISDIR : EINVAL;
    if (!err && off && lseek(fd, (off_t)off, SEEK_SET) < 0) err = errno;
    struct reading *r = err ? NULL : malloc(sizeof *r);
    struct stream *s = r ? stream_new(stream, &reading_ops, r) : NULL;
    if (!s) {
        if (!err) err = ENOMEM;
        free(r);
        if (fd >= 0) close(fd);
        stream_end(stream, err, err == EINVAL ? "not a regular file" : strerror(err), NULL);
        return;
    }
    *r = (struct reading){fd, off, len ? len : UINT64_MAX};
    s->limit[1] = off + WINDOW;
    struct buf b = {0};
    put_stat(&b, AT_FDCWD, path, &st);
    emit(T_OPENED, OP_READ, stream, b.p, b.len);
    buf_free(&b);
}

struct writing {
    int fd;
    struct user user;
    char *path, *temp; /* temp is NULL when the target is written in place */
    int64_t mode;
    uint64_t off, acked; /* off: of what came, whether it is written or waits in parts */
    struct iovec parts[BATCH];
    int n;
};
/* The stream whose data waits: it lies in the channel's buffer, and is written before that is moved. */
static struct stream *gathered;

static void write_close(struct stream *s) {
    struct writing *w = s->ctx;
    if (gathered == s) gathered = NULL;
    if (w->fd >= 0) close(w->fd);
    if (w->temp) { /* never finished: as if nothing had happened */
        if (!user_become(&w->user)) unlink(w->temp);
        user_restore();
    }
    free(w->temp);
    free(w->path);
    free(w);
}

static void write_fail(struct stream *s, int err) { stream_end(s->id, err, strerror(err), NULL); }

static bool write_parts(struct stream *s) {
    struct writing *w = s->ctx;
    if (gathered == s) gathered = NULL; /* another's data waits on until it is written */
    for (int at = 0; at < w->n;) {
        ssize_t k = writev(w->fd, w->parts + at, w->n - at);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) {
            write_fail(s, k ? errno : ENOSPC);
            return false;
        }
        for (; at < w->n && (size_t)k >= w->parts[at].iov_len; at++) k -= (ssize_t)w->parts[at].iov_len;
        if (at < w->n) {
            w->parts[at].iov_base = (uint8_t *)w->parts[at].iov_base + k;
            w->parts[at].iov_len -= (size_t)k;
        }
    }
    w->n = 0;
    if (w->off - w->acked >= UPLOAD_WINDOW / 8) {
        w->acked = w->off;
        emit_ack(0, s->id, w->off, w->off + UPLOAD_WINDOW);
    }
    return true;
}

void write_gathered(void) {
    if (gathered) write_parts(gathered);
}

static void write_data(struct stream *s, uint16_t chan, uint64_t off, const uint8_t *p, size_t n) {
    struct writing *w = s->ctx;
    if (chan || off != w->off) {
        write_fail(s, EPROTO);
        return;
    }
    if (gathered != s) write_gathered();
    if (!n) return;
    w->parts[w->n++] = (struct iovec){(void *)p, n};
    w->off += n;
    gathered = s;
    if (w->n == BATCH) write_parts(s);
}

static void write_eof(struct stream *s, uint16_t chan) {
    struct writing *w = s->ctx;
    struct stat st;
    if (!write_parts(s)) return;
    int err = user_become(&w->user);
    if (!err && w->mode != NO_MODE && fchmod(w->fd, (mode_t)w->mode & 07777) < 0) err = errno;
    if (!err && fstat(w->fd, &st) < 0) err = errno;
    if (!err && close(w->fd) < 0) err = errno;
    if (!err) w->fd = -1;
    if (!err && w->temp) {
        if (rename(w->temp, w->path) < 0) {
            err = errno;
        } else {
            free(w->temp);
            w->temp = NULL;
        }
    }
    user_restore();
    (void)chan;
    struct buf b = {0};
    if (!err) put_stat(&b, AT_FDCWD, w->path, &st);
    stream_end(s->id, err, err ? strerror(err) : NULL, &b);
    buf_free(&b);
}

static const struct stream_ops writing_ops = {.data = write_data, .eof = write_eof, .close = write_close};

/* A link that leads to nothing yet: the path that it names, where the file is made, as open(2) does. */
static int follow(char **path) {
    char to[PATH_MAX];
    for (int i = 0; i < 40; i++) {
        ssize_t n = readlink(*path, to, sizeof to - 1);
        if (n < 0) return 0;
        to[n] = 0;
        const char *slash = strrchr(*path, '/');
        int dir = *to == '/' || !slash ? 0 : (int)(slash - *path) + 1;
        char *next;
        if (asprintf(&next, "%.*s%s", dir, *path, to) < 0) return ENOMEM;
        free(*path);
        *path = next;
    }
    return ELOOP;
}

/* Runs as the user. A regular file of the user's own is replaced whole, by a rename; what belongs to
   somebody else, or is a device or a pipe, is written in place and stays what it was. */
static int write_open(struct writing *w, const struct user *u, bool parents) {
    static unsigned serial;
    struct stat st;
    int err = parents ? make_parents(w->path, 0777) : 0;
    if (err) return err;
    char *real = realpath(w->path, NULL); /* a link is followed, not replaced */
    if (real) {
        free(w->path);
        w->path = real;
    } else if ((err = follow(&w->path))) {
        return err;
    }
    bool exists = stat(w->path, &st) == 0;
    if (exists && S_ISDIR(st.st_mode)) return EISDIR;
    if (exists) {
        int probe = open(w->path, O_WRONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
        if (probe < 0) return errno;
        if (!S_ISREG(st.st_mode)) {
            w->fd = probe;
            return 0;
        }
        close(probe);
    }
    const char *slash = strrchr(w->path, '/');
    int dir = slash ? (int)(slash - w->path) : 0;
    if (!exists || st.st_uid == u->uid || !u->uid) {
        if (asprintf(&w->temp, "%.*s/.forkyard-%d-%u.tmp", dir, w->path, getpid(), ++serial) < 0) {
            w->temp = NULL;
            return ENOMEM;
        }
        w->fd = open(w->temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (w->fd >= 0) {
            if (exists) {
                if (w->mode == NO_MODE) fchmod(w->fd, st.st_mode & 07777);
                if (fchown(w->fd, st.st_uid, st.st_gid) < 0) { /* a group of the old file that is not ours */ }
            }
            return 0;
        }
        err = errno;
        free(w->temp);
        w->temp = NULL;
        if (!exists || (err != EACCES && err != EROFS)) return err;
    }
    w->fd = open(w->path, O_WRONLY | O_TRUNC | O_CLOEXEC | O_NONBLOCK);
    return w->fd < 0 ? errno : 0;
}

void op_write(uint32_t stream, const struct user *u, const char *path, struct in *in) {
    int64_t mode = (int32_t)get32(in);
    bool parents = get8(in) & 1;
    struct writing *w = calloc(1, sizeof *w);
    int err = in->bad ? EINVAL : !w ? ENOMEM : 0;
    if (w) w->fd = -1; /* 0 is the channel */
    if (!err) {
        w->user = *u;
        w->mode = mode;
        w->path = strdup(path);
        err = w->path ? user_become(u) : ENOMEM;
    }
    if (!err) {
        err = write_open(w, u, parents);
        user_restore();
    }
    struct stream *s = err ? NULL : stream_new(stream, &writing_ops, w);
    if (s) {
        s->limit[0] = 0;
        return; /* the end of the upload is the answer */
    }
    if (w) {
        struct stream gone = {.ctx = w};
        write_close(&gone);
    }
    stream_end(stream, err ? err : EAGAIN, strerror(err ? err : EAGAIN), NULL);
}
