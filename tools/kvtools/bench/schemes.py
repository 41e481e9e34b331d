"""Group `schemes`: what each block-quantised scheme does to real K, V and attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import InvalidArgument
from kvcodecs.ggml import dequantise, quantise
from kvcodecs.ggml.schemes import SCHEMES, Scheme
from kvcodecs.rope import Rope, from_coded, to_coded
from kvcodecs.spec import F32, StreamSpec

from kvtools.bench.rows import Row, interleaved
from kvtools.sample import Sample
from kvtools.terminal import number_text, show_table

GROUP = "schemes"
#: The last tokens ask; where the file has no queries, their K does.
N_QUERIES = 64
#: Rows are repeated until there are so many values: shorter runs say little about speed.
TIMED_VALUES = 1 << 20
#: Some schemes search long for each value.
SEARCHED_VALUES = 1 << 17
#: Rows are as wide as whole blocks of every scheme.
_WIDEST_BLOCK = max(scheme.block_values for scheme in SCHEMES)
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

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of several layers side by side: all of them are coded as one row of a token.

    Attributes
    ----------
    k, v : (heads, tokens, head_dim) float32
        K before RoPE, in coded channel order, and V.
    q : (heads, queries, head_dim) float32
        Queries of the last tokens after RoPE, those of all query heads that share a KV head in one.
    position : (queries,) int64
        Of the query: it sees the tokens before it, and its own.
    rope
        Of K.
    """

    k: F32
    v: F32
    q: F32
    position: npt.NDArray[np.int64]
    rope: Rope | None


def heads_of(sample: Sample) -> Heads:
    """Put as many heads of all layers side by side as make whole blocks of every scheme.

    Raises
    ------
    InvalidArgument
        Layers differ in their geometry, or all heads together are too narrow.
    """
    shapes = {x.shape for x in (*sample.k, *sample.v)}
    if len(shapes) != 1:
        raise InvalidArgument(f"{sample.label}: K and V of all layers must have one shape here")
    rope, n_tokens = sample.model.rope, sample.n_tokens
    k = np.concatenate([_coded(x, rope) for x in sample.k])
    v = np.concatenate(sample.v).astype(np.float32)
    head_dim = k.shape[2]
    n_heads = len(k)
    while n_heads and n_heads * head_dim % _WIDEST_BLOCK:
        n_heads -= 1
    if not n_heads:
        raise InvalidArgument(
            f"{sample.label}: {len(k)} heads of {head_dim} channels make no rows of whole blocks "
            f"of {_WIDEST_BLOCK} values"
        )
    first = max(0, n_tokens - N_QUERIES)
    if sample.q is None:
        q = _rotated(k[:, first:], rope, first)
        group = 1
    else:
        asked = np.concatenate([_coded(x, rope) for x in sample.q])
        first = n_tokens - asked.shape[1]
        q = _rotated(asked, rope, first)
        group = len(q) // len(k)
    n_queries = n_tokens - first
    q = q[: n_heads * group].reshape(n_heads, group * n_queries, head_dim)
    position = np.tile(np.arange(first, n_tokens), group)
    return Heads(k[:n_heads], v[:n_heads], q, position, rope)


def attention(heads: Heads, k: F32, v: F32) -> F64:
    """Return what the queries read from `k` and `v`, in float64: (heads, queries, head_dim)."""
    rotated = _rotated(k, heads.rope, 0).astype(np.float64)
    scores = heads.q.astype(np.float64) @ rotated.transpose(0, 2, 1) / np.sqrt(k.shape[2])
    beyond = np.arange(k.shape[1]) > heads.position[:, None]
    scores = np.where(beyond, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    mixed: F64 = weights @ v.astype(np.float64) / weights.sum(axis=2, keepdims=True)
    return mixed


def rows_of(x: F32) -> F32:
    """Return (heads, tokens, head_dim) as rows: (tokens, channels)."""
    return np.ascontiguousarray(x.transpose(1, 0, 2)).reshape(x.shape[1], -1)


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
    lines: dict[str, list[str]] = {}
    notes = {}
    for row in rows:
        name = row.name.partition(", ")[0]
        lines.setdefault(name, []).append(number_text(row.value, 5))
        notes[name] = row.note
    columns = [f"{what} {unit}".strip() for what, unit in _UNITS.items()]
    columns[0] = _UNITS["bits"]
    noted = any(notes.values())
    columns += ["note"] if noted else []
    table = [(name, *line, *((notes[name],) if noted else ())) for name, line in lines.items()]
    show_table("", ("scheme", *columns), table)
    print(_LEGEND)


def _coded(x: npt.NDArray[np.generic], rope: Rope | None) -> F32:
    return to_coded(x, StreamSpec("k", x.shape[0], x.shape[2], rope))


def _rotated(x: F32, rope: Rope | None, first: int) -> F32:
    return from_coded(x, StreamSpec("k", x.shape[0], x.shape[2], rope), "post", first)


def _precision(scheme: Scheme, heads: Heads, truth: F64) -> dict[str, float]:
    decoded = {}
    found: dict[str, float] = {}
    for kind, x in (("K", heads.k), ("V", heads.v)):
        rows = dequantise(quantise(rows_of(x), scheme.name), scheme.name, "float32")
        back = rows.reshape(x.shape[1], x.shape[0], x.shape[2]).transpose(1, 0, 2)
        decoded[kind] = np.ascontiguousarray(back)
        found[f"{kind} cosine"] = _cosine(x, back)
        found[f"{kind} MAE"] = float(np.abs(x.astype(np.float64) - back).mean())
    read = attention(heads, decoded["K"], decoded["V"])
    found["attention cosine"] = _cosine(truth, read)
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


def _cosine(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating]) -> float:
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    norm = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / norm) if norm else 1.0
