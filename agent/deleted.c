/* Files that were deleted and are still held: what stands in the way of saving this machine's
 * memory under an older runsc. */
#define _GNU_SOURCE
#include "agent.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_DELETED = 64 };
static const char mark[] = " (deleted)";

/* On a tmpfs they are saved with the memory. memfd and shared memory lie on one too. */
static bool on_tmpfs(const char *path) {
    static const char *dirs[] = {"/tmp/", "/var/tmp/", "/dev/", "/memfd:", "/SYSV", NULL};
    for (int i = 0; dirs[i]; i++)
        if (!strncmp(path, dirs[i], strlen(dirs[i]))) return true;
    return path[0] != '/';
}

static bool look(struct buf *b, const char *pid, const char *link) {
    char path[300], target[MAX_PATH + sizeof mark];
    snprintf(path, sizeof path, "/proc/%.16s/%.200s", pid, link);
    ssize_t n = readlink(path, target, sizeof target - 1);
    if (n <= (ssize_t)sizeof mark) return false;
    target[n] = 0;
    size_t cut = (size_t)n - (sizeof mark - 1);
    if (strcmp(target + cut, mark) || on_tmpfs(target)) return false;
    char comm[64] = "", name[64];
    snprintf(name, sizeof name, "/proc/%.16s/comm", pid);
    FILE *f = fopen(name, "re");
    if (f) {
        if (!fgets(comm, sizeof comm, f)) comm[0] = 0;
        fclose(f);
    }
    comm[strcspn(comm, "\n")] = 0;
    putbytes(b, target, cut);
    put32(b, (uint32_t)strtoul(pid, NULL, 10));
    putbytes(b, comm, strlen(comm));
    return true;
}

void op_deleted(uint32_t stream, struct in *in) {
    struct buf list = {0}, b = {0};
    uint32_t count = 0;
    DIR *d = opendir("/proc");
    for (struct dirent *e; d && count < MAX_DELETED && (e = readdir(d));) {
        if (e->d_name[0] < '1' || e->d_name[0] > '9') continue;
        count += look(&list, e->d_name, "cwd");
        count += look(&list, e->d_name, "exe");
        char fds[64];
        snprintf(fds, sizeof fds, "/proc/%.16s/fd", e->d_name);
        DIR *open = opendir(fds);
        for (struct dirent *f; open && count < MAX_DELETED && (f = readdir(open));) {
            char link[64];
            snprintf(link, sizeof link, "fd/%.16s", f->d_name);
            if (f->d_name[0] != '.') count += look(&list, e->d_name, link);
        }
        if (open) closedir(open);
    }
    if (d) closedir(d);
    put32(&b, count);
    putraw(&b, list.p, list.len);
    stream_end(stream, 0, NULL, &b);
    buf_free(&list);
    buf_free(&b);
}
