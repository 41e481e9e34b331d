"""Archives in memory: the model that every other backend is tested against.

A store with a name lives until the process ends or `discard` is called, so that an archive can
be closed and opened again; a nameless one belongs to the object that made it.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

from kvcodecs.errors import Closed, Full, InvalidArgument, Locked, NotFound

from ..backend import MAX_KEY_BYTES, BackendInfo, Mode, Value
from ..forklock import ForkLock
from ..lease import locked


class _Version:
    """One immutable committed state; keys are sorted when somebody first scans."""

    def __init__(self, items: dict[bytes, bytes]) -> None:
        self.items = items
        self._keys: list[bytes] | None = None

    def keys(self) -> list[bytes]:
        if self._keys is None:
            self._keys = sorted(self.items)
        return self._keys


class _Store:
    def __init__(self) -> None:
        self.version = _Version({})
        self.writer = threading.Lock()
        self.leases: set[int] = set()
        # Reentrant: the garbage collector may release a lease while another one is being taken.
        self.lease_lock = ForkLock()


_stores: dict[str, _Store] = {}
_stores_lock = threading.Lock()


def discard(name: str) -> None:
    """Forget the named store; archives that have it open keep it until they close."""
    with _stores_lock:
        _stores.pop(name, None)


class _MemorySnapshot:
    def __init__(self, version: _Version) -> None:
        self._version = version

    def get(self, key: bytes) -> memoryview | None:
        value = self._version.items.get(key)
        return None if value is None else memoryview(value)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
        return _scan(self._version.keys(), self._version.items, prefix)

    def at_or_after(self, key: bytes) -> bytes | None:
        return _at_or_after(self._version.keys(), key)

    def before(self, key: bytes) -> bytes | None:
        return _before(self._version.keys(), key)

    def release(self, view: memoryview) -> None:
        """Nothing: the value is the only copy."""


class _MemoryTransaction:
    def __init__(self, version: _Version, where: str, limit: int | None) -> None:
        self.items = dict(version.items)
        self._where, self._limit = where, limit
        self._n_bytes = _n_bytes(self.items)

    def get(self, key: bytes) -> memoryview | None:
        value = self.items.get(key)
        return None if value is None else memoryview(value)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
        return _scan(sorted(self.items), dict(self.items), prefix)

    def at_or_after(self, key: bytes) -> bytes | None:
        return _at_or_after(sorted(self.items), key)

    def before(self, key: bytes) -> bytes | None:
        return _before(sorted(self.items), key)

    def release(self, view: memoryview) -> None:
        """Nothing: the value is the only copy."""

    def put(self, key: bytes, value: Value) -> None:
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise InvalidArgument(f"{self._where}: key of {len(key)} bytes")
        self.delete(key)
        self._n_bytes += len(key) + len(value)
        if self._limit is not None and self._n_bytes > self._limit:
            raise Full(f"{self._where}: map_size of {self._limit} bytes is used up")
        self.items[key] = bytes(value)

    def delete(self, key: bytes) -> None:
        old = self.items.pop(key, None)
        if old is not None:
            self._n_bytes -= len(key) + len(old)


class _MemoryLease:
    def __init__(self, store: _Store, owner: int) -> None:
        self._store, self._owner = store, owner
        self._held = True

    def release(self) -> None:
        with self._store.lease_lock:
            if self._held:
                self._store.leases.discard(self._owner)
            self._held = False

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
        Upper limit of keys and values in bytes.
    """

    def __init__(self, name: str, mode: Mode, *, map_size: int | None = None) -> None:
        self._path = f"memory:{name}"
        self._limit, self._closed, self._read_only = map_size, False, mode == "r"
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
        yield _MemorySnapshot(self._store.version)

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
            transaction = _MemoryTransaction(self._store.version, self._path, self._limit)
            yield transaction
            self._store.version = _Version(transaction.items)
        finally:
            self._store.writer.release()

    def lease(self, owner: int, name: str) -> _MemoryLease:
        self._check_open()
        with self._store.lease_lock:
            if owner in self._store.leases:
                raise locked(self._path, name)
            self._store.leases.add(owner)
        return _MemoryLease(self._store, owner)

    def info(self) -> BackendInfo:
        self._check_open()
        items = self._store.version.items
        return BackendInfo("memory", _n_bytes(items), 0, len(items))

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
