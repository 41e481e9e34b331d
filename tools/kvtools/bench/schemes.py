"""Group `schemes`: what each block-quantised scheme does to real K, V and attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from kvcodecs.fibquant.quality import F64, cosine
from kvcodecs.ggml import dequantise, quantise
from kvcodecs.ggml.schemes import SCHEMES, Scheme
from kvcodecs.spec import F32

from kvtools.bench.heads import N_QUERIES, Heads, attention, heads_of, rows_of
from kvtools.bench.rows import Row, interleaved
from kvtools.bench.tables import show_by_name
from kvtools.sample import Sample

GROUP = "schemes"
#: Rows are repeated until there are so many values: shorter runs say little about speed.
TIMED_VALUES = 1 << 20
#: Some schemes search long for each value.
SEARCHED_VALUES = 1 << 17
_UNITS = {
    "bits": "bits per value",
    "K cosine": "",
    "V cosine": "",
    "K MAE": "",
    "V MAE": "",
    "attention cosine": "",
    "attention RMSE": "",
    "encode": "Mvalues/s",
    "decode": "Mvalues/s",
}

_LEGEND = (
    f"K and V against what was coded; attention: what the last {N_QUERIES} tokens read. "
    "Speeds: CPU time of one thread."
)


def measure_schemes(sample: Sample, reps: int) -> list[Row]:
    """Code the sample with every scheme; speed is of one thread, from float32 and to float16.

    Heads of all layers make one row, so that every scheme has whole blocks; a note says which ones
    a row of a layer of the sample is too narrow for.
    """
    heads = heads_of(sample)
    truth = attention(heads, heads.k, heads.v)
    rows: list[Row] = []
    n_heads, _, head_dim = sample.k[0].shape
    for scheme in SCHEMES:
        fits = n_heads * head_dim % scheme.block_values == 0
        note = "" if fits else f"not for {n_heads} x {head_dim}"
        found = {"bits": scheme.bits_per_value, **_precision(scheme, heads, truth)}
        found |= _speed(scheme, rows_of(heads.k), reps)
        rows += [
            Row(GROUP, f"{scheme.name}, {what}", x, _UNITS[what], note) for what, x in found.items()
        ]
    return rows


def show_schemes(rows: Sequence[Row]) -> None:
    """Print one line per scheme, and what the columns are."""
    show_by_name("scheme", rows, _UNITS, _LEGEND)


def _precision(scheme: Scheme, heads: Heads, truth: F64) -> dict[str, float]:
    decoded = {}
    found: dict[str, float] = {}
    for kind, x in (("K", heads.k), ("V", heads.v)):
        rows = dequantise(quantise(rows_of(x), scheme.name), scheme.name, "float32")
        back = rows.reshape(x.shape[1], x.shape[0], x.shape[2]).transpose(1, 0, 2)
        decoded[kind] = np.ascontiguousarray(back)
        found[f"{kind} cosine"] = cosine(x.astype(np.float64), back.astype(np.float64))
        found[f"{kind} MAE"] = float(np.abs(x.astype(np.float64) - back).mean())
    read = attention(heads, decoded["K"], decoded["V"])
    found["attention cosine"] = cosine(truth, read)
    found["attention RMSE"] = float(np.sqrt(np.square(truth - read).mean()))
    return {what: found[what] for what in _UNITS if what in found}


def _speed(scheme: Scheme, x: F32, reps: int) -> dict[str, float]:
    x = np.tile(x, (max(1, -(-TIMED_VALUES // x.size)), 1))
    coded = quantise(x, scheme.name)
    out = np.empty(x.shape, np.float16)
    few = x[: max(1, SEARCHED_VALUES // x.shape[1])]
    actions: list[Callable[[], object]] = [
        partial(quantise, few, scheme.name, n_threads=1),
        partial(dequantise, coded, scheme.name, "float16", out=out, n_threads=1),
    ]
    timings = interleaved(actions, max(3, reps))
    speeds = [n / 1e6 / timings.seconds(i, "cpu") for i, n in enumerate((few.size, x.size))]
    return dict(zip(("encode", "decode"), speeds, strict=True))
