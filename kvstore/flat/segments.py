"""Where the rows of a layer are: segments of its file, and the checksums of their blocks.

A row has an index, its position less that of the first one ever. Segments hold successive indices;
a ring has one, and index i is in slot i modulo its slots. FORMAT.md section 11.2.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from kvcodecs.errors import InvalidArgument, Truncated
from kvcodecs.spec import Kind

from .file import Bytes, LayerFile
from .layout import COMMIT_OFFSETS, PAGE, SEGMENT_ALIGN, Header, Segment, segment_after

FIRST_SEGMENT: Final = -(-(COMMIT_OFFSETS[1] + PAGE) // SEGMENT_ALIGN) * SEGMENT_ALIGN


class Run(NamedTuple):
    """Successive rows in successive slots of one segment."""

    segment: int
    slot: int
    n_rows: int


class Segments:
    """The segments of an open file, mapped when they are first read."""

    def __init__(self, header: Header, file: LayerFile) -> None:
        self._header, self._file = header, file
        self._segments: list[Segment] = []
        self._maps: list[tuple[mmap.mmap, Bytes] | None] = []
        self._is_random = False

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def n_rows(self) -> int:
        """Slots of all segments."""
        return self._segments[-1].first + self._segments[-1].rows if self._segments else 0

    @property
    def end(self) -> int:
        """Bytes of the file."""
        last = self._segments[-1]
        return last.offset + last.size

    def know(self, n_segments: int) -> None:
        """Take note of segments that the file has."""
        while len(self._segments) < n_segments:
            self._segments.append(self._next())
            self._maps.append(None)

    def add(self, *, sparse: bool) -> None:
        """Make the file one segment longer; `Full` if there is no room."""
        segment = self._next()
        self._file.reserve(segment.offset, segment.size, sparse=sparse)
        self.know(len(self._segments) + 1)

    def _next(self) -> Segment:
        offset = self.end if self._segments else FIRST_SEGMENT
        return segment_after(self._header, len(self._segments), self.n_rows, offset)

    def runs(self, lo: int, hi: int) -> Iterator[Run]:
        """Yield where the rows with indices ``[lo, hi)`` are."""
        while lo < hi:
            if self._header.max_rows is not None:
                number, slot = 0, lo % self._segments[0].rows
            else:
                number = bisect_right(self._segments, lo, key=lambda s: s.first) - 1
                slot = lo - self._segments[number].first
            n = min(hi - lo, self._segments[number].rows - slot)
            yield Run(number, slot, n)
            lo += n

    def rows(self, kind: Kind, run: Run) -> Bytes:
        """Return rows as ``(n, row_bytes)``: a view of the map, or read with ``pread``."""
        row_bytes = self._header.row_bytes(kind)
        at = self._segments[run.segment].areas[kind][0] + run.slot * row_bytes
        return self._bytes(run.segment, at, run.n_rows * row_bytes).reshape(run.n_rows, row_bytes)

    def gather(self, kind: Kind, lo: int, hi: int) -> Bytes:
        """Return the rows with indices ``[lo, hi)`` in one piece; copied where they are not."""
        parts = [self.rows(kind, run) for run in self.runs(lo, hi)]
        if not parts:
            return np.empty((0, self._header.row_bytes(kind)), np.uint8)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def write_rows(self, kind: Kind, lo: int, rows: Bytes) -> None:
        """Write rows from index `lo` on."""
        row_bytes, done = self._header.row_bytes(kind), 0
        for run in self.runs(lo, lo + len(rows)):
            at = self._segments[run.segment].areas[kind][0] + run.slot * row_bytes
            self._file.write(at, rows[done : done + run.n_rows])
            done += run.n_rows

    def checksums(self, kind: Kind, run: Run) -> list[int]:
        """Return the stored checksums of the whole blocks of a run that begins with a block."""
        size = self._header.block_rows
        at = self._segments[run.segment].areas[kind][1] + run.slot // size * 4
        found = self._bytes(run.segment, at, run.n_rows // size * 4)
        return [int(crc) for crc in found.view("<u4")]

    def write_checksum(self, kind: Kind, block: int, crc: int) -> None:
        """Store the checksum of a block that is whole now."""
        self._file.write(self._checksum_at(kind, block)[1], crc.to_bytes(4, "little"))

    def _checksum_at(self, kind: Kind, block: int) -> tuple[int, int]:
        lo = block * self._header.block_rows
        run = next(self.runs(lo, lo + 1))
        index = run.slot // self._header.block_rows
        return run.segment, self._segments[run.segment].areas[kind][1] + 4 * index

    def areas(self, kind: Kind, n_rows: int) -> list[Bytes]:
        """Return the mapped rows of each segment, read-only: up to index `n_rows`, or a ring's."""
        if self._file.pread:
            raise InvalidArgument(
                f"{self._file.where}: opened with pread=True, which maps nothing; open it without"
            )
        self._header.spec(kind)
        found = []
        for number, segment in enumerate(self._segments):
            n = segment.rows if self._header.max_rows is not None else n_rows - segment.first
            if n > 0:
                found.append(self.rows(kind, Run(number, 0, min(n, segment.rows))))
        return found

    def advise(self, lo: int, hi: int, what: str) -> None:
        """Advise the kernel about the rows with indices ``[lo, hi)``: see `LayerFile.advise`."""
        for run in self.runs(lo, hi):
            segment = self._segments[run.segment]
            for kind in self._header.kinds:
                row_bytes = self._header.row_bytes(kind)
                at = segment.areas[kind][0] - segment.offset + run.slot * row_bytes
                mapped = None if self._file.pread else self._map(run.segment)[0]
                end = at + run.n_rows * row_bytes
                self._file.advise(mapped, segment.offset, at, end, what)

    def advise_random(self) -> None:
        """Advise the kernel, for all segments, not to read ahead."""
        self._is_random = True
        for number in range(len(self._segments)):
            self._advise_random(number)

    def _advise_random(self, number: int) -> None:
        segment = self._segments[number]
        mapped = None if self._file.pread else self._map(number)[0]
        self._file.advise(mapped, segment.offset, 0, segment.size, "random")

    def punch(self, lo: int, hi: int) -> None:
        """Give back the room of whole pages of the rows with indices ``[lo, hi)``."""
        for run in self.runs(lo, hi):
            for kind in self._header.kinds:
                row_bytes = self._header.row_bytes(kind)
                first = self._segments[run.segment].areas[kind][0]
                at = first + run.slot * row_bytes
                end = (first + (run.slot + run.n_rows) * row_bytes) // PAGE * PAGE
                at = -(-at // PAGE) * PAGE
                self._file.punch(at, end - at)

    def _bytes(self, number: int, offset: int, n_bytes: int) -> Bytes:
        if self._file.pread:
            return self._file.read(offset, n_bytes)
        # A map may be touched only where there is a file.
        self._file.check_size(offset + n_bytes)
        segment = self._segments[number]
        at = offset - segment.offset
        return self._map(number)[1][at : at + n_bytes]

    def _map(self, number: int) -> tuple[mmap.mmap, Bytes]:
        found = self._maps[number]
        if found is None:
            segment = self._segments[number]
            found = self._maps[number] = self._file.map(segment.offset, segment.size)
            if self._is_random:
                self._advise_random(number)
        return found

    def check_whole(self) -> None:
        """Raise `Truncated` unless the file has all its segments."""
        if self._file.size < self.end:
            raise Truncated(
                f"{self._file.where}: {self._file.size} of {self.end} bytes: it was cut; restore a "
                "copy"
            )
