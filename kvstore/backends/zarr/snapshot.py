"""What is stored as of one commit: the tables of the commit on top of each other, and the frames.

The newest table that speaks of a key says what it has. What the tables say of a frame is where it
lies: reading it is reading that object. FORMAT.md section 9.3.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from kvcodecs.errors import NotFound

from ... import keys
from .._checks import expired
from .objects import Objects, Request
from .places import IN_ARRAY, INTERNAL, Lookup, chunk_of, frame_bytes, home_of, locations
from .segment import GONE, Entry, Outside, Table, Value

#: What prefetched values take up at most.
MOST_PREFETCHED: Final = 64 << 20
# Where the owner is in a frame, and in the key of one: the other byte order.
_OWNER_IN_FRAME: Final = slice(8, 16)
_OWNER_IN_KEY: Final = slice(8, 0, -1)


class Pending(bytes):
    """A frame that a transaction has put: it has no place yet, and no reference."""


class View:
    """Tables on top of each other, the newest first. A `places.Lookup`."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables

    def find(self, key: bytes) -> Value | None:
        """Return the value of a key, or where it is; None if there is none."""
        for table in self._tables:
            entry = table.get(key)
            if entry is not None:
                return None if entry is GONE else entry
        return None

    def entries(self, prefix: bytes) -> Iterator[tuple[bytes, Value]]:
        """Return keys that start with `prefix` and values, or where they are, in key order.

        As of this call, whatever changes in a transaction while one walks.
        """
        return _newest([table.scan(prefix, rank) for rank, table in enumerate(self._tables)])

    def raw(self, key: bytes) -> bytes | None:
        value = self.find(key)
        return value.read() if isinstance(value, Outside) else value

    def raw_scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key, value in self.entries(prefix):
            yield key, value.read() if isinstance(value, Outside) else value


def _newest(scans: list[Iterator[tuple[bytes, int, Entry]]]) -> Iterator[tuple[bytes, Value]]:
    last = None
    for key, _, entry in heapq.merge(*scans):  # no two have the same key and rank
        if key != last:
            last = key
            if entry is not GONE:
                yield key, entry


class ZarrSnapshot(View):
    """See `backend.Snapshot`.

    Parameters
    ----------
    tables
        The newest first.
    seconds
        How long it may be read from.
    newest
        Returns what is stored now, to tell damage from frames that were deleted meanwhile.
    grace_seconds
        After which deleted frames go, for messages.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        objects: Objects,
        seconds: float,
        newest: Callable[[], Lookup],
        grace_seconds: float,
    ) -> None:
        super().__init__(tables)
        self._objects, self._where = objects, objects.where
        self._seconds, self._expires = seconds, time.monotonic() + seconds
        self._newest, self._grace_seconds = newest, grace_seconds
        self._groups: dict[int, str] = {}
        self._prefetched: dict[bytes, bytes] = {}
        self._n_prefetched = 0

    def get(self, key: bytes) -> memoryview | None:
        if time.monotonic() > self._expires:
            raise expired(self._where, self._seconds)
        value = self.find(key)
        return None if value is None else self._view(key, value)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
        self._check_age()
        return self._scan(self.entries(prefix))

    def _scan(self, entries: Iterator[tuple[bytes, Value]]) -> Iterator[tuple[bytes, memoryview]]:
        for key, value in entries:
            self._check_age()
            if key >= INTERNAL:
                return
            view = self._view(key, value)
            if view is not None:
                yield key, view

    def sizes(self, prefix: bytes) -> Iterator[tuple[bytes, int]]:
        self._check_age()
        return self._sizes(self.entries(prefix))

    def _sizes(self, entries: Iterator[tuple[bytes, Value]]) -> Iterator[tuple[bytes, int]]:
        for key, value in entries:
            self._check_age()
            if key >= INTERNAL:
                return
            yield key, length_of(key, value)

    def at_or_after(self, key: bytes) -> bytes | None:
        self._check_age()
        while True:
            found = (table.at_or_after(key) for table in self._tables)
            first = min((key for key in found if key is not None), default=INTERNAL)
            if first >= INTERNAL:
                return None
            if self.find(first) is not None:
                return first
            key = first + b"\0"

    def before(self, key: bytes) -> bytes | None:
        self._check_age()
        key = min(key, INTERNAL)
        while True:
            found = (table.before(key) for table in self._tables)
            last = max((key for key in found if key is not None), default=None)
            if last is None or self.find(last) is not None:
                return last
            key = last

    def prefetch(self, keys: Iterable[bytes]) -> None:
        """See `backend.Snapshot.prefetch`; what `get` returns is fetched anew the next time."""
        self._check_age()
        if not self._objects.is_remote:
            return  # files are read one after the other, sooner or later
        wanted: dict[bytes, Request] = {}
        room = MOST_PREFETCHED - self._n_prefetched
        for key in keys:
            value = None if key in self._prefetched else self.find(key)
            if value is None or type(value) is Pending:
                continue
            if is_frame(key) and isinstance(value, bytes):
                request = locations(self, key, value)[0]
            elif isinstance(value, Outside) and value.key is not None:
                request = value.key, value.start, value.start + value.n_bytes
            else:
                continue
            room -= length_of(key, value)
            if room < 0:
                break
            wanted[key] = request
        if len(wanted) < 2:
            return
        for key, data in zip(wanted, self._objects.get_many(list(wanted.values())), strict=True):
            if data is not None:
                self._prefetched[key] = data
                self._n_prefetched += len(data)

    def zarr_group(self, owner: int) -> str | None:
        home = home_of(self, owner)
        return None if home is None else home.group

    def release(self, view: memoryview) -> None:
        """Nothing: who has the view has the only reference to its memory."""

    def _view(self, key: bytes, value: Value) -> memoryview | None:
        fetched = None
        if self._prefetched:
            fetched = self._prefetched.pop(key, None)
            self._n_prefetched -= 0 if fetched is None else len(fetched)
        if isinstance(value, Outside):
            return memoryview(value.read() if fetched is None else value.checked(fetched))
        if is_frame(key) and type(value) is not Pending:
            return self._frame(key, value, fetched)
        return memoryview(value)

    def _frame(self, key: bytes, reference: bytes, fetched: bytes | None) -> memoryview | None:
        """Read a frame; bytes that are not it are returned too, for the engine to say so."""
        n_bytes = frame_bytes(reference)
        if fetched is None and reference[0] == IN_ARRAY:
            fetched = self._chunk(key)
        if fetched is not None and _is_frame_of(key, fetched, n_bytes):
            return memoryview(fetched)
        wrong = None
        for request in locations(self, key, reference):
            data = self._objects.get(*request)
            if data is not None:
                if _is_frame_of(key, data, n_bytes):
                    return memoryview(data)
                wrong = data if wrong is None else wrong
        if self._newest().raw(key) != reference:
            raise NotFound(
                f"{self._where}: this snapshot is older than the {self._grace_seconds:g} s for "
                "which deleted blocks are kept (grace_seconds); read again from a new one"
            )
        return None if wrong is None else memoryview(wrong)

    def _chunk(self, key: bytes) -> bytes | None:
        """Read the chunk where a frame is mostly found, as the first of `locations` says."""
        owner, layer, kind, block = keys.unpack_frame_key(key)
        group = self._groups.get(owner)
        if group is None:
            home = home_of(self, owner)
            if home is None:
                return None
            group = self._groups[owner] = home.group
        return self._objects.get(chunk_of(group, layer, kind, block))

    def _check_age(self) -> None:
        if time.monotonic() > self._expires:
            raise expired(self._where, self._seconds)


def is_frame(key: bytes) -> bool:
    """Whether a key is of a frame, which lies in an object of its own."""
    return key[:1] == keys.FRAME


def length_of(key: bytes, value: Value) -> int:
    """Return the length of a value of the engine's, without reading it."""
    if isinstance(value, Outside):
        return value.n_bytes
    if is_frame(key) and type(value) is not Pending:
        return frame_bytes(value)
    return len(value)


def _is_frame_of(key: bytes, data: bytes, n_bytes: int) -> bool:
    """Whether an object is of the owner of `key`, as far as its length and head tell."""
    return len(data) == n_bytes and data[_OWNER_IN_FRAME] == key[_OWNER_IN_KEY]
