"""Unsigned LEB128 numbers, as headers hold them."""

from __future__ import annotations

from .errors import Corrupt, Truncated


def varint(value: int) -> bytes:
    """Return `value` as unsigned LEB128."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varints(view: memoryview, offset: int, count: int, where: str) -> tuple[list[int], int]:
    """Read `count` unsigned LEB128 numbers of at most 64 bits, and the offset behind them.

    Raises
    ------
    Truncated, Corrupt
        The bytes end inside a number, or one is too long; messages start with `where`.
    """
    values = []
    for _ in range(count):
        value = shift = 0
        while True:
            if offset >= view.nbytes:
                raise Truncated(f"{where} ends after {view.nbytes} bytes")
            byte = view[offset]
            offset += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift >= 70:
                raise Corrupt(f"{where}: a varint before byte {offset} does not fit 64 bits")
        if value >= 1 << 64:
            raise Corrupt(f"{where}: a varint before byte {offset} does not fit 64 bits")
        values.append(value)
    return values, offset
