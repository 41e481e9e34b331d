"""The errors of every package of the project.

One base class and few kinds, so that a caller can act on each differently. A message says what
is wrong, where (archive, session, layer, kind, block), and what to do about it.
"""

from __future__ import annotations

from functools import partial
from typing import Final

#: Messages repeat what was given or found, which may be of any length.
_MOST_CHARACTERS: Final = 2000


class KvError(Exception):
    """Base of all errors that this project raises on purpose; long messages lose their middle."""

    def __init__(self, message: str = "") -> None:
        if len(message) > _MOST_CHARACTERS:
            n = _MOST_CHARACTERS // 4
            message = f"{message[: 3 * n]} ... {message[-n:]}"
        super().__init__(message)


class InvalidArgument(KvError, ValueError):
    """The caller asked for something that cannot be done; nothing was changed."""


class Unsupported(KvError):
    """The data needs a newer release or a codec that this one does not know."""


class Truncated(KvError):
    """Stored bytes end before they should."""


class Corrupt(KvError):
    """Stored bytes are not what was written, or are in the wrong place."""


class IdentityMismatch(KvError):
    """Stored KV belongs to another model, revision, RoPE, geometry, dtype, layout, shard or salt.

    Attributes
    ----------
    field
        Dotted name of the first field that differs, for example ``"rope.inv_freq"``.
    expected, found
        The two values.
    """

    def __init__(self, message: str, *, field: str, expected: object, found: object) -> None:
        super().__init__(message)
        self.field = field
        self.expected = expected
        self.found = found

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are made anew from their positional arguments, as in another process.
        made = partial(IdentityMismatch, field=self.field, expected=self.expected, found=self.found)
        return made, self.args


class NotFound(KvError):
    """No such archive, session, layer, kind or block."""


class Locked(KvError):
    """Another writer holds the lock or lease, and the time-out ran out."""


class Full(KvError):
    """No room is left in the archive's map or on the disk; what was committed is unharmed.

    Attributes
    ----------
    is_limit
        The archive's own limit is reached, so that deleting sessions makes room; else the disk,
        the memory or the address space is full.
    """

    def __init__(self, message: str, *, is_limit: bool = False) -> None:
        super().__init__(message)
        self.is_limit = is_limit

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Full, is_limit=self.is_limit), self.args


class Closed(KvError):
    """The archive or session was closed, or belongs to a process before a fork."""
