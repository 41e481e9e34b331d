"""What the engine asks of the place where frames live.

A backend is a small ordered map from byte keys to byte values with snapshots and atomic write
transactions, plus one lock per session (the lease). It knows nothing of what a key or a value
means; `keys` and `records` do. FORMAT.md section 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from kvcodecs.errors import InvalidArgument

Mode: TypeAlias = Literal["r", "a"]
Value: TypeAlias = bytes | memoryview

MEMORY_PREFIX: Final = "memory:"
#: Longest key in bytes: LMDB's own limit.
MAX_KEY_BYTES: Final = 511
# Thirty years; much longer ones overflow the system's clock.
_LONGEST_WAIT: Final = 1e9


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """Size of an archive as its backend stores it.

    Attributes
    ----------
    kind
        Name of the backend, ``"lmdb"`` or ``"memory"``.
    file_bytes
        Length of the data file; for memory, the bytes of all keys and values.
    free_bytes
        Bytes inside the file that the next writes use again before it grows.
    n_entries
        Number of keys.
    """

    kind: str
    file_bytes: int
    free_bytes: int
    n_entries: int


class Lease(Protocol):
    """Exclusive right to append to one session; ends with `release` or with the process."""

    def release(self) -> None:
        """Give the lease back; a second call does nothing."""
        ...


class Snapshot(Protocol):
    """The committed state at one moment, unaffected by later writes."""

    def get(self, key: bytes) -> memoryview | None:
        """Return a read-only view of the value, or None.

        The view is valid until the snapshot ends (inside a transaction: until the next `put`
        or `delete`) and never after it.
        """
        ...

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
        """Yield keys that start with `prefix` and their values, in key order; views as in `get`."""
        ...

    def at_or_after(self, key: bytes) -> bytes | None:
        """Return the first stored key that is not less than `key`, or None."""
        ...

    def before(self, key: bytes) -> bytes | None:
        """Return the last stored key that is less than `key`, or None."""
        ...

    def release(self, view: memoryview) -> None:
        """Let go of the memory behind a view; it can be read again, at the cost of a new read."""
        ...


class Passing:
    """Lets go of views once they add up to some megabytes, for walks over many values.

    A mapped page counts as this process's memory from its first touch, and touching one brings
    its neighbours in: letting go of one value at a time would leave most of them behind.
    """

    LIMIT: Final = 8 << 20

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._views: list[memoryview] = []
        self._n_bytes = 0

    def add(self, view: memoryview) -> None:
        """Note a view that was read and is not needed any more."""
        self._views.append(view)
        self._n_bytes += view.nbytes
        if self._n_bytes >= self.LIMIT:
            self.release()

    def release(self) -> None:
        """Let go of all views noted."""
        for view in self._views:
            self._snapshot.release(view)
        self._views, self._n_bytes = [], 0


class Transaction(Snapshot, Protocol):
    """A snapshot that can be changed; sees its own changes, is made durable as a whole."""

    def put(self, key: bytes, value: Value) -> None:
        """Store or replace a value; `value` is copied. Raises `Full`."""
        ...

    def delete(self, key: bytes) -> None:
        """Remove a key; an absent one is no error."""
        ...


class Backend(Protocol):
    """Where the frames of one archive live. Safe to use from many threads."""

    @property
    def path(self) -> str:
        """What the archive was opened as, for messages."""
        ...

    def read(self) -> AbstractContextManager[Snapshot]:
        """Open a snapshot. Never waits for writers. Raises `Truncated`, `Closed`."""
        ...

    def write(self, timeout: float) -> AbstractContextManager[Transaction]:
        """Open the one write transaction: committed at the end, rolled back on an exception.

        Raises
        ------
        Locked
            Another writer, in this or any other process, held the lock for `timeout` seconds.
        Full
            On commit: no space; the transaction has been rolled back.
        """
        ...

    def lease(self, owner: int, name: str) -> Lease:
        """Take the lease of the streams of `owner`, at once or not at all.

        `name` is the session's, for the message of `Locked`.
        """
        ...

    def info(self) -> BackendInfo:
        """Return sizes."""
        ...

    def close(self) -> None:
        """Let go of everything; a second call does nothing."""
        ...


def check_timeout(seconds: object) -> float:
    """Return a time-out that the system's clock can take; `InvalidArgument` if it is none."""
    if not isinstance(seconds, int | float) or not seconds >= 0:
        raise InvalidArgument(f"lock_timeout {seconds!r}: expected seconds")
    return float(min(seconds, _LONGEST_WAIT))


def _is_path(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def open_backend(
    path: str | os.PathLike[str],
    mode: Mode,
    *,
    kind: str | None = None,
    map_size: int | None = None,
) -> Backend:
    """Open the backend that `kind` names, or that `path` asks for.

    Parameters
    ----------
    path
        ``"memory:NAME"`` for memory, else a directory for LMDB.
    mode
        ``"r"`` creates nothing; ``"a"`` creates what is missing.
    kind
        ``"lmdb"``, ``"memory"`` or None to go by `path`.
    map_size
        Upper limit of the archive in bytes; None for the backend's default.

    Raises
    ------
    InvalidArgument
        Unknown mode or backend, or an archive that cannot be written with mode "a".
    NotFound
        Mode "r" and no archive there.
    """
    if mode not in ("r", "a"):
        raise InvalidArgument(f"mode {mode!r}, expected 'r' (read) or 'a' (create or append)")
    if map_size is not None and not (type(map_size) is int and 0 < map_size < 1 << 63):
        raise InvalidArgument(f"map_size {map_size!r} is not a positive number of bytes")
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not _is_path(text):
        raise InvalidArgument(f"path {path!r}: expected a string or a path")
    if kind is None:
        kind = "memory" if text.startswith(MEMORY_PREFIX) else "lmdb"
    # Backends never import each other, and nobody pays for one that is not used.
    if kind == "memory":
        from .backends.memory import MemoryBackend

        return MemoryBackend(text.removeprefix(MEMORY_PREFIX), mode, map_size=map_size)
    if kind == "lmdb":
        from .backends.lmdb import LmdbBackend

        return LmdbBackend(text, mode, map_size=map_size)
    raise InvalidArgument(f"backend {kind!r}, expected 'lmdb' or 'memory'")
