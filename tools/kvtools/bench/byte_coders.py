"""Group `peers`: quantising to int8 and a general compressor, against KVR1 at its error bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.codec import CodecConfig
from kvcodecs.errors import Corrupt
from kvcodecs.spec import F32

from kvtools.bench.codec import (
    CodedStream,
    block_tokens,
    decode_all,
    empty_like,
    encode_all,
    rivals,
    sources_of,
)
from kvtools.bench.rows import Row, interleaved
from kvtools.bench.speed import LEAST_SECONDS, ROUNDS_PER_REP, timed_layers
from kvtools.sample import Sample

#: Where a block begins, as in `kvtools.bench.peers`, and the step of a stream.
_INDEX_BYTES, _STEP_BYTES = 4, 4
_MAX_CODE = 127
#: Products of float32 are rounded, so that a value may be this much further off, in steps.
_ROUNDING = 1e-4


@dataclass(frozen=True, slots=True)
class _Packed:
    """A block: compressed codes, and the values beyond them with their positions."""

    data: bytes
    at: npt.NDArray[np.uint32]
    beyond: npt.NDArray[np.int32]

    @property
    def n_bytes(self) -> int:
        return len(self.data) + self.at.nbytes + self.beyond.nbytes + _INDEX_BYTES


@dataclass(frozen=True, slots=True)
class _Peer:
    """A compressor of numcodecs, after ``rint(x / step)`` by numpy.

    Attributes
    ----------
    zigzag
        Small codes of either sign become small bytes, for what sorts their bits.
    """

    name: str
    coder: Any
    zigzag: bool = False

    def encode(self, x: F32, step: float) -> _Packed:
        """Quantise and compress ``[heads][tokens][head_dim]``."""
        steps = np.rint(x * np.float32(1 / step))
        at = np.empty(0, np.uint32)
        if max(steps.max(), -steps.min()) > _MAX_CODE:
            at = np.flatnonzero(np.abs(steps) > _MAX_CODE).astype(np.uint32)
        beyond = steps.ravel()[at].astype(np.int32)
        codes = np.clip(steps, -_MAX_CODE, _MAX_CODE, out=steps).astype(np.int8)
        if self.zigzag:
            codes = (codes << 1) ^ (codes >> 7)
        return _Packed(bytes(self.coder.encode(codes)), at, beyond)

    def decode(self, packed: _Packed, step: float, out: F32) -> None:
        """Decompress into the values that were nearest to the input."""
        codes = np.frombuffer(self.coder.decode(packed.data), np.int8).reshape(out.shape)
        if self.zigzag:
            codes = ((codes.view(np.uint8) >> 1).view(np.int8)) ^ -(codes & 1)
        np.multiply(codes, np.float32(step), out=out)
        if packed.at.size:
            out[np.unravel_index(packed.at, out.shape)] = packed.beyond * np.float32(step)


def measure_peers(config: CodecConfig, sample: Sample, reps: int) -> list[Row]:
    """Compare KVR1 with compressors that any program has at hand, all from and to float32.

    The same steps and blocks for all. KVR1 is timed with its statistics, checks and checksums; the
    others have none.
    """
    ours = rivals(config).get("kvr1")
    if ours is None:
        return []
    sample = timed_layers(sample)
    sources, block = sources_of(sample), block_tokens(sample)
    streams = encode_all(ours, sources, block)
    out: list[F32] = empty_like(streams, np.float32)
    actions: list[Callable[[], object]] = [
        partial(encode_all, ours, sources, block),
        partial(decode_all, ours, streams, out, 1),
    ]
    names = ["kvr1"]
    rows = _sizes("kvr1", streams, [stream.n_bytes for stream in streams])
    for peer in _peers():
        packed = _encode(peer, streams, block)
        _decode(peer, streams, packed, out, block)
        _check(peer, streams, out)
        names.append(peer.name)
        n_bytes = [sum(part.n_bytes for part in parts) + _STEP_BYTES for parts in packed]
        rows += _sizes(peer.name, streams, n_bytes)
        actions.append(partial(_encode, peer, streams, block))
        actions.append(partial(_decode, peer, streams, packed, out, block))
    times = interleaved(actions, reps * ROUNDS_PER_REP, least_seconds=LEAST_SECONDS)
    for way, what in enumerate(("encode", "decode")):
        for index, name in enumerate(names):
            rate = sample.n_values / times.seconds(2 * index + way, "cpu") / 1e6
            rows.append(Row("peers", f"{name}, {what}", rate, "Mvalues/s", "CPU time, one thread"))
        for index, name in enumerate(names[1:], 1):
            ratio = times.ratio(2 * index + way, way, "cpu")
            rows.append(Row("peers", f"kvr1 / {name}, {what}", ratio, "ratio"))
    return rows


def _peers() -> list[_Peer]:
    from numcodecs import blosc
    from numcodecs.lz4 import LZ4
    from numcodecs.zstd import Zstd

    blosc.use_threads = False
    shuffled = blosc.Blosc("zstd", clevel=5, shuffle=blosc.BITSHUFFLE)
    return [
        _Peer("zstd-1", Zstd(1)),
        _Peer("zstd-9", Zstd(9)),
        _Peer("lz4", LZ4()),
        _Peer("blosc bitshuffle zstd-5", shuffled, zigzag=True),
    ]


def _encode(peer: _Peer, streams: Sequence[CodedStream], block: int) -> list[list[_Packed]]:
    return [
        [
            peer.encode(s.source.x[:, first : first + block], s.params.step)
            for first in range(0, s.source.x.shape[1], block)
        ]
        for s in streams
    ]


def _decode(
    peer: _Peer,
    streams: Sequence[CodedStream],
    packed: Sequence[Sequence[_Packed]],
    outputs: Sequence[F32],
    block: int,
) -> None:
    for stream, parts, out in zip(streams, packed, outputs, strict=True):
        for index, part in enumerate(parts):
            at = index * block
            peer.decode(part, stream.params.step, out[:, at : at + block])


def _check(peer: _Peer, streams: Sequence[CodedStream], outputs: Sequence[F32]) -> None:
    for stream, out in zip(streams, outputs, strict=True):
        worst = np.abs(out - stream.source.x).max(initial=0.0) / stream.params.step
        if not worst <= 0.5 + _ROUNDING:
            raise Corrupt(f"{stream.source.name}: {peer.name} is {worst:g} steps off")


def _sizes(name: str, streams: Sequence[CodedStream], n_bytes: Sequence[int]) -> list[Row]:
    """Sizes of all, and of the first layer alone."""
    rows = []
    notes = {"size": "every byte", "size of layer 0": "a token's values recur with the token"}
    for (what, note), last in zip(notes.items(), (1 << 32, 0), strict=True):
        here = [i for i, stream in enumerate(streams) if stream.source.layer <= last]
        n_values = sum(streams[i].source.x.size for i in here)
        rate = 8 * sum(n_bytes[i] for i in here) / n_values
        rows.append(Row("peers", f"{name}, {what}", rate, "bits per value", note))
    return rows
