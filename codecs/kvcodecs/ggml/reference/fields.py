"""Fields of blocks as arrays: the notation of FORMAT.md section 10.3."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]
#: float32 too, where NumPy's types do not know it.
Floats = npt.NDArray[np.floating]


def split(blocks: U8, *sizes: int) -> list[U8]:
    """Cut every block into fields of so many bytes."""
    ends = np.cumsum(sizes)[:-1]
    return [np.ascontiguousarray(field) for field in np.split(blocks, ends, axis=1)]


def f16(field: U8) -> F32:
    """Read float16 numbers, as float32."""
    return field.view("<f2").astype(np.float32)


def u16(field: U8) -> U16:
    return field.view("<u2").astype(np.uint16)


def u32(field: U8) -> U32:
    return field.view("<u4").astype(np.uint32)


def planes(field: U8, run: int, bits: int) -> U8:
    """Read codes of `bits` bits, `run` bytes at a time, plane after plane.

    Of every run of bytes, first come the lowest `bits` bits of each byte, then the next ones, to
    the highest. With runs of one byte, codes are in the order of the bits.
    """
    runs = field.reshape(len(field), -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    codes: U8 = runs >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(len(field), -1)


def numbers(codes: npt.NDArray[np.integer], zero: int = 0) -> F32:
    """Return whole numbers as float32, counted from `zero`."""
    return codes.astype(np.float32) - np.float32(zero)


def spread(scales: F32, n: int) -> F32:
    """Repeat every scale for the `n` values it belongs to."""
    return np.repeat(scales, n, axis=1)


def ratio(a: Floats, b: Floats) -> F32:
    """Return ``a / b``, and 0 where `b` is 0."""
    return np.where(b != 0, a / b, np.float32(0))


def half(x: Floats) -> U8:
    """Return the bytes of float16 numbers, infinite beyond it."""
    return np.ascontiguousarray(x).astype("<f2").view(np.uint8)


def join_planes(codes: U8, run: int, bits: int) -> U8:
    """Undo `planes`: bytes of codes that are below `2 ** bits`."""
    n_planes = 8 // bits
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    runs = codes.reshape(len(codes), -1, n_planes, run) << shifts
    joined: U8 = np.bitwise_or.reduce(runs, axis=2).astype(np.uint8)
    return joined.reshape(len(codes), -1)
