"""FibQuant frames as tables of a plan: coded and raw vectors, and the books of the coded ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from . import _core
from .blocks import LEVELS, failed_blocks
from .rows import BLOCK_DTYPE
from .spec import F32

if TYPE_CHECKING:
    from .targets import Arguments, Failure, Placement

# The struct of csrc/fibquant/tables.hpp, field by field. Blocks are those of rows.
STREAM_DTYPE = np.dtype(
    [
        ("order", "u8"),
        ("channels", "u8"),
        ("book", "u4"),
        ("heads", "u4"),
        ("head_dim", "u4"),
        ("n_pairs", "u4"),
    ]
)
NO_CHANNELS: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class VectorTables:
    """What the frames of one stream share; built once per stream.

    Attributes
    ----------
    book
        Rotation and codewords.
    heads, head_dim
        The stream.
    channels : (2 * heads * head_dim,)
        Mean of each channel, then scale of each; None where values are coded as they are.
    order : (head_dim,)
        Channel of the output of each coded channel.
    n_pairs
        RoPE pairs of a head.
    """

    book: _core.FibBook
    heads: int
    head_dim: int
    channels: F32 | None
    order: npt.NDArray[np.uint32]
    n_pairs: int


@dataclass(slots=True)
class Vectors:
    """All FibQuant frames of one plan."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    _tables: dict[int, tuple[VectorTables, int]] = field(default_factory=dict)

    def add(
        self, tables: VectorTables, first_token: int, placement: Placement, target: int, rope: int
    ) -> None:
        """Add one frame; `target` and `rope` are indices into the plan's `Targets`."""
        _, stream = self._tables.setdefault(id(tables), (tables, len(self._tables)))
        self.rows.append((stream, *placement.of_block(first_token, target, rope)))

    def arrays(
        self,
    ) -> tuple[
        list[_core.FibBook],
        npt.NDArray[Any],
        npt.NDArray[Any],
        npt.NDArray[np.uint32],
        F32,
    ]:
        """Return books, frames, streams, and the order and channel tables that they index."""
        tables = [entry[0] for entry in self._tables.values()]
        books: dict[int, tuple[_core.FibBook, int]] = {}
        streams, orders, channels = [], [], [np.zeros(0, np.float32)]
        n_order = n_channels = 0
        for t in tables:
            _, book = books.setdefault(id(t.book), (t.book, len(books)))
            first = NO_CHANNELS if t.channels is None else n_channels
            streams.append((n_order, first, book, t.heads, t.head_dim, t.n_pairs))
            orders.append(t.order)
            n_order += t.head_dim
            if t.channels is not None:
                channels.append(t.channels)
                n_channels += t.channels.size
        return (
            [book for book, _ in books.values()],
            np.array(self.rows, BLOCK_DTYPE),
            np.array(streams, STREAM_DTYPE),
            np.concatenate(orders).astype(np.uint32),
            np.concatenate(channels),
        )

    def run(self, arguments: Arguments, n_threads: int, simd: str) -> list[Failure]:
        """Decode all vectors wanted; return the frames that fail."""
        if not self.rows:
            return []
        arrays = self.arrays()
        status = _core.run_fib_blocks(*arrays, *arguments, n_threads, LEVELS[simd])
        return failed_blocks(status, arrays[1])
