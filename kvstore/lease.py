"""Leases: one appender per session, ended by `release` or by the end of the process.

A lease file is locked with ``flock``, which the system drops when the process dies, however
it dies. Inside one process ``flock`` keeps two descriptors apart as well. A process that stands
still keeps its lock: so a lease may say after how many seconds without a sign of life another
appender may take its file away. The files hold nothing else, and may be deleted whenever no
process has the archive open. FORMAT.md section 5.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import time
import weakref
from collections.abc import Iterator
from typing import Final

from kvcodecs.errors import Closed, Full, InvalidArgument, Locked

from .files import has_name
from .forklock import ForkLock

LEASE_DIRECTORY: Final = "leases"
#: Least time between two renewals, of a lease that lasts long.
RENEWAL_PAUSE: Final = 1.0
# How long to wait for another process that is changing the names of lease files.
_NAMES_TIMEOUT: Final = 0.2
_MOST_TEXT: Final = 64


class FileLease:
    """A lease held through an ``flock`` on ``<archive>/leases/<owner>.lock``."""

    def __init__(self, fd: int, path: str, archive: str, name: str, expires: float | None) -> None:
        self._fd, self._path = fd, path
        self._archive, self._name, self._expires = archive, name, expires
        self._renewed = time.monotonic()
        self._lock = ForkLock()
        _held.add(self)

    def check(self) -> None:
        """Renew the lease; raises `Locked` if another appender has taken it."""
        with self._lock:
            if self._fd < 0:
                raise Closed(f"{self._archive}: the lease of session {self._name!r} was given back")
            if not has_name(self._fd, self._path):
                raise lost(self._archive, self._name)
        self.renew()

    def renew(self) -> None:
        """Show a sign of life, at most once a second."""
        now = time.monotonic()
        if self._expires is None or now - self._renewed < min(RENEWAL_PAUSE, self._expires / 4):
            return
        with self._lock, contextlib.suppress(OSError):
            if self._fd >= 0:
                self._renewed = now
                os.utime(self._fd)

    def release(self) -> None:
        """Give the lease back; a second call does nothing."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd < 0:
            return
        # The name goes while the lock is held: whoever locks a file afterwards checks that it
        # still has its name (`take_file_lease`). A file that nobody unlinks does no harm.
        with contextlib.suppress(OSError):
            if self._expires is None:
                os.unlink(self._path)
            else:
                with _names(os.path.dirname(self._path)) as mine:
                    if mine and has_name(fd, self._path):
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


def take_file_lease(
    archive: str,
    owner: int,
    name: str,
    expires: float | None = None,
    *,
    shown: str | None = None,
) -> FileLease:
    """Lock the lease file of `owner`, at once or not at all.

    Parameters
    ----------
    expires
        Seconds without renewal after which `take_over_file_lease` may take it; None for never.
    shown
        The archive as messages call it, if not `archive`.

    Raises
    ------
    Locked
        Another appender holds it.
    Full, InvalidArgument
        The lease file cannot be made.
    """
    path, archive = _path(archive, owner), shown or archive
    with _explained(archive, name):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        while True:
            fd = _open_and_lock(path)
            if fd is None:
                raise locked(archive, name)
            if has_name(fd, path):
                return _held_lease(fd, path, archive, name, expires)
            # Released and unlinked by its holder between our open and our flock: try the new one.
            os.close(fd)


def is_expired(archive: str, owner: int) -> bool:
    """Whether the holder of a lease has said for how long, and has shown no sign of life since."""
    try:
        fd = os.open(_path(archive, owner), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        expires = _expires_of(fd)
        return expires is not None and time.time() - os.fstat(fd).st_mtime > expires
    except OSError:
        return False
    finally:
        os.close(fd)


def take_over_file_lease(
    archive: str,
    owner: int,
    name: str,
    expires: float | None = None,
    *,
    shown: str | None = None,
) -> FileLease:
    """Take a lease that has expired from its holder, who learns of it from `FileLease.check`.

    The caller has the archive's write transaction open. So the holder, who checks its lease
    inside each of its own, is not in the middle of one, and begins none without noticing. What
    it has committed before is to be read again afterwards.

    Raises
    ------
    Locked
        It has not expired, or other leases are changing hands.
    Full, InvalidArgument
        The lease file cannot be made.
    """
    path, where = _path(archive, owner), shown or archive
    with _explained(where, name), _names(os.path.dirname(path)) as mine:
        if not mine or not is_expired(archive, owner):
            raise locked(where, name)
        fd = _open_and_lock(path)
        if fd is None:
            os.unlink(path)  # its holder keeps the lock on a file without a name
            fd = _open_and_lock(path)
        if fd is None:
            raise locked(where, name)  # a third appender was faster
        return _held_lease(fd, path, where, name, expires)


def _path(archive: str, owner: int) -> str:
    return os.path.join(archive, LEASE_DIRECTORY, f"{owner:016x}.lock")


def _open_and_lock(path: str) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _held_lease(fd: int, path: str, archive: str, name: str, expires: float | None) -> FileLease:
    # Without room for the number of seconds the lease does not expire: deleting must be possible
    # on a full disk.
    with contextlib.suppress(OSError):
        os.utime(fd)
        os.ftruncate(fd, 0)
        if expires is not None:
            os.pwrite(fd, f"{expires}\n".encode(), 0)
    return FileLease(fd, path, archive, name, expires)


def _expires_of(fd: int) -> float | None:
    text = os.pread(fd, _MOST_TEXT, 0)
    if not text.endswith(b"\n"):
        return None
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None


@contextlib.contextmanager
def _names(directory: str) -> Iterator[bool]:
    """Be the only one to unlink files of leases that expire; yields whether that came true."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _NAMES_TIMEOUT
        mine = False
        while not mine and time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = True
            except BlockingIOError:
                time.sleep(0.001)
        try:
            yield mine
        finally:
            if mine:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may have the descriptor too
    finally:
        os.close(fd)


@contextlib.contextmanager
def _explained(archive: str, name: str) -> Iterator[None]:
    try:
        yield
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


def lost(archive: str, name: str) -> Locked:
    """Return the error of an appender whose lease was taken over."""
    return Locked(
        f"{archive}: the lease of session {name!r} expired and another appender took it; reopen "
        "the session and append again from its n_committed"
    )
