"""KVR1 blocks as tables of a plan: one lane group of 32 interleaved states each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _core

if TYPE_CHECKING:
    from .targets import Arguments, Failure, Placement

# The structs of csrc/plan_tables.hpp, field by field.
STREAM_DTYPE = np.dtype(
    [
        ("components", "u8"),
        ("order", "u8"),
        ("sink", "u8"),
        ("heads", "u4"),
        ("head_dim", "u4"),
        ("n_pairs", "u4"),
        ("sink_div", "u4"),
        ("sink_classes", "u4"),
        ("unit", "f4"),
    ]
)
BLOCK_DTYPE = np.dtype(
    [
        ("first_token", "u8"),
        ("stream", "u4"),
        ("payload", "u4"),
        ("output", "u4"),
        ("n_tokens", "u4"),
        ("stop", "u4"),
        ("skip", "u4"),
        ("row", "u4"),
        ("rope_row", "u4"),
        ("rope", "i4"),
        ("reserved", "u4"),
    ]
)

# csrc/simd.hpp Level; the best one first.
LEVELS: Final = {"avx512": 2, "avx2": 1, "portable": 0}
#: Instruction sets that this CPU can decode with, the fastest first; all give the same bits.
SIMD_LEVELS: Final = tuple(name for name, level in LEVELS.items() if _core.level_supported(level))


#: Blocks, streams, mean, rho, classes and order of a plan, as the core takes them.
BlockArrays: TypeAlias = tuple[
    npt.NDArray[Any],
    npt.NDArray[Any],
    npt.NDArray[np.int32],
    npt.NDArray[np.uint8],
    npt.NDArray[np.uint8],
    npt.NDArray[np.uint32],
]


@dataclass(frozen=True, slots=True)
class BlockTables:
    """What the blocks of one stream share; built once per stream.

    Attributes
    ----------
    rans
        Frequency tables.
    heads, head_dim
        The stream; a component is a channel of a head, head by head, coded channel order.
    mean, rho, cls : (heads * head_dim,) int32, uint8, uint8
        Of each component.
    unit
        Of decoded values, as float32.
    sink, sink_div, sink_classes
        Positions below `sink` are `sink_div` times finer and their classes so much higher.
    order : (head_dim,)
        Channel of the output of each coded channel.
    n_pairs
        RoPE pairs of a head.
    """

    rans: _core.RansTables
    heads: int
    head_dim: int
    mean: npt.NDArray[np.int32]
    rho: npt.NDArray[np.uint8]
    cls: npt.NDArray[np.uint8]
    unit: float
    sink: int
    sink_div: int
    sink_classes: int
    order: npt.NDArray[np.intp]
    n_pairs: int


@dataclass(slots=True)
class Blocks:
    """All KVR1 blocks of one plan."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    _tables: dict[int, tuple[BlockTables, int]] = field(default_factory=dict)

    def add(
        self,
        tables: BlockTables,
        first_token: int,
        placement: Placement,
        target: int,
        rope: int,
    ) -> None:
        """Add one block; `target` and `rope` are indices into the plan's `Targets`."""
        _, stream = self._tables.setdefault(id(tables), (tables, len(self._tables)))
        self.rows.append((first_token, stream, *placement.of_block(first_token, target, rope)))

    def arrays(self) -> BlockArrays:
        """Return blocks, streams, and the mean, rho, class and order tables they index."""
        tables = [entry[0] for entry in self._tables.values()]
        streams: list[tuple[float, ...]] = []
        components = order = 0
        for t in tables:
            shape, sinks = (t.heads, t.head_dim, t.n_pairs), (t.sink_div, t.sink_classes)
            streams.append((components, order, t.sink, *shape, *sinks, t.unit))
            components += t.mean.size
            order += t.head_dim
        return (
            np.array(self.rows, BLOCK_DTYPE),
            np.array(streams, STREAM_DTYPE),
            np.concatenate([t.mean for t in tables]),
            np.concatenate([t.rho for t in tables]),
            np.concatenate([t.cls for t in tables]),
            np.concatenate([t.order for t in tables]).astype(np.uint32),
        )

    @property
    def rans(self) -> _core.RansTables:
        """The frequency tables, which all blocks share."""
        return next(iter(self._tables.values()))[0].rans

    def run(self, arguments: Arguments, n_threads: int, simd: str) -> list[Failure]:
        """Decode all blocks; return those that fail."""
        if not self.rows:
            return []
        arrays = self.arrays()
        status = _core.run_blocks(self.rans, *arrays, *arguments, n_threads, LEVELS[simd])
        return failed_blocks(status, arrays[0])


def failed_blocks(status: npt.NDArray[np.uint8], blocks: npt.NDArray[Any]) -> list[Failure]:
    """Return the blocks, with a field ``output``, that have a status."""
    return [(int(status[i]), int(blocks[i]["output"]), "") for i in np.flatnonzero(status)]
