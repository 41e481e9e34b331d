"""Pages of a file: advice to the kernel about them, and giving back the room that they take."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any, Final, Literal, TypeAlias

Advice: TypeAlias = Literal["prefetch", "random", "release"]

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_MADV_PAGEOUT: Final = 21
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


class Map:
    """A part of a file, mapped for reading; ``np.asarray`` of it gives the bytes.

    It goes with the last array that refers to it. Unlike `mmap.mmap` it has no descriptor of its
    own: a session of many layers and segments would soon have more than a process may have.

    Raises
    ------
    OSError
        It cannot be mapped.
    """

    def __init__(self, fd: int, offset: int, size: int) -> None:
        address = _libc.mmap(
            None,
            ctypes.c_size_t(size),
            ctypes.c_int(mmap.PROT_READ),
            ctypes.c_int(mmap.MAP_SHARED),
            ctypes.c_int(fd),
            ctypes.c_int64(offset),
        )
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._address, self._size = address, size
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address, True),  # read-only
        }
        end = weakref.finalize(self, _libc.munmap, ctypes.c_void_p(address), ctypes.c_size_t(size))
        end.atexit = False  # somebody may still have a view

    def madvise(self, advice: int, lo: int, hi: int) -> None:
        """Advise the kernel about bytes ``[lo, hi)``; what it does not take is lost."""
        _libc.madvise(
            ctypes.c_void_p(self._address + lo),
            ctypes.c_size_t(min(hi, self._size) - lo),
            ctypes.c_int(advice),
        )


def advise(
    fd: int, mapped: Map | None, offset: int, lo: int, hi: int, what: Advice, *, named: bool
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
            mapped.madvise(advice, lo, hi)
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
    done = _libc.fallocate(
        ctypes.c_int(fd),
        ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE),
        ctypes.c_int64(offset),
        ctypes.c_int64(size),
    )
    return int(done) == 0
