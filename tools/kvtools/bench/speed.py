"""Group `codec`: how fast TKV1 and KVR1 encode and decode, in one run on the same values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from kvcodecs.blocks import SIMD_LEVELS
from kvcodecs.codec import CodecConfig
from kvcodecs.errors import Corrupt
from kvcodecs.plan import available_cpus

from kvstore import Model
from kvtools.bench.codec import (
    Source,
    block_tokens,
    check_bound,
    decode_all,
    empty_like,
    encode_all,
    rivals,
    sources_of,
)
from kvtools.bench.rows import Clock, Row, Timings, interleaved
from kvtools.sample import Sample

#: As many layers are timed as have so many values for each core: no action takes long then.
VALUES_PER_CORE = 1 << 20
ROUNDS_PER_REP = 10
LEAST_SECONDS = 1e-2
MEMCPY = "memcpy"
_NOTES: dict[Clock, str] = {"cpu": "CPU time, one thread", "wall": "wall time"}


class _Contender:
    """A codec, its frames of the sample, and what it is timed at.

    Attributes
    ----------
    config, streams
        The codec and what it made of the sample.
    truth
        The streams decoded to float32 on one thread, within the bound.
    actions
        By name. Each was run once, with the same result as the others.
    """

    def __init__(self, config: CodecConfig, sample: Sample) -> None:
        self.config = config
        self.actions: dict[str, Callable[[], object]] = {}
        sources, block = sources_of(sample), block_tokens(sample)
        self.streams = encode_all(config, sources, block)
        self.truth = empty_like(self.streams, np.float32)
        decode_all(config, self.streams, self.truth, 1)
        for stream, x in zip(self.streams, self.truth, strict=True):
            check_bound(stream, x, config)
        self._encodings(sources, sources_of(sample, None), block)
        for dtype in (np.float16, np.float32):
            self._decodings(dtype)

    @property
    def name(self) -> str:
        return self.config.codec

    @property
    def bits_per_value(self) -> float:
        n_values = sum(stream.source.x.size for stream in self.streams)
        return 8 * sum(stream.n_bytes for stream in self.streams) / n_values

    def _encodings(self, sources: Sequence[Source], own: Sequence[Source], block: int) -> None:
        """Add the ways to encode: float32, and the sample's own dtype."""
        n_cores, dtype = available_cpus(), own[0].x.dtype
        ways = {"encode": (sources, 1)}
        if dtype != np.float32:
            ways[f"encode from {dtype}"] = (own, 1)
        if n_cores > 1:
            ways[f"encode, {n_cores} threads"] = (sources, n_cores)
        for name, (values, n_threads) in ways.items():
            again = encode_all(self.config, values, block, n_threads)
            if [stream.frames for stream in again] != [stream.frames for stream in self.streams]:
                raise Corrupt(f"{self.name} {name}: other frames")
            self.actions[name] = partial(encode_all, self.config, values, block, n_threads)

    def _decodings(self, dtype: type[np.floating[Any]]) -> None:
        """Add the ways to decode to `dtype`: every SIMD level, and all cores."""
        n_cores, out = available_cpus(), empty_like(self.streams, dtype)
        ways: dict[str, tuple[int, str | None]] = {"": (1, None)}
        if self.name == "kvr1":
            ways |= {f", {level}": (1, level) for level in SIMD_LEVELS}
        if n_cores > 1:
            ways[f", {n_cores} threads"] = (n_cores, None)
        for suffix, (n_threads, simd) in ways.items():
            name = f"decode to {out[0].dtype}{suffix}"
            for values in out:
                values[...] = np.nan
            decode_all(self.config, self.streams, out, n_threads, simd)
            for stream, x, y in zip(self.streams, self.truth, out, strict=True):
                if x.astype(dtype).tobytes() != y.tobytes():
                    raise Corrupt(f"{self.name} {name}: {stream.source.name} differs")
            self.actions[name] = partial(
                decode_all, self.config, self.streams, out, n_threads, simd
            )


def measure_codec(config: CodecConfig, sample: Sample, reps: int) -> list[Row]:
    """Encode and decode speed from values to frames and back, of `config` and its rival."""
    sample = timed_layers(sample)
    contenders = [_Contender(each, sample) for each in rivals(config).values()]
    source, target = np.ones((2, sample.n_values), np.float16)
    actions = {f"{c.name} {what}": action for c in contenders for what, action in c.actions.items()}
    actions[MEMCPY] = lambda: np.copyto(target, source)
    times = interleaved(list(actions.values()), reps * ROUNDS_PER_REP, least_seconds=LEAST_SECONDS)
    return _rows(contenders, list(actions), times, sample.n_values)


def timed_layers(sample: Sample) -> Sample:
    """Return layers spread over the model, with enough values for every core."""
    n_layers = sample.model.n_layers
    wanted = VALUES_PER_CORE * available_cpus() * n_layers / sample.n_values
    at = np.linspace(0, n_layers - 1, min(math.ceil(wanted), n_layers)).astype(int)
    model = Model(
        name=sample.model.name,
        layers=tuple(sample.model.layers[i] for i in at),
        rope=sample.model.rope,
    )
    k, v = ([tensors[i] for i in at] for tensors in (sample.k, sample.v))
    return replace(sample, model=model, k=k, v=v)


def _rows(
    contenders: Sequence[_Contender], names: list[str], times: Timings, n_values: int
) -> list[Row]:
    """Sizes and speeds, then what they are of memcpy, of one thread, and of TKV1."""
    rows = [
        Row("codec", f"{c.name} size", c.bits_per_value, "bits per value", "every byte")
        for c in contenders
    ]
    for index, name in enumerate(names):
        rate = n_values / times.seconds(index, _clock(name)) / 1e6
        rows.append(Row("codec", name, rate, "Mvalues/s", _NOTES[_clock(name)]))

    def compare(name: str, other: str) -> None:
        clock = _clock(name)
        ratio = times.ratio(names.index(other), names.index(name), clock)
        rows.append(Row("codec", f"{name} / {other}", ratio, "ratio", _NOTES[clock]))

    for contender in contenders:
        for what in ("encode", "decode to float16"):
            compare(f"{contender.name} {what}", MEMCPY)
    for name in names:
        if _clock(name) == "wall":
            compare(name, name.rpartition(", ")[0])
    for name in names:
        rival = name.replace("kvr1", "tkv1")
        if rival != name and rival in names:
            compare(name, rival)
    return rows


def _clock(name: str) -> Clock:
    """CPU time leaves the neighbours of one thread out, but not what several threads gain."""
    return "wall" if name.endswith("threads") else "cpu"
