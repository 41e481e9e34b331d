"""Group `quality`: what FibQuant does to K, V and attention, beside codecs of as many bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from kvcodecs.codec import CodecConfig, codec_for
from kvcodecs.errors import InvalidArgument
from kvcodecs.fibquant import FibQuant
from kvcodecs.fibquant.config import Axis
from kvcodecs.fibquant.quality import F64, cosine, kl_divergence
from kvcodecs.ggml import GGML
from kvcodecs.ggml.schemes import scheme_by_name
from kvcodecs.kvr1 import KVR1
from kvcodecs.plan import available_cpus
from kvcodecs.spec import F32, KINDS, StreamSpec
from kvcodecs.tkv1 import TKV1

from kvtools.bench.codec import (
    CodedStream,
    Source,
    block_tokens,
    check_bound,
    decode_all,
    empty_like,
    encode_all,
)
from kvtools.bench.heads import N_QUERIES, Heads, attention_weights, heads_of
from kvtools.bench.rows import Row
from kvtools.bench.tables import show_by_name
from kvtools.sample import Sample

GROUP = "quality"
CODEBOOKS = ((2, 16), (2, 64), (2, 256), (4, 32), (4, 256), (8, 256))
#: The rate of the first is that of the others to compare with.
AXES: tuple[Axis, ...] = ("per_channel", "role_aware", "per_token")
SCHEMES = ("q4_0", "iq4_nl", "q3_k", "iq3_xxs", "q2_k", "iq2_xs", "iq1_m")
#: Tries to ask KVR1 and TKV1 for a rate: what they are asked for is that of a few blocks.
_TRIES = 4
_UNITS = {
    "bits": "bits per value",
    "K cosine": "",
    "V cosine": "",
    "attention cosine": "",
    "KL": "nats",
}
_LEGEND = (
    "Bits count every byte: frames, stream headers, and FibQuant's codebooks once. K before RoPE.\n"
    f"Attention: what the last {N_QUERIES} tokens read; KL: of their weights, mean of queries.\n"
    "KVR1 and TKV1 have the rate of the per_channel or ggml line above them, of K and V each."
)


@dataclass(frozen=True, slots=True)
class _Data:
    """Streams, K and V in turns, the same heads side by side, and what their queries read."""

    sources: list[Source]
    heads: Heads
    weights: F64
    read: F64

    @classmethod
    def of(cls, heads: Heads, per_stream: int) -> _Data:
        sources = [
            # K is in coded order already: its stream needs no RoPE here.
            Source(first // per_stream, StreamSpec(kind, per_stream, x.shape[2]), part)
            for first in range(0, len(heads.k), per_stream)
            for kind, x in zip(KINDS, (heads.k, heads.v), strict=True)
            for part in (x[first : first + per_stream],)
        ]
        weights = attention_weights(heads, heads.k)
        return cls(sources, heads, weights, weights @ heads.v.astype(np.float64))


def measure_quality(sample: Sample) -> list[Row]:
    """Code the sample as archives do, with every codec.

    Schemes of ggml whose blocks are wider than a token of a layer take heads of several layers side
    by side; a note says so.
    """
    heads, block = heads_of(sample, 1), block_tokens(sample)
    per_layer, _, head_dim = sample.k[0].shape
    data = _Data.of(heads, per_layer)
    rows: list[Row] = []

    def add(name: str, config: CodecConfig, data: _Data = data, note: str = "") -> float:
        found = _found(config, data, block)
        rows.extend(
            Row(GROUP, f"{name}, {what}", x, _UNITS[what], note) for what, x in found.items()
        )
        return found["bits"]

    def add_rivals(bits: float, beside: str) -> None:
        for kind in (KVR1, TKV1):
            config = _at_rate(kind, bits, data, block)
            if config is not None:
                add(f"{kind.codec} beside {beside}", config)

    for k, n in CODEBOOKS:
        if head_dim % k or head_dim == k:
            continue
        rates = [add(f"fibquant.{k}x{n} {axis}", FibQuant(k, n, axis=axis)) for axis in AXES]
        add_rivals(rates[0], f"{k}x{n}")
    for scheme in map(scheme_by_name, SCHEMES):
        name, config = f"ggml.{scheme.name}", GGML(scheme.name)
        if per_layer * head_dim % scheme.block_values == 0:
            rate = add(name, config)
            if scheme.name == "q4_0":
                add_rivals(rate, "q4_0")
        elif len(heads.k) * head_dim >= scheme.block_values:
            some = heads_of(sample, scheme.block_values)
            note = f"{len(some.k)} heads of all layers side by side"
            add(name, config, _Data.of(some, len(some.k)), note)
    return rows


def show_quality(rows: Sequence[Row]) -> None:
    """Print one line per codec, and what the columns are."""
    show_by_name("codec", rows, _UNITS, _LEGEND)


def _found(config: CodecConfig, data: _Data, block: int) -> dict[str, float]:
    streams = encode_all(config, data.sources, block)
    out = empty_like(streams, np.float32)
    decode_all(config, streams, out, available_cpus())
    for stream, x in zip(streams, out, strict=True):
        check_bound(stream, x, config)
    k, v = (np.concatenate(out[first::2]) for first in range(2))
    weights = attention_weights(data.heads, k)
    return {
        "bits": _rate(config, streams),
        "K cosine": _cosine(data.heads.k, k),
        "V cosine": _cosine(data.heads.v, v),
        "attention cosine": cosine(data.read, weights @ v.astype(np.float64)),
        "KL": float(kl_divergence(data.weights, weights).mean()),
    }


def _rate(config: CodecConfig, streams: Sequence[CodedStream]) -> float:
    """Return bits per value of everything, and of what streams share once."""
    codec = codec_for(config)
    shared: dict[bytes, bytes] = {}
    for stream in streams:
        shared |= codec.shared(stream.params)
    n_bytes = sum(stream.n_bytes for stream in streams) + sum(map(len, shared.values()))
    return 8 * n_bytes / sum(stream.source.x.size for stream in streams)


def _at_rate(
    kind: type[KVR1] | type[TKV1], bits: float, data: _Data, block: int
) -> CodecConfig | None:
    """Return what takes nearest to `bits`, every byte counted; None if that is too little."""
    asked, found = bits, []
    for _ in range(_TRIES):
        config = kind(bpv=asked)
        try:
            rate = _rate(config, encode_all(config, data.sources, block))
        except InvalidArgument:
            break
        found.append((abs(rate - bits), config))
        asked += bits - rate
    return min(found, key=lambda each: each[0])[1] if found else None


def _cosine(x: F32, y: F32) -> float:
    return cosine(x.astype(np.float64), y.astype(np.float64))
