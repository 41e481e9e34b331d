"""Streams coded to frames in memory, without an archive, and checked."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.codec import CodecConfig, codec_for, config_from_json
from kvcodecs.errors import Corrupt
from kvcodecs.frame import header_tag, open_frame, pack_frame
from kvcodecs.plan import Plan
from kvcodecs.quantiser import QuantiserConfig
from kvcodecs.spec import KINDS, StreamSpec
from kvcodecs.tensor import as_float32

from kvstore.layout import auto_block_tokens
from kvtools.sample import Sample

Floats = npt.NDArray[Any]

_RIVALS = {"tkv1": "kvr1", "kvr1": "tkv1"}
_SHARED = {field.name for field in fields(QuantiserConfig)}


@dataclass(frozen=True, slots=True)
class Source:
    """Values of one stream, ``[heads][tokens][head_dim]`` of the coded domain, any float dtype."""

    layer: int
    spec: StreamSpec
    x: Floats

    @property
    def name(self) -> str:
        return f"layer {self.layer} {self.spec.kind}"


@dataclass(frozen=True, slots=True)
class CodedStream:
    """One stream as an archive stores it: its parameters, their header, its frames."""

    source: Source
    params: Any
    header: bytes
    frames: list[bytes]

    @property
    def n_bytes(self) -> int:
        """Every byte: stream header, and frames with their headers and checksums."""
        return len(self.header) + sum(map(len, self.frames))


def sources_of(sample: Sample, dtype: type[np.float32] | None = np.float32) -> list[Source]:
    """Every stream of a sample, layer by layer; `dtype` None keeps the sample's own."""
    return [
        Source(layer, sample.model.stream(layer, kind), x if dtype is None else as_float32(x))
        for layer in range(sample.model.n_layers)
        for kind, x in zip(KINDS, (sample.k[layer], sample.v[layer]), strict=True)
    ]


def block_tokens(sample: Sample) -> int:
    """Return the block size that archives choose for the sample's first layer."""
    return auto_block_tokens(sample.model.stream(0, "k"))


def rivals(config: CodecConfig) -> dict[str, CodecConfig]:
    """Return by name what is measured in one run: `config`, and KVR1 or TKV1 asked for the same.

    Only `config` where there is nothing to compare: another codec, or options the other lacks.
    """
    found = {config.codec: config}
    if isinstance(config, QuantiserConfig):
        shared: dict[str, object] = {"codec": _RIVALS[config.codec]}
        shared |= {k: v for k, v in config.to_json().items() if k in _SHARED}
        # What one codec takes may be beyond the limits of the other.
        with contextlib.suppress(Corrupt):
            found[_RIVALS[config.codec]] = config_from_json(shared)
    return found


def encode_stream(
    config: CodecConfig, source: Source, block_tokens: int, n_threads: int = 1
) -> CodedStream:
    """Fit, check and encode one stream."""
    codec = codec_for(config)
    x, spec = as_float32(source.x), source.spec
    params = codec.fit(config, spec, lambda: [x])
    codec.check(params, x, 0)
    header = codec.pack(params)
    tag = header_tag(header)
    frames = []
    for first in range(0, x.shape[1], block_tokens):
        block = x[:, first : first + block_tokens]
        encoder = codec.encoder(params, first)
        encoder.push(block, n_threads)
        frames.append(
            pack_frame(
                codec=codec.number,
                kind=spec.kind,
                owner=1,
                layer=source.layer,
                first_token=first,
                n_tokens=block.shape[1],
                payload=encoder.payload(),
                header_tag=tag,
                error=encoder.error,
            )
        )
    return CodedStream(source, params, header, frames)


def encode_all(
    config: CodecConfig, sources: Sequence[Source], block_tokens: int, n_threads: int = 1
) -> list[CodedStream]:
    """Encode every stream, one after the other."""
    return [encode_stream(config, source, block_tokens, n_threads) for source in sources]


def decode_all(
    config: CodecConfig,
    streams: Sequence[CodedStream],
    outputs: Sequence[Floats],
    n_threads: int,
    simd: str | None = None,
) -> None:
    """Open every frame, checksums included, and decode all of them into `outputs`."""
    codec = codec_for(config)
    plan = Plan()
    for stream, out in zip(streams, outputs, strict=True):
        for frame in stream.frames:
            header, payload = open_frame(frame)
            first, stop = header.first_token, header.stop_token
            plan.add(
                codec, stream.params, payload,
                first_token=first, n_tokens=header.n_tokens, start=first, stop=stop,
                out=out[:, first:stop],
            )  # fmt: skip
    plan.run(n_threads, simd=simd)


def empty_like(streams: Sequence[CodedStream], dtype: type[np.floating[Any]]) -> list[Floats]:
    """Return an output for every stream."""
    return [np.empty(stream.source.x.shape, dtype) for stream in streams]


def check_bound(stream: CodedStream, out: Floats, config: CodecConfig) -> None:
    """Raise `Corrupt` unless every value is within the bound of its input.

    Where the codec states none, within the largest error that its frames say.
    """
    codec = codec_for(config)
    step = codec.step(stream.params)
    error = np.abs(out - as_float32(stream.source.x))
    limit = 0.0 if step is None else step / 2
    if step is None and not codec.lossless:
        limit = max(open_frame(frame)[0].error.max_error for frame in stream.frames)
    sink = 0 if step is None else stream.params.sink
    worst, worst_sink = error[:, sink:].max(initial=0.0), error[:, :sink].max(initial=0.0)
    fine = limit / stream.params.sink_div if sink else 0.0
    if not (worst <= limit and worst_sink <= fine):  # NaN is no success
        raise Corrupt(
            f"{stream.source.name}: error {worst:g} of at most {limit:g}, "
            f"sinks {worst_sink:g} of at most {fine:g}"
        )
