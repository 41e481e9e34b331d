"""Group `rows`: how fast block-quantised rows are made and read, against memcpy and gguf."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Corrupt
from kvcodecs.ggml import dequantise, quantise
from kvcodecs.ggml.schemes import scheme_by_name
from kvcodecs.spec import F32

from kvtools.bench.heads import heads_of, rows_of
from kvtools.bench.rows import Row, interleaved
from kvtools.sample import Sample

GROUP = "rows"
#: Beyond the caches, and within them: a block of 128 tokens of 1,024 channels.
MANY_VALUES, FEW_VALUES = 1 << 23, 1 << 17
PLAIN = ("q8_0", "q4_0")
K_FAMILY = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
LEAST_SECONDS = 5e-3
_NOTE = "CPU time, one thread"


def measure_rows(sample: Sample, reps: int, *, all_sizes: bool = True) -> list[Row]:
    """Time every way on the sample's K, repeated until it is large enough.

    Without `all_sizes`, gguf is compared with on many values only.
    """
    x = rows_of(heads_of(sample).k)
    rows = [row for name in PLAIN for row in _plain(name, _sized(x, MANY_VALUES), reps)]
    gguf = _gguf()
    for name in K_FAMILY if gguf is not None else ():
        for n_values in (FEW_VALUES, MANY_VALUES) if all_sizes else (MANY_VALUES,):
            rows += _against_gguf(gguf, name, _sized(x, n_values), reps)
    return rows


def _plain(name: str, x: F32, reps: int) -> list[Row]:
    coded = quantise(x, name, n_threads=1)
    out = np.empty(x.shape, np.float16)
    copy = np.empty_like(out)
    dequantise(coded, name, "float16", out=out, n_threads=1)
    if not np.array_equal(out, dequantise(coded, name).astype(np.float16)):
        raise Corrupt(f"{name}: float16 and float32 differ")
    half = x.astype(np.float16)
    actions: dict[str, Callable[[], object]] = {
        "memcpy": partial(np.copyto, copy, out),
        "dequantise to float16": partial(dequantise, coded, name, "float16", out=out, n_threads=1),
        "quantise": partial(quantise, x, name, n_threads=1),
        "quantise from float16": partial(quantise, half, name, n_threads=1),
    }
    timings = interleaved(list(actions.values()), max(3, reps), least_seconds=LEAST_SECONDS)
    rows = [
        Row(GROUP, f"{name}, {what}", x.size / 1e6 / timings.seconds(i, "cpu"), "Mvalues/s", _NOTE)
        for i, what in enumerate(actions)
    ]
    ratio = timings.ratio(0, 1, "cpu")
    return [*rows, Row(GROUP, f"{name}, dequantise to float16 / memcpy", ratio, "x", "of speeds")]


def _against_gguf(gguf: Any, name: str, x: F32, reps: int) -> list[Row]:
    kind = gguf.GGMLQuantizationType(scheme_by_name(name).number)
    coded = quantise(x, name)
    rows = []
    for dtype in (np.float32, np.float16):
        out = np.empty(x.shape, dtype)
        ours = partial(dequantise, coded, name, dtype.__name__, out=out, n_threads=1)
        theirs = partial(_gguf_values, gguf, coded, kind, dtype)
        ours()
        if not np.array_equal(theirs(), out):
            raise Corrupt(f"{name}: other values than gguf")
        timings = interleaved([ours, theirs], max(3, reps), least_seconds=LEAST_SECONDS)
        what = f"{name}, dequantise {x.size >> 10}k values to {dtype.__name__}"
        speeds = [x.size / 1e6 / timings.seconds(i, "cpu") for i in range(2)]
        rows += [
            Row(GROUP, what, speeds[0], "Mvalues/s", _NOTE),
            Row(GROUP, f"{what}, gguf", speeds[1], "Mvalues/s", "numpy of the package gguf"),
            Row(GROUP, f"{what} / gguf", timings.ratio(1, 0, "cpu"), "x", "of speeds"),
        ]
    return rows


def _gguf_values(gguf: Any, coded: npt.NDArray[np.uint8], kind: Any, dtype: type[Any]) -> Any:
    return gguf.quants.dequantize(coded, kind).astype(dtype, copy=False)


def _sized(x: F32, n_values: int) -> F32:
    n_rows = max(1, n_values // x.shape[1])
    sized: F32 = x[np.arange(n_rows) % len(x)]
    return sized


def _gguf() -> ModuleType | None:
    """Return the package gguf, which is nothing this project needs, if it is there."""
    try:
        import gguf
    except ImportError:
        return None
    module: ModuleType = gguf
    return module
