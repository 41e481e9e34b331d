"""Archives in memory: the model that every other backend is tested against.

A store with a name lives until the process ends or `discard` is called, so that an archive can
be closed and opened again; a nameless one belongs to the object that made it.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final

from kvcodecs.errors import Closed, Full, InvalidArgument, Locked, NotFound

from ..backend import (
    MAX_KEY_BYTES,
    SNAPSHOT_SECONDS,
    BackendInfo,
    Mode,
    ReaderInfo,
    Value,
    check_seconds,
)
from ..forklock import ForkLock
from ..lease import locked, lost
from ._checks import check_limit, expired, no_shards

# As the other backends have, so that an archive beyond its limit can be emptied.
_ROOM_TO_REMOVE: Final = 1 << 16


class _Version:
    """One immutable committed state; keys are sorted when somebody first scans."""

    def __init__(self, items: dict[bytes, bytes], number: int) -> None:
        self.items, self.number = items, number
        self._keys: list[bytes] | None = None

    def keys(self) -> list[bytes]:
        if self._keys is None:
            self._keys = sorted(self.items)
        return self._keys


class _Store:
    def __init__(self) -> None:
        self.version = _Version({}, 0)
        self.limit: int | None = None
        #: What the limit lets keys and values have: some more if they had more when it was set.
        self.cap = 0
        #: Version and start of each snapshot that is open.
        self.snapshots: dict[int, tuple[int, float]] = {}
        self.writer = threading.Lock()
        self.uses: dict[int, int] = {}
        self.leases: dict[int, _Hold] = {}
        self.writing_thread: int | None = None
        # Reentrant: the garbage collector may release a lease while another one is being taken.
        self.lease_lock = ForkLock()


_stores: dict[str, _Store] = {}
_stores_lock = threading.Lock()


def discard(name: str) -> None:
    """Forget the named store; archives that have it open keep it until they close."""
    with _stores_lock:
        _stores.pop(name, None)


_snapshot_numbers = count()


class _MemorySnapshot:
    def __init__(self, version: _Version, where: str, seconds: float) -> None:
        self._version, self._where = version, where
        self._seconds, self._expires = seconds, time.monotonic() + seconds

    def get(self, key: bytes) -> memoryview | None:
        self._check_age()
        value = self._version.items.get(key)
        return None if value is None else memoryview(value)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
        self._check_age()
        for found in _scan(self._version.keys(), self._version.items, prefix):
            yield found
            self._check_age()

    def sizes(self, prefix: bytes) -> Iterator[tuple[bytes, int]]:
        return ((key, value.nbytes) for key, value in self.scan(prefix))

    def prefetch(self, keys: Iterable[bytes]) -> None:
        """Nothing: all values are at hand."""
        self._check_age()

    def at_or_after(self, key: bytes) -> bytes | None:
        self._check_age()
        return _at_or_after(self._version.keys(), key)

    def before(self, key: bytes) -> bytes | None:
        self._check_age()
        return _before(self._version.keys(), key)

    def _check_age(self) -> None:
        if time.monotonic() > self._expires:
            raise expired(self._where, self._seconds)

    def zarr_group(self, owner: int) -> str | None:
        return None

    def release(self, view: memoryview) -> None:
        """Nothing: the value is the only copy."""


class _MemoryTransaction:
    def __init__(self, version: _Version, where: str, limit: int | None, what: str) -> None:
        self.items = dict(version.items)
        self._where, self._limit, self._what = where, limit, what
        #: The error after which nothing is committed, as in LMDB.
        self.failed: Full | None = None
        self._n_bytes = _n_bytes(self.items)

    def get(self, key: bytes) -> memoryview | None:
        value = self.items.get(key)
        return None if value is None else memoryview(value)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
        return _scan(sorted(self.items), dict(self.items), prefix)

    def sizes(self, prefix: bytes) -> Iterator[tuple[bytes, int]]:
        return ((key, value.nbytes) for key, value in self.scan(prefix))

    def prefetch(self, keys: Iterable[bytes]) -> None:
        """Nothing: all values are at hand."""

    def at_or_after(self, key: bytes) -> bytes | None:
        return _at_or_after(sorted(self.items), key)

    def before(self, key: bytes) -> bytes | None:
        return _before(sorted(self.items), key)

    def zarr_group(self, owner: int) -> str | None:
        return None

    def release(self, view: memoryview) -> None:
        """Nothing: the value is the only copy."""

    def put(self, key: bytes, value: Value) -> None:
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise InvalidArgument(f"{self._where}: key of {len(key)} bytes")
        if self.failed is not None:
            raise self.failed
        old = self.items.get(key)
        n_bytes = self._n_bytes + len(key) + len(value)
        n_bytes -= 0 if old is None else len(key) + len(old)
        if self._limit is not None and n_bytes > max(self._limit, self._n_bytes):
            text = f"{self._where}: {self._what} of {self._limit} bytes is reached"
            self.failed = Full(text, is_limit=True)
            raise self.failed
        self._n_bytes = n_bytes
        self.items[key] = bytes(value)

    def delete(self, key: bytes) -> None:
        old = self.items.pop(key, None)
        if old is not None:
            self._n_bytes -= len(key) + len(old)

    def shard(self, name: str, shard_bytes: int) -> bool:
        raise no_shards(self._where)

    def used_bytes(self) -> int:
        return self._n_bytes


class _Hold:
    """That somebody holds a lease, and until when without a sign of life."""

    def __init__(self, expires: float | None) -> None:
        self.expires, self.renewed = expires, time.monotonic()

    @property
    def is_expired(self) -> bool:
        return self.expires is not None and time.monotonic() - self.renewed > self.expires


class _MemoryLease:
    def __init__(self, store: _Store, owner: int, hold: _Hold, where: str, name: str) -> None:
        self._store, self._owner = store, owner
        self._hold: _Hold | None = hold
        self._where, self._name = where, name

    def check(self) -> None:
        with self._store.lease_lock:
            if self._hold is None:
                raise Closed(f"{self._where}: the lease of session {self._name!r} was given back")
            if self._store.leases.get(self._owner) is not self._hold:
                raise lost(self._where, self._name)
            self._hold.renewed = time.monotonic()

    def renew(self) -> None:
        hold = self._hold
        if hold is not None:
            hold.renewed = time.monotonic()

    def release(self) -> None:
        with self._store.lease_lock:
            hold, self._hold = self._hold, None
            if hold is not None and self._store.leases.get(self._owner) is hold:
                del self._store.leases[self._owner]

    def __del__(self) -> None:
        self.release()


class MemoryBackend:
    """An ordered map with copy-on-write snapshots.

    Parameters
    ----------
    name
        Which store of this process; an empty name makes a new one.
    mode
        ``"r"`` raises `NotFound` when there is no such store.
    map_size
        Upper limit of keys and values in bytes, for writes through this object.
    snapshot_seconds
        How long a snapshot may be read from.
    """

    def __init__(
        self,
        name: str,
        mode: Mode,
        *,
        map_size: int | None = None,
        snapshot_seconds: float = SNAPSHOT_SECONDS,
    ) -> None:
        self._path = f"memory:{name}"
        self._map_size, self._closed, self._read_only = map_size, False, mode == "r"
        self._snapshot_seconds = check_seconds("snapshot_seconds", snapshot_seconds)
        with _stores_lock:
            if mode == "r" and name not in _stores:
                raise NotFound(f"{self._path}: no such archive in this process")
            self._store = _stores.setdefault(name, _Store()) if name else _Store()

    @property
    def path(self) -> str:
        return self._path

    @contextmanager
    def read(self) -> Iterator[_MemorySnapshot]:
        self._check_open()
        version, number = self._store.version, next(_snapshot_numbers)
        self._store.snapshots[number] = version.number, time.monotonic()
        try:
            yield _MemorySnapshot(version, self._path, self._snapshot_seconds)
        finally:
            del self._store.snapshots[number]

    @contextmanager
    def write(self, timeout: float) -> Iterator[_MemoryTransaction]:
        self._check_open()
        if self._read_only:
            raise InvalidArgument(f"{self._path}: opened with mode='r'; use mode='a' to write")
        started = time.monotonic()
        if not self._store.writer.acquire(timeout=max(timeout, 0.0)):
            waited = time.monotonic() - started
            raise Locked(f"{self._path}: another writer held the lock for {waited:.1f} s")
        try:
            version = self._store.version
            limit, what = self._cap()
            transaction = _MemoryTransaction(version, self._path, limit, what)
            self._store.writing_thread = threading.get_ident()
            yield transaction
            if transaction.failed is not None:
                raise transaction.failed
            self._store.version = _Version(transaction.items, version.number + 1)
        finally:
            self._store.writing_thread = None
            self._store.writer.release()

    def lease(
        self, owner: int, name: str, *, expires: float | None = None, timeout: float = 10.0
    ) -> _MemoryLease:
        self._check_open()
        hold = _Hold(None if expires is None else check_seconds("expires", expires))
        with self._store.lease_lock:
            held = self._store.leases.get(owner)
            if held is None:
                self._store.leases[owner] = hold
            elif expires is None or not held.is_expired:
                raise locked(self._path, name)
        if held is not None:
            if self._store.writing_thread == threading.get_ident():
                self._take_over(owner, name, hold)
            else:
                with self.write(timeout):
                    self._take_over(owner, name, hold)
        return _MemoryLease(self._store, owner, hold, self._path, name)

    def _take_over(self, owner: int, name: str, hold: _Hold) -> None:
        with self._store.lease_lock:
            held = self._store.leases.get(owner)
            if held is not None and not held.is_expired:
                raise locked(self._path, name)
            self._store.leases[owner] = hold

    def info(self) -> BackendInfo:
        self._check_open()
        items = self._store.version.items
        n_bytes = _n_bytes(items)
        return BackendInfo("memory", n_bytes, 0, n_bytes, len(items))

    @property
    def limit(self) -> int | None:
        return self._store.limit

    def set_limit(self, n_bytes: int | None) -> None:
        self._check_open()
        limit = check_limit(n_bytes)
        if limit is not None and limit != self._store.limit:
            used = _n_bytes(self._store.version.items)
            self._store.cap = limit if used <= limit else used + max(used >> 7, _ROOM_TO_REMOVE)
        self._store.limit = limit

    def _cap(self) -> tuple[int | None, str]:
        limit = self._store.limit
        if limit is None or (self._map_size is not None and self._map_size < limit):
            return self._map_size, "map_size"
        return self._store.cap, "the limit"

    def readers(self) -> list[ReaderInfo]:
        self._check_open()
        last, now = self._store.version.number, time.monotonic()
        found = [
            ReaderInfo(os.getpid(), last - number, now - began)
            for number, began in self._store.snapshots.copy().values()
        ]
        return sorted(found, key=lambda reader: (-reader.n_behind, -(reader.age_seconds or 0.0)))

    def reclaim(self, timeout: float) -> bool:
        with self.write(timeout):
            pass  # nothing waits to be freed; the same errors as elsewhere
        return any(reader.n_behind for reader in self.readers())

    def collect(self, timeout: float) -> int:
        self._check_open()
        return 0  # there are no objects

    def note_use(self, session_id: int) -> None:
        if not self._closed:
            self._store.uses[session_id] = time.time_ns()

    def last_uses(self) -> dict[int, int]:
        self._check_open()
        return self._store.uses.copy()

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._path}: the archive is closed")


def _n_bytes(items: dict[bytes, bytes]) -> int:
    return sum(len(key) + len(value) for key, value in items.items())


def _at_or_after(keys: list[bytes], key: bytes) -> bytes | None:
    i = bisect_left(keys, key)
    return keys[i] if i < len(keys) else None


def _before(keys: list[bytes], key: bytes) -> bytes | None:
    i = bisect_left(keys, key)
    return keys[i - 1] if i else None


def _scan(
    keys: list[bytes], items: dict[bytes, bytes], prefix: bytes
) -> Iterator[tuple[bytes, memoryview]]:
    for i in range(bisect_left(keys, prefix), len(keys)):
        if not keys[i].startswith(prefix):
            return
        yield keys[i], memoryview(items[keys[i]])
