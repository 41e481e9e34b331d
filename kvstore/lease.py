"""Leases: one appender per session, ended by `release` or by the end of the process.

A lease file is locked with ``flock``, which the system drops when the process dies, however
it dies. Inside one process ``flock`` keeps two descriptors apart as well. The files are empty
and may be deleted whenever no process has the archive open. FORMAT.md section 5.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import weakref
from typing import Final

from kvcodecs.errors import Full, InvalidArgument, Locked

LEASE_DIRECTORY: Final = "leases"


class FileLease:
    """A lease held through an ``flock`` on ``<archive>/leases/<owner>.lock``."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd, self._path = fd, path
        self._lock = threading.Lock()
        _held.add(self)

    def release(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd < 0:
            return
        # The name goes while the lock is held: whoever locks a file afterwards checks that it
        # still has its name (`take_file_lease`).
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(fd)

    def __del__(self) -> None:
        self.release()

    def _forget_in_child(self) -> None:
        # The parent's lock must not live on in a forked child; closing does not unlock it.
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_held: weakref.WeakSet[FileLease] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for lease in list(_held):
        lease._forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


def take_file_lease(archive: str, owner: int, name: str) -> FileLease:
    """Lock the lease file of `owner`, at once or not at all.

    Raises
    ------
    Locked
        Another appender holds it.
    Full, InvalidArgument
        The lease file cannot be made.
    """
    directory = os.path.join(archive, LEASE_DIRECTORY)
    path = os.path.join(directory, f"{owner:016x}.lock")
    try:
        os.makedirs(directory, exist_ok=True)
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_named(fd, path):
                    return FileLease(fd, path)
            except BlockingIOError:
                os.close(fd)
                raise locked(archive, name) from None
            except BaseException:
                os.close(fd)
                raise
            # Released and unlinked by its holder between our open and our flock: try the new one.
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Full(f"{archive}: no space for the lease of session {name!r}") from error
        raise InvalidArgument(
            f"{archive}: cannot take the lease of session {name!r}: {error.strerror}"
        ) from error


def locked(archive: str, name: str) -> Locked:
    """Return the error that a second appender gets."""
    return Locked(
        f"{archive}: session {name!r} already has an appender; close it, or wait until its "
        "process ends"
    )


def _is_named(fd: int, path: str) -> bool:
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)
