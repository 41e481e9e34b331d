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

_META: Final = struct.Struct("=16xIIQQ")  # page header, magic, version, address, map size
_TREE: Final = struct.Struct("=IHHQQQQQ")  # pad, flags, depth, page and entry counts, root
_LAST: Final = struct.Struct("=QQ")  # last page, transaction id
_PAGE: Final = struct.Struct("=QHHHH")  # number, pad, flags, lower, upper
_NODE: Final = struct.Struct("=HHHH")  # low, high, flags, key size
_MAGIC: Final = 0xBEEFC0DE
_NO_PAGE: Final = 2**64 - 1
_BRANCH, _LEAF, _BIG = 1, 2, 1
_MAX_DEPTH: Final = 32


class _Short(Exception):
    """A page that is needed is not in the file, or is not what it should be."""


def tail_is_free(fd: int, page_bytes: int, txn_id: int, n_bytes: int) -> bool:
    """Whether every page that a file of `n_bytes` lacks is free.

    Parameters
    ----------
    fd
        The data file.
    txn_id
        Transaction that is kept alive by a reader meanwhile, so that its pages stay.
    """
    try:
        root, last_page = _head(fd, page_bytes, txn_id)
        missing = set(range(n_bytes // page_bytes, last_page + 1))
        for page in _free_pages(fd, page_bytes, root):
            missing.discard(page)
        return not missing
    except (_Short, struct.error):
        return False


def _head(fd: int, page_bytes: int, txn_id: int) -> tuple[int, int]:
    """Return root of the free list and last page, as of a transaction."""
    for page in (0, 1):
        data = _read(fd, page * page_bytes, 152)
        magic, version, _, _ = _META.unpack_from(data)
        last_page, found = _LAST.unpack_from(data, 136)
        if (magic, version, found) == (_MAGIC, 1, txn_id):
            return _TREE.unpack_from(data, 40)[7], last_page
    raise _Short


def _free_pages(fd: int, page_bytes: int, root: int) -> Iterator[int]:
    if root == _NO_PAGE:
        return
    todo = [(root, 0)]
    while todo:
        number, depth = todo.pop()
        data = _read(fd, number * page_bytes, page_bytes)
        stored, _, flags, lower, _ = _PAGE.unpack_from(data)
        if stored != number or depth > _MAX_DEPTH:
            raise _Short
        for (at,) in struct.iter_unpack("=H", data[_PAGE.size : lower]):
            low, high, node_flags, key_bytes = _NODE.unpack_from(data, at)
            body = at + _NODE.size + key_bytes
            if flags & _BRANCH:
                todo.append((low | high << 16 | node_flags << 32, depth + 1))
                continue
            if not flags & _LEAF:
                raise _Short
            n_bytes = low | high << 16
            if node_flags & _BIG:
                (big,) = struct.unpack_from("=Q", data, body)
                value = _read(fd, big * page_bytes + _PAGE.size, n_bytes)
            else:
                value = data[body : body + n_bytes]
            pages = struct.unpack(f"={n_bytes // 8}Q", value)
            yield from pages[1 : 1 + pages[0]]


def _read(fd: int, offset: int, n_bytes: int) -> bytes:
    data = os.pread(fd, n_bytes, offset)
    if len(data) != n_bytes:
        raise _Short
    return data
