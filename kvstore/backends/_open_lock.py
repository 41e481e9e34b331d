"""Who has an archive open: a shared ``flock`` on ``open.lock``, or that of who wants it alone.

The file is empty and stays. Where it can be neither made nor opened (another user's directory, a
full disk) an archive is opened without; compaction and upgrades then ask LMDB's own locks as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Iterator
from typing import Final

OPEN_LOCK: Final = "open.lock"


class OpenLock:
    """A lock on ``open.lock``, until `release` or the end of the process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _held.add(self)

    def release(self) -> None:
        """Let go of it; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # A child that was forked just now may have the descriptor still.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _forget_in_child(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)  # the parent's lock stays
            self._fd = -1


_held: weakref.WeakSet[OpenLock] = weakref.WeakSet()
#: Archives that this process has locked and opens without.
_alone: set[str] = set()


def _after_fork_in_child() -> None:
    for lock in list(_held):
        lock._forget_in_child()
    _alone.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def share(directory: str) -> OpenLock | None:
    """Lock an archive against compaction; None where that is not possible.

    Raises
    ------
    BlockingIOError
        It is being compacted or upgraded.
    """
    if directory in _alone:
        return None  # this process has locked out all others
    path = os.path.join(directory, OPEN_LOCK)
    for flags in (os.O_CREAT, 0):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, 0o666)
        except OSError:
            continue
        return _lock(fd, fcntl.LOCK_SH)
    return None


def exclude(directory: str) -> OpenLock:
    """Keep everybody from opening an archive.

    Raises
    ------
    BlockingIOError
        Somebody has it open.
    OSError
        The directory cannot be written, or this file system has no such locks.
    """
    path = os.path.join(directory, OPEN_LOCK)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_CREAT, 0o666)
    lock = _lock(fd, fcntl.LOCK_EX)
    if lock is None:
        raise OSError("no locks on this file system")
    return lock


@contextlib.contextmanager
def alone(directory: str) -> Iterator[None]:
    """Keep other processes from opening an archive while this one does; errors of `exclude`."""
    lock = exclude(directory)
    _alone.add(directory)
    try:
        yield
    finally:
        _alone.discard(directory)
        lock.release()


def _lock(fd: int, how: int) -> OpenLock | None:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise
    except OSError:
        os.close(fd)
        return None
    return OpenLock(fd)
