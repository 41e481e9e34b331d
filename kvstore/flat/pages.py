"""Pages of a file: advice to the kernel about them, and giving back the room that they take."""

from __future__ import annotations

import mmap
import os
from typing import Final, Literal, TypeAlias

Advice: TypeAlias = Literal["prefetch", "random", "release"]

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_MADV_PAGEOUT: Final = 21


def advise(
    fd: int, mapped: mmap.mmap | None, offset: int, lo: int, hi: int, what: Advice, *, named: bool
) -> None:
    """Tell the kernel about bytes ``[lo, hi)``, relative to a part that begins at `offset`.

    Advice that it does not take is lost, and nothing else.

    Parameters
    ----------
    mapped
        The map of that part; None where it is read with ``pread``.
    named
        Whether the file has a name; what has none is memory.
    """
    page = mmap.PAGESIZE
    if what == "release":
        lo, hi = -(-lo // page) * page, hi // page * page  # pages that are wholly inside
    else:
        lo = lo // page * page
    if lo >= hi:
        return
    try:
        if mapped is not None:
            # Maps are shared: what is released stays, in the file or in the memory without a name.
            advice = {
                "prefetch": mmap.MADV_WILLNEED,
                "random": mmap.MADV_RANDOM,
                "release": mmap.MADV_DONTNEED if named else _MADV_PAGEOUT,
            }[what]
            mapped.madvise(advice, lo, min(hi, len(mapped)) - lo)
        if named and (mapped is None or what == "release"):
            told = {
                "prefetch": os.POSIX_FADV_WILLNEED,
                "random": os.POSIX_FADV_RANDOM,
                "release": os.POSIX_FADV_DONTNEED,
            }[what]
            os.posix_fadvise(fd, offset + lo, hi - lo, told)
    except OSError:
        return


def punch(fd: int, offset: int, size: int) -> bool:
    """Give the room of a part back, which then reads as zeros; False if that cannot be."""
    import ctypes

    done = ctypes.CDLL(None, use_errno=True).fallocate(
        ctypes.c_int(fd),
        ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE),
        ctypes.c_int64(offset),
        ctypes.c_int64(size),
    )
    return int(done) == 0
