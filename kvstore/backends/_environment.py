"""One `lmdb.Environment` per archive and process, and the rules for living with it.

LMDB forbids opening a file twice in a process, using an environment after a fork, growing the
map under a running transaction, and closing it under one; it waits for its write lock without
a time-out and dies of SIGBUS when the file is shorter than it says. This module deals with each;
`lmdb` next door is the backend on top.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from typing import Any, Final

import lmdb
from kvcodecs.errors import (
    Closed,
    Corrupt,
    Full,
    InvalidArgument,
    KvError,
    Locked,
    Truncated,
    Unsupported,
)

from ._directory import (
    DATA_FILE,
    LOCK_FILE,
    MAX_READERS,
    NO_SPACE,
    check_directory,
    mark_begun,
    reserve_lock_file,
)
from ._freelist import tail_is_free

# A large map costs address space only; a process with a limit on that gets a smaller one.
_MAP_LADDER: Final = (1 << 40, 1 << 36, 1 << 33, 1 << 30)
_RESIZE_TIMEOUT: Final = 10.0
# LMDB calls a write that the disk cut short an input/output error.
_MAYBE_NO_SPACE: Final = (errno.EIO, "mdb_txn_commit")
_NOT_ALLOWED: Final = frozenset((errno.EACCES, errno.EROFS, errno.EPERM))


def translate(error: lmdb.Error, where: str) -> KvError:
    """Return the error of ours that says what `error` means for the caller."""
    code = getattr(error, "code", None)
    if isinstance(error, lmdb.MapFullError):
        return Full(f"{where}: the map is used up; reopen with a larger map_size")
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


class Environment:
    """A shared `lmdb.Environment`; made by `acquire`, given back by `release`."""

    def __init__(self, env: Any, path: str, identity: tuple[int, int], writable: bool) -> None:
        self.env, self.path, self.writable = env, path, writable
        self.identity = identity
        self.refs = 1
        self.writer_lock = threading.Lock()
        self.waiter: threading.Thread | None = None
        self._pid = os.getpid()
        # Reentrant: the garbage collector may end an abandoned transaction, or give an archive
        # back, in the middle of `enter` or `leave` of the same thread.
        self._gate = threading.Condition(threading.RLock())
        self._n_active = 0
        self._closed = False
        self._short_but_sound = (0, 0)
        self._page_bytes = int(env.stat()["psize"])
        # Ours alone, for its length; LMDB's locks are on the other file.
        self._data_fd = os.open(os.path.join(path, DATA_FILE), os.O_RDONLY | os.O_CLOEXEC)

    def enter(self) -> None:
        """Announce a transaction, then check that it is safe to begin one.

        Raises
        ------
        Closed
            Closed, or this process was forked from the one that opened it.
        Truncated
            The file is shorter than its pages: reading it would kill the process.
        """
        self.check_process()
        with self._gate:
            if self._closed:
                raise Closed(f"{self.path}: the archive is closed")
            self._n_active += 1
        try:
            self._check_length()
        except BaseException:
            self.leave()
            raise

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the process that opened it: nothing may be touched then."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raise `Closed` in a child of the process that opened it."""
        if self.is_forked:
            raise Closed(f"{self.path}: opened before a fork; reopen it in this process")

    def leave(self) -> None:
        """Take back `enter`; closes the environment if nobody wants it any more."""
        with self._gate:
            self._n_active -= 1
            idle = self._n_active == 0
            self._gate.notify_all()
        if idle and self.refs == 0:
            _given_back.append((self, 0))
            _settle()

    def adopt_size(self, map_size: int = 0) -> None:
        """Remap to `map_size` bytes, or with 0 to what another process has grown the file to.

        Raises
        ------
        Locked
            Transactions of this process did not end in time.
        """
        with self._gate:
            if not self._gate.wait_for(lambda: self._n_active == 0, timeout=_RESIZE_TIMEOUT):
                raise Locked(
                    f"{self.path}: another process has grown the archive, and reads of this one "
                    f"did not end within {_RESIZE_TIMEOUT:.0f} s; try again"
                )
            try:
                self.env.set_mapsize(map_size)
            except lmdb.Error as error:
                raise translate(error, self.path) from error

    def sizes(self) -> tuple[int, int, int]:
        """Return bytes of the file, bytes in pages not in use, and number of entries."""
        self.enter()
        try:
            stat, info = self.env.stat(), self.env.info()
            n_used = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] + 2
            n_free = max(0, info["last_pgno"] + 1 - n_used)
            n_bytes = os.fstat(self._data_fd).st_size
            return n_bytes, n_free * self._page_bytes, int(stat["entries"])
        finally:
            self.leave()

    def _check_length(self) -> None:
        n_bytes = os.fstat(self._data_fd).st_size
        # Even LMDB's own two head pages are only safe to touch when the file has them.
        expected = 2 * self._page_bytes
        if n_bytes >= expected:
            expected = (int(self.env.info()["last_pgno"]) + 1) * self._page_bytes
            if n_bytes >= expected or self._is_sound(expected):
                return
        raise Truncated(
            f"{self.path}: {DATA_FILE} has {n_bytes} of {expected} bytes; restore a copy"
        )

    def _is_sound(self, expected: int) -> bool:
        """Look again at a file that seemed too short."""
        n_bytes = os.fstat(self._data_fd).st_size  # another process may just have extended it
        if n_bytes >= expected or (n_bytes, expected) == self._short_but_sound:
            return True
        txn = self.env.begin()
        try:
            sound = tail_is_free(self._data_fd, self._page_bytes, txn.id(), n_bytes)
        finally:
            txn.abort()
        if sound:
            self._short_but_sound = n_bytes, expected
        return sound

    def _close_if_unused(self) -> None:
        # Under the registry's lock: whoever opens the path meanwhile has raised `refs`.
        with self._gate:
            if self.refs or self._n_active or self._closed:
                return
            self._closed = True
        _registry.pop(self.identity, None)
        self.env.close()
        os.close(self._data_fd)

    def _forget_in_child(self) -> None:
        # Closing frees the child to reopen the path, and is safe unless a transaction was open:
        # ending that here would take its slot from the parent. Then it must never be freed.
        self._gate = threading.Condition(threading.RLock())
        self.writer_lock, self.waiter = threading.Lock(), None
        self._closed = True
        if self._n_active == 0:
            self.env.close()
        else:
            keep_for_ever(self.env)
        os.close(self._data_fd)


def keep_for_ever(thing: object) -> None:
    """Never free an object of LMDB's that a forked child shares with its parent."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


_registry: dict[tuple[int, int], Environment] = {}
_registry_lock = threading.Lock()
# Environments given back, each with the references that go. A queue, since whoever gives one back
# may be a finalizer, which runs anywhere: in the middle of `acquire`, or where a lock is held.
_given_back: deque[tuple[Environment, int]] = deque()


def _settle() -> None:
    """Close what nobody uses; never waits: who holds the lock settles when it lets go."""
    while _given_back and _registry_lock.acquire(blocking=False):
        try:
            _settle_locked()
        finally:
            _registry_lock.release()


def _settle_locked() -> None:
    while _given_back:
        environment, n_refs = _given_back.popleft()
        environment.refs -= n_refs
        environment._close_if_unused()


def _after_fork_in_child() -> None:
    global _registry_lock
    _registry_lock = threading.Lock()
    _given_back.clear()
    for environment in _registry.values():
        environment._forget_in_child()
    _registry.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def acquire(path: str, *, create: bool, map_size: int | None, shown: str) -> Environment:
    """Return the environment of an archive directory, opened or already open.

    Parameters
    ----------
    path
        Absolute path of the directory.
    create
        Make what is missing; else `NotFound`.
    map_size
        Size of the map, or None for the largest that the process can have. An environment that
        is open already only ever grows.
    shown
        The path as the caller spelled it.
    """
    try:
        with _registry_lock:
            _settle_locked()
            found = _find_or_open(path, map_size, create, shown)
    finally:
        _settle()
    if create and not found.writable:
        release(found)
        raise InvalidArgument(f"{shown}: not writable here; open it with mode='r'")
    try:
        if map_size is not None and map_size > found.env.info()["map_size"]:
            found.adopt_size(map_size)
    except KvError:
        release(found)
        raise
    return found


def release(environment: Environment) -> None:
    """Give an environment back; the last one closes it, after the transactions still open."""
    _given_back.append((environment, 1))
    _settle()


def _find_or_open(path: str, map_size: int | None, create: bool, shown: str) -> Environment:
    data = os.path.join(path, DATA_FILE)
    found = _registry.get(_identity(data)) if os.path.exists(data) else None
    check_directory(path, create, shown, is_open=found is not None)
    if found is None:
        found = _open(path, data, map_size, create, shown)
        _registry[found.identity] = found
    else:
        found.refs += 1
    return found


def _open(path: str, data: str, map_size: int | None, create: bool, shown: str) -> Environment:
    exists = os.path.exists(data)
    n_bytes = os.stat(data).st_size if exists else 0
    lock = os.path.join(path, LOCK_FILE)
    writable = (not exists or os.access(data, os.W_OK)) and os.access(
        lock if os.path.exists(lock) else path, os.W_OK
    )
    sizes = [size for size in _MAP_LADDER if size >= 2 * n_bytes] or [4 * n_bytes]
    if map_size is not None:
        sizes = [map_size]
    # A reader takes a writable environment too: the process can have only this one, and may
    # want to write later. Without the right to write, LMDB still wants its lock file; only
    # where that cannot be had is it read without (no writer can be active there either).
    attempts: list[dict[str, Any]] = [{}]
    if not writable:
        attempts = [{"readonly": True}, {"readonly": True, "lock": False}]
    reserve_lock_file(path, shown)
    error: lmdb.Error | None = None
    for options in attempts:
        for size in sizes:
            try:
                env = lmdb.open(
                    os.fsencode(path),  # LMDB's own way to bytes refuses names that are not UTF-8
                    map_size=size,
                    create=create,
                    mode=0o666,
                    max_readers=MAX_READERS,
                    max_spare_txns=0,  # a spare would share its reader slot with a forked child
                    lib_version=0,  # the two formats exclude each other; never the default's
                    **options,
                )
            except lmdb.MemoryError as failure:
                error = failure
                continue
            except lmdb.Error as failure:
                error = failure
                break
            if options.get("lock", True):
                env.reader_check()  # frees the slots of readers that were killed
            if create and writable:
                mark_begun(path)
            return Environment(env, path, _identity(data), writable)
    if error is None:
        raise Full(f"{shown}: no map size fits")
    if "already open in this process" in str(error):
        raise Closed(
            f"{shown}: already open in this process: by the lmdb package itself, or the process "
            "that this one was forked from was just using it; use a process started anew"
        ) from error
    if exists and not os.access(data, os.R_OK):
        raise InvalidArgument(f"{shown}: no right to read {DATA_FILE}") from error
    if isinstance(error, lmdb.InvalidError) and n_bytes < 8192:
        raise Truncated(f"{shown}: {DATA_FILE} has only {n_bytes} bytes") from error
    raise translate(error, shown) from error


def _identity(data: str) -> tuple[int, int]:
    stat = os.stat(data)
    return stat.st_dev, stat.st_ino
