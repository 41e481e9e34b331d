"""The lock of the one writer of a directory: ``flock`` on a file, which ends with the process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Final

from kvcodecs.errors import Closed, Locked

from ...files import has_name

_FIRST_PAUSE: Final = 0.0005
_LONGEST_PAUSE: Final = 0.02


class FileWriter:
    """The right to write to a directory; see `objects.Writer`."""

    def __init__(self, fd: int, where: str) -> None:
        self._fd, self._where = fd, where
        _held.add(self)

    @property
    def epoch(self) -> int:
        """0: the system itself keeps writers apart."""
        return 0

    def check(self) -> None:
        """Raise `Closed` where the right is not this process's, or was given back."""
        if self._fd < 0:
            raise Closed(
                f"{self._where}: the right to write was given back, or is that of the process "
                "before a fork; begin again"
            )

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(
                    fd, fcntl.LOCK_UN
                )  # another process may have the descriptor from a fork
            os.close(fd)

    def _forget_in_child(self) -> None:
        # Only closed: to unlock would take the lock from the parent.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_held: weakref.WeakSet[FileWriter] = weakref.WeakSet()
# One for each file, so that threads of a process wait without asking again and again.
_locks: weakref.WeakValueDictionary[str, _ThreadLock] = weakref.WeakValueDictionary()
_locks_lock = threading.Lock()


class _ThreadLock:
    def __init__(self) -> None:
        self.lock = threading.Lock()


def _after_fork_in_child() -> None:
    global _locks_lock, _locks
    # What other threads held would never be released.
    _locks_lock, _locks = threading.Lock(), weakref.WeakValueDictionary()
    for writer in list(_held):
        writer._forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


@contextlib.contextmanager
def file_writer(path: str, where: str, timeout: float) -> Iterator[FileWriter]:
    """Hold the lock on the file `path`, whose directory is there.

    Raises
    ------
    Locked
        Another thread or process held it for `timeout` seconds.
    """
    deadline = time.monotonic() + max(timeout, 0.0)
    with _locks_lock:
        mutex = _locks.get(path)
        if mutex is None:
            mutex = _locks[path] = _ThreadLock()
    if not mutex.lock.acquire(timeout=max(timeout, 0.0)):
        raise _locked(where, timeout)
    try:
        writer = _take(path, where, deadline)
        if writer is None:
            raise _locked(where, timeout)
        try:
            yield writer
        finally:
            writer._release()
    finally:
        mutex.lock.release()


def _take(path: str, where: str, deadline: float) -> FileWriter | None:
    """Lock the file that has the name at that moment; None if the time is over."""
    pause = _FIRST_PAUSE
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        writer = FileWriter(fd, where)  # known before it is locked: a fork may come at any time
        try:
            while not _try_lock(fd):
                left = deadline - time.monotonic()
                if left <= 0:
                    writer._release()
                    return None
                time.sleep(min(left, pause * random.uniform(0.5, 1.0)))
                pause = min(pause * 2, _LONGEST_PAUSE)
            if has_name(fd, path):
                return writer
        except BaseException:
            writer._release()
            raise
        writer._release()


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _locked(where: str, timeout: float) -> Locked:
    return Locked(
        f"{where}: another writer held the lock for {timeout:g} s; raise lock_timeout or try again"
    )
