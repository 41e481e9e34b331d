"""What block codecs over the quantiser share: fitting its parameters, refusing values, encoding.

The statistics are those of FORMAT.md section 3.2.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import partial
from typing import ClassVar, Generic, TypeVar

import numpy as np

from . import _core
from .codec import BlockEncoder, Chunks
from .errors import InvalidArgument
from .frame import BytesLike, ErrorStats
from .quantiser import EXACT_UNITS, MAX_UNITS, QuantiserConfig, QuantiserParams, session_step
from .shared import NothingShared
from .spec import F32, KState, StreamSpec, describe_value

_MANY_VALUES = 1 << 14
#: Stands for the RMS of a prefill of zeros, which says nothing of what follows.
_RMS_OF_ZEROS = 2.0**-10
# The bits-per-value search codes at most this many tokens, and stops at this ratio of steps.
_SEARCH_TOKENS = 1024
_SEARCH_RATIO = 1.002

ConfigT = TypeVar("ConfigT", bound=QuantiserConfig)
ParamsT = TypeVar("ParamsT", bound=QuantiserParams)


class CoreEncoder:
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

    def resume(self, values: F32, payload: BytesLike, error: ErrorStats) -> None:
        # Coding decoded values again gives the same values and bytes, but measures no error.
        self.push(values)
        self._core.error = (error.max_error, error.sum_squares, error.n_values)


class QuantisingCodec(NothingShared, ABC, Generic[ConfigT, ParamsT]):
    """The part of a `BlockCodec` that is its quantiser's.

    Attributes
    ----------
    class_of_one, n_classes
        Class of a residual whose spread is one step, and how many classes there are.
    pairs_share
        Whether the two channels of a RoPE pair of K share their class.
    sinks_apart
        Whether means, coefficients and classes leave out the sinks, which may lie far beyond all
        other tokens.
    """

    name: str
    lossless = False
    header_at_once = False
    rows_stand_alone = False

    class_of_one: ClassVar[int]
    n_classes: ClassVar[int]
    pairs_share: ClassVar[bool]
    sinks_apart: ClassVar[bool]

    def check_stream(self, config: ConfigT, spec: StreamSpec) -> None:
        """See `BlockCodec.check_stream`; values decide, as the step is fitted to them."""

    @abstractmethod
    def encoder(self, params: ParamsT, first_token: int) -> BlockEncoder:
        """Start a block at absolute position `first_token`."""

    @abstractmethod
    def _params(self, config: ConfigT, quantiser: QuantiserParams) -> ParamsT:
        """Return the codec's parameters with those of the quantiser."""

    def fit(
        self, config: ConfigT, spec: StreamSpec, chunks: Chunks, k_state: KState = "pre"
    ) -> ParamsT:
        left_out = config.sink if self.sinks_apart else 0
        statistics = _means(spec, chunks, left_out)
        if left_out and statistics.n_tokens <= 2 * left_out:
            statistics = _means(spec, chunks, 0)
        statistics.finish_mean()
        for chunk in chunks():
            statistics.add_moments(chunk)
        n_values = spec.n_values(statistics.n_tokens)
        rms = math.sqrt(statistics.sum_squares / n_values) if n_values else 0.0
        fitted = partial(self._fitted, statistics, config, spec)
        policy, value = config.policy
        if policy == "bpv":
            step = self._step_of_rate(value, rms or _RMS_OF_ZEROS, chunks, fitted)
        else:
            step = _step(policy, value, rms or _RMS_OF_ZEROS, spec, k_state)
        if policy == "max_error":
            step = _room_for_rounding(step, statistics.largest, config.sink_div)
        return fitted(step)

    def check(self, params: ParamsT, x: F32, first_token: int) -> None:
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

    def step(self, params: ParamsT) -> float | None:
        return params.step

    def name_of(self, params: ParamsT) -> str:
        return self.name

    def _fitted(
        self, statistics: _core.Statistics, config: ConfigT, spec: StreamSpec, step: float
    ) -> ParamsT:
        step = session_step(step, config.sink_div, f"{spec.kind} stream")
        unit = step / config.sink_div
        pairs = self.pairs_share and spec.kind == "k"
        mean, rho, cls = statistics.finish(
            step, unit, config.ar, pairs, self.class_of_one, self.n_classes
        )
        if (np.abs(mean) >= MAX_UNITS - config.sink_div).any():
            raise InvalidArgument(
                f"{spec.kind} stream: a channel mean is beyond 2^23 units: "
                f"the step {step:g} is too small"
            )
        sink, sink_div, ar = config.sink, config.sink_div, config.ar
        return self._params(
            config,
            QuantiserParams(spec, step, sink, sink_div, ar, mean.astype(np.int32), rho, cls),
        )

    def _step_of_rate(
        self, bpv: float, rms: float, chunks: Chunks, fitted: partial[ParamsT]
    ) -> float:
        """The finest step whose block of the first tokens needs at most `bpv` bits per value."""
        sample = first_tokens_of(chunks, _SEARCH_TOKENS)

        def rate(step: float) -> float:
            try:
                params = fitted(step)
                self.check(params, sample, 0)
            except InvalidArgument:  # too fine for these values
                return math.inf
            encoder = self.encoder(params, 0)
            encoder.push(sample)
            return 8.0 * len(encoder.payload()) / sample.size

        low, high = rms * 1e-5, rms * 10.0
        if rate(high) > bpv:
            raise InvalidArgument(
                f"bpv {bpv:g} is not reachable: a block's overhead needs more; give more bits"
            )
        while high / low > _SEARCH_RATIO:
            middle = math.sqrt(low * high)
            if rate(middle) > bpv:
                low = middle
            else:
                high = middle
        return high


def _means(spec: StreamSpec, chunks: Chunks, left_out: int) -> _core.Statistics:
    """Return statistics after their first pass over a finite prefill."""
    statistics = _core.Statistics(spec.heads, spec.head_dim, left_out)
    for chunk in chunks():
        at = _core.find_beyond(chunk, np.inf)
        if at >= 0:
            what = describe_value(chunk, at, spec, statistics.n_tokens)
            raise InvalidArgument(f"{what} is not finite")
        statistics.add_mean(chunk)
    return statistics


def _step(policy: str, value: float, rms: float, spec: StreamSpec, k_state: KState) -> float:
    if policy == "rel_step":
        return value * rms
    if policy == "rmse":
        return value * math.sqrt(12.0)
    if policy == "max_error":
        if spec.rope is not None and k_state == "post":
            return math.sqrt(2.0) * value / spec.rope.scaling
        return 2.0 * value
    return value


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


def first_tokens_of(chunks: Chunks, n_tokens: int) -> F32:
    parts: list[F32] = []
    have = 0
    for chunk in chunks():
        parts.append(chunk[:, : n_tokens - have])
        have += parts[-1].shape[1]
        if have >= n_tokens:
            break
    return np.ascontiguousarray(np.concatenate(parts, axis=1))
