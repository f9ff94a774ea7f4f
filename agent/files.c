/* File requests that answer at once, done with the named user's rights. */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void put_stat(struct buf *b, int dir, const char *name, const struct stat *st) {
    char target[MAX_PATH];
    ssize_t n = S_ISLNK(st->st_mode) ? readlinkat(dir, name, target, sizeof target) : 0;
    put32(b, st->st_mode);
    put32(b, st->st_uid);
    put32(b, st->st_gid);
    put64(b, (uint64_t)st->st_size);
    put64(b, (uint64_t)st->st_mtim.tv_sec * 1000000000ull + (uint64_t)st->st_mtim.tv_nsec);
    putbytes(b, target, n > 0 ? (size_t)n : 0);
}

/* mkdir -p of everything above the last component. */
int make_parents(const char *path, mode_t mode) {
    char copy[MAX_PATH + 1];
    if (strlen(path) > MAX_PATH) return ENAMETOOLONG;
    strcpy(copy, path);
    char *last = strrchr(copy, '/');
    if (!last || last == copy) return 0;
    *last = 0;
    struct stat st;
    if (stat(copy, &st) == 0) return S_ISDIR(st.st_mode) ? 0 : ENOTDIR;
    for (char *p = copy + 1;; p++) {
        if (*p && *p != '/') continue;
        char held = *p;
        *p = 0;
        if (mkdir(copy, mode) < 0 && errno != EEXIST) return errno;
        *p = held;
        if (!held) return stat(copy, &st) < 0 ? errno : S_ISDIR(st.st_mode) ? 0 : ENOTDIR;
    }
}

static int make_dir(const char *path, mode_t mode, bool parents) {
    struct stat st;
    if (!parents) return mkdir(path, mode) < 0 ? errno : 0;
    int err = make_parents(path, 0777);
    if (err) return err;
    if (mkdir(path, mode) == 0) return 0;
    if (errno != EEXIST) return errno;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode) ? 0 : EEXIST;
}

static int utime_ns(const char *path, uint64_t atime, uint64_t mtime, bool follow) {
    struct timespec t[2] = {{(time_t)(atime / 1000000000), (long)(atime % 1000000000)},
                            {(time_t)(mtime / 1000000000), (long)(mtime % 1000000000)}};
    return utimensat(AT_FDCWD, path, t, follow ? 0 : AT_SYMLINK_NOFOLLOW) < 0 ? errno : 0;
}

static int simple(uint16_t op, const char *path, struct in *in, struct buf *out) {
    struct stat st;
    char *other = NULL;
    int err = 0;
    switch (op) {
    case OP_STAT: {
        bool follow = get8(in) & 1;
        if (fstatat(AT_FDCWD, path, &st, follow ? 0 : AT_SYMLINK_NOFOLLOW) < 0) return errno;
        put_stat(out, AT_FDCWD, path, &st);
        return 0;
    }
    case OP_MKDIR: {
        mode_t mode = get32(in);
        return make_dir(path, mode, get8(in) & 1);
    }
    case OP_RENAME:
        other = getstr(in, MAX_PATH);
        if (!other) return EINVAL;
        if (get8(in) & 1) err = make_parents(other, 0777);
        if (!err && rename(path, other) < 0) err = errno;
        break;
    case OP_SYMLINK:
        other = getstr(in, MAX_PATH);
        if (!other) return EINVAL;
        if (symlink(other, path) < 0) err = errno;
        break;
    case OP_READLINK: {
        char target[MAX_PATH];
        ssize_t n = readlink(path, target, sizeof target);
        if (n < 0) return errno;
        putbytes(out, target, (size_t)n);
        return 0;
    }
    case OP_CHMOD:
        return chmod(path, get32(in) & 07777) < 0 ? errno : 0;
    case OP_CHOWN: {
        uint32_t uid = get32(in), gid = get32(in);
        return fchownat(AT_FDCWD, path, uid, gid, AT_SYMLINK_NOFOLLOW) < 0 ? errno : 0;
    }
    case OP_UTIME: {
        uint64_t atime = get64(in), mtime = get64(in);
        return utime_ns(path, atime, mtime, get8(in) & 1);
    }
    default:
        return ENOSYS;
    }
    free(other);
    return err;
}

void op_file(uint32_t stream, uint16_t op, struct in *in) {
    static struct user u;
    char *name = getstr(in, 128), *path = getstr(in, MAX_PATH), *full = NULL;
    int err = in->bad || !*path ? EINVAL : user_find(name, &u);
    if (err) {
        stream_end(stream, err, err == ENOENT ? "no such user" : "malformed request", NULL);
        goto out;
    }
    /* A relative path starts at the user's home. */
    if (*path != '/' && asprintf(&full, "%s/%s", u.home, path) < 0) full = NULL;
    const char *p = full ? full : path;
    switch (op) {
    case OP_READ: op_read(stream, &u, p, in); goto out;
    case OP_WRITE: op_write(stream, &u, p, in); goto out;
    case OP_LIST: op_list(stream, &u, p); goto out;
    case OP_REMOVE: op_remove(stream, &u, p, get8(in) & 1); goto out;
    }
    struct buf b = {0};
    err = user_become(&u);
    if (!err) {
        err = simple(op, p, in, &b);
        if (!err && in->bad) err = EINVAL;
        user_restore();
    }
    stream_end(stream, err, err ? strerror(err) : NULL, &b);
    buf_free(&b);
out:
    free(full);
    free(name);
    free(path);
}
