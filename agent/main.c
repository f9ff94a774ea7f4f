/* forkyard-agent: PID 1 of a sandbox, or (--plain) an ordinary process.

   One thread, one loop: the FIFOs to the daemon, the commands' pipes, and SIGCHLD, which interrupts
   ppoll and is blocked everywhere else. */
#define _GNU_SOURCE
#include "net.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

bool plain, quiesced, privileged;
int null_fd = -1;
uint64_t nofile_soft = 1024;
uint32_t cmd_serial;
static volatile sig_atomic_t child_ended;

uint64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static void on_child(int sig) {
    (void)sig;
    child_ended = 1;
}

/* What no command may have, not even root's: taken from the bounding and the inheritable set once,
   here, so that starting a command costs no call for it. The agent itself keeps what it was given. */
static void drop_for_children(void) {
    static const int never[] = {CAP_SYS_ADMIN, CAP_NET_ADMIN, CAP_NET_RAW, CAP_MKNOD,
                                CAP_SYS_PTRACE, CAP_SYS_RESOURCE, CAP_SYS_MODULE, CAP_SYS_BOOT};
    struct __user_cap_header_struct h = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct d[2];
    bool known = syscall(SYS_capget, &h, d) == 0;
    for (size_t i = 0; i < sizeof never / sizeof *never; i++) {
        prctl(PR_CAPBSET_DROP, never[i], 0, 0, 0);
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_LOWER, never[i], 0, 0);
        d[never[i] / 32].inheritable &= ~(1u << never[i] % 32);
    }
    if (known) syscall(SYS_capset, &h, d);
}

/* gVisor (seen in the release of July 2024) keeps up to 1000 entries of /proc cached, and each one of an
   ended process keeps that process: 82 KB in every memory image from then on. A static glibc program
   looks up /proc/self/exe as it starts, so commands alone fill it, and our own scans would too. A /proc
   without the cache costs nothing measurable. Linux refuses the option, and needs none of this. */
static void proc_without_cache(void) {
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "dentry_cache_limit=0");
}

/* gVisor's release of July 2024 shows everybody the environment that we were started with (and 2026's nobody).
   We need none of it. */
static void forget_environment(void) {
    for (char **e = environ; e && *e; e++) memset(*e, 0, strlen(*e));
    clearenv();
}

static void setup(void) {
    forget_environment();
    sigset_t all;
    sigfillset(&all);
    /* Whatever the daemon was started with. By the call itself: the C library keeps a few numbers from its
       own functions, and one that a parent ignored would stay ignored in every command. */
    static const unsigned long by_default[8];
    for (int s = 1; s <= 64; s++) syscall(SYS_rt_sigaction, s, by_default, NULL, 8);
    struct sigaction sa = {.sa_handler = on_child, .sa_flags = SA_NOCLDSTOP};
    sigaction(SIGCHLD, &sa, NULL);
    sigprocmask(SIG_SETMASK, &all, NULL);
    fcntl(2, F_SETFD, FD_CLOEXEC);
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) == 0) {
        nofile_soft = r.rlim_cur;
        r.rlim_cur = r.rlim_max;
        setrlimit(RLIMIT_NOFILE, &r);
    }
    null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    umask(022);
    privileged = geteuid() == 0;
    if (plain) {
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    } else {
        proc_without_cache();
        /* Root in a microVM has a kernel of its own, and may do with it what it likes. */
        if (!microvm) drop_for_children();
    }
    crc32_init();
    channel_init();
}

static uint64_t children_cpu_us(void) {
    struct rusage r;
    getrusage(RUSAGE_CHILDREN, &r);
    return (uint64_t)(r.ru_utime.tv_sec + r.ru_stime.tv_sec) * 1000000 +
           (uint64_t)(r.ru_utime.tv_usec + r.ru_stime.tv_usec);
}

static void reap(void) {
    static uint64_t before;
    for (;;) {
        int status;
        struct rusage ru;
        pid_t pid = wait4(-1, &status, WNOHANG, &ru);
        if (pid <= 0) return;
        /* One child at a time, so the growth of the sum is this child's and its children's. */
        uint64_t after = children_cpu_us();
        cmd_reaped(pid, status, after - before, (uint64_t)ru.ru_maxrss);
        before = after;
    }
}

int main(int argc, char **argv) {
    if (getpid() == 1 && argc > 0 && !strcmp(argv[0], "/init")) boot();
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--plain")) plain = true;
        if (!strncmp(argv[i], "--net=", 6)) net_ports(argv[i] + 6);
        if (!strcmp(argv[i], "--version")) {
            printf("forkyard-agent wire %d build %s\n", WIRE_VERSION, BUILD_ID);
            return 0;
        }
    }
    setup();
    enum { FIXED = 3, MAX_POLL = FIXED + 3 * MAX_CMDS + 256 };
    static struct pollfd fds[MAX_POLL];
    sigset_t waiting;
    sigfillset(&waiting);
    sigdelset(&waiting, SIGCHLD);
    bool busy = false;
    for (;;) {
        fds[0] = (struct pollfd){channel_wants_read() ? 0 : -1, POLLIN, 0};
        fds[1] = (struct pollfd){channel_wants_write() ? 1 : -1, POLLOUT, 0};
        fds[2] = (struct pollfd){net_fd(), POLLIN, 0};
        size_t nc = cmds_poll(fds + FIXED, MAX_POLL - FIXED);
        size_t nd = discard_poll(fds + FIXED + nc, MAX_POLL - FIXED - nc);
        int timeout = (busy && channel_has_room()) || child_ended ? 0 : identity_timeout(cmds_timeout(-1));
        struct timespec t = {timeout / 1000, timeout % 1000 * 1000000L};
        if (timeout && (quiesced || !streams_count())) channel_trim();
        int n = ppoll(fds, FIXED + nc + nd, timeout < 0 ? NULL : &t, &waiting);
        if (n > 0) {
            if (fds[0].revents && !channel_read()) return 0;
            if (fds[2].revents) net_ready();
            cmds_ready(fds + FIXED, nc);
            for (size_t i = 0; i < nd; i++)
                if (fds[FIXED + nc + i].revents) discard_ready(&fds[FIXED + nc + i]);
        }
        if (child_ended) {
            child_ended = 0;
            reap();
        }
        cmds_timeout(-1);
        busy = streams_pump();
        streams_sweep();
        net_sweep();
        if (channel_wants_write() && !channel_flush()) return 0;
    }
}
