"""Checksums of blocks of rows, many at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from kvcodecs.frame import crc32c_each, extend_crc32c
from kvcodecs.plan import available_cpus

from .file import Bytes


def block_checksums(
    parts: Sequence[Bytes], block_rows: int, n_threads: int | None = None
) -> npt.NDArray[np.uint32]:
    """Return the checksum of each block of `block_rows` rows, and of what is left in each part.

    Parameters
    ----------
    parts
        Each ``(n, row_bytes)``, C-contiguous, from the first row of a block on.
    """
    blocks: list[memoryview] = []
    for part in parts:
        data, step = part.reshape(-1).data, block_rows * part.shape[1]
        blocks += [data[at : at + step] for at in range(0, len(data), step)]
    return crc32c_each(blocks, n_threads or available_cpus())


def extended(
    rows: Bytes, filled: int, block_rows: int, crc: int
) -> tuple[npt.NDArray[np.uint32], int]:
    """Return the checksums of blocks that `rows` fill, and of the block that is unfinished then.

    Parameters
    ----------
    filled, crc
        Rows in the unfinished block before, and their checksum; 0 and 0 where there is none.
    """
    left = min(block_rows - filled, len(rows))
    crc = extend_crc32c(crc, rows[:left])
    if filled + left < block_rows:
        return np.empty(0, np.uint32), crc
    others = block_checksums([rows[left:]], block_rows)
    sums = np.concatenate([np.array([crc], np.uint32), others])
    if (filled + len(rows)) % block_rows:
        return sums[:-1], int(sums[-1])
    return sums, 0
