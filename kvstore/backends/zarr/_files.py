"""Files of a directory: whole reads and writes, temporary names, durability, what errors mean."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from typing import Final

from kvcodecs.errors import Full, InvalidArgument, KvError, Locked

from ._keys import UNFINISHED

NO_SPACE: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
#: There is no such object. A directory in its place is none either.
ABSENT: Final = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EISDIR))
#: The file system makes no hard link of this file, or of any.
NO_LINKS: Final = frozenset(
    (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
)
_NOT_ALLOWED: Final = frozenset((errno.EACCES, errno.EPERM, errno.EROFS))
_BAD_NAME: Final = frozenset((errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)) | ABSENT
_NO_FLUSH: Final = frozenset((errno.EINVAL, errno.ENOTSUP, errno.EBADF))
# A pipe that somebody has put there is not waited for.
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Reading more at a time is refused by the system.
_MOST: Final = 1 << 30


def translate(error: OSError, where: str, what: str) -> KvError:
    """Return the error of ours that says what `error` means for the caller."""
    if error.errno in NO_SPACE:
        return Full(
            f"{where}: {what}: no space on the disk ({error.strerror}); what was committed is "
            "unharmed"
        )
    if error.errno in _NOT_ALLOWED:
        return InvalidArgument(f"{where}: {what}: {error.strerror}; check the rights of the files")
    if error.errno in _BAD_NAME:
        return InvalidArgument(f"{where}: {what}: {error.strerror}")
    return Locked(f"{where}: {what}: {error.strerror}; check the storage, then try again")


def read(path: str, start: int | None = None, stop: int | None = None) -> bytes:
    """Return a file, or what there is of bytes ``[start, stop)``."""
    fd = os.open(path, _READ)
    try:
        begin, end = start or 0, os.fstat(fd).st_size
        n_bytes = max(0, (end if stop is None or stop > end else stop) - begin)
        data = os.pread(fd, min(n_bytes, _MOST), begin)
        if len(data) == n_bytes or not data:
            return data
        parts, missing = [data], n_bytes - len(data)
        while missing and data:
            begin += len(data)
            data = os.pread(fd, min(missing, _MOST), begin)
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)
    finally:
        os.close(fd)


def is_same(path: str, data: bytes) -> bool:
    """Whether there is a file with these bytes."""
    try:
        return os.stat(path).st_size == len(data) and read(path) == data
    except OSError as error:
        if error.errno in ABSENT:
            return False
        raise


def create(path: str, data: bytes, *, durable: bool = False) -> None:
    """Make a file where there is none; one that cannot be written whole goes again."""
    fd = os.open(path, _CREATE, 0o666)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        remove(path)
        raise


def temporary(path: str) -> str:
    """Return a name beside `path` that nobody else uses."""
    first, last = UNFINISHED
    return f"{os.path.dirname(path)}/{first}{secrets.token_hex(8)}{last}"


def remove(path: str) -> None:
    """Unlink a file, if that is possible."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def flush_file(path: str) -> None:
    """Make a file durable; one that has gone needs it no longer."""
    _flush(path, _READ, frozenset())


def flush_directory(path: str) -> None:
    """Make the names in a directory durable, where the file system knows how."""
    _flush(path, _DIRECTORY, _NO_FLUSH)


def _flush(path: str, flags: int, no_error: frozenset[int]) -> None:
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in ABSENT:
            return
        raise
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in no_error:
            raise
    finally:
        os.close(fd)
