"""Frames of fixed-rate rows as tables of a plan: one row of blocks a token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import _core
from .blocks import LEVELS, failed_blocks

if TYPE_CHECKING:
    from .targets import Arguments, Failure, Placement

# The structs of csrc/ggml/rows.hpp, field by field.
STREAM_DTYPE = np.dtype(
    [("order", "u8"), ("scheme", "u4"), ("heads", "u4"), ("head_dim", "u4"), ("n_pairs", "u4")]
)
BLOCK_DTYPE = np.dtype(
    [
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


@dataclass(frozen=True, slots=True)
class RowTables:
    """What the frames of one stream share; built once per stream.

    Attributes
    ----------
    scheme
        Number of the scheme.
    heads, head_dim
        The stream; a row is whole blocks.
    order : (head_dim,)
        Channel of the output of each coded channel.
    n_pairs
        RoPE pairs of a head.
    """

    scheme: int
    heads: int
    head_dim: int
    order: npt.NDArray[np.uint32]
    n_pairs: int


@dataclass(slots=True)
class Rows:
    """All frames of rows of one plan."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    _tables: dict[int, tuple[RowTables, int]] = field(default_factory=dict)

    def add(
        self, tables: RowTables, first_token: int, placement: Placement, target: int, rope: int
    ) -> None:
        """Add one frame; `target` and `rope` are indices into the plan's `Targets`."""
        _, stream = self._tables.setdefault(id(tables), (tables, len(self._tables)))
        self.rows.append((stream, *placement.of_block(first_token, target, rope)))

    def arrays(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.uint32]]:
        """Return frames, streams, and the order table that they index."""
        tables = [entry[0] for entry in self._tables.values()]
        streams, order = [], 0
        for t in tables:
            streams.append((order, t.scheme, t.heads, t.head_dim, t.n_pairs))
            order += t.head_dim
        return (
            np.array(self.rows, BLOCK_DTYPE),
            np.array(streams, STREAM_DTYPE),
            np.concatenate([t.order for t in tables]).astype(np.uint32),
        )

    def run(self, arguments: Arguments, n_threads: int, simd: str) -> list[Failure]:
        """Decode all rows wanted; return the frames that fail."""
        if not self.rows:
            return []
        blocks, streams, order = self.arrays()
        status = _core.run_row_blocks(blocks, streams, order, *arguments, n_threads, LEVELS[simd])
        return failed_blocks(status, blocks)
