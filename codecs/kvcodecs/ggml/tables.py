"""The frozen grids of the IQ schemes. FORMAT.md section 10.5."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import Corrupt


@dataclass(frozen=True, slots=True)
class Grid:
    """One grid: `entries` rows of `width` values, each one of `levels`.

    Attributes
    ----------
    source
        The class of `gguf.quants` that has it.
    bits
        Of a value in the file.
    """

    name: str
    source: str
    entries: int
    width: int
    levels: tuple[int, ...]
    bits: int

    @property
    def n_bytes(self) -> int:
        return self.entries * self.width * self.bits // 8


_IQ2_LEVELS: Final = (8, 25, 43)

#: In the order of the file.
GRIDS: Final = (
    Grid("iq2_xxs", "IQ2_XXS", 256, 8, _IQ2_LEVELS, 2),
    Grid("iq2_xs", "IQ2_XS", 512, 8, _IQ2_LEVELS, 2),
    Grid("iq2_s", "IQ2_S", 1024, 8, _IQ2_LEVELS, 2),
    Grid("iq1", "IQ1_S", 2048, 8, (-1, 0, 1), 2),
    Grid("iq3_xxs", "IQ3_XXS", 256, 4, (4, 12, 20, 28, 36, 44, 52, 62), 4),
    Grid("iq3_s", "IQ3_S", 512, 4, (1, 3, 5, 7, 9, 11, 13, 15), 4),
)

#: What the 16 codes of iq4_nl and iq4_xs stand for.
IQ4_VALUES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@cache
def grids() -> dict[str, npt.NDArray[np.int8]]:
    """Return every grid by name, `[entries][width]`, read-only."""
    data = files(__package__).joinpath("grids.bin").read_bytes()
    expected = sum(grid.n_bytes for grid in GRIDS)
    if len(data) != expected:
        raise Corrupt(f"installed grids have {len(data)} bytes, expected {expected}")
    result, start = {}, 0
    for grid in GRIDS:
        packed = np.frombuffer(data, np.uint8, grid.n_bytes, start)
        start += grid.n_bytes
        shifts = np.arange(0, 8, grid.bits, dtype=np.uint8)
        codes = packed[:, None] >> shifts & np.uint8((1 << grid.bits) - 1)
        values = np.array(grid.levels, np.int8)[codes].reshape(grid.entries, grid.width)
        values.flags.writeable = False
        result[grid.name] = values
    return result


@cache
def sign_masks() -> npt.NDArray[np.uint8]:
    """Return the 128 masks of eight signs: seven bits and the one that makes the ones even."""
    seven = np.arange(128, dtype=np.uint8)
    masks = seven | (np.bitwise_count(seven) & np.uint8(1)) << np.uint8(7)
    masks.flags.writeable = False
    return masks
