"""Where in a layer's file the parts of a segment are. FORMAT.md section 11.2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvcodecs.spec import Kind

from .header import Header

#: Segments begin at multiples of this, which every page size in use divides.
SEGMENT_ALIGN: Final = 65536
PAGE: Final = 4096
FIRST_SEGMENT: Final = SEGMENT_ALIGN


@dataclass(frozen=True, slots=True)
class Segment:
    """Where the parts of one segment are in the file.

    Attributes
    ----------
    first
        Index of its first row: rows count from `State.origin`.
    rows
        Slots.
    offset, size
        In the file.
    areas
        Offset of the rows of each kind, and of their checksums.
    """

    first: int
    rows: int
    offset: int
    size: int
    areas: dict[Kind, tuple[int, int]]


def segment_after(header: Header, index: int, first: int, offset: int) -> Segment:
    """Return the segment with this number, which begins at `offset`."""
    rows = header.segment_rows(index)
    at = offset
    starts: dict[Kind, int] = {}
    for kind in header.kinds:
        starts[kind] = at
        at = _aligned(at + rows * header.row_bytes(kind), PAGE)
    areas: dict[Kind, tuple[int, int]] = {}
    for kind in header.kinds:
        areas[kind] = starts[kind], at
        at += rows // header.block_rows * 4
    return Segment(first, rows, offset, _aligned(at, SEGMENT_ALIGN) - offset, areas)


def _aligned(n: int, unit: int) -> int:
    return -(-n // unit) * unit
