"""Where the rows of a layer are: segments of its file, and the checksums of their blocks.

A row has an index, its position less that of the first one ever. Segments hold successive indices;
a ring has one, and index i is in slot i modulo its slots. FORMAT.md section 11.2.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import InvalidArgument, Truncated
from kvcodecs.spec import Kind

from .checksums import extended
from .file import Bytes, LayerFile
from .header import Header
from .pages import Advice, Map
from .placement import FIRST_SEGMENT, PAGE, Segment, segment_after


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
        self._maps: list[tuple[Map, Bytes] | None] = []
        self._is_random = False
        self._n_claimed = 0

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
        """Take note of segments that the file should have, as far as it goes."""
        self._n_claimed = n_segments
        while len(self._segments) < n_segments:
            segment = self._next()
            if segment.offset >= self._file.size:
                return  # cut, or a claim that no file could keep: what there is can be read
            self._segments.append(segment)
            self._maps.append(None)

    @property
    def is_cut(self) -> bool:
        """Whether whole segments are missing."""
        return len(self._segments) < self._n_claimed

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
        self._check_there(hi)
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

    def pick(self, kind: Kind, indices: npt.NDArray[np.int64]) -> Bytes:
        """Return copies of single rows, ``(n, row_bytes)``; no page of others is touched."""
        row_bytes = self._header.row_bytes(kind)
        out = np.empty((len(indices), row_bytes), np.uint8)
        self._check_there(int(indices.max(initial=-1)) + 1)
        firsts = np.array([segment.first for segment in self._segments])
        if self._header.max_rows is not None:
            numbers, slots = np.zeros_like(indices), indices % self._segments[0].rows
        else:
            numbers = np.searchsorted(firsts, indices, side="right") - 1
            slots = indices - firsts[numbers]
        if self._file.pread:
            starts = np.array([segment.areas[kind][0] for segment in self._segments])
            offsets = starts[numbers] + slots * row_bytes
            for row, offset in zip(out, offsets.tolist(), strict=True):
                self._file.read_into(offset, row.data)
            return out
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            wanted = slots[chosen]
            area = self.rows(kind, Run(number, 0, int(wanted.max()) + 1))
            out[chosen] = area[wanted]
        return out

    def extend(self, kind: Kind, lo: int, rows: Bytes, crc: int) -> int:
        """Write rows from index `lo` on, and the checksums of blocks that they fill.

        Parameters
        ----------
        crc
            Checksum of the rows before `lo` in its block.

        Returns
        -------
        crc
            Of those in the block that is unfinished now.
        """
        row_bytes, size, done = self._header.row_bytes(kind), self._header.block_rows, 0
        rows = np.ascontiguousarray(rows)
        for run in self.runs(lo, lo + len(rows)):
            part = rows[done : done + run.n_rows]
            done += run.n_rows
            at, sums_at = self._segments[run.segment].areas[kind]
            self._file.write(at + run.slot * row_bytes, part)
            sums, crc = extended(part, run.slot % size, size, crc)
            if len(sums):
                self._file.write(sums_at + run.slot // size * 4, sums.astype("<u4"))
        return crc

    def checksums(self, kind: Kind, lo: int, hi: int) -> npt.NDArray[np.uint32]:
        """Return the stored checksums of the whole blocks ``[lo, hi)``."""
        size, found = self._header.block_rows, [np.empty(0, np.uint32)]
        for run in self.runs(lo * size, hi * size):
            at = self._segments[run.segment].areas[kind][1] + run.slot // size * 4
            found.append(self._bytes(run.segment, at, run.n_rows // size * 4).view("<u4"))
        return np.concatenate(found)

    def areas(self, kind: Kind, n_rows: int) -> list[Bytes]:
        """Return the mapped rows of each segment, read-only: up to index `n_rows`, or a ring's."""
        if self._file.pread:
            raise InvalidArgument(
                f"{self._file.where}: opened with pread=True, which maps nothing; open it without"
            )
        self._header.spec(kind)
        found = []
        self._check_there(n_rows)
        for number, segment in enumerate(self._segments):
            n = segment.rows if self._header.max_rows is not None else n_rows - segment.first
            if n > 0:
                found.append(self.rows(kind, Run(number, 0, min(n, segment.rows))))
        return found

    def advise(self, lo: int, hi: int, what: Advice) -> None:
        """Advise the kernel about the rows with indices ``[lo, hi)``: see `pages.advise`."""
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
        """Give back the room of the rows with indices ``[lo, hi)``; those before are dropped too.

        Whole pages: the last one may have rows that stay.
        """
        for run in self.runs(lo, hi):
            for kind in self._header.kinds:
                row_bytes = self._header.row_bytes(kind)
                first = self._segments[run.segment].areas[kind][0]
                at = (first + run.slot * row_bytes) // PAGE * PAGE
                end = (first + (run.slot + run.n_rows) * row_bytes) // PAGE * PAGE
                self._file.punch(at, end - at)

    def close(self) -> None:
        """Let go of the maps; views of them keep theirs."""
        self._maps = [None] * len(self._maps)

    def _bytes(self, number: int, offset: int, n_bytes: int) -> Bytes:
        if self._file.pread:
            return self._file.read(offset, n_bytes)
        # A map may be touched only where there is a file.
        self._file.check_size(offset + n_bytes)
        segment = self._segments[number]
        at = offset - segment.offset
        return self._map(number)[1][at : at + n_bytes]

    def _map(self, number: int) -> tuple[Map, Bytes]:
        found = self._maps[number]
        if found is None:
            segment = self._segments[number]
            found = self._maps[number] = self._file.map(segment.offset, segment.size)
            if self._is_random:
                self._advise_random(number)
        return found

    def check_whole(self) -> None:
        """Raise `Truncated` unless the file has all its segments."""
        self._check_there(self.n_rows + 1)
        self._file.check_size(self.end)

    def _check_there(self, n_rows: int) -> None:
        """Raise `Truncated` if rows up to index `n_rows` would be in a segment that is missing."""
        if self.is_cut and n_rows > self.n_rows:
            raise Truncated(
                f"{self._file.where}: {self._file.size} bytes, {len(self._segments)} of "
                f"{self._n_claimed} segments: it was cut; restore a copy"
            )
