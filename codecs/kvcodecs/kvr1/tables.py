"""KVR1's classes and the frozen frequency tables they select. FORMAT.md section 9.2."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import Corrupt

N_CLASSES: Final = 88
N_TABLES: Final = 36
N_SYMBOLS: Final = 64
#: The class of residuals with a spread of one step; a class is a quarter of an octave.
CLASS_OF_ONE: Final = 12
#: No symbol times a finer step reaches 2^30 up to here.
MAX_SINK_DIV: Final = 512


@cache
def frequencies() -> npt.NDArray[np.uint16]:
    """Return the frozen frequencies, 36 tables x 64 symbols, each row of sum 2048; read-only."""
    data = files(__package__).joinpath("frequencies.u16").read_bytes()
    if len(data) != 2 * N_TABLES * N_SYMBOLS:
        raise Corrupt(
            f"installed frequency tables have {len(data)} bytes, "
            f"expected {2 * N_TABLES * N_SYMBOLS}"
        )
    table = np.frombuffer(data, dtype="<u2").astype(np.uint16).reshape(N_TABLES, N_SYMBOLS)
    table.flags.writeable = False
    return table


def table_of(cls: int) -> int:
    """Return the frequency table of a class; wide ones share four, one per quarter octave."""
    return cls if cls < N_TABLES else N_TABLES - 4 + cls % 4


def shift_of(cls: int) -> int:
    """Return how many low bits of a residual of a class are stored as they are."""
    return 0 if cls < 24 else (cls - 20) >> 2


def sink_classes(sink_div: int) -> int:
    """Return how many classes wider residuals are where the step is `sink_div` times finer.

    This is ``round(4 log2(sink_div))``, from integers alone: the largest `d` with
    ``2^(2d - 1) <= sink_div^8``.
    """
    return (sink_div**8).bit_length() // 2
