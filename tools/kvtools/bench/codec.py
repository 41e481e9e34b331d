"""Group `codec`: frames in memory, without an archive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.codec import CodecConfig, codec_for
from kvcodecs.errors import Corrupt
from kvcodecs.frame import open_frame, pack_frame
from kvcodecs.plan import Plan, available_cpus
from kvcodecs.spec import F32, KINDS, Kind, StreamSpec

from kvstore.layout import auto_block_tokens
from kvtools.bench.rows import Row, interleaved_seconds
from kvtools.sample import Sample


@dataclass(frozen=True, slots=True)
class CodedStream:
    """One stream of the data: its values, its parameters and its frames."""

    layer: int
    kind: Kind
    spec: StreamSpec
    x: F32
    params: Any
    frames: list[bytes]


def encode_stream(
    config: CodecConfig,
    spec: StreamSpec,
    layer: int,
    x: F32,
    block_tokens: int,
    n_threads: int = 1,
) -> CodedStream:
    """Fit, check and encode one stream [heads][tokens][head_dim] of the coded domain."""
    codec = codec_for(config)
    params = codec.fit(config, spec, lambda: [x])
    codec.check(params, x, 0)
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
                layer=layer,
                first_token=first,
                n_tokens=block.shape[1],
                payload=encoder.payload(),
                error=encoder.error,
            )
        )
    return CodedStream(layer, spec.kind, spec, x, params, frames)


def block_tokens(sample: Sample) -> int:
    """Return the block size that archives choose for the sample's first layer."""
    return auto_block_tokens(sample.model.stream(0, "k"))


def encode_all(
    config: CodecConfig, sample: Sample, block: int, n_threads: int = 1
) -> list[CodedStream]:
    """Encode every stream of the sample, one after the other."""
    return [
        encode_stream(config, sample.model.stream(layer, kind), layer, x, block, n_threads)
        for layer, kind, x in streams_of(sample)
    ]


def streams_of(sample: Sample) -> list[tuple[int, Kind, F32]]:
    """Every stream of a sample as (layer, kind, float32 values before RoPE)."""
    return [
        (layer, kind, np.ascontiguousarray(tensors[layer], np.float32))
        for layer in range(sample.model.n_layers)
        for kind, tensors in zip(KINDS, (sample.k, sample.v), strict=True)
    ]


def decode_all(
    config: CodecConfig,
    streams: list[CodedStream],
    outputs: list[npt.NDArray[Any]],
    n_threads: int,
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
    plan.run(n_threads)


def check_bound(stream: CodedStream, out: F32, config: CodecConfig) -> None:
    """Raise `Corrupt` unless every value is within the bound of its input."""
    step = codec_for(config).step(stream.params)
    error = np.abs(out - stream.x)
    limit = 0.0 if step is None else step / 2
    sink = 0 if step is None else stream.params.sink
    worst, worst_sink = error[:, sink:].max(initial=0.0), error[:, :sink].max(initial=0.0)
    fine = limit / stream.params.sink_div if sink else 0.0
    if not (worst <= limit and worst_sink <= fine):  # NaN is no success
        raise Corrupt(
            f"layer {stream.layer} {stream.kind}: error {worst:g} of at most {limit:g}, "
            f"sinks {worst_sink:g} of at most {fine:g}"
        )


def measure_codec(config: CodecConfig, sample: Sample, block: int, reps: int) -> list[Row]:
    """Encode and decode speed from values to frames and back."""
    streams = encode_all(config, sample, block)
    n_values = sum(stream.x.size for stream in streams)
    n_cores = available_cpus()
    one: list[npt.NDArray[Any]] = [np.empty_like(s.x) for s in streams]
    many: list[npt.NDArray[Any]] = [np.empty_like(s.x) for s in streams]
    half: list[npt.NDArray[Any]] = [np.empty(s.x.shape, np.float16) for s in streams]
    decode_all(config, streams, one, 1)
    decode_all(config, streams, many, n_cores)
    decode_all(config, streams, half, n_cores)
    for stream, x, y, z in zip(streams, one, many, half, strict=True):
        check_bound(stream, x, config)
        if x.tobytes() != y.tobytes() or x.astype(np.float16).tobytes() != z.tobytes():
            raise Corrupt(f"layer {stream.layer} {stream.kind}: decodings differ")

    parallel = encode_all(config, sample, block, n_cores)
    if [stream.frames for stream in parallel] != [stream.frames for stream in streams]:
        raise Corrupt("frames depend on the number of threads")

    source, target = np.ones((2, n_values), np.float16)
    actions = {
        "encode": lambda: encode_all(config, sample, block),
        f"encode, {n_cores} threads": lambda: encode_all(config, sample, block, n_cores),
        "decode": lambda: decode_all(config, streams, one, 1),
        f"decode, {n_cores} threads": lambda: decode_all(config, streams, many, n_cores),
        "decode to float16": lambda: decode_all(config, streams, half, 1),
        "memcpy": lambda: np.copyto(target, source),
    }
    notes = {
        "encode": "fit, check, code, frame; one thread",
        "decode": "frames to float32, checksums included; one thread",
        "decode to float16": "one thread",
        "memcpy": "float16 bytes, one thread",
    }
    times = interleaved_seconds(list(actions.values()), reps)
    rows = []
    for name, seconds in zip(actions, times, strict=True):
        note = notes.get(name, "")
        rows.append(Row("codec", name, n_values / seconds / 1e6, "Mvalues/s", note))
        rows.append(Row("codec", name, 2 * n_values / seconds / 1e9, "GB/s of float16", note))
        if name != "memcpy":
            rows.append(Row("codec", f"{name} / memcpy", times[-1] / seconds, "ratio"))
    for index, name in enumerate(("encode", "decode")):
        speed_up = times[2 * index] / times[2 * index + 1]
        rows.append(Row("codec", f"{name}, {n_cores} threads / one", speed_up, "ratio"))
    return rows
