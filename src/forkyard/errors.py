"""Every error forkyard raises, as one closed set.

    ForkyardError
    ├── InvalidRequestError      the call itself is wrong; fix the argument
    ├── NotFoundError            no such sandbox, snapshot, checkpoint, template or file
    ├── ConflictError            the name is taken, or the state forbids it
    ├── AccessDeniedError        the caller may not do this
    ├── CapacityError            the machine (or a limit) is full; the message has the figures
    ├── DeadlineError            it took longer than allowed (also a TimeoutError)
    ├── UnsupportedError         this version, engine or host cannot do it
    ├── UnavailableError         no daemon answers, or it is of another version
    ├── SandboxLostError         the sandbox died; ``cause`` says on whose account
    ├── CorruptSnapshotError     a snapshot's files are not what its manifest says
    ├── ForkError                a fork was undone; the source is unharmed
    ├── CommandFailedError       ``check=True`` and the command did not exit with 0
    └── InternalError            a defect of forkyard

The wire carries ``code``, never a class or a traceback: :func:`from_wire` looks the
code up in a fixed table, so that a hostile peer can choose a message but not a type.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "AccessDeniedError",
    "CapacityError",
    "CommandFailedError",
    "ConflictError",
    "CorruptSnapshotError",
    "DeadlineError",
    "ForkError",
    "ForkyardError",
    "InternalError",
    "InvalidRequestError",
    "NotFoundError",
    "SandboxLostError",
    "UnavailableError",
    "UnsupportedError",
    "from_wire",
    "to_wire",
]


class ForkyardError(Exception):
    """Base of all errors.

    Args:
        message: What failed, with which value.
        hint: What to do about it, as a sentence or a command.
        retryable: Whether the same call may succeed later.
        sandbox: Id of the sandbox concerned, if one is.
    """

    code: ClassVar[str] = "internal"

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        retryable: bool = False,
        sandbox: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.retryable = retryable
        self.sandbox = sandbox

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return from_wire, (to_wire(self),)

    def extra(self) -> dict[str, Any]:
        """Fields that a subclass adds, as plain data for the wire."""
        return {}


class InvalidRequestError(ForkyardError):
    code = "invalid_request"


class NotFoundError(ForkyardError):
    code = "not_found"


class ConflictError(ForkyardError):
    code = "conflict"


class AccessDeniedError(ForkyardError):
    code = "access_denied"


class CapacityError(ForkyardError):
    code = "capacity"


class DeadlineError(ForkyardError, TimeoutError):
    code = "deadline"


class UnsupportedError(ForkyardError):
    code = "unsupported"


class UnavailableError(ForkyardError):
    code = "unavailable"


class SandboxLostError(ForkyardError):
    """The sandbox is gone. ``cause`` is ``"host"``, ``"guest"`` or ``"unknown"``."""

    code = "sandbox_lost"

    def __init__(self, message: str, *, cause: str = "unknown", hint: str = "", **kwargs: Any) -> None:
        hint = hint or "rewind or start it from a checkpoint, or delete it"
        super().__init__(message, hint=hint, **kwargs)
        self.cause = cause

    def extra(self) -> dict[str, Any]:
        return {"cause": self.cause}


class CorruptSnapshotError(ForkyardError):
    code = "corrupt_snapshot"


class ForkError(ForkyardError):
    code = "fork_failed"


class CommandFailedError(ForkyardError):
    """Raised for ``check=True``. ``result`` is the :class:`forkyard.types.ExecResult`
    where the client made the error, else None."""

    code = "command_failed"

    def __init__(self, message: str, *, result: Any = None, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.result = result


class InternalError(ForkyardError):
    code = "internal"


_BY_CODE: dict[str, type[ForkyardError]] = {
    cls.code: cls
    for cls in (
        InvalidRequestError,
        NotFoundError,
        ConflictError,
        AccessDeniedError,
        CapacityError,
        DeadlineError,
        UnsupportedError,
        UnavailableError,
        SandboxLostError,
        CorruptSnapshotError,
        ForkError,
        CommandFailedError,
        InternalError,
    )
}


def to_wire(error: ForkyardError) -> dict[str, Any]:
    """Plain data for a reply: code, message, hint, retryable, sandbox and extras."""
    return {
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "retryable": error.retryable,
        "sandbox": error.sandbox,
        **error.extra(),
    }


def from_wire(data: dict[str, Any]) -> ForkyardError:
    """The error that ``data`` (see :func:`to_wire`) describes; an unknown code gives the base class."""
    cls = _BY_CODE.get(str(data.get("code")), ForkyardError)
    kwargs: dict[str, Any] = {
        "hint": str(data.get("hint") or ""),
        "retryable": bool(data.get("retryable")),
        "sandbox": data.get("sandbox"),
    }
    if cls is SandboxLostError:
        kwargs["cause"] = str(data.get("cause") or "unknown")
    return cls(str(data.get("message") or "unknown error"), **kwargs)
