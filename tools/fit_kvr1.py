"""Fit the frequency tables of KVR1 to a dump of real KV, and measure them on another.

The tables are part of the format (codecs/FORMAT.md section 9.2), so what this writes is frozen with
the first release: the script documents where they came from and serves a second set, if ever.

    python tools/fit_kvr1.py code.safetensors frequencies.u16 --measure prose.safetensors
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvcodecs.codec import codec_for
from kvcodecs.kvr1.tables import (
    CLASS_OF_ONE,
    N_CLASSES,
    N_SYMBOLS,
    N_TABLES,
    shift_of,
    sink_classes,
    table_of,
)
from kvcodecs.spec import F32, Kind
from kvtools.sample import Sample, load_sample

from kvstore import TKV1

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

SINK, SINK_DIV = 4, 16
#: Steps over the RMS of a stream, a quarter octave apart, from about 1/128 to about 4: residuals of
#: real streams then fill every class that has a table of its own.
FIT_STEPS = tuple(2.0 ** (k / 4 + 1 / 8) for k in range(-28, 9))
MEASURED_STEPS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
TOTAL = 2048
#: What an escaped value costs beyond the escape symbol; 32 bits are too rare to matter.
ESCAPE_BITS = 16
#: Samples that a table gets from the tables beside it. It decides only where a table has
#: hardly any of its own, and keeps its tail from ending at the largest value that was seen.
NEIGHBOUR_SAMPLES = 4096.0

SHIFTS = np.array([shift_of(c) for c in range(N_CLASSES)])
TABLES = np.array([table_of(c) for c in range(N_CLASSES)])


@dataclass(frozen=True)
class Columns:
    """Channels of many streams side by side.

    Attributes
    ----------
    x : (tokens, columns)
        The coded domain.
    rms : (columns,)
        RMS of the column's stream over the tokens that its statistics come from.
    n_fit
        How many tokens those are: the first half, so that tables see the drift of real sessions.
    is_k : (columns,)
        Whether a column is of a K stream.
    """

    x: F64
    rms: F64
    n_fit: int
    is_k: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Statistics:
    """What a stream header holds, per column; FORMAT.md sections 3.2 and 9.1."""

    unit: F64
    mu: I64
    rho: I64
    cls: I64


def streams_of(sample: Sample) -> Iterator[tuple[int, Kind, F32]]:
    """Yield layer, kind and values of every stream."""
    for layer, (k, v) in enumerate(zip(sample.k, sample.v, strict=True)):
        yield layer, "k", np.ascontiguousarray(k, np.float32)
        yield layer, "v", np.ascontiguousarray(v, np.float32)


def load_columns(path: str) -> Columns:
    parts, rms, is_k = [], [], []
    for _, kind, x in streams_of(load_sample(path)):
        heads, n_tokens, head_dim = x.shape
        rows = x.transpose(1, 0, 2).reshape(n_tokens, heads * head_dim).astype(np.float64)
        parts.append(rows)
        rms.append(np.full(rows.shape[1], math.sqrt(float(np.mean(rows[: n_tokens // 2] ** 2)))))
        is_k.append(np.full(rows.shape[1], kind == "k"))
    values: F64 = np.concatenate(parts, axis=1)
    return Columns(values, np.concatenate(rms), len(values) // 2, np.concatenate(is_k))


def round_away(x: F64) -> F64:
    """Round to nearest, halves away from zero."""
    whole = np.trunc(x)
    return whole + np.copysign(np.abs(x - whole) >= 0.5, x)


def statistics(columns: Columns, step: F64) -> Statistics:
    x = columns.x[SINK : columns.n_fit]
    mean = np.add.reduce(x) / len(x)
    r = x - mean
    c0 = np.add.reduce(r * r)
    c1 = np.add.reduce(r[1:] * r[:-1])
    ratio = np.divide(c1, c0, out=np.zeros_like(c0), where=c0 > 0)
    rho = np.clip(round_away(16.0 * ratio), 0, 15)
    var = c0 / len(x) * np.maximum(1.0 - (rho / 16.0) ** 2, 0.05)
    spread = np.log2(np.maximum(np.sqrt(var) / step, 1e-9))
    cls = np.clip(round_away(4.0 * spread) + CLASS_OF_ONE, 0, N_CLASSES - 1)
    unit = (step / SINK_DIV).astype(np.float32).astype(np.float64)
    mu = round_away(mean / unit)
    return Statistics(unit, mu.astype(np.int64), rho.astype(np.int64), cls.astype(np.int64))


def residuals(columns: Columns, s: Statistics) -> Iterator[I64]:
    """Quantise in the closed loop of FORMAT.md section 4.5; yields one token after the other."""
    pred = s.mu
    for p, row in enumerate(columns.x):
        scale = 1 if p < SINK else SINK_DIV
        q = round_away((row / s.unit - pred) / scale).astype(np.int64)
        yield q
        previous = pred + q * scale
        pred = s.mu + ((s.rho * (previous - s.mu)) >> 4)


def symbols(q: I64, cls: I64) -> I64:
    """Return the symbol of every residual if no frequency is 0."""
    u = q >> SHIFTS[cls]
    return np.where(np.abs(u) <= 31, u + 32, 0)


def histograms(columns: Columns) -> F64:
    """Count symbols per table over all steps, without the sink.

    The mirror image of every residual is counted too: that left and right tails differ in one
    dump says nothing of the next. (Shifted tables are not symmetric: 0 stands for 0 to 2^s - 1.)
    """
    counts = np.zeros(N_TABLES * N_SYMBOLS)
    for rel_step in FIT_STEPS:
        s = statistics(columns, rel_step * columns.rms)
        first = TABLES[s.cls] * N_SYMBOLS
        for p, q in enumerate(residuals(columns, s)):
            if p >= SINK:
                both = np.concatenate([first + symbols(q, s.cls), first + symbols(-q, s.cls)])
                counts += np.bincount(both, minlength=counts.size)
    return counts.reshape(N_TABLES, N_SYMBOLS)


def smoothed(counts: F64) -> F64:
    """Blend every row with some of its neighbours of about the same shape.

    From class 24 on, four classes later is the same spread in symbols; before, the next class is
    a quarter of an octave wider.
    """
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    out = counts.copy()
    for t in range(N_TABLES):
        near = [t - 1, t + 1] if t < 24 else [t - 4, t + 4]
        near = [n for n in near if 0 <= n < N_TABLES and (t < 24) == (n < 24)]
        out[t] += NEIGHBOUR_SAMPLES * np.mean([share[n] for n in near], axis=0)
    return out


def cost(counts: F64, freqs: I64) -> float:
    """Return the bits that symbols of these counts need with these frequencies."""
    coded = freqs > 0
    coded[0] = False
    escaped = float(counts[~coded].sum())
    bits = float((counts[coded] * (11.0 - np.log2(freqs[coded]))).sum())
    return bits + escaped * (11.0 - math.log2(int(freqs[0])) + ESCAPE_BITS)


def allot(counts: list[float]) -> list[int]:
    """Share TOTAL among symbols, at least 1 each, at the least code length.

    The code length is convex in every frequency, so giving each unit where it saves most is
    optimal.
    """
    freqs = [1] * len(counts)
    gains = [(-count, i) for i, count in enumerate(counts)]  # a second unit saves one bit
    heapq.heapify(gains)
    for _ in range(TOTAL - len(counts)):
        _, i = gains[0]
        freqs[i] += 1
        heapq.heapreplace(gains, (-counts[i] * math.log2((freqs[i] + 1) / freqs[i]), i))
    return freqs


def best_frequencies(counts: F64) -> I64:
    """Return the frequencies of the least code length; symbols not worth one get 0.

    Which symbols those are: the rarest, and every number of them is tried.
    """
    order = sorted(range(1, N_SYMBOLS), key=lambda i: (-counts[i], abs(i - 32), i))
    best, least = np.zeros(N_SYMBOLS, np.int64), math.inf
    for n in range(1, N_SYMBOLS):
        freqs = np.zeros(N_SYMBOLS, np.int64)
        escaped = float(counts[0] + counts[order[n:]].sum())
        # Nothing seen is not impossible: the escape keeps a weight that breaks ties.
        freqs[[0, *order[:n]]] = allot([max(escaped, 1e-6), *counts[order[:n]].tolist()])
        bits = cost(counts, freqs)
        if bits < least:
            best, least = freqs, bits
    return best


def measure(columns: Columns, freqs: I64, rel_step: float) -> dict[bool, float]:
    """Return bits per value of V (False) and K (True): code lengths, without states and header."""
    s = statistics(columns, rel_step * columns.rms)
    escape = 11.0 - np.log2(freqs[:, :1]) + ESCAPE_BITS
    lengths = np.where(freqs > 0, 11.0 - np.log2(np.maximum(freqs, 1)), escape)
    lengths[:, 0] = escape[:, 0]
    bits = np.zeros(columns.x.shape[1])
    for p, q in enumerate(residuals(columns, s)):
        cls = s.cls if p >= SINK else np.minimum(s.cls + sink_classes(SINK_DIV), N_CLASSES - 1)
        bits += lengths[TABLES[cls], symbols(q, cls)] + SHIFTS[cls]
    return {k: float(bits[columns.is_k == k].mean()) / len(columns.x) for k in (False, True)}


def measure_tkv1(path: str, rel_step: float) -> dict[bool, float]:
    """Return bits per value of TKV1's payloads, one block a stream."""
    config = TKV1(rel_step=rel_step)
    codec = codec_for(config)
    sample = load_sample(path)
    n_bytes, n_values = {False: 0, True: 0}, {False: 0, True: 0}
    for layer, kind, x in streams_of(sample):
        prefill = np.ascontiguousarray(x[:, : x.shape[1] // 2])
        params = codec.fit(config, sample.model.stream(layer, kind), partial(iter, [prefill]))
        encoder = codec.encoder(params, 0)
        encoder.push(x)
        n_bytes[kind == "k"] += len(encoder.payload())
        n_values[kind == "k"] += x.size
    return {k: 8 * n_bytes[k] / n_values[k] for k in (False, True)}


def report(path: str, freqs: I64) -> None:
    columns = load_columns(path)
    print("rel_step  KVR1 K    V    TKV1 K    V    ratio K    V    both")
    for rel_step in MEASURED_STEPS:
        ours, theirs = measure(columns, freqs, rel_step), measure_tkv1(path, rel_step)
        both = (ours[True] + ours[False]) / (theirs[True] + theirs[False])
        print(
            f"{rel_step:8.4f}  {ours[True]:.4f} {ours[False]:.4f}  "
            f"{theirs[True]:.4f} {theirs[False]:.4f}  "
            f"{ours[True] / theirs[True]:.4f} {ours[False] / theirs[False]:.4f} {both:.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dump", help="KV to fit: safetensors as `kvstore pack` reads them")
    parser.add_argument("output", type=Path, help="file of frequencies to write")
    parser.add_argument("--measure", metavar="DUMP", help="report bits per value on other KV")
    args = parser.parse_args()
    counts = histograms(load_columns(args.dump))
    freqs = np.stack([best_frequencies(row) for row in smoothed(counts)])
    for t, row in enumerate(freqs):
        n, rare = counts[t].sum() / 2, counts[t, row == 0].sum() / max(counts[t].sum(), 1.0)
        n_symbols = np.count_nonzero(row) - 1
        print(f"table {t}: {n:.0f} samples, {n_symbols} symbols, escapes {rare:.1e}")
    data = freqs.astype("<u2").tobytes()
    args.output.write_bytes(data)
    print(hashlib.sha256(data).hexdigest())
    if args.measure:
        report(args.measure, freqs)


if __name__ == "__main__":
    main()
