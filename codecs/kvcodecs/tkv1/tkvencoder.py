"""Writing `.tkv` files: an append-friendly encoder, one-shot encoding, a rate search."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from ..errors import InvalidArgument
from ..quantiser import MAX_UNITS, means_fit
from ..spec import Kind
from ..tensor import as_array
from ..varints import varint
from .codec import CODEC
from .params import prior_table
from .tkvheader import ChannelStatistics, Layout, TkvParams, lane_params, pack_header


class StreamEncoder:
    """Append-friendly encoder of one `.tkv` stream.

    Parameters
    ----------
    params
        The header.
    prefill : (heads, n, head_dim), n >= 1
        The first tokens; their statistics fix the stream.

    Raises
    ------
    InvalidArgument
        Wrong shape, non-finite values, or values beyond 2^24 units.
    """

    def __init__(self, params: TkvParams, prefill: npt.NDArray[Any]) -> None:
        self.params = params
        self._blocks: list[bytes] = []
        self._n_tokens = 0
        first = self._coded(prefill)
        if first.shape[1] == 0:
            raise InvalidArgument("TKV1: the prefill needs at least one token")
        statistics = _core.Statistics(params.heads, params.head_dim)
        statistics.add_mean(first)
        statistics.finish_mean()
        statistics.add_moments(first)
        lane = params.layout == "lane"
        unit = float(np.float32(params.step / params.sink_div)) if lane else params.step
        self._statistics = ChannelStatistics(
            *statistics.finish(params.step, unit, params.ar, params.kind == "k")
        )
        if not means_fit(self._statistics.mean):
            raise InvalidArgument(
                "TKV1: a channel mean is beyond 2^24 units: the step is too small"
            )
        self._tail = first[:, :0]
        self._push(first)

    @property
    def n_tokens(self) -> int:
        """Tokens so far."""
        return self._n_tokens

    @property
    def n_sealed_blocks(self) -> int:
        """Full blocks; they never change again."""
        return len(self._blocks)

    def append(self, x: npt.NDArray[Any]) -> None:
        """Append tokens ``(heads, n, head_dim)``."""
        self._push(self._coded(x))

    def to_bytes(self) -> bytes:
        """Return the `.tkv` bytes; the tail is coded as a short block."""
        head = pack_header(self.params, self._n_tokens, self._statistics)
        tail = [self._encode(self._tail)] if self._tail.shape[1] else []
        return b"".join([head, *self._blocks, *tail])

    def _coded(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        p = self.params
        if x.ndim != 3 or x.shape[0] != p.heads or x.shape[2] != p.head_dim:
            raise InvalidArgument(
                f"TKV1: shape {x.shape}, expected (heads={p.heads}, n_tokens, "
                f"head_dim={p.head_dim})"
            )
        narrow = np.ascontiguousarray(x, np.float32)
        at = _core.find_beyond(narrow, np.inf)
        if at >= 0:
            head, token, channel = (int(i) for i in np.unravel_index(at, narrow.shape))
            raise InvalidArgument(
                f"TKV1: value {narrow[head, token, channel]} at head {head}, token "
                f"{self._n_tokens + token}, channel {channel} is not finite"
            )
        if p.layout == "lane":
            return narrow
        coded = narrow.astype(np.float64)
        if p.rotated:
            _core.rotate(coded, p.theta, self._n_tokens, -1.0)
        return coded

    def _push(self, y: npt.NDArray[Any]) -> None:
        block = self.params.block_tokens
        pending = np.concatenate([self._tail, y], axis=1) if self._tail.shape[1] else y
        blocks: list[bytes] = []
        at = 0
        while pending.shape[1] - at >= block:
            first = (len(self._blocks) + len(blocks)) * block
            blocks.append(self._encode(pending[:, at : at + block], first))
            at += block
        tail = pending[:, at:].copy()
        # Refuse what cannot be coded before anything changes. Values far below the limit always can
        # be; only others are worth coding the tail for.
        if tail.size and not self._is_small(y):
            self._encode(tail, (len(self._blocks) + len(blocks)) * block)
        self._blocks += blocks
        self._tail = tail
        self._n_tokens += y.shape[1]

    def _is_small(self, y: npt.NDArray[Any]) -> bool:
        quantum = self.params.step / self.params.sink_div
        mean_unit = quantum if self.params.layout == "lane" else self.params.step
        largest = max(
            float(np.abs(y).max(initial=0.0)),
            float(np.abs(self._statistics.mean).max()) * mean_unit,
        )
        return largest < MAX_UNITS / 2 * quantum

    def _encode(self, y: npt.NDArray[Any], first_token: int | None = None) -> bytes:
        p, (mean, rho, cls) = self.params, self._statistics
        first = len(self._blocks) * p.block_tokens if first_token is None else first_token
        y = np.ascontiguousarray(y)
        if p.layout == "stream":
            data = _core.stream_encode(
                prior_table(), p.step, p.sink, p.sink_div, mean, rho, cls, first, y
            )
            return varint(len(data)) + data
        params = lane_params(p, self._statistics)
        encoder = CODEC.encoder(params, first)
        encoder.push(y)
        return encoder.payload()


def encode_stream(
    x: npt.NDArray[Any],
    *,
    kind: Kind,
    step: float,
    layout: Layout = "lane",
    pre_rope: bool | None = None,
    prefill: int | None = None,
    chunk: int | None = None,
    **fields: Any,
) -> bytes:
    """Return the `.tkv` bytes of ``x`` (heads, n, head_dim).

    Parameters
    ----------
    pre_rope
        Default: True for K in the stream layout.
    prefill
        Fix the statistics from the first `prefill` tokens, then append the rest; default all.
    chunk
        Tokens per append after the prefill; default all at once.
    fields
        Further fields of `TkvParams`.
    """
    x = as_array(x, "TKV1")
    if x.ndim != 3:
        raise InvalidArgument(f"TKV1: shape {x.shape}, expected (heads, n_tokens, head_dim)")
    if pre_rope is None:
        pre_rope = kind == "k" and layout == "stream"
    params = TkvParams(
        kind, x.shape[0], x.shape[2], step, layout=layout, pre_rope=pre_rope, **fields
    )
    n = x.shape[1]
    first = n if prefill is None else min(prefill, n)
    encoder = StreamEncoder(params, x[:, :first])
    for at in range(first, n, chunk or max(n - first, 1)):
        encoder.append(x[:, at : at + (chunk or n)])
    return encoder.to_bytes()


def step_for_bpv(
    x: npt.NDArray[Any], bpv: float, *, params: TkvParams | None = None, **fields: Any
) -> float:
    """Return the step whose one-shot stream is closest to, and not above, `bpv` bits per value.

    30 bisections of ``ln(step)`` between 1e-5 and 10 times the RMS of `x`. `fields` are those of
    `encode_stream` but ``step``.
    """
    x = np.asarray(x, np.float32)
    if not (math.isfinite(bpv) and bpv > 0):
        raise InvalidArgument(f"TKV1: bpv {bpv!r} is not a positive number")
    rms = max(math.sqrt(float(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0, 1e-30)
    low, high = math.log(rms * 1e-5), math.log(rms * 10.0)
    for _ in range(30):
        middle = 0.5 * (low + high)
        try:
            if params is not None:
                encoded = StreamEncoder(replace(params, step=math.exp(middle)), x).to_bytes()
            else:
                encoded = encode_stream(x, step=math.exp(middle), **fields)
            rate = 8.0 * len(encoded) / x.size
        except InvalidArgument:  # too fine for these values
            rate = math.inf
        if rate > bpv:
            low = middle
        else:
            high = middle
    return math.exp(high)
