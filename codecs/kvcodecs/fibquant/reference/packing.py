"""Indices of codewords as bits, and back. FORMAT.md section 11.6.

Index i of a vector has the bits ``[i * width, (i + 1) * width)``, the lowest first; bit b is bit
``b % 8`` of byte ``b // 8``. Each vector starts on a byte.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ...errors import Corrupt, InvalidArgument

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]

MAX_WIDTH: Final = 32
MAX_PACKED_BITS: Final = 1 << 34


def packed_bytes(width: int, count: int) -> int:
    """Return the bytes of `count` indices of `width` bits.

    Raises
    ------
    InvalidArgument
        A width that is not 1 to 32, or more than 2^34 bits.
    """
    if not 1 <= width <= MAX_WIDTH:
        raise InvalidArgument(f"indices of {width} bits: 1 to {MAX_WIDTH}")
    if not 0 <= count * width <= MAX_PACKED_BITS:
        raise InvalidArgument(f"{count} indices of {width} bits: at most 2^34 bits")
    return (count * width + 7) // 8


def pack_indices(indices: U32, width: int) -> U8:
    """Return the packed indices of each row.

    Raises
    ------
    InvalidArgument
        As `packed_bytes`, or an index that needs more bits.
    """
    packed_bytes(width, indices.shape[1])
    if indices.size and int(indices.max()) >= 1 << width:
        raise InvalidArgument(f"index {indices.max()} does not fit {width} bits")
    bits = (indices[:, :, None] >> np.arange(width, dtype=np.uint32)) & 1
    flat = bits.astype(np.uint8).reshape(len(indices), indices.shape[1] * width)
    return np.packbits(flat, axis=1, bitorder="little")


def unpack_indices(packed: U8, width: int, count: int) -> U32:
    """Return the `count` indices of each row.

    Raises
    ------
    InvalidArgument
        As `packed_bytes`.
    Corrupt
        Rows of another length, or a bit behind the indices that is not 0.
    """
    expected = packed_bytes(width, count)
    if packed.shape[1] != expected:
        raise Corrupt(
            f"{count} indices of {width} bits take {expected} bytes, not {packed.shape[1]}"
        )
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    if bits[:, count * width :].any():
        vector = int(np.flatnonzero(bits[:, count * width :].any(1))[0])
        raise Corrupt(f"vector {vector}: bits that are not 0 behind its indices")
    each = bits[:, : count * width].reshape(len(packed), count, width).astype(np.uint32)
    total: U32 = (each << np.arange(width, dtype=np.uint32)).sum(axis=2, dtype=np.uint32)
    return total
