"""KVR1: what the user asks, what the stream header stores, and the tables of the plan.

FORMAT.md sections 9.1 (parameters) and 9.3 (stream header).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar

import numpy as np

from .. import _core
from ..blocks import BlockTables
from ..frame import BytesLike
from ..quantiser import QuantiserConfig, QuantiserParams
from ..spec import StreamSpec
from ..stream_header import pack_stream_header, unpack_stream_header
from .tables import MAX_SINK_DIV, N_CLASSES, frequencies, sink_classes


@dataclass(frozen=True, slots=True)
class KVR1(QuantiserConfig):
    """Ask for the KVR1 codec: quantised residuals in vectorised rANS with frozen tables.

    Several times faster than `TKV1`, at about its size.

    Attributes
    ----------
    rel_step
        Quantiser step over the RMS of the prefill, per layer and kind; 1/4 if nothing is asked.
    step
        Absolute step: values decode within ``step / 2``, those of sinks within that over
        `sink_div`.
    max_error
        Largest absolute error, of K as it was given: a step of ``2 max_error``, or
        ``sqrt(2) max_error / scaling`` for K given after RoPE, as a rotation mixes two channels.
    rmse
        Expected root mean square error: a step of ``sqrt(12) rmse``.
    bpv
        Bits per value of the prefill's payload, of 1024 tokens at most: the finest step that needs
        no more. Headers and records come on top.
    sink, sink_div
        The first `sink` tokens are coded `sink_div` (1 to 512) times finer.
    ar
        Predict each channel from its previous token.

    Notes
    -----
    At most one of the first five. Bounds hold for what is read as float32: reading as float16 or
    bfloat16 adds half a unit in the last place of that type.
    """

    codec: ClassVar[str] = "kvr1"
    max_sink_div: ClassVar[int] = MAX_SINK_DIV


def config_from_fields(values: Mapping[str, Any]) -> KVR1:
    """Return the configuration with these JSON fields."""
    return KVR1.from_fields(values)


@cache
def rans_tables() -> _core.RansTables:
    """Return the frozen frequency tables as the core uses them."""
    return _core.RansTables(frequencies())


@dataclass(frozen=True, eq=False)
class KVR1Params(QuantiserParams):
    """What a stream header stores: `QuantiserParams` and nothing else."""

    @property
    def sink_classes(self) -> int:
        """How many classes wider residuals are at sinks."""
        return sink_classes(self.sink_div)

    @cached_property
    def block_tables(self) -> BlockTables:
        """The plan's tables of this stream."""
        spec, rope = self.spec, self.spec.rope
        order = np.arange(spec.head_dim) if rope is None else rope.channel_order(spec.head_dim)
        return BlockTables(
            rans=rans_tables(),
            heads=spec.heads,
            head_dim=spec.head_dim,
            mean=self.mean,
            rho=self.rho,
            cls=self.cls,
            unit=self.unit,
            sink=self.sink,
            sink_div=self.sink_div,
            sink_classes=self.sink_classes,
            order=order.astype(np.intp),
            n_pairs=0 if rope is None else rope.n_pairs,
        )


def pack_params(params: KVR1Params) -> bytes:
    """Return the stream header. FORMAT.md section 9.3."""
    return pack_stream_header(params)


def unpack_params(spec: StreamSpec, data: BytesLike) -> KVR1Params:
    """Read a stream header of the stream `spec`."""
    quantiser, _ = unpack_stream_header(
        spec, data, "KVR1 stream header", n_classes=N_CLASSES, max_sink_div=MAX_SINK_DIV
    )
    return KVR1Params.extend(quantiser)
