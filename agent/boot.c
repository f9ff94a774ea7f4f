/* The first process of a microVM: from the initramfs to the root on its disk, then the agent itself.

   The kernel starts us as /init. What the host's container engine does for a sandbox otherwise is done
   here: modules, mounts, devices, the loopback interface, the streams to the daemon on 0 and 1. */
#define _GNU_SOURCE
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define ROOT "/root"
#define AGENT_DIR "/.forkyard"
#define RESIZE_FS _IOW('f', 16, uint64_t)
enum { DEVICES_MS = 10000 };

bool microvm;

/* The kernel panics when its first process ends, and the machine with it: the last words are for its log. */
static void fail(const char *what) {
    int fd = open("/dev/kmsg", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) dprintf(fd, "forkyard: %s: %s\n", what, strerror(errno));
    _exit(1);
}

static void make(const char *dir, const char *type, const char *options, unsigned long flags) {
    mkdir(dir, 0755);
    if (mount(type, dir, type, flags, options) < 0) fail(dir);
}

static void load_modules(void) {
    for (int i = 0;; i++) {
        char path[32];
        snprintf(path, sizeof path, "/modules/%d.ko", i);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0) return;
        if (syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST) fail(path);
        close(fd);
        unlink(path);
    }
}

/* Its name has the number of the device, which is the kernel's to give. */
static bool find_port(char *path, size_t n) {
    DIR *d = opendir("/dev");
    bool found = false;
    struct dirent *e;
    while (d && !found && (e = readdir(d)))
        if (!strncmp(e->d_name, "vport", 5)) {
            snprintf(path, n, "/dev/%.40s", e->d_name);
            found = true;
        }
    if (d) closedir(d);
    return found;
}

/* Ports are announced by the device itself, a moment after its driver is there. */
static void open_streams(void) {
    char path[64];
    for (int i = 0; !find_port(path, sizeof path); i++) {
        if (i >= DEVICES_MS) fail("there is no serial port");
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    int fd = open(path, O_RDWR); /* once: a second open is refused */
    if (fd < 0) fail(path);
    int null = open("/dev/null", O_RDWR);
    dup2(null, 2);
    dup2(fd, 0);
    dup2(fd, 1);
    if (fd > 2) close(fd);
    if (null > 2) close(null);
}

/* The disk may have been made larger than its file system, which never shrinks. */
static void grow(void) {
    struct statfs s;
    uint64_t bytes;
    int disk = open("/dev/vda", O_RDONLY | O_CLOEXEC), root = open(ROOT, O_RDONLY | O_CLOEXEC);
    if (disk < 0 || root < 0 || ioctl(disk, BLKGETSIZE64, &bytes) < 0 || fstatfs(root, &s) < 0) fail("the disk");
    uint64_t blocks = bytes / (uint64_t)s.f_bsize;
    /* Less than a group's worth may be of no use to it, and is no error. */
    ioctl(root, RESIZE_FS, &blocks);
    close(disk);
    close(root);
}

static void mount_root(void) {
    mkdir(ROOT, 0755);
    /* noinit_itable: tables that were never written read as zeros from a new image. */
    if (mount("/dev/vda", ROOT, "ext4", MS_NOATIME, "discard,noinit_itable,commit=30") < 0) fail("the disk");
    grow();
}

static void install_agent(void) {
    static char buffer[65536];
    make(ROOT AGENT_DIR, "tmpfs", "mode=755,size=4m", MS_NOSUID | MS_NODEV);
    int from = open("/init", O_RDONLY | O_CLOEXEC);
    int to = open(ROOT AGENT_DIR "/fy-agent", O_WRONLY | O_CREAT | O_CLOEXEC, 0755);
    ssize_t n;
    while ((n = read(from, buffer, sizeof buffer)) > 0)
        if (write(to, buffer, (size_t)n) != n) fail("the agent's copy");
    close(from);
    close(to);
    mount(NULL, ROOT AGENT_DIR, NULL, MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL);
}

static void loopback_up(void) {
    struct ifreq r = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (ioctl(fd, SIOCSIFFLAGS, &r) < 0) fail("the loopback interface");
    close(fd);
}

static void limit(int what, const char *value, rlim_t soft) {
    rlim_t hard = value ? strtoul(value, NULL, 10) : 65536;
    struct rlimit r = {soft ? soft : hard, hard};
    setrlimit(what, &r);
}

bool memory_ran_out(void) {
    static unsigned long known;
    char text[8192], *at;
    int fd = open("/proc/vmstat", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
    if (fd >= 0) close(fd);
    text[n > 0 ? n : 0] = 0;
    at = strstr(text, "\noom_kill ");
    unsigned long before = known;
    if (at) known = strtoul(at + 10, NULL, 10);
    return known > before;
}

void boot(void) {
    microvm = true;
    make("/proc", "proc", NULL, MS_NOSUID | MS_NODEV | MS_NOEXEC);
    make("/sys", "sysfs", NULL, MS_NOSUID | MS_NODEV | MS_NOEXEC);
    make("/dev", "devtmpfs", "mode=755", MS_NOSUID);
    load_modules();
    mount_root();
    install_agent();
    static const char *const moved[] = {"/dev", "/proc", "/sys"};
    for (size_t i = 0; i < sizeof moved / sizeof *moved; i++) {
        char to[32];
        snprintf(to, sizeof to, ROOT "%s", moved[i]);
        mkdir(to, 0755);
        if (mount(moved[i], to, NULL, MS_MOVE, NULL) < 0) fail(to);
    }
    unlink("/init"); /* its memory; what runs is kept */
    if (chdir(ROOT) < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 || chdir("/") < 0) fail(ROOT);
    make("/dev/pts", "devpts", "gid=5,mode=620,ptmxmode=666", MS_NOSUID | MS_NOEXEC);
    make("/dev/shm", "tmpfs", "mode=1777", MS_NOSUID | MS_NODEV);
    mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    static const char *const links[][2] = {{"/proc/self/fd", "/dev/fd"}, {"fd/0", "/dev/stdin"},
                                           {"fd/1", "/dev/stdout"}, {"fd/2", "/dev/stderr"}};
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        if (symlink(links[i][0], links[i][1]) < 0 && errno != EEXIST) fail(links[i][1]);
    static const char *const scratch[] = {"/tmp", "/var/tmp"};
    mkdir("/var", 0755);
    for (size_t i = 0; i < 2; i++)
        if (mkdir(scratch[i], 01777) == 0) chmod(scratch[i], 01777);
    mkdir("/run", 0755);
    loopback_up();
    if (sethostname("sandbox", 7) < 0) fail("the host name");
    limit(RLIMIT_NOFILE, NULL, 1024);
    limit(RLIMIT_NPROC, getenv("processes"), 0);
    open_streams();
}
