"""TKV1 as a block codec: the lane layout in frames."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from .. import _core
from ..codec import Chunks
from ..errors import Corrupt, InvalidArgument
from ..frame import BytesLike, ErrorStats, byte_view
from ..plan import Placement, Plan
from ..spec import F32, KState, StreamSpec, describe_value
from .params import (
    EXACT_UNITS,
    MAX_UNITS,
    TKV1,
    TKV1Params,
    config_from_fields,
    lane_width,
    pack_params,
    prior_table,
    session_step,
    unpack_params,
)

__all__ = ["CODEC", "TKV1Codec", "config_from_fields"]

_MANY_VALUES = 1 << 14
#: Stands for the RMS of a prefill of zeros, which says nothing of what follows.
_RMS_OF_ZEROS = 2.0**-10
# The bits-per-value search codes at most this many tokens, and stops at this ratio of steps.
_SEARCH_TOKENS = 1024
_SEARCH_RATIO = 1.002


class _Encoder:
    """`BlockEncoder` over the C++ one."""

    def __init__(self, core: _core.BlockEncoder) -> None:
        self._core = core

    @property
    def n_tokens(self) -> int:
        return self._core.n_tokens

    @property
    def error(self) -> ErrorStats:
        max_error, sum_squares, n_values = self._core.error
        if math.isnan(max_error):
            return ErrorStats.unknown()
        return ErrorStats(max_error, sum_squares, n_values)

    def push(self, x: F32, n_threads: int = 1) -> None:
        # A thread costs as much as some hundred values.
        self._core.push(np.ascontiguousarray(x), n_threads if x.size > _MANY_VALUES else 1)

    def payload(self) -> bytes:
        return self._core.payload()

    def resume(self, error: ErrorStats) -> None:
        self._core.error = (error.max_error, error.sum_squares, error.n_values)


class TKV1Codec:
    """`BlockCodec` of number 1."""

    number = 1
    name = "tkv1"

    def fit(
        self, config: TKV1, spec: StreamSpec, chunks: Chunks, k_state: KState = "pre"
    ) -> TKV1Params:
        width = lane_width(spec.head_dim, config.lane_channels)
        statistics = _core.Statistics(spec.heads, spec.head_dim)
        for chunk in chunks():
            at = _core.find_beyond(chunk, np.inf)
            if at >= 0:
                what = describe_value(chunk, at, spec, statistics.n_tokens)
                raise InvalidArgument(f"{what} is not finite")
            statistics.add_mean(chunk)
        statistics.finish_mean()
        for chunk in chunks():
            statistics.add_moments(chunk)
        n_values = spec.n_values(statistics.n_tokens)
        rms = math.sqrt(statistics.sum_squares / n_values) if n_values else 0.0
        fitted = partial(_fitted, statistics, config, spec, width)
        step = _step(config, rms or _RMS_OF_ZEROS, spec, k_state, chunks, fitted)
        if config.max_error is not None:
            step = _room_for_rounding(step, statistics.largest, config.sink_div)
        return fitted(step)

    def pack(self, params: TKV1Params) -> bytes:
        return pack_params(params)

    def unpack(self, spec: StreamSpec, data: BytesLike) -> TKV1Params:
        return unpack_params(spec, data)

    def check(self, params: TKV1Params, x: F32, first_token: int) -> None:
        # One quantum below the limit, so that rounding cannot pass it.
        limit = (MAX_UNITS - params.sink_div) * params.unit
        at = _core.find_beyond(x, limit)
        if at < 0:
            return
        what = describe_value(x, at, params.spec, first_token)
        if not np.isfinite(x.ravel()[at]):
            raise InvalidArgument(f"{what} is not finite")
        raise InvalidArgument(
            f"{what} is beyond 2^23 units of {params.unit:g}: the step {params.step:g} is too small"
        )

    def encoder(self, params: TKV1Params, first_token: int) -> _Encoder:
        spec = params.spec
        return _Encoder(
            _core.block_encoder(
                prior_table(),
                spec.heads,
                spec.head_dim,
                params.width,
                params.unit,
                params.sink,
                params.sink_div,
                first_token,
                params.mean,
                params.rho,
                params.cls,
            )
        )

    def schedule(
        self,
        plan: Plan,
        params: TKV1Params,
        payload: BytesLike,
        first_token: int,
        placement: Placement,
    ) -> None:
        entries, stop = _core.scan_entries(payload, 0, params.n_lanes)
        size = byte_view(payload).nbytes
        if stop != size:
            raise Corrupt(f"{size - stop} bytes after the last lane")
        if placement.n_rows:
            plan.decode_lanes(params.lane_tables(), entries, payload, first_token, placement)

    def step(self, params: TKV1Params) -> float | None:
        return params.step

    def worst_case_bytes(self, params: TKV1Params, n_tokens: int) -> int:
        # csrc/encoder.hpp kMaxResidualBytes; a lane adds its length and four bytes of coder state.
        return params.spec.n_values(n_tokens) * 48 + params.n_lanes * 14


def _fitted(
    statistics: _core.Statistics, config: TKV1, spec: StreamSpec, width: int, step: float
) -> TKV1Params:
    step = session_step(step, config.sink_div, f"{spec.kind} stream")
    unit = step / config.sink_div
    mean, rho, cls = statistics.finish(step, unit, config.ar, spec.kind == "k")
    if (np.abs(mean) >= MAX_UNITS - config.sink_div).any():
        raise InvalidArgument(
            f"{spec.kind} stream: a channel mean is beyond 2^23 units: "
            f"the step {step:g} is too small"
        )
    return TKV1Params(
        spec, step, config.sink, config.sink_div, config.ar, width, mean.astype(np.int32), rho, cls
    )


def _step(
    config: TKV1,
    rms: float,
    spec: StreamSpec,
    k_state: KState,
    chunks: Chunks,
    fitted: partial[TKV1Params],
) -> float:
    policy, value = config.policy
    if policy == "rel_step":
        return value * rms
    if policy == "step":
        return value
    if policy == "rmse":
        return value * math.sqrt(12.0)
    if policy == "max_error":
        rotated = spec.kind == "k" and k_state == "post" and spec.rope is not None
        if rotated and spec.rope is not None:
            return math.sqrt(2.0) * value / spec.rope.scaling
        return 2.0 * value
    return _step_of_rate(value, rms, chunks, fitted)


def _room_for_rounding(step: float, largest: float, sink_div: int) -> float:
    """Return a step whose bound holds after float32 has rounded values as large as `largest`.

    Up to `EXACT_UNITS` units nothing is rounded (`session_step`).
    """
    if largest <= EXACT_UNITS * step / sink_div / 2:
        return step
    ulp = float(np.spacing(np.float32(largest)))
    if step <= 2 * ulp:
        raise InvalidArgument(
            f"max_error asks for a step of {step:g}, float32 resolves {ulp:g} at {largest:g}; "
            "use Raw() or a larger bound"
        )
    return step - ulp


def _step_of_rate(bpv: float, rms: float, chunks: Chunks, fitted: partial[TKV1Params]) -> float:
    """The finest step whose block of the first tokens needs at most `bpv` bits per value."""
    sample = _first_tokens(chunks, _SEARCH_TOKENS)

    def rate(step: float) -> float:
        try:
            params = fitted(step)
            CODEC.check(params, sample, 0)
        except InvalidArgument:  # too fine for these values
            return math.inf
        encoder = CODEC.encoder(params, 0)
        encoder.push(sample)
        return 8.0 * len(encoder.payload()) / sample.size

    low, high = rms * 1e-5, rms * 10.0
    if rate(high) > bpv:
        raise InvalidArgument(f"bpv {bpv:g} is not reachable: lane lengths alone need more")
    while high / low > _SEARCH_RATIO:
        middle = math.sqrt(low * high)
        if rate(middle) > bpv:
            low = middle
        else:
            high = middle
    return high


def _first_tokens(chunks: Chunks, n_tokens: int) -> F32:
    parts: list[F32] = []
    have = 0
    for chunk in chunks():
        parts.append(chunk[:, : n_tokens - have])
        have += parts[-1].shape[1]
        if have >= n_tokens:
            break
    return np.ascontiguousarray(np.concatenate(parts, axis=1))


CODEC = TKV1Codec()
