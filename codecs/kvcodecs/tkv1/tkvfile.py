"""Reading `.tkv` files: one stream with its header, in the lane or the stream layout.

FORMAT.md section 6. They have no checksum: truncations and malformed headers are errors, flipped
payload bits can only be promised not to crash or read out of bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _core
from ..errors import Corrupt, InvalidArgument, Truncated
from ..frame import BytesLike, byte_view
from ..plan import Plan
from .codec import CODEC
from .params import TKV1Params, lane_width, prior_table
from .tkvheader import ChannelStatistics, TkvParams, lane_params, unpack_header


class GpuTables(NamedTuple):
    """Tables of the lane layout for a GPU decoder.

    Attributes
    ----------
    mean : (channels,) int32
    rho, cls : (channels,) uint32
    lanes : (n_lanes, 6) uint64
        Byte offset, byte length, first token, tokens, head, channel group of each lane.
    """

    mean: npt.NDArray[np.int32]
    rho: npt.NDArray[np.uint32]
    cls: npt.NDArray[np.uint32]
    lanes: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class TkvFile:
    """A parsed `.tkv` stream.

    Attributes
    ----------
    params
        The header.
    n_tokens
        Tokens of the stream.
    """

    params: TkvParams
    n_tokens: int
    _data: memoryview
    _statistics: ChannelStatistics
    _entries: npt.NDArray[np.uint64]
    _first_entry: int

    @classmethod
    def parse(cls, data: BytesLike) -> TkvFile:
        """Parse `.tkv` bytes; `data` is referred to, not copied.

        Raises
        ------
        Truncated
            The bytes end before the last block does.
        Corrupt
            Not TKV1, a header that no encoder writes, or bytes after the last block.
        Unsupported
            Reserved flags.
        """
        view = byte_view(data)
        params, n_tokens, statistics, at = unpack_header(view)
        block = params.block_tokens
        # Every entry is at least its length byte: no count beyond the bytes left is believed.
        n_entries = -(-n_tokens // block) * params.entries_per_block
        if n_entries > view.nbytes - at:
            raise Truncated(
                f"TKV1: {n_tokens} tokens need more than the {view.nbytes - at} bytes left"
            )
        entries, stop = _core.scan_entries(view, at, n_entries)
        if stop != view.nbytes:
            raise Corrupt(f"TKV1: {view.nbytes - stop} bytes after the last block")
        return cls(params, n_tokens, view, statistics, entries, at)

    @property
    def n_blocks(self) -> int:
        return -(-self.n_tokens // self.params.block_tokens)

    def block_entries(self, block: int) -> memoryview:
        """Return the entries of one block as stored, lengths included: a frame's payload."""
        n = self.params.entries_per_block
        if not 0 <= block < self.n_blocks:
            raise InvalidArgument(f"TKV1: block {block} of {self.n_blocks}")
        # A block starts where the one before ends: lengths may be longer varints than they need.
        start = self._first_entry if block == 0 else int(self._entries[block * n - 1].sum())
        return self._data[start : int(self._entries[(block + 1) * n - 1].sum())]

    def lane_params(self) -> TKV1Params:
        """Return the parameters of the lane layout as frames use them."""
        if self.params.layout != "lane":
            raise InvalidArgument("TKV1: the stream layout has no lanes")
        return lane_params(self.params, self._statistics)

    def decode(
        self,
        start: int = 0,
        stop: int | None = None,
        out: npt.NDArray[Any] | None = None,
        n_threads: int | None = None,
    ) -> npt.NDArray[Any]:
        """Decode tokens ``[start, stop)``, only the blocks that cover them.

        Returns
        -------
        out : (heads, stop - start, head_dim) float32
            `out` if it was given.

        Raises
        ------
        InvalidArgument
            A range outside the stream, or an `out` of the wrong shape or dtype.
        Corrupt
            A block that does not decode.
        """
        p = self.params
        stop = self.n_tokens if stop is None else stop
        if not 0 <= start <= stop <= self.n_tokens:
            raise InvalidArgument(f"TKV1: tokens [{start}, {stop}) of {self.n_tokens}")
        shape = (p.heads, stop - start, p.head_dim)
        if out is None:
            out = np.empty(shape, np.float32)
        elif out.shape != shape or out.dtype != np.float32:
            raise InvalidArgument(f"TKV1: out is {out.dtype} {out.shape}, expected float32 {shape}")
        if p.layout == "lane":
            self._decode_lanes(start, stop, out, n_threads)
        else:
            self._decode_stream(start, stop, out)
        return out

    def gpu_tables(self) -> GpuTables:
        """Return the tables of the lane layout; `InvalidArgument` for the stream layout."""
        p = self.params
        if p.layout != "lane":
            raise InvalidArgument("TKV1: the stream layout has no lanes")
        groups = p.head_dim // lane_width(p.head_dim, p.lane_channels)
        index = np.arange(len(self._entries), dtype=np.uint64)
        per_block = np.uint64(p.entries_per_block)
        first = index // per_block * np.uint64(p.block_tokens)
        lanes = np.empty((len(index), 6), np.uint64)
        lanes[:, 0:2] = self._entries
        lanes[:, 2] = first
        lanes[:, 3] = np.minimum(np.uint64(p.block_tokens), np.uint64(self.n_tokens) - first)
        lanes[:, 4] = index % per_block // np.uint64(groups)
        lanes[:, 5] = index % np.uint64(groups)
        mean, rho, cls = self._statistics
        return GpuTables(mean.astype(np.int32), rho.astype(np.uint32), cls.astype(np.uint32), lanes)

    def _ranges(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Block, first token and token count of the blocks that cover ``[start, stop)``."""
        block = self.params.block_tokens
        blocks = range(start // block, -(-stop // block)) if stop > start else range(0)
        return [(b, b * block, min(block, self.n_tokens - b * block)) for b in blocks]

    def _decode_lanes(
        self, start: int, stop: int, out: npt.NDArray[Any], n_threads: int | None
    ) -> None:
        params, plan = self.lane_params(), Plan()
        for block, first, n in self._ranges(start, stop):
            lo, hi = max(start, first), min(stop, first + n)
            plan.add(
                CODEC,
                params,
                self.block_entries(block),
                first_token=first,
                n_tokens=n,
                start=lo,
                stop=hi,
                out=out[:, lo - start : hi - start],
                where=f"block {block}",
            )
        plan.run(n_threads)

    def _decode_stream(self, start: int, stop: int, out: npt.NDArray[Any]) -> None:
        p, (mean, rho, cls) = self.params, self._statistics
        for block, first, n in self._ranges(start, stop):
            at, n_bytes = (int(i) for i in self._entries[block])
            lo, hi = max(start, first), min(stop, first + n)
            y = _core.stream_decode(
                prior_table(),
                p.heads,
                p.head_dim,
                p.step,
                p.sink,
                p.sink_div,
                mean,
                rho,
                cls,
                first,
                hi - first,
                self._data[at : at + n_bytes],
            )
            wanted = np.ascontiguousarray(y[:, lo - first :])
            if p.rotated:
                _core.rotate(wanted, p.theta, lo, 1.0)
            with np.errstate(over="ignore", invalid="ignore"):
                out[:, lo - start : hi - start] = wanted
            if not np.isfinite(out[:, lo - start : hi - start]).all():
                raise Corrupt(f"TKV1: block {block}: a value beyond float32")
