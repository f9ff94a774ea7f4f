/* forkyard's guest agent: shared declarations. The protocol is in docs/wire.md. */
#ifndef FORKYARD_AGENT_H
#define FORKYARD_AGENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifndef BUILD_ID
#define BUILD_ID "dev"
#endif

enum { WIRE_VERSION = 1, WIRE_VERSION_MIN = 1 };
#define MAGIC 0x31575946u /* "FYW1" */
enum {
    HDR = 24,
    MAX_DATA = 65536,
    MAX_PAYLOAD = MAX_DATA + 8,
    MAX_FRAME = HDR + MAX_PAYLOAD,
    MAX_CONTROL = 4096 - HDR,
    MAX_REQUEST = 4 << 20,
    MAX_PATH = 4096,
    MAX_CMDS = 256,
    MAX_ENDED = 64,
    MAX_STREAMS = 1024,
    WINDOW = 256 << 10,
    RING_MAX = 1 << 20,
};

enum frame_type {
    T_ATTACH = 1, T_HELLO, T_PING, T_PONG, T_QUIESCE, T_QUIESCED, T_UNQUIESCE, T_ERROR,
    T_OPEN = 16, T_OPENED, T_END, T_RESET, T_DATA, T_EOF, T_ACK, T_EXIT, T_RELEASE, T_SIGNAL, T_RESIZE,
};
enum { F_MORE = 1 };

enum op {
    OP_SPAWN = 1, OP_ADOPT, OP_IDENTIFY, OP_PROCS, OP_KILL_LARGEST, OP_ACTIVITY, OP_LOOKUP, OP_KILL, OP_DELETED,
    OP_STAT = 32, OP_LIST, OP_READ, OP_WRITE, OP_MKDIR, OP_RENAME, OP_REMOVE, OP_SYMLINK, OP_READLINK,
    OP_CHMOD, OP_CHOWN, OP_UTIME,
    OP_RESOLVE = 64, OP_CONNECT, OP_EGRESS,
};
enum { FEATURE_NET = 1, FEATURE_CROWDS = 2 };

/* ---- wire.c: reading and writing payloads */
struct in { const uint8_t *p; size_t left; bool bad; };
uint8_t get8(struct in *);
uint16_t get16(struct in *);
uint32_t get32(struct in *);
uint64_t get64(struct in *);
/* A length-prefixed byte string inside the payload (not terminated). Over max: bad. */
const uint8_t *getbytes(struct in *, size_t max, size_t *len);
/* The same as a fresh C string, or NULL; a NUL inside makes the payload bad. */
char *getstr(struct in *, size_t max);

struct buf { uint8_t *p; size_t len, cap; };
uint8_t *buf_room(struct buf *, size_t n); /* n bytes at the end, not yet counted */
void put8(struct buf *, uint8_t);
void put16(struct buf *, uint16_t);
void put32(struct buf *, uint32_t);
void put64(struct buf *, uint64_t);
void putbytes(struct buf *, const void *, size_t); /* length-prefixed */
void putraw(struct buf *, const void *, size_t);
void buf_free(struct buf *);
uint32_t crc32_of(uint32_t crc, const void *p, size_t n);
void crc32_init(void);

struct header { uint8_t type, flags; uint16_t chan; uint32_t stream, length, epoch, crc; };
bool header_read(const uint8_t *p, struct header *h); /* false: not a header */
void header_write(uint8_t *p, uint8_t type, uint8_t flags, uint16_t chan, uint32_t stream, uint32_t length,
                  uint32_t epoch);
/* Fills in the checksum of a frame whose payload follows its header. */
void frame_seal(uint8_t *frame);
bool frame_check(const uint8_t *frame);

/* ---- stream.c: one request or one attached command */
struct stream;
struct stream_ops {
    void (*data)(struct stream *, uint16_t chan, uint64_t off, const uint8_t *p, size_t n);
    void (*eof)(struct stream *, uint16_t chan);
    void (*ack)(struct stream *, uint16_t chan, uint64_t delivered);
    void (*control)(struct stream *, uint8_t type, struct in *);
    /* Do a small piece of work, emit at most one bulk frame. True: call again soon. */
    bool (*pump)(struct stream *);
    void (*close)(struct stream *); /* release ctx; the stream is gone */
};
struct stream {
    struct stream *next;
    uint32_t id;
    bool dead;
    const struct stream_ops *ops;
    void *ctx;
    uint64_t limit[3]; /* what the daemon lets us send, by channel, as an absolute offset */
};
struct stream *stream_new(uint32_t id, const struct stream_ops *, void *ctx);
struct stream *stream_find(uint32_t id);
void stream_drop(struct stream *); /* close without a word */
void streams_drop_all(void);
void streams_sweep(void);
bool streams_pump(void);
unsigned streams_count(void);
void stream_end(uint32_t id, int err, const char *what, const struct buf *payload);

/* ---- channel.c: the two FIFOs */
void channel_init(void);
bool channel_read(void); /* false: the other end is gone */
bool channel_flush(void);
void channel_trim(void); /* give back what bulk data needed */
bool channel_wants_write(void);
bool channel_wants_read(void);
bool channel_has_room(void); /* a bulk frame may be begun now */
void emit(uint8_t type, uint16_t chan, uint32_t stream, const void *payload, size_t n);
uint8_t *emit_begin(void); /* room for MAX_DATA bytes; then: */
struct iovec;
int emit_parts(struct iovec *, size_t n); /* the same for n bytes in several frames; how many those are */
void emit_data(uint16_t chan, uint32_t stream, uint64_t off, size_t n);
void emit_ack(uint16_t chan, uint32_t stream, uint64_t delivered, uint64_t limit);

/* ---- transfer.c */
void write_gathered(void); /* what uploads have left in the channel's buffer */

/* ---- ops.c */
void op_open(uint32_t stream, uint16_t op, struct in *in);

/* ---- users.c */
enum { MAX_GROUPS = 128 };
struct user {
    uid_t uid;
    gid_t gid;
    int ngroups;
    gid_t groups[MAX_GROUPS];
    char name[64], home[1024], shell[256];
};
/* By name, or "uid" or "uid:gid" in digits. 0, or an errno (ENOENT: no such user). */
int user_find(const char *spec, struct user *);
void user_name(uid_t, char *out, size_t n); /* digits if it has none */
int user_become(const struct user *); /* effective ids only; undone by user_restore */
void user_restore(void);

/* ---- ring.c: bytes by absolute offset */
struct ring { uint8_t *p; uint32_t cap; uint64_t start, sent, end; bool keep; /* its room, though empty */ };
size_t ring_used(const struct ring *);
/* Reads from fd. As read(2), and -2 if the ring is full. drop: overwrite what is oldest. */
ssize_t ring_fill(struct ring *, int fd, bool drop, bool *lost);
void ring_add(struct ring *, const void *, size_t); /* grows past RING_MAX if need be */
size_t ring_copy(const struct ring *, uint64_t off, uint8_t *to, size_t n);
ssize_t ring_drain(struct ring *, int fd); /* write(2) of what is not yet sent */
void ring_ack(struct ring *, uint64_t off);
void ring_free(struct ring *);
void ring_trim(struct ring *); /* its room, if it is empty */
void memory_trim(bool much); /* to the kernel, if there is much or was in rings */

/* ---- spawn.c */
struct plan {
    char **argv, **envp, **paths;
    const char *cwd;
    const struct user *user; /* NULL: stay who we are */
    int fd[3];
    const char *tty; /* slave to open as the controlling terminal, or NULL */
    uint64_t mark;
    uint32_t nofile;
    int error, stage; /* set by the child if it could not start the program */
};
enum { STAGE_SETUP = 1, STAGE_USER, STAGE_CWD, STAGE_EXEC };
pid_t spawn_plan(struct plan *);
char **spawn_paths(const char *file, char **envp);
char **spawn_env(char **given, size_t n, const struct user *, bool pty);
void strv_free(char **);

/* ---- cmd.c */
struct cmd {
    struct cmd *next;
    uint32_t id, stream, flags;
    pid_t pid;
    int in, out, err; /* our ends, -1 when closed; a PTY has in == out */
    struct ring ring[2], stdin_;
    struct flow { uint64_t bytes, last_ms, rest_until; bool wide; } flow[2];
    uint64_t stdin_seen;
    uint64_t must[2]; /* offsets that output has to reach before a drain may end */
    bool stdin_eof, exited, drained, exit_sent, oom, crowded, killing, drop, lost;
    int code, sig;
    uint64_t cpu_us, rss_kb, started_ms;
    uint64_t gap_at, cut_at, kill_until, kill_at, idle_until;
    size_t taglen;
    uint8_t tag[64];
    void (*done)(struct cmd *, void *); /* an internal command: called at its end, then freed */
    void *done_ctx;
};
enum { C_PTY = 1, C_MERGE = 2, C_STDIN = 4, C_DETACHED = 8 };
extern struct cmd *cmds;
void op_spawn(uint32_t stream, struct in *);
void op_adopt(uint32_t stream, struct in *);
struct cmd *cmd_internal(char **argv, char **env, void (*done)(struct cmd *, void *), void *ctx);
void cmd_reaped(pid_t, int status, uint64_t cpu_us, uint64_t rss_kb);
void cmds_trim(void); /* memory that is kept for what may come */
void cmd_detach_all(void); /* a new epoch: no stream is bound */
void cmd_free(struct cmd *);
void cmd_kill_tree(struct cmd *);
uint64_t cmd_mark(const struct cmd *);
struct cmd *cmd_by_mark(uint64_t mark);
bool cmd_marked(uint64_t mark); /* whether it is some command's, perhaps one that is forgotten */
void cmds_table(struct buf *);
struct pollfd;
size_t cmds_poll(struct pollfd *, size_t max);
void cmds_ready(const struct pollfd *, size_t n);
int cmds_timeout(int timeout); /* and runs what is due */
extern const struct stream_ops cmd_stream;

/* ---- cmdio.c */
void cmd_read(struct cmd *, int which);
void cmd_write(struct cmd *);
void cmd_close_stdin(struct cmd *);
void cmd_settle(struct cmd *); /* decide whether draining is over */
void discard_add(int fd);
size_t discard_poll(struct pollfd *, size_t max);
bool discard_ready(const struct pollfd *);
int pty_open(int rows, int cols, char *slave, size_t n);
int pty_resize(int fd, int rows, int cols);

/* ---- procs.c: what /proc says */
struct proc { pid_t pid, ppid, pgrp, session; char state; uint64_t mark, cpu_ms, children_ms, rss_kb; bool hit; };
struct procs { struct proc *v; size_t n, cap; bool stopped; };
/* Stops all processes on the way if they leave us too little of the CPU; procs_free lets them go on. */
bool procs_scan(struct procs *, bool marks);
void procs_free(struct procs *);
extern uint64_t stood_still_ms; /* when that was last so */
/* Sends SIGKILL to all that descends from the command. How many were alive. */
int procs_kill_tree(struct cmd *);
void procs_winch(const struct cmd *); /* its terminal has another size */
int procs_kill_pid_tree(pid_t root, int sig);
void op_procs(uint32_t stream, struct in *);
void op_kill(uint32_t stream, struct in *);
void op_kill_largest(uint32_t stream, struct in *);
void op_activity(uint32_t stream, struct in *);

/* ---- deleted.c */
void op_deleted(uint32_t stream, struct in *);

/* ---- identity.c */
extern char fork_id[128];
void op_identify(uint32_t stream, struct in *);
int identity_timeout(int timeout);

/* ---- files.c, transfer.c, tree.c */
void op_file(uint32_t stream, uint16_t op, struct in *);
void op_read(uint32_t stream, const struct user *, const char *path, struct in *);
void op_write(uint32_t stream, const struct user *, const char *path, struct in *);
void op_list(uint32_t stream, const struct user *, const char *path);
void op_remove(uint32_t stream, const struct user *, const char *path, bool recursive);
struct stat;
void put_stat(struct buf *, int dir, const char *name, const struct stat *);
int make_parents(const char *path, mode_t mode);

/* ---- boot.c: the initramfs of a microVM */
extern bool microvm;
void boot(void);
bool memory_ran_out(void); /* since the last call, for some process, which the kernel has killed */

/* ---- main.c */
extern bool plain, quiesced, privileged;
extern int null_fd;
extern uint64_t nofile_soft; /* what commands start with; the agent itself takes all it may have */
extern uint32_t cmd_serial;
uint64_t now_ms(void);

#endif
