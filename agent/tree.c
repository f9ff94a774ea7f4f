/* Listing and removing directories, in slices, so that a large one holds nobody up. */
#define _GNU_SOURCE
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SLICE = 128, MAX_DEPTH = 512 };

struct listing {
    DIR *d;
    struct user user;
    struct buf out; /* entries, [sent, len) not yet emitted */
    uint64_t sent;
    size_t at;
    bool done;
};

static bool dots(const char *n) { return n[0] == '.' && (!n[1] || (n[1] == '.' && !n[2])); }

static bool list_pump(struct stream *s) {
    struct listing *l = s->ctx;
    if (!l->done && l->out.len - l->at < MAX_DATA) {
        if (l->at == l->out.len) l->at = l->out.len = 0;
        if (!user_become(&l->user)) {
            for (int i = 0; i < SLICE; i++) {
                struct dirent *e = readdir(l->d);
                struct stat st;
                if (!e) {
                    l->done = true;
                    break;
                }
                if (dots(e->d_name) || fstatat(dirfd(l->d), e->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0) continue;
                putbytes(&l->out, e->d_name, strlen(e->d_name));
                put_stat(&l->out, dirfd(l->d), e->d_name, &st);
            }
            user_restore();
        } else {
            l->done = true;
        }
    }
    size_t n = l->out.len - l->at;
    if (!n && l->done) {
        stream_end(s->id, 0, NULL, NULL);
        return false;
    }
    if (n > MAX_DATA) n = MAX_DATA;
    if (l->sent >= s->limit[1]) return false;
    if (n > s->limit[1] - l->sent) n = (size_t)(s->limit[1] - l->sent);
    if (n) {
        memcpy(emit_begin(), l->out.p + l->at, n);
        emit_data(1, s->id, l->sent, n);
        l->at += n;
        l->sent += n;
    }
    return true;
}

static void list_close(struct stream *s) {
    struct listing *l = s->ctx;
    closedir(l->d);
    buf_free(&l->out);
    free(l);
}

static const struct stream_ops listing_ops = {.pump = list_pump, .close = list_close};

void op_list(uint32_t stream, const struct user *u, const char *path) {
    struct listing *l = calloc(1, sizeof *l);
    int err = l ? user_become(u) : ENOMEM;
    if (!err) {
        int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        err = fd < 0 ? errno : 0;
        l->d = fd < 0 ? NULL : fdopendir(fd);
        user_restore();
    }
    if (!err && l->d) {
        l->user = *u;
        if (stream_new(stream, &listing_ops, l)) return;
        closedir(l->d);
        err = EAGAIN;
    }
    free(l);
    stream_end(stream, err ? err : ENOMEM, strerror(err ? err : ENOMEM), NULL);
}

struct removal {
    struct user user;
    DIR *dir[MAX_DEPTH];
    char *name[MAX_DEPTH]; /* of dir[i], in dir[i - 1] */
    int depth, err, again;
};

static int enter(struct removal *r, int at, const char *name) {
    if (r->depth == MAX_DEPTH) return ELOOP;
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return errno;
    r->dir[r->depth] = fdopendir(fd);
    r->name[r->depth] = strdup(name);
    r->depth++;
    return 0;
}

static void leave(struct removal *r) {
    int i = --r->depth;
    closedir(r->dir[i]);
    char *name = r->name[i];
    int at = i ? dirfd(r->dir[i - 1]) : AT_FDCWD;
    if (unlinkat(at, name, AT_REMOVEDIR) < 0 && !r->err) {
        /* Deleting while reading may skip entries: look again, but not for ever. */
        int err = errno;
        if (err == ENOTEMPTY && r->again++ < 100) err = enter(r, at, name);
        r->err = err;
    }
    free(name);
}

static void step(struct removal *r) {
    DIR *d = r->dir[r->depth - 1];
    struct dirent *e = readdir(d);
    if (!e) {
        leave(r);
        return;
    }
    if (dots(e->d_name) || unlinkat(dirfd(d), e->d_name, 0) == 0) return;
    int err = errno;
    if (err == EISDIR || err == EPERM) err = enter(r, dirfd(d), e->d_name);
    if (err && err != ENOENT && !r->err) r->err = err;
}

static bool remove_pump(struct stream *s) {
    struct removal *r = s->ctx;
    int err = user_become(&r->user);
    for (int i = 0; i < SLICE && r->depth && !err; i++) step(r);
    user_restore();
    if (r->depth && !err) return true;
    if (!err) err = r->err;
    stream_end(s->id, err, err ? strerror(err) : NULL, NULL);
    return false;
}

static void remove_close(struct stream *s) {
    struct removal *r = s->ctx;
    while (r->depth) {
        closedir(r->dir[--r->depth]);
        free(r->name[r->depth]);
    }
    free(r);
}

static const struct stream_ops removal_ops = {.pump = remove_pump, .close = remove_close};

void op_remove(uint32_t stream, const struct user *u, const char *path, bool recursive) {
    struct removal *r = calloc(1, sizeof *r);
    int err = r ? user_become(u) : ENOMEM;
    if (!err) {
        if (unlink(path) < 0) {
            err = errno;
            if (err == EISDIR || err == EPERM) {
                if (!recursive)
                    err = rmdir(path) < 0 ? errno : 0;
                else
                    err = enter(r, AT_FDCWD, path);
            }
        }
        user_restore();
    }
    if (!err && r->depth) {
        r->user = *u;
        if (stream_new(stream, &removal_ops, r)) return;
        err = EAGAIN;
        struct stream gone = {.ctx = r};
        remove_close(&gone);
        r = NULL;
    }
    free(r);
    stream_end(stream, err, err ? strerror(err) : NULL, NULL);
}
