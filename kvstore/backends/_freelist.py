"""Which pages of an LMDB file are free, read from the file itself.

LMDB does not write a page that a transaction took and gave back, so when such pages are the last
ones, a sound file is shorter than its head says. A file that was cut is shorter too. The list of
free pages tells them apart: nobody reads a free page. Read with ``pread``, never through the
map, since touching what is not there is fatal. Layout: LMDB 0.9, 64 bits, native byte order.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Final

from ._heads import HEAD_BYTES, parse_head

_PAGE: Final = struct.Struct("=QHHHH")  # number, pad, flags, lower, upper
_NODE: Final = struct.Struct("=HHHH")  # low, high, flags, key size
_NO_PAGE: Final = 2**64 - 1
_BRANCH, _LEAF, _BIG = 1, 2, 1


class _Short(Exception):
    """A page that is needed is not in the file, or is not what it should be."""


class _File:
    """A file of which nothing is read twice, so that damaged pages cannot lead in circles."""

    def __init__(self, fd: int, n_bytes: int) -> None:
        self._fd, self._n_bytes = fd, n_bytes
        self._n_left = n_bytes
        self._seen: set[int] = set()

    def read(self, offset: int, n_bytes: int) -> bytes:
        """Return bytes; numbers that lead out of the file cost nothing."""
        if offset + n_bytes > self._n_bytes or n_bytes > self._n_left or offset in self._seen:
            raise _Short
        self._seen.add(offset)
        self._n_left -= n_bytes
        data = os.pread(self._fd, n_bytes, offset)
        if len(data) != n_bytes:
            raise _Short
        return data


def tail_is_free(fd: int, page_bytes: int, txn_id: int, n_bytes: int) -> bool:
    """Whether every page that a file of `n_bytes` lacks is free.

    Parameters
    ----------
    fd
        The data file.
    txn_id
        Transaction that is kept alive by a reader meanwhile, so that its pages stay.
    """
    file = _File(fd, n_bytes)
    first = n_bytes // page_bytes
    try:
        root, last_page = _head(file, page_bytes, txn_id)
        # No larger than the list in the file, whatever number the head gives.
        free = {p for p in _free_pages(file, page_bytes, root) if first <= p <= last_page}
        return len(free) == last_page + 1 - first
    except (_Short, struct.error, IndexError):
        return False


def _head(file: _File, page_bytes: int, txn_id: int) -> tuple[int, int]:
    """Return root of the free list and last page, as of a transaction."""
    for page in (0, 1):
        head = parse_head(file.read(page * page_bytes, HEAD_BYTES))
        if head is not None and head.txn_id == txn_id:
            return head.free.root, head.last_page
    raise _Short


def _free_pages(file: _File, page_bytes: int, root: int) -> Iterator[int]:
    if root == _NO_PAGE:
        return
    todo = [root]
    while todo:
        number = todo.pop()
        data = file.read(number * page_bytes, page_bytes)
        stored, _, flags, lower, _ = _PAGE.unpack_from(data)
        if stored != number:
            raise _Short
        for (at,) in struct.iter_unpack("=H", data[_PAGE.size : lower]):
            low, high, node_flags, key_bytes = _NODE.unpack_from(data, at)
            body = at + _NODE.size + key_bytes
            if flags & _BRANCH:
                todo.append(low | high << 16 | node_flags << 32)
                continue
            if not flags & _LEAF:
                raise _Short
            n_bytes = low | high << 16
            if node_flags & _BIG:
                (big,) = struct.unpack_from("=Q", data, body)
                value = file.read(big * page_bytes + _PAGE.size, n_bytes)
            else:
                value = data[body : body + n_bytes]
            pages = struct.unpack(f"={n_bytes // 8}Q", value)
            yield from pages[1 : 1 + pages[0]]
