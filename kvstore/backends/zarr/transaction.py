"""A write transaction: what it changes on top of the last commit, and what that adds up to."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from kvcodecs.errors import Full, InvalidArgument, NotFound

from ... import keys
from ...backend import MAX_KEY_BYTES, Value
from .commit import commit_changes
from .objects import Writer
from .places import INTERNAL, REFERENCE_BYTES, home_of
from .segment import GONE, Entry, Gone, successor
from .sessions import n_sealed, stored_session
from .shared import Head, Shared
from .snapshot import Pending, View, ZarrSnapshot, is_frame, length_of

_FRAME_KEY_BYTES: Final = 22


class Overlay:
    """Changes that are not committed yet. A `segment.Table`."""

    def __init__(self) -> None:
        self.items: dict[bytes, bytes | Gone] = {}
        self._keys: list[bytes] = []  # in order
        self._new: list[bytes] = []  # not among them yet

    def put(self, key: bytes, entry: bytes | Gone) -> None:
        """Set an entry."""
        if key not in self.items:
            self._new.append(key)
        self.items[key] = entry

    def get(self, key: bytes) -> Entry | None:
        return self.items.get(key)

    def at_or_after(self, key: bytes) -> bytes | None:
        keys = self._ordered()
        i = bisect_left(keys, key)
        return keys[i] if i < len(keys) else None

    def before(self, key: bytes) -> bytes | None:
        keys = self._ordered()
        i = bisect_left(keys, key)
        return keys[i - 1] if i else None

    def scan(self, prefix: bytes, rank: int) -> Iterator[tuple[bytes, int, Entry]]:
        """Return an iterator over the entries as of now, whatever is changed meanwhile."""
        keys, stop = self._ordered(), successor(prefix)
        first = bisect_left(keys, prefix)
        last = len(keys) if stop is None else bisect_left(keys, stop, first)
        return iter([(key, rank, self.items[key]) for key in keys[first:last]])

    def _ordered(self) -> list[bytes]:
        if self._new:
            self._keys += self._new
            self._keys.sort()  # two runs: quick
            self._new = []
        return self._keys


class ZarrTransaction(ZarrSnapshot):
    """See `backend.Transaction`.

    Parameters
    ----------
    shared
        The archive.
    head
        What it begins with: the last commit, as nobody else commits meanwhile.
    writer
        The right to write.
    limit, what
        Most bytes of keys and values, or None, and what messages call it.
    grace_seconds
        How long deleted objects are kept.
    """

    def __init__(
        self,
        shared: Shared,
        head: Head,
        writer: Writer,
        limit: int | None,
        what: str,
        grace_seconds: float,
    ) -> None:
        self._overlay, self._base = Overlay(), View(head.tables)
        super().__init__(
            (self._overlay, *head.tables),
            shared.objects,
            math.inf,
            lambda: self._base,
            grace_seconds,
        )
        self._shared, self._head, self._writer = shared, head, writer
        self._limit, self._what = limit, what
        self._n_bytes, self._n_entries = head.used_bytes, head.n_entries
        self._n_table_bytes = head.table_bytes
        self._shards: dict[str, int] = {}
        #: The error after which nothing is committed, as in LMDB.
        self.failed: Full | None = None

    def put(self, key: bytes, value: Value) -> None:
        if not 1 <= len(key) <= MAX_KEY_BYTES or key >= INTERNAL:
            raise InvalidArgument(f"{self._where}: key of {len(key)} bytes, {key[:1]!r} first")
        if is_frame(key) and len(key) != _FRAME_KEY_BYTES:
            raise InvalidArgument(f"{self._where}: key of {len(key)} bytes is of no frame")
        if self.failed is not None:
            raise self.failed
        old = self.find(key)
        length = len(key) + len(value)
        less = 0 if old is None else len(key) + length_of(key, old)
        n_bytes = self._n_bytes + length - less
        if self._limit is not None and n_bytes > max(self._limit, self._n_bytes):
            text = f"{self._where}: {self._what} of {self._limit} bytes is reached"
            self.failed = Full(text, is_limit=True)
            raise self.failed
        self._n_bytes = n_bytes
        self._n_table_bytes += _in_tables(key, length) - (_in_tables(key, less) if less else 0)
        self._n_entries += old is None
        self._overlay.put(key, Pending(value) if is_frame(key) else bytes(value))

    def delete(self, key: bytes) -> None:
        old = self.find(key) if key < INTERNAL else None
        if old is not None:
            less = len(key) + length_of(key, old)
            self._n_bytes -= less
            self._n_table_bytes -= _in_tables(key, less)
            self._n_entries -= 1
            self._overlay.put(key, GONE)

    def shard(self, name: str, shard_bytes: int) -> bool:
        stored = stored_session(self._base, name, self._base.raw(keys.session_key(name)))
        if stored is None:
            raise NotFound(f"{self._where}: session {name!r}: none, or its record is damaged")
        home = home_of(self._base, stored.record.owner)
        if home is None or home.shard_blocks:
            return False
        if not any(n_sealed(stored.record, stream) for stream in stored.record.streams):
            return False
        self._shards[name] = shard_bytes
        return True

    def used_bytes(self) -> int:
        return self._n_bytes

    def commit(self) -> None:
        """Store the changes; see `commit.commit_changes`."""
        changes = {
            key: None if entry is GONE else entry
            for key, entry in self._overlay.items.items()
            if entry is not GONE or self._base.find(key) is not None
        }
        if changes or self._shards:
            commit_changes(
                self._shared,
                self._head,
                self._writer,
                changes,
                n_entries=self._n_entries,
                used_bytes=self._n_bytes,
                table_bytes=self._n_table_bytes,
                grace_seconds=self._grace_seconds,
                shards=self._shards,
            )


def _in_tables(key: bytes, n_bytes: int) -> int:
    """Return how much of a key and its value the tables have."""
    return len(key) + REFERENCE_BYTES if is_frame(key) else n_bytes
