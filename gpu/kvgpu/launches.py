"""How many threads decode, and with how much memory each: what suits a device and a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

Kernel = Literal[
    "kv_decode_lanes",
    "kv_decode_blocks",
    "kv_decode_blocks_compact",
    "kv_look_through_payloads",
    "kv_decode_vectors",
    "kv_copy_rows",
]

WARP: Final = 32
#: Threads of a processor that the registers of the kernels leave room for.
_RESIDENT: Final = 1024
#: Scratch of all threads of a launch stays below this, as long as a warp's is.
_SCRATCH_BYTES: Final = 1 << 30
#: Tables in shared memory pay only where every processor decodes so many blocks.
_COMPACT_FROM: Final = 32
#: FibQuant: warps of a processor that the registers leave room for, kernels/arguments.hpp.
_VECTOR_WARPS: Final = 28
#: FibQuant: so many warps of a processor are enough for room in shared memory to pay.
_FEW_WARPS: Final = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device has room for.

    Attributes
    ----------
    n_processors
        Streaming multiprocessors.
    shared_bytes
        Dynamic shared memory that one thread block may ask for.
    """

    n_processors: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel to run.

    Attributes
    ----------
    kernel, arguments
        Its name, and the offset of its struct.
    n_blocks, block_threads, shared_bytes
        Thread blocks, and what each has.
    """

    kernel: Kernel
    arguments: int
    n_blocks: int
    block_threads: int
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Grid:
    """Threads or warps of a launch that have work, and memory.

    Attributes
    ----------
    n
        Threads, or warps where a warp decodes a block or a piece of one.
    block_threads
        Of a thread block.
    scratch_words
        Of global memory, for each of the `n`.
    shared_words
        Of shared memory, likewise.
    compact
        Whether the tables come into shared memory.
    """

    n: int
    block_threads: int
    scratch_words: int
    shared_words: int = 0
    compact: bool = False

    @property
    def scratch_bytes(self) -> int:
        return 4 * self.n * self.scratch_words


def lane_grid(n_lanes: int, scratch_words: int, limits: Limits) -> Grid:
    """Return how `n_lanes` TKV1 lanes are decoded: one thread each, some after the other."""
    most = min(limits.n_processors * _RESIDENT, _SCRATCH_BYTES // (4 * scratch_words))
    n = min(n_lanes, max(most // WARP, 1) * WARP)
    # Few lanes go to as many processors as there are.
    return Grid(n, 128 if n >= 128 * limits.n_processors else WARP, scratch_words)


def block_grid(n_components: npt.NDArray[np.integer], compact_words: int, limits: Limits) -> Grid:
    """Return how KVR1 blocks are decoded: one warp each, some after the other.

    Parameters
    ----------
    n_components : (n_blocks,)
        Of each block.
    compact_words
        Of the tables.
    """
    n_blocks = len(n_components)
    n = min(n_blocks, limits.n_processors * _RESIDENT // WARP)
    warps = min(-(-n // limits.n_processors), _RESIDENT // WARP)
    room = limits.shared_bytes // 4
    compact = n_blocks >= _COMPACT_FROM * limits.n_processors and room > 2 * compact_words
    wanted = -(-int(n_components.max()) // WARP) * WARP
    share = (room - compact * compact_words) // warps // WARP * WARP
    # All in shared memory, or all in scratch: the kernel asks block by block.
    shared = min(wanted, share)
    scratch = wanted if shared < wanted else 0
    most = max(_SCRATCH_BYTES // (4 * scratch), 1) if scratch else n
    return Grid(min(n, most), warps * WARP, scratch, shared, compact)


def vector_grid(n_pieces: int, words: int, limits: Limits) -> Grid:
    """Return how pieces of FibQuant blocks are decoded: one warp each, some after the other.

    Parameters
    ----------
    words
        That a warp needs for the longest vectors.
    """
    room = limits.shared_bytes // 4
    warps = min(max(-(-n_pieces // limits.n_processors), 1), _VECTOR_WARPS)
    if room >= _FEW_WARPS * words:
        warps = min(warps, room // words)
    shared = min(words, room // warps // WARP * WARP)
    scratch = words if shared < words else 0
    most = max(_SCRATCH_BYTES // (4 * scratch), 1) if scratch else n_pieces
    return Grid(min(n_pieces, limits.n_processors * warps, most), warps * WARP, scratch, shared)
