"""One `lmdb.Environment` per archive and process, and the rules for living with it.

LMDB forbids opening a file twice in a process, using an environment after a fork, growing the
map under a running transaction, and closing it under one; it waits for its write lock without
a time-out and dies of SIGBUS when the file is shorter than it says. This module deals with each;
`lmdb` next door is the backend on top.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import lmdb
from kvcodecs.errors import Closed, Corrupt, Full, InvalidArgument, KvError, Locked, Truncated

from ..backend import BackendInfo
from ..forklock import keep_for_ever
from ._directory import DATA_FILE, check_directory
from ._errors import translate
from ._freelist import tail_is_free
from ._heads import Head, read_head
from ._open_lock import OpenLock, share
from ._opening import can_map, open_environment

_RESIZE_TIMEOUT: Final = 10.0
# How long a new transaction lets go first who waits for that.
_YIELD_SECONDS: Final = 0.5
# How long opening waits for a compaction or an upgrade to end, and how often it looks.
_COMPACTION_TIMEOUT: Final = 5.0
_COMPACTION_PAUSE: Final = 0.02
# What an archive beyond its limit may grow by, since removing changes pages too.
_ROOM_TO_REMOVE: Final = 1 << 16
# How often a file that seems too short is looked at while others commit to it.
_LOOKS: Final = 100


class Environment:
    """A shared `lmdb.Environment`; made by `acquire`, given back by `release`."""

    def __init__(
        self,
        env: Any,
        path: str,
        identity: tuple[int, int],
        writable: bool,
        map_size: int | None,
        open_lock: OpenLock | None,
    ) -> None:
        self.env, self.path, self.writable = env, path, writable
        self._open_lock = open_lock
        self.identity = identity
        self.refs = 1
        self.writer_lock = threading.Lock()
        self.waiter: threading.Thread | None = None
        #: Who has the write transaction open.
        self.writing_thread: int | None = None
        #: Transaction id and start of each snapshot that is open here.
        self.snapshots: dict[int, tuple[int, float]] = {}
        self.limit: int | None = None
        self.main = env.open_db(None)
        self.page_bytes = int(env.stat()["psize"])
        #: The last transaction of `Backend.reclaim`.
        self.reclaimed = -1
        self._pid = os.getpid()
        # Reentrant: the garbage collector may end an abandoned transaction, or give an archive
        # back, in the middle of `enter` or `leave` of the same thread.
        self._gate = threading.Condition(threading.RLock())
        self._n_active = self._n_waiting = 0
        self._closed = False
        self._short_but_sound = (0, 0)
        # What the map would be without a limit, and whether a caller wanted it no larger.
        self._map_size, self._is_wish = self._mapped(), map_size is not None
        # Ours alone, for its length and heads; LMDB's locks are on the other file.
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
            # Reads that overlap would never leave a moment for who waits. But not for long: this
            # thread may have another transaction open, which is what that one waits for.
            self._gate.wait_for(lambda: not self._n_waiting, timeout=_YIELD_SECONDS)
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

    def adopt_size(self) -> None:
        """Map again, after another process has grown the file beyond the map of this one.

        Raises
        ------
        Locked
            Transactions of this process did not end in time.
        """
        with self._idle("another process has grown the archive"):
            head = self.head()
            size = self._wanted()
            if self.limit is None and can_map(max(1, head.map_size - self._mapped())):
                size = max(size, head.map_size)  # what others have mapped
            self._map(max(size, (head.last_page + 1) * self.page_bytes))
            if self.limit is None:
                self._map_size = self._mapped()

    def grow_map(self, map_size: int) -> None:
        """Map at least so many bytes, for a caller who opens again with a larger `map_size`."""
        if map_size > self._map_size:
            with self._idle("a larger map_size is wanted"):
                self._map_size = map_size
                self._map(self._wanted())

    def set_limit(self, n_bytes: int | None) -> None:
        """See `Backend.set_limit`."""
        if n_bytes is not None:
            # The two heads are there always, and LMDB takes 0 for something else.
            n_bytes = max(n_bytes // self.page_bytes, 2) * self.page_bytes
        with self._gate:
            if n_bytes == self.limit:
                return
        with self._idle("its limit is being changed"):
            before, self.limit = self.limit, n_bytes
            try:
                self._map(self._wanted())
            except BaseException:
                self.limit = before
                raise

    @property
    def effective_limit(self) -> int | None:
        """The limit, unless the map is smaller for other reasons; for messages."""
        return self.limit if self.limit is not None and self._mapped() >= self.limit else None

    def _wanted(self) -> int:
        if self.limit is None or (self._is_wish and self._map_size < self.limit):
            return self._map_size
        n_bytes = (self.head().last_page + 1) * self.page_bytes
        if n_bytes > self.limit:
            return n_bytes + max(n_bytes >> 7, _ROOM_TO_REMOVE)
        # A limit beyond what the process can map is none.
        fits = self.limit <= self._map_size or can_map(self.limit - self._mapped())
        return self.limit if fits else self._map_size

    @contextmanager
    def _idle(self, why: str) -> Iterator[None]:
        """Hold off new transactions; waits until there are none."""
        self.check_process()
        with self._gate:
            self._n_waiting += 1
            try:
                idle = self._gate.wait_for(lambda: self._n_active == 0, timeout=_RESIZE_TIMEOUT)
            finally:
                self._n_waiting -= 1
                self._gate.notify_all()
            if not idle:
                raise Locked(
                    f"{self.path}: {why}, and transactions of this process did not end within "
                    f"{_RESIZE_TIMEOUT:.0f} s; try again"
                )
            if self._closed:
                raise Closed(f"{self.path}: the archive is closed")
            yield

    def _map(self, size: int) -> None:
        # LMDB unmaps first: a map that does not fit would leave it with none.
        if size > self._mapped() and not can_map(size - self._mapped()):
            raise Full(f"{self.path}: not enough address space to map {size} bytes")
        try:
            self.env.set_mapsize(size)  # never less than the pages in use
        except lmdb.Error as error:
            self.end()
            raise translate(error, self.path) from error

    def _mapped(self) -> int:
        return int(self.env.info()["map_size"])

    def head(self) -> Head:
        """Return the last commit's head; call it between `enter` and `leave`."""
        head = read_head(self._data_fd, self.page_bytes)
        if head is None:
            raise Corrupt(f"{self.path}: {DATA_FILE} has no sound head page; restore a copy")
        return head

    def info(self) -> BackendInfo:
        """See `Backend.info`."""
        self.enter()
        try:
            head, n_bytes = self.head(), os.fstat(self._data_fd).st_size
        finally:
            self.leave()
        n_free = max(0, head.last_page + 1 - head.n_used)
        return BackendInfo(
            kind="lmdb",
            file_bytes=n_bytes,
            free_bytes=n_free * self.page_bytes,
            used_bytes=head.n_used * self.page_bytes,
            n_entries=head.main.n_entries,
        )

    def _check_length(self) -> None:
        n_bytes = os.fstat(self._data_fd).st_size
        # Even LMDB's own two head pages are only safe to touch when the file has them.
        expected = 2 * self.page_bytes
        if n_bytes >= expected:
            expected = (int(self.env.info()["last_pgno"]) + 1) * self.page_bytes
            if n_bytes >= expected or self._is_sound(expected):
                return
        raise Truncated(
            f"{self.path}: {DATA_FILE} has {n_bytes} of {expected} bytes; restore a copy"
        )

    def _is_sound(self, expected: int) -> bool:
        """Look again at a file that seemed too short."""
        for _ in range(_LOOKS):
            txn = self.env.begin()
            try:
                # Measured after the snapshot is held: all its pages that count are there by now.
                n_bytes = os.fstat(self._data_fd).st_size
                if n_bytes >= expected or (n_bytes, expected) == self._short_but_sound:
                    return True
                if tail_is_free(self._data_fd, self.page_bytes, txn.id(), n_bytes):
                    self._short_but_sound = n_bytes, expected
                    return True
                if self.head().txn_id == txn.id():
                    return False
                # Others have committed since, over the head of the snapshot.
            finally:
                txn.abort()
        return False

    def _close_if_unused(self) -> None:
        # Under the registry's lock: whoever opens the path meanwhile has raised `refs`.
        with self._gate:
            if self.refs or self._n_active or self._closed:
                return
            self.end()

    def end(self) -> None:
        """Close it; nobody has a transaction open."""
        self._closed = True
        _registry.pop(self.identity, None)
        self.env.close()
        os.close(self._data_fd)
        if self._open_lock is not None:
            self._open_lock.release()

    def _forget_in_child(self) -> None:
        # Closing frees the child to reopen the path, and is safe unless a transaction was open:
        # ending that here would take its slot from the parent. Then it must never be freed.
        self._gate = threading.Condition(threading.RLock())
        self.writer_lock, self.waiter = threading.Lock(), None
        self.snapshots, self.writing_thread = {}, None
        self._closed = True
        if self._n_active == 0:
            self.env.close()
        else:
            keep_for_ever(self.env)
        os.close(self._data_fd)


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
    deadline = time.monotonic() + _COMPACTION_TIMEOUT
    while True:
        try:
            with _registry_lock:
                _settle_locked()
                found = _find_or_open(path, map_size, create, shown)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Locked(f"{shown}: is being compacted or upgraded; try again later") from None
        finally:
            _settle()
        time.sleep(_COMPACTION_PAUSE)
    if create and not found.writable:
        release(found)
        raise InvalidArgument(f"{shown}: not writable here; open it with mode='r'")
    try:
        if map_size is not None:
            found.grow_map(map_size)
    except KvError:
        release(found)
        raise
    return found


def release(environment: Environment) -> None:
    """Give an environment back; the last one closes it, after the transactions still open."""
    _given_back.append((environment, 1))
    _settle()


def is_open_here(path: str) -> bool:
    """Whether this process has the archive in a directory open."""
    with _registry_lock:
        _settle_locked()
        return _identity(os.path.join(path, DATA_FILE)) in _registry


def _find_or_open(path: str, map_size: int | None, create: bool, shown: str) -> Environment:
    data = os.path.join(path, DATA_FILE)
    found = _registry.get(_identity(data)) if os.path.exists(data) else None
    check_directory(path, create, shown, is_open=found is not None)
    if found is None:
        open_lock = share(path)
        try:
            env, writable = open_environment(path, data, map_size, create, shown)
            found = Environment(env, path, _identity(data), writable, map_size, open_lock)
        except BaseException:
            if open_lock is not None:
                open_lock.release()
            raise
        _registry[found.identity] = found
    else:
        found.refs += 1
    return found


def _identity(data: str) -> tuple[int, int]:
    stat = os.stat(data)
    return stat.st_dev, stat.st_ino
