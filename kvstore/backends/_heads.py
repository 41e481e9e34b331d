"""The two head pages of an LMDB file, read from the file itself.

Each commit writes one of them, in turn; the one with the higher transaction id counts. LMDB tells
its callers nothing of the list of free pages, which is a tree of its own: only the heads do.
Layout: LMDB 0.9, 64 bits, native byte order.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Final

_META: Final = struct.Struct("=16xIIQQ")  # page header, magic, version, address, map size
_TREE: Final = struct.Struct("=IHHQQQQQ")  # pad, flags, depth, page and entry counts, root
_LAST: Final = struct.Struct("=QQ")  # last page, transaction id
_MAGIC: Final = 0xBEEFC0DE
#: Bytes of a head page that mean something.
HEAD_BYTES: Final = 152
_READS: Final = 100


@dataclass(frozen=True, slots=True)
class Tree:
    """One of the two trees of pages: the list of free pages, or the database."""

    depth: int
    n_overflow: int
    n_pages: int
    n_entries: int
    root: int


@dataclass(frozen=True, slots=True)
class Head:
    """What a commit left: the last page of the file, the largest map so far, and both trees."""

    txn_id: int
    last_page: int
    map_size: int
    free: Tree
    main: Tree

    @property
    def n_used(self) -> int:
        """Pages that are not free, the two heads and the list of free pages included."""
        return 2 + self.free.n_pages + self.main.n_pages


def parse_head(data: bytes) -> Head | None:
    """Return what a head page says, or None if it is none."""
    if len(data) < HEAD_BYTES:
        return None
    magic, version, _, map_size = _META.unpack_from(data)
    if (magic, version) != (_MAGIC, 1):
        return None
    last_page, txn_id = _LAST.unpack_from(data, 136)
    return Head(txn_id, last_page, map_size, _tree(data, 40), _tree(data, 88))


def _tree(data: bytes, at: int) -> Tree:
    _, _, depth, n_branch, n_leaf, n_overflow, n_entries, root = _TREE.unpack_from(data, at)
    return Tree(depth, n_overflow, n_branch + n_leaf + n_overflow, n_entries, root)


def read_head(fd: int, page_bytes: int) -> Head | None:
    """Return the newer head, or None if there is none, or no two reads agree.

    Another process may be writing the older one: it counts as soon as its transaction id is
    there, so that a page read twice with the same result is whole.
    """
    before: Head | None = None
    for _ in range(_READS):
        heads = [
            head
            for page in (0, 1)
            if (head := parse_head(os.pread(fd, HEAD_BYTES, page * page_bytes))) is not None
        ]
        if not heads:
            return None
        newer = max(heads, key=lambda head: head.txn_id)
        if newer == before:
            return newer
        before = newer
    return None
