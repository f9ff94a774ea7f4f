/* Who this machine is after a start: names, entropy, and the hooks of a fork. */
#define _GNU_SOURCE
#include "net.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#define HOOKS "/etc/forkyard/on-fork.d"
enum { MAX_HOOKS = 64, HOOKS_MS = 10000 };

char fork_id[128];

static struct {
    uint32_t stream;
    size_t n, at;
    char *name[MAX_HOOKS];
    uint64_t until;
    struct cmd *running;
    struct buf results;
    uint32_t ran;
} hooks;

static void write_file(const char *path, const char *text, mode_t mode) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, mode);
    if (fd < 0) return;
    ssize_t n = write(fd, text, strlen(text));
    (void)n;
    close(fd);
}

/* sudo and others look their own host name up. */
static void set_hosts(const char *hostname) {
    static char old[65536], new[65536 + 512];
    size_t len = 0, n = 0;
    int fd = open("/etc/hosts", O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd >= 0) {
        ssize_t r = read(fd, old, sizeof old - 1);
        len = r > 0 ? (size_t)r : 0;
        close(fd);
        if (len == sizeof old - 1) return; /* too long to be rewritten safely */
    }
    old[len] = 0;
    bool localhost = false;
    for (char *p = old; *p;) {
        size_t line = strcspn(p, "\n"), whole = line + (p[line] == '\n');
        bool ours = line > 11 && !memcmp(p + line - 11, " # forkyard", 11);
        if (memmem(p, line, "localhost", 9)) localhost = true;
        if (!ours) {
            memcpy(new + n, p, line);
            n += line;
            new[n++] = '\n';
        }
        p += whole;
    }
    if (!localhost) n += (size_t)sprintf(new + n, "127.0.0.1\tlocalhost\n");
    n += (size_t)snprintf(new + n, 300, "127.0.1.1\t%.255s # forkyard\n", hostname);
    new[n] = 0;
    write_file("/etc/hosts", new, 0644);
}

/* Names are asked of us. An image's file, or a link to some other resolver's, is replaced. */
static void set_resolver(void) {
    static const char ours[] = "nameserver 127.0.0.1\n";
    char text[4096];
    struct stat st;
    int fd = open("/etc/resolv.conf", O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
    if (fd >= 0) close(fd);
    text[n > 0 ? n : 0] = 0;
    char *first = strstr(text, "nameserver");
    if (first && !strncmp(first, ours, sizeof ours - 1)) return; /* options in it are its owner's */
    if (lstat("/etc/resolv.conf", &st) == 0 && !S_ISREG(st.st_mode)) unlink("/etc/resolv.conf");
    write_file("/etc/resolv.conf", ours, 0644);
}

static void add_entropy(const uint8_t *seed, size_t n) {
    int fd = open("/dev/urandom", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    ssize_t r = write(fd, seed, n);
    (void)r;
    ioctl(fd, RNDRESEEDCRNG);
    close(fd);
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static void find_hooks(void) {
    DIR *d = opendir(HOOKS);
    if (!d) return;
    struct dirent *e;
    struct stat st;
    while ((e = readdir(d)) && hooks.n < MAX_HOOKS)
        if (e->d_name[0] != '.' && fstatat(dirfd(d), e->d_name, &st, 0) == 0 && S_ISREG(st.st_mode) &&
            st.st_mode & 0111)
            hooks.name[hooks.n++] = strdup(e->d_name);
    closedir(d);
    qsort(hooks.name, hooks.n, sizeof *hooks.name, by_name);
}

static void finish(void) {
    struct buf b = {0};
    put32(&b, hooks.ran);
    putraw(&b, hooks.results.p, hooks.results.len);
    stream_end(hooks.stream, 0, NULL, &b);
    buf_free(&b);
    buf_free(&hooks.results);
    for (size_t i = 0; i < hooks.n; i++) free(hooks.name[i]);
    memset(&hooks, 0, sizeof hooks);
}

static void result(int code) {
    putbytes(&hooks.results, hooks.name[hooks.at], strlen(hooks.name[hooks.at]));
    put32(&hooks.results, (uint32_t)code);
    hooks.ran++;
    hooks.at++;
}

static void next_hook(void);

static void hook_done(struct cmd *c, void *ctx) {
    (void)ctx;
    hooks.running = NULL;
    result(now_ms() >= hooks.until && c->sig == 9 ? 124 : c->code);
    next_hook();
}

static void next_hook(void) {
    while (hooks.at < hooks.n && !hooks.running) {
        if (now_ms() >= hooks.until) {
            result(124);
            continue;
        }
        char path[512], env_id[160];
        snprintf(path, sizeof path, HOOKS "/%s", hooks.name[hooks.at]);
        snprintf(env_id, sizeof env_id, "FORKYARD_FORK_ID=%s", fork_id);
        char *argv[] = {path, NULL};
        char *env[] = {"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", env_id, NULL};
        hooks.running = cmd_internal(argv, env, hook_done, NULL);
        if (!hooks.running) result(126);
    }
    if (!hooks.running) finish();
}

int identity_timeout(int timeout) {
    if (!hooks.running) return timeout;
    uint64_t now = now_ms();
    if (now >= hooks.until) {
        if (!hooks.running->killing && !hooks.running->exited) cmd_kill_tree(hooks.running);
        return timeout < 0 || timeout > 20 ? 20 : timeout;
    }
    int wait = (int)(hooks.until - now);
    return timeout < 0 || wait < timeout ? wait : timeout;
}

static void apply(const char *hostname, const char *machine_id, const uint8_t *seed, size_t seedlen, uint64_t ns) {
    char line[600];
    if (ns) {
        struct timeval t = {(time_t)(ns / 1000000000), (suseconds_t)(ns / 1000 % 1000000)}, have;
        gettimeofday(&have, NULL);
        /* EPERM is fine: gVisor's is the host's. A microVM's stood still while it was an image. */
        if (llabs((have.tv_sec - t.tv_sec) * 1000LL + (have.tv_usec - t.tv_usec) / 1000) > 20) settimeofday(&t, NULL);
    }
    if (seedlen) add_entropy(seed, seedlen);
    if (*hostname) {
        if (sethostname(hostname, strlen(hostname)) < 0) { /* not allowed: the files still say it */ }
        snprintf(line, sizeof line, "%.255s\n", hostname);
        write_file("/etc/hostname", line, 0644);
        set_hosts(hostname);
    }
    if (*machine_id) {
        snprintf(line, sizeof line, "%.64s\n", machine_id);
        write_file("/etc/machine-id", line, 0444);
    }
    mkdir("/run", 0755);
    mkdir("/run/forkyard", 0755);
    snprintf(line, sizeof line, "%.127s\n", fork_id);
    write_file("/run/forkyard/fork", line, 0644);
    set_resolver();
}

void op_identify(uint32_t stream, struct in *in) {
    uint32_t flags = get32(in);
    uint32_t generation = get32(in);
    char *hostname = getstr(in, 255), *machine_id = getstr(in, 64), *id = getstr(in, sizeof fork_id - 1);
    size_t n;
    const uint8_t *seed = getbytes(in, 512, &n);
    uint64_t ns = get64(in);
    uint32_t network = in->left >= 4 ? get32(in) : 0;
    int err = in->bad ? EINVAL : hooks.running ? EBUSY : 0;
    if (err) {
        stream_end(stream, err, "bad or repeated identity", NULL);
    } else {
        strcpy(fork_id, id);
        if (!plain) apply(hostname, machine_id, seed, n, ns);
        net_configure(network, generation);
        memset(&hooks, 0, sizeof hooks);
        hooks.stream = stream;
        hooks.until = now_ms() + HOOKS_MS;
        if (flags & 1) { /* a fork: what the source's commands say is kept, but never waited for */
            for (struct cmd *c = cmds; c; c = c->next) {
                c->flags |= C_DETACHED;
                if (!c->stream) c->drop = true;
            }
            if (!plain) find_hooks();
        }
        next_hook();
    }
    free(hostname);
    free(machine_id);
    free(id);
}
