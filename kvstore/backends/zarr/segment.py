"""Sorted tables of keys and values in immutable bytes: the delta of a commit, or several merged.

From the start: values that are too long to stand beside their keys, blocks of entries, the index
of the blocks, a footer. Everything is under a crc32c, and each is reached from the footer's:
footer, index, block, value. So the footer's crc stands for the whole. FORMAT.md section 9.2.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import accumulate, chain, islice, pairwise
from operator import lt
from typing import Final, NamedTuple, Protocol, TypeAlias

from kvcodecs.errors import Corrupt, Truncated, Unsupported
from kvcodecs.frame import crc32c

MAGIC: Final = b"KVZT"
VERSION: Final = 1
#: Longer values do not stand beside their keys.
MOST_INLINE: Final = 256
#: Tables of fewer bytes are read as a whole.
WHOLE_BYTES: Final = 1 << 20

# values, blocks (bytes); entries, blocks (count); index (bytes, crc); version, magic
_FOOTER: Final = struct.Struct("<QQQIIIB3s4s")
_CRC: Final = struct.Struct("<I")
FOOTER_BYTES: Final = _FOOTER.size + _CRC.size
_COUNT: Final = struct.Struct("<I")
_PLACE: Final = struct.Struct("<QQI")  # of a value: offset, length, crc
_ELSEWHERE: Final = 0xFFFE  # instead of a length: a place follows
_DELETED: Final = 0xFFFF
_WIDTHS: Final = {_ELSEWHERE: _PLACE.size, _DELETED: 0}
# Index: lengths of the first keys, lengths of the blocks, their crcs; then the keys.
_INDEX_ENTRY_BYTES: Final = 2 + 4 + 4
_BLOCK_BYTES: Final = 4 << 10
# Blocks of one table that are kept parsed.
_MOST_BLOCKS: Final = 512
# What is read first of a table that is not read whole: the footer, and mostly all of the index.
_END_BYTES: Final = 64 << 10

#: Returns bytes ``[start, stop)`` of an object, or what there is of them.
Read: TypeAlias = Callable[[int, int], bytes]


class Gone(Enum):
    """Stands for a value: the key is deleted, whatever older tables say."""

    GONE = 0


GONE: Final = Gone.GONE


class Outside(NamedTuple):
    """A value that is not beside its key, not read yet.

    Attributes
    ----------
    key
        Of the object, if reading it is a request to a storage far away; else None.
    start, n_bytes
        Where it is in the object.
    crc
        Its checksum.
    """

    read_range: Read
    where: str
    key: str | None
    start: int
    n_bytes: int
    crc: int

    def read(self) -> bytes:
        """Return the value; raises `Truncated`, `Corrupt`."""
        return self.checked(self.copy())

    def checked(self, data: bytes) -> bytes:
        """Return `data` if it is the value; raises `Truncated`, `Corrupt`."""
        crc = crc32c(data)
        if crc != self.crc:
            raise Corrupt(
                f"{self.where}: value of {self.n_bytes} bytes: crc32c {crc:#010x}, expected "
                f"{self.crc:#010x}; restore a copy of the archive"
            )
        return data

    def copy(self) -> bytes:
        """Return the bytes as they are: damage goes with them to wherever they are copied."""
        data = self.read_range(self.start, self.start + self.n_bytes)
        if len(data) < self.n_bytes:
            raise _short(self.where, len(data), self.n_bytes)
        return data


Value: TypeAlias = bytes | Outside
Entry: TypeAlias = Value | Gone


class Table(Protocol):
    """Entries in key order, of a segment or of changes that are not committed yet."""

    def get(self, key: bytes) -> Entry | None:
        """Return the entry of a key; None if this table does not speak of it."""
        ...

    def at_or_after(self, key: bytes) -> bytes | None:
        """Return the first key that is not less than `key`, deleted ones too."""
        ...

    def before(self, key: bytes) -> bytes | None:
        """Return the last key that is less than `key`, deleted ones too."""
        ...

    def scan(self, prefix: bytes, rank: int) -> Iterator[tuple[bytes, int, Entry]]:
        """Return the (key, `rank`, entry) of keys that start with `prefix`, in key order."""
        ...


class Packed(NamedTuple):
    """A table's bytes, and the crc of its footer."""

    data: bytes
    crc: int


def pack_segment(entries: Iterable[tuple[bytes, Entry]]) -> Packed:
    """Return a table of entries, which come in key order, each key once."""
    values: list[bytes] = []
    n_values = n_entries = 0
    blocks: list[bytes] = []
    firsts: list[bytes] = []
    keys: list[bytes] = []
    codes: list[int] = []
    beside: list[bytes] = []
    n_block = 0

    def end_block() -> None:
        counts = struct.pack(f"<I{2 * len(keys)}H", len(keys), *map(len, keys), *codes)
        blocks.append(b"".join(chain((counts,), keys, beside)))
        firsts.append(keys[0])
        for part in (keys, codes, beside):
            part.clear()

    for key, entry in entries:
        if isinstance(entry, Gone):
            code, short = _DELETED, b""
        elif isinstance(entry, bytes) and len(entry) <= MOST_INLINE:
            code, short = len(entry), entry
        else:
            # A copied value keeps the crc that it was stored with: damage stays damage.
            value, crc = (
                (entry, crc32c(entry)) if isinstance(entry, bytes) else (entry.copy(), entry.crc)
            )
            code, short = _ELSEWHERE, _PLACE.pack(n_values, len(value), crc)
            values.append(value)
            n_values += len(value)
        keys.append(key)
        codes.append(code)
        beside.append(short)
        n_entries += 1
        n_block += len(key) + len(short) + 4
        if n_block >= _BLOCK_BYTES:
            end_block()
            n_block = 0
    if keys:
        end_block()
    n = len(blocks)
    sizes = (*map(len, blocks), *map(crc32c, blocks))
    counts = struct.pack(f"<{n}H{2 * n}I", *map(len, firsts), *sizes)
    index = b"".join((counts, *firsts))
    footer = _FOOTER.pack(
        n_values,
        sum(map(len, blocks)),
        n_entries,
        n,
        len(index),
        crc32c(index),
        VERSION,
        bytes(3),
        MAGIC,
    )
    crc = crc32c(footer)
    return Packed(b"".join((*values, *blocks, index, footer, _CRC.pack(crc))), crc)


def merge_segments(segments: Sequence[Segment], *, keep_deleted: bool) -> Packed | None:
    """Return one table instead of several, the newest first; None if nothing is left."""
    entries: dict[bytes, Entry] = {}
    for segment in reversed(segments):
        entries.update((key, entry) for key, _, entry in segment.scan(b"", 0))
    kept = (
        (key, entry)
        for key, entry in ((key, entries[key]) for key in sorted(entries))
        if keep_deleted or entry is not GONE
    )
    packed = pack_segment(kept)
    return packed if len(packed.data) > FOOTER_BYTES else None


class Segment:
    """A table that is read as it is needed. Safe to use from many threads.

    Parameters
    ----------
    read
        Reads the object.
    n_bytes
        Length of the object; the table is at its end.
    where
        For messages.
    key
        Of the object, if reading it is a request to a storage far away.
    crc
        Of the footer, if it is known which table this must be.

    Raises
    ------
    Truncated, Corrupt, Unsupported
        Not the table that it should be. Blocks and values are checked when they are read.
    """

    def __init__(
        self,
        read: Read,
        n_bytes: int,
        where: str,
        *,
        key: str | None = None,
        crc: int | None = None,
    ) -> None:
        self.n_bytes, self._read, self._where, self._key = n_bytes, read, where, key
        end = _exactly(read, max(0, n_bytes - _END_BYTES), n_bytes, where)
        if len(end) < FOOTER_BYTES:
            raise Truncated(f"{where}: {len(end)} bytes are no table; restore a copy")
        footer = end[-FOOTER_BYTES : -_CRC.size]
        self.crc = crc32c(footer)
        n_values, n_blocks_bytes, self.n_entries, n, n_index, index_crc, version, _, magic = (
            _FOOTER.unpack(footer)
        )
        if magic != MAGIC:
            raise Truncated(f"{where}: does not end as a table does: cut short; restore a copy")
        if (self.crc,) != _CRC.unpack(end[-_CRC.size :]) or crc not in (None, self.crc):
            raise Corrupt(f"{where}: wrong crc32c of the footer; restore a copy")
        if version > VERSION:
            raise Unsupported(f"{where}: table version {version}, upgrade to read it")
        #: Where the table begins in its object.
        self.start = n_bytes - (n_values + n_blocks_bytes + n_index + FOOTER_BYTES)
        if version == 0 or self.start < 0 or n_index < n * _INDEX_ENTRY_BYTES:
            raise Corrupt(f"{where}: impossible lengths in the footer; restore a copy")
        if n_index + FOOTER_BYTES > len(end):
            stop = n_bytes - FOOTER_BYTES
            index = _exactly(read, stop - n_index, stop, where)
        else:
            index = end[len(end) - FOOTER_BYTES - n_index : len(end) - FOOTER_BYTES]
        if crc32c(index) != index_crc:
            raise Corrupt(f"{where}: wrong crc32c of the index; restore a copy")
        lengths = struct.unpack_from(f"<{n}H", index)
        sizes = struct.unpack_from(f"<{n}I", index, 2 * n)
        self._crcs = struct.unpack_from(f"<{n}I", index, 6 * n)
        self._firsts = _cut(index, _INDEX_ENTRY_BYTES * n, lengths)
        if sum(sizes) != n_blocks_bytes or _INDEX_ENTRY_BYTES * n + sum(lengths) != n_index:
            raise Corrupt(f"{where}: index and footer differ; restore a copy")
        if not _ascend(self._firsts):
            raise Corrupt(f"{where}: blocks are not in order; restore a copy")
        self._starts = tuple(accumulate(sizes, initial=self.start + n_values))
        self._blocks: dict[int, _Block] = {}

    def get(self, key: bytes) -> Entry | None:
        """See `Table.get`."""
        i = bisect_right(self._firsts, key) - 1
        if i < 0:
            return None
        block = self._blocks.get(i) or self._load(i)
        keys = block.keys
        j = bisect_left(keys, key)
        if j == len(keys) or keys[j] != key:
            return None
        return self._entry(block, j)

    def at_or_after(self, key: bytes) -> bytes | None:
        """See `Table.at_or_after`."""
        i = bisect_right(self._firsts, key) - 1
        if i >= 0:
            keys = (self._blocks.get(i) or self._load(i)).keys
            j = bisect_left(keys, key)
            if j < len(keys):
                return keys[j]
        return self._firsts[i + 1] if i + 1 < len(self._firsts) else None

    def before(self, key: bytes) -> bytes | None:
        """See `Table.before`."""
        i = bisect_left(self._firsts, key) - 1
        if i < 0:
            return None
        keys = (self._blocks.get(i) or self._load(i)).keys
        return keys[bisect_left(keys, key) - 1]  # the first of them is less than `key`

    def scan(self, prefix: bytes, rank: int) -> Iterator[tuple[bytes, int, Entry]]:
        """See `Table.scan`."""
        stop = successor(prefix)
        entry = self._entry
        for i in range(max(bisect_right(self._firsts, prefix) - 1, 0), len(self._firsts)):
            if stop is not None and self._firsts[i] >= stop:
                return
            block = self._blocks.get(i) or self._load(i)
            keys = block.keys
            first = bisect_left(keys, prefix)
            end = len(keys) if stop is None else bisect_left(keys, stop, first)
            for j in range(first, end):
                yield keys[j], rank, entry(block, j)

    def in_memory(self) -> Segment:
        """Return the same table, read whole."""
        data = _exactly(self._read, self.start, self.n_bytes, self._where)
        return Segment(reader_of(data), len(data), self._where, crc=self.crc)

    def _entry(self, block: _Block, j: int) -> Entry:
        code, at = block.codes[j], block.starts[j]
        if code <= MOST_INLINE:
            return block.data[at : at + code]
        if code == _DELETED:
            return GONE
        start, n_bytes, crc = _PLACE.unpack_from(block.data, at)
        start += self.start
        return Outside(self._read, self._where, self._key, start, n_bytes, crc)

    def _load(self, i: int) -> _Block:
        start, stop = self._starts[i], self._starts[i + 1]
        data = _exactly(self._read, start, stop, self._where)
        if crc32c(data) != self._crcs[i]:
            raise Corrupt(f"{self._where}: wrong crc32c of block {i}; restore a copy")
        block = _parse(data)
        following = self._firsts[i + 1 : i + 2]
        if block is None or block.keys[0] != self._firsts[i] or not _ascend(block.keys + following):
            raise Corrupt(f"{self._where}: block {i} is none; restore a copy")
        if len(self._blocks) >= _MOST_BLOCKS:
            self._blocks = {}
        self._blocks[i] = block
        return block


class _Block:
    __slots__ = ("codes", "data", "keys", "starts")

    def __init__(
        self, data: bytes, keys: list[bytes], codes: tuple[int, ...], starts: list[int]
    ) -> None:
        self.data, self.keys, self.codes, self.starts = data, keys, codes, starts


def _parse(data: bytes) -> _Block | None:
    """Return a block, or None if the numbers in it are impossible."""
    if len(data) < _COUNT.size:
        return None
    (n,) = _COUNT.unpack_from(data)
    at = _COUNT.size + 4 * n
    if n == 0 or at > len(data):
        return None
    numbers = struct.unpack_from(f"<{2 * n}H", data, _COUNT.size)
    lengths, codes = numbers[:n], numbers[n:]
    keys = _cut(data, at, lengths)
    try:
        widths = [code if code <= MOST_INLINE else _WIDTHS[code] for code in codes]
    except KeyError:
        return None
    starts = list(accumulate(widths, initial=at + sum(lengths)))
    return _Block(data, keys, codes, starts) if starts[-1] == len(data) else None


def _ascend(keys: list[bytes]) -> bool:
    """Whether keys are in order, none twice."""
    return all(map(lt, keys, islice(keys, 1, None)))


def _cut(data: bytes, at: int, lengths: Sequence[int]) -> list[bytes]:
    return [data[start:stop] for start, stop in pairwise(accumulate(lengths, initial=at))]


def successor(prefix: bytes) -> bytes | None:
    """Return the least key above all that start with `prefix`; None if there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


def reader_of(data: bytes) -> Read:
    """Return a reader of bytes in memory."""
    return lambda start, stop: data[start:stop]


def _exactly(read: Read, start: int, stop: int, where: str) -> bytes:
    data = read(start, stop)
    if len(data) < stop - start:
        raise _short(where, start + len(data), stop)
    return data


def _short(where: str, found: int, expected: int) -> Truncated:
    return Truncated(f"{where}: {found} of {expected} bytes; restore a copy of the archive")
