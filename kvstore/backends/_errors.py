"""What LMDB's errors mean for the caller."""

from __future__ import annotations

import errno
from typing import Final

import lmdb
from kvcodecs.errors import (
    Closed,
    Corrupt,
    Full,
    InvalidArgument,
    KvError,
    Locked,
    Unsupported,
)

from ._directory import MAX_READERS, NO_SPACE

# LMDB calls a write that the disk cut short an input/output error.
_MAYBE_NO_SPACE: Final = (errno.EIO, "mdb_txn_commit")
_NOT_ALLOWED: Final = frozenset((errno.EACCES, errno.EROFS, errno.EPERM))


def translate(error: lmdb.Error, where: str, limit: int | None = None) -> KvError:
    """Return the error of ours that says what `error` means for the caller.

    Parameters
    ----------
    limit
        What `Backend.set_limit` has set the size of the map to.
    """
    code = getattr(error, "code", None)
    if isinstance(error, lmdb.MapFullError):
        if limit is not None:
            text = f"the limit of {limit} bytes is reached; remove sessions or raise it"
            return Full(f"{where}: {text}", is_limit=True)
        return Full(f"{where}: the map is used up; reopen with a larger map_size", is_limit=True)
    if isinstance(error, lmdb.DiskError) or code in NO_SPACE:
        return Full(f"{where}: no space on the disk ({error}); what was committed is unharmed")
    if (code, getattr(error, "what", "")) == _MAYBE_NO_SPACE:
        return Full(
            f"{where}: no space on the disk, or it fails ({error}); what was committed is unharmed"
        )
    if isinstance(error, lmdb.MemoryError):
        return Full(f"{where}: not enough address space or memory ({error})")
    if isinstance(error, lmdb.ReadersFullError):
        return Locked(f"{where}: {MAX_READERS} readers have it open; close some")
    if isinstance(error, lmdb.VersionMismatchError):
        return Unsupported(f"{where}: written by another version of LMDB ({error})")
    if isinstance(error, lmdb.PanicError):
        return Closed(f"{where}: an earlier write failed half-way; close and reopen the archive")
    if isinstance(error, lmdb.ReadonlyError) or code in _NOT_ALLOWED:
        return InvalidArgument(f"{where}: cannot be written ({error}); open it with mode='r'")
    return Corrupt(f"{where}: LMDB: {error}")
