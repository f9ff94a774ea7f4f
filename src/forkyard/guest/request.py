"""Requests with one answer, and what an agent's refusal means."""

from __future__ import annotations

import asyncio
import errno
import os

from forkyard.errors import (
    AccessDeniedError,
    CapacityError,
    ConflictError,
    ForkyardError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from forkyard.guest.channel import Channel
from forkyard.wire import Frame, Type, Unpacker, WireError

_CLASSES: dict[int, type[ForkyardError]] = {
    **dict.fromkeys((errno.ENOENT, errno.ESRCH, errno.ENXIO), NotFoundError),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), AccessDeniedError),
    **dict.fromkeys((errno.EEXIST, errno.ENOTEMPTY, errno.EBUSY, errno.ETXTBSY, errno.EXDEV), ConflictError),
    **dict.fromkeys(
        (errno.EINVAL, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.E2BIG),
        InvalidRequestError,
    ),
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EFBIG),
        CapacityError,
    ),
    **dict.fromkeys((errno.ENOSYS, errno.EOPNOTSUPP), UnsupportedError),
}


def error_for(code: int, text: str, what: str = "") -> ForkyardError:
    """The error for an errno and a message of the guest's, which is data and nothing more."""
    text = "".join(c if c.isprintable() else "?" for c in text[:512])
    text = text or os.strerror(code)
    # Any other, such as EIO, is a failure inside, and not the daemon's own.
    cls = _CLASSES.get(code, UnavailableError)
    error = cls(f"{what}: {text}" if what else text)
    error.errno = code  # type: ignore[attr-defined]
    return error


def error_of(u: Unpacker, what: str = "") -> ForkyardError | None:
    """Read an END's beginning: None for success, else the error."""
    code, text = u.u32(), u.str(1024)
    return error_for(code, text.decode("utf-8", "replace"), what) if code else None


class Request:
    """A stream with one answer: the payload of its END behind errno and message."""

    def __init__(self, channel: Channel, what: str) -> None:
        self._channel = channel
        self._what = what
        self.stream = channel.open(self)
        self._answer: asyncio.Future[Unpacker] = asyncio.get_running_loop().create_future()

    def on_frame(self, frame: Frame) -> None:
        if frame.type in (Type.END, Type.ERROR):
            u = Unpacker(frame.payload)
            error = error_of(u, self._what)
            self._channel.forget(self.stream)
            if self._answer.done():
                return
            if error is not None:
                self._answer.set_exception(error)
            elif frame.type == Type.END:
                self._answer.set_result(u)
        elif frame.type not in (Type.ACK, Type.RESET):
            raise WireError(f"a frame of type {frame.type} for a request")

    def fail(self, error: ForkyardError) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)
            self._answer.exception()

    async def answer(self) -> Unpacker:
        try:
            return await self._answer
        finally:
            self._channel.forget(self.stream, reset=True)


REQUEST_S = 30.0
