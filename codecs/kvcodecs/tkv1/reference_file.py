"""Statistics and files of the readable TKV1 reference, as FORMAT.md sections 3.2 and 6."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace

import numpy as np

from ..errors import Corrupt, Unsupported
from ..spec import F32
from .reference import (
    N_CLASSES,
    VALUE_LIMIT,
    Params,
    Reader,
    decode_block,
    encode_block,
    put_varint,
    round_away,
    zigzag,
)

FLOAT32_TINY, FLOAT32_MAX = 2.0**-126, 2.0**128 - 2.0**104

# --- Section 3.2: statistics --------------------------------------------------------------


def fit(params: Params, y: F32) -> Params:
    """Return `params` with the statistics of the prefill `y` ``[heads][n][head_dim]``.

    All sums are float64 and run token by token.
    """
    heads, n, head_dim = y.shape
    rows = y.astype(np.float64).transpose(1, 0, 2).reshape(n, heads * head_dim)
    mean = np.zeros(heads * head_dim)
    for row in rows:
        mean += row
    mean /= n
    c0, c1 = np.zeros_like(mean), np.zeros_like(mean)
    before = None
    for row in rows:
        r = row - mean
        c0 += r * r
        if before is not None:
            c1 += r * before
        before = r
    rho, var = [], []
    for zero, one in zip(c0.tolist(), c1.tolist(), strict=True):
        a = one / zero if params.ar and zero > 0.0 else 0.0
        rho.append(min(max(round_away(16.0 * a), 0), 15))
        var.append(zero / n * max(1.0 - (rho[-1] / 16.0) ** 2, 0.05))
    classes = []
    for j in range(heads * head_dim):
        v = var[j]
        if params.kind == "k":
            pair = j - j % head_dim + (j + head_dim // 2) % head_dim
            v = 0.5 * (v + var[pair])
        spread = math.log2(max(math.sqrt(v) / params.step, 1e-9))
        classes.append(min(max(round_away(4.0 * spread) + 8, 0), N_CLASSES - 1))
    mu = tuple(round_away(m / float(params.unit)) for m in mean.tolist())
    return replace(params, mu=mu, rho=tuple(rho), classes=tuple(classes))


# --- Section 6: the TKV1 file, lane layout ------------------------------------------------


@dataclass(frozen=True)
class File:
    """A parsed TKV1 file: parameters and the payload of every block."""

    params: Params
    theta: float
    pre_rope: bool
    block_tokens: int
    n_tokens: int
    payloads: tuple[bytes, ...]

    def span(self, block: int) -> tuple[int, int]:
        """Return the first token and the number of tokens of a block."""
        first = block * self.block_tokens
        return first, min(self.block_tokens, self.n_tokens - first)

    def decode(self) -> F32:
        """Return all values, ``[heads][n_tokens][head_dim]`` float32."""
        blocks = [
            decode_block(self.params, payload, *self.span(i))
            for i, payload in enumerate(self.payloads)
        ]
        empty = np.empty((self.params.heads, 0, self.params.head_dim), np.float32)
        return np.concatenate([empty, *blocks], axis=1)


def encode_file(
    params: Params,
    x: F32,
    *,
    block_tokens: int,
    prefill: int | None = None,
    theta: float = 1e5,
    pre_rope: bool = False,
) -> bytes:
    """Return the lane-layout file of `x`, statistics from its first `prefill` tokens."""
    params = fit(params, x[:, :prefill])
    n = x.shape[1]
    payloads = [
        encode_block(params, x[:, at : at + block_tokens], at) for at in range(0, n, block_tokens)
    ]
    return pack_file(File(params, theta, pre_rope, block_tokens, n, tuple(payloads)))


def pack_file(file: File) -> bytes:
    """Return the bytes of a lane-layout file."""
    p = file.params
    split = p.n_groups > 1
    flags = (p.kind == "v") | file.pre_rope << 1 | p.ar << 2 | 1 << 3 | split << 4
    out = bytearray(b"TKV1")
    out.append(flags)
    put_varint(out, p.heads)
    put_varint(out, p.head_dim)
    out += struct.pack("<dd", file.theta, p.step)
    for value in (p.sink, p.sink_div, file.block_tokens, file.n_tokens):
        put_varint(out, value)
    if split:
        put_varint(out, p.lane_width)
    for mu, rho, klass in zip(p.mu, p.rho, p.classes, strict=True):
        put_varint(out, zigzag(mu))
        out += bytes([klass, rho] if p.ar else [klass | 0x80])
    return bytes(out) + b"".join(file.payloads)


def parse_file(data: bytes) -> File:
    """Read a lane-layout file; nothing is decoded yet."""
    r = Reader(data)
    if r.take(4) != b"TKV1":
        raise Corrupt("not a TKV1 file")
    flags = r.u8()
    if flags & 0xE0 or not flags & 0x08:
        raise Unsupported(f"flags {flags:#04x}")
    ar = bool(flags & 0x04)
    heads, head_dim = r.varint(), r.varint()
    theta, step = r.f64(), r.f64()
    sink, sink_div, block_tokens, n_tokens = r.varint(), r.varint(), r.varint(), r.varint()
    lane_channels = r.varint() if flags & 0x10 else 0
    if head_dim < 2 or head_dim % 2 or 0 in (heads, sink_div, block_tokens):
        raise Corrupt("bad header")
    # A NaN fails this as well.
    if not FLOAT32_TINY <= step / sink_div <= FLOAT32_MAX / VALUE_LIMIT:
        raise Corrupt("bad step")
    if lane_channels % 2 or (lane_channels and head_dim % lane_channels):
        raise Corrupt("bad lane width")
    mu, rho, classes = [], [], []
    for _ in range(heads * head_dim):
        mu.append(r.svarint())
        classes.append(r.u8() & 0x7F)
        rho.append(min(r.u8(), 15) if ar else 0)
    if any(abs(m) >= VALUE_LIMIT for m in mu) or any(c >= N_CLASSES for c in classes):
        raise Corrupt("mean or class out of range")
    params = Params(
        kind="v" if flags & 0x01 else "k",
        heads=heads,
        head_dim=head_dim,
        step=step,
        sink=sink,
        sink_div=sink_div,
        ar=ar,
        lane_channels=lane_channels,
        mu=tuple(mu),
        rho=tuple(rho),
        classes=tuple(classes),
    )
    payloads = []
    for _ in range(-(-n_tokens // block_tokens)):
        start = r.at
        _skip_lanes(r, heads * params.n_groups)
        payloads.append(data[start : r.at])
    if r.at != len(data):
        raise Corrupt(f"{len(data) - r.at} bytes after the last block")
    pre_rope = bool(flags & 0x02)
    return File(params, theta, pre_rope, block_tokens, n_tokens, tuple(payloads))


def _skip_lanes(reader: Reader, n_lanes: int) -> None:
    for _ in range(n_lanes):
        reader.take(reader.varint())
