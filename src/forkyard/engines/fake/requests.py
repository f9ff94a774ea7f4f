"""The toy agent's requests: files, identity and questions."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable

from forkyard.engines.fake.agent import Agent, User
from forkyard.engines.fake.streams import Sending, Upload
from forkyard.engines.fake.tree import ROOT, describe, fault
from forkyard.wire import Op, Packer, Scope, SpawnFlag, Type, Unpacker

NO_MODE = 0xFFFFFFFF


def _path(agent: Agent, u: Unpacker, *, follow: bool = True) -> tuple[User, str]:
    user, path = agent.user(u.str(128).decode("latin-1")), u.str().decode("latin-1")
    return user, agent.kernel.tree.resolve(path, user.home, user.who, follow=follow)


def _raw(agent: Agent, u: Unpacker) -> tuple[User, str]:
    return agent.user(u.str(128).decode("latin-1")), u.str().decode("latin-1")


def _op_stat(agent: Agent, number: int, u: Unpacker) -> bytes:
    user, path = _raw(agent, u)
    full = agent.kernel.tree.resolve(path, user.home, user.who, follow=bool(u.u8() & 1))
    if full not in agent.kernel.tree.virtual and not agent.kernel.tree.exists(full):
        raise fault(errno.ENOENT)
    return describe(agent.kernel.tree, full)


def _op_list(agent: Agent, number: int, u: Unpacker) -> None:
    user, path = _path(agent, u)
    tree = agent.kernel.tree
    if not tree.is_dir(path):
        raise fault(errno.ENOTDIR if tree.exists(path) else errno.ENOENT)
    entries = Packer()
    for name in tree.list(path, user.who):
        entries.str(name.encode("latin-1")).raw(describe(tree, f"{path.rstrip('/')}/{name}"))
    rest = bytearray(entries.done())

    def take(room: int) -> bytes:
        piece = bytes(rest[:room])
        del rest[:room]
        return piece

    agent.streams[number] = Sending(agent, number, 0, take)


def _op_read(agent: Agent, number: int, u: Unpacker) -> None:
    user, path = _path(agent, u)
    offset, length = u.u64(), u.u64()
    tree = agent.kernel.tree
    if tree.is_dir(path):
        raise fault(errno.EISDIR)
    tree.open(path, user.who, write=False)
    at, left = offset, length or 1 << 62

    def take(room: int) -> bytes:
        nonlocal at, left
        data = tree.read(path, at, min(room, left))
        at, left = at + len(data), left - len(data)
        return data

    agent.emit(Type.OPENED, number, describe(tree, path), chan=Op.READ)
    agent.streams[number] = Sending(agent, number, offset, take)


def _op_write(agent: Agent, number: int, u: Unpacker) -> None:
    user, raw = _raw(agent, u)
    mode, parents = u.u32(), u.u8()
    tree = agent.kernel.tree
    if parents & 1:
        above = raw.rpartition("/")[0]
        if above:
            tree.make_parents(tree.resolve_new(above, user.home, user.who) + "/x", user.who)
    path = tree.resolve(raw, user.home, user.who)
    if tree.is_dir(path):
        raise fault(errno.EISDIR)
    if tree.exists(path):
        tree.check(path, user.who, 2)
    elif path != "/dev/null":
        tree.check_parent(path, user.who)
    agent.streams[number] = Upload(agent, number, user.who, path, None if mode == NO_MODE else mode)


def _op_mkdir(agent: Agent, number: int, u: Unpacker) -> bytes:
    user, raw = _raw(agent, u)
    mode, parents = u.u32(), u.u8() & 1
    tree = agent.kernel.tree
    path = (tree.resolve_new if parents else tree.resolve)(raw, user.home, user.who)
    if parents:
        agent.kernel.tree.make_parents(path, user.who)
        if agent.kernel.tree.is_dir(path):
            return b""
    agent.kernel.tree.mkdir(path, user.who, mode)
    return b""


def _op_rename(agent: Agent, number: int, u: Unpacker) -> bytes:
    user, path = _path(agent, u, follow=False)
    to, tree = u.str().decode("latin-1"), agent.kernel.tree
    if not tree.exists(path):
        raise fault(errno.ENOENT)
    if u.u8() & 1:
        target = tree.resolve_new(to, user.home, user.who)
        tree.make_parents(target, user.who)
    tree.rename(path, tree.resolve(to, user.home, user.who, follow=False), user.who)
    return b""


def _op_remove(agent: Agent, number: int, u: Unpacker) -> bytes:
    user, path = _path(agent, u, follow=False)
    agent.kernel.tree.remove(path, user.who, recursive=bool(u.u8() & 1))
    return b""


def _op_symlink(agent: Agent, number: int, u: Unpacker) -> bytes:
    user, path = _path(agent, u, follow=False)
    agent.kernel.tree.symlink(path, u.str().decode("latin-1"), user.who)
    return b""


def _op_readlink(agent: Agent, number: int, u: Unpacker) -> bytes:
    _, path = _path(agent, u, follow=False)
    return Packer().str(os.readlink(agent.kernel.tree.host(path))).done()


def _owned(agent: Agent, user: User, path: str) -> None:
    if not agent.kernel.tree.exists(path):
        raise fault(errno.ENOENT)
    if user.uid not in (0, agent.kernel.tree.attributes(path).uid):
        raise fault(errno.EPERM)


def _op_chmod(agent: Agent, number: int, u: Unpacker) -> bytes:
    user, path = _path(agent, u)
    _owned(agent, user, path)
    agent.kernel.tree.set(path, mode=u.u32() & 0o7777)
    return b""


def _op_chown(agent: Agent, number: int, u: Unpacker) -> bytes:
    user, path = _path(agent, u, follow=False)
    _owned(agent, user, path)
    if user.uid:
        raise fault(errno.EPERM)
    agent.kernel.tree.set(path, uid=u.u32(), gid=u.u32())
    return b""


def _op_utime(agent: Agent, number: int, u: Unpacker) -> bytes:
    user, raw = _raw(agent, u)
    atime, mtime, follow = u.u64(), u.u64(), bool(u.u8() & 1)
    path = agent.kernel.tree.resolve(raw, user.home, user.who, follow=follow)
    _owned(agent, user, path)
    os.utime(agent.kernel.tree.host(path), ns=(atime, mtime), follow_symlinks=False)
    return b""


def _op_identify(agent: Agent, number: int, u: Unpacker) -> bytes:
    """The new identity. The toy machine runs no hooks."""
    fork, _ = u.u32(), u.u32()
    hostname, machine_id, fork_id = (u.str().decode() for _ in range(3))
    seed = u.str()
    k, state = agent.kernel, agent.state
    k.state.hostname = hostname or k.state.hostname
    k.state.seed += seed
    state.fork_id = fork_id
    tree = k.tree
    for path, text in (("/etc/hostname", hostname), ("/etc/machine-id", machine_id)):
        if text and tree.is_dir("/etc"):
            tree.replace(path, f"{text}\n".encode(), ROOT, 0o644)
    if fork & 1:
        for command in state.commands:
            if not command.stream:
                command.flags |= SpawnFlag.DETACHED
                command.drop = True
    return Packer().u32(0).done()


def _op_processes(agent: Agent, number: int, u: Unpacker) -> bytes:
    commands = {command.id: command for command in agent.state.commands}
    procs = list(agent.kernel.procs.values())
    p = Packer().u32(len(procs))
    for proc in procs:
        mine = commands.get(proc.command)
        code = b"Z" if proc.dead else b"T" if proc.stopped else b"S" if proc.wait else b"R"
        p.u32(proc.pid).u32(proc.ppid).u32(proc.uid).raw(code).u64(proc.cpu_us // 1000).u64(proc.rss_kb)
        p.u32(mine.pid if mine else 0).u8(bool(mine and mine.flags & SpawnFlag.DETACHED))
        p.str(proc.user.encode()).str(" ".join(proc.argv).encode("latin-1")[:512])
    return p.done()


def _op_kill(agent: Agent, number: int, u: Unpacker) -> bytes:
    pid, sig, scope = struct.unpack("<i", u.raw(4))[0], u.u32(), u.u8()
    k = agent.kernel
    if scope == Scope.TREE:
        chosen = k.descendants(lambda proc: proc.pid == pid or proc.session == pid)
    else:
        chosen = [p for p in k.procs.values() if (p.pgrp if scope else p.pid) == pid and not p.dead]
    if not chosen:
        raise OSError(errno.ESRCH, "cannot signal the process")
    for proc in chosen:
        k.deliver(proc, sig)
    return b""


def _op_activity(agent: Agent, number: int, u: Unpacker) -> bytes:
    living = sum(not proc.dead for proc in agent.kernel.procs.values())
    return Packer().u64(agent.kernel.cpu_ms()).u32(living).done()


def _op_lookup(agent: Agent, number: int, u: Unpacker) -> bytes:
    user = agent.user(u.str(128).decode("latin-1"))
    p = Packer().u32(user.uid).u32(user.gid)
    for text in (user.name, user.home, user.shell):
        p.str(text.encode("latin-1"))
    return p.done()


Handler = Callable[[Agent, int, Unpacker], bytes | None]
HANDLERS: dict[int, Handler] = {
    Op.SPAWN: Agent.spawn,
    Op.ADOPT: Agent.adopt,
    Op.IDENTIFY: _op_identify,
    Op.PROCS: _op_processes,
    Op.KILL_LARGEST: lambda agent, number, u: agent.kill_largest(),
    Op.ACTIVITY: _op_activity,
    Op.LOOKUP: _op_lookup,
    Op.KILL: _op_kill,
    # The toy kernel's files are found by name each time: none is open and deleted.
    Op.DELETED: lambda agent, number, u: Packer().u32(0).done(),
    Op.STAT: _op_stat,
    Op.LIST: _op_list,
    Op.READ: _op_read,
    Op.WRITE: _op_write,
    Op.MKDIR: _op_mkdir,
    Op.RENAME: _op_rename,
    Op.REMOVE: _op_remove,
    Op.SYMLINK: _op_symlink,
    Op.READLINK: _op_readlink,
    Op.CHMOD: _op_chmod,
    Op.CHOWN: _op_chown,
    Op.UTIME: _op_utime,
}
