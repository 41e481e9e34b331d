"""Group `flat`: rows in mapped files, against quantising, checking and decoding the same bytes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Corrupt
from kvcodecs.frame import crc32c
from kvcodecs.ggml import dequantise, quantise
from kvcodecs.spec import F32

from kvstore.flat import FlatLayer
from kvtools.bench.heads import heads_of, rows_of
from kvtools.bench.rows import Row, interleaved
from kvtools.sample import Sample

GROUP = "flat"
SCHEME = "q8_0"
N_TOKENS, HEADS, HEAD_DIM = 1 << 14, 8, 128
#: Random rows of a `gather`.
FEW_ROWS, MANY_ROWS = 100, 10_000
DTYPES = ("float16", "float32")
_ONE = "CPU time, one thread"
_ORDER = "of times; read_rows puts heads first, dequantise does not"


def measure_flat(sample: Sample, reps: int, folder: Path) -> list[Row]:
    """Append, read and pick 16k rows of the sample's K and V, 8 heads of 128 channels."""
    heads = heads_of(sample)
    k, v = (_sized(rows_of(x)) for x in (heads.k, heads.v))
    rows: list[Row] = []
    for mode, pread in (("mapped", False), ("pread", True)):
        path = folder / f"{mode}.kvf"
        with FlatLayer.create(
            path, heads=HEADS, head_dim=HEAD_DIM, scheme=SCHEME, capacity=len(k), pread=pread
        ) as layer:
            rows += _append(layer, mode, k, v, reps)
            rows += _read(layer, mode, k, v, reps)
            rows += _pages(layer, mode, path)
    return rows


def pages_in_memory(path: Path | str) -> npt.NDArray[np.bool_]:
    """Return which pages of a file are in memory, whoever read them."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        data = np.frombuffer(mapped, np.uint8)
        found = np.zeros(-(-data.size // mmap.PAGESIZE), np.uint8)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_size_t(data.size),
            ctypes.c_void_p(found.ctypes.data),
        )
        del data  # the map cannot be closed before
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    resident: npt.NDArray[np.bool_] = found & 1 == 1
    return resident


def _append(layer: FlatLayer, mode: str, k: F32, v: F32, reps: int) -> list[Row]:
    tensors = _heads(k), _heads(v)

    def append() -> None:
        layer.append(*tensors)
        layer._forget(0)

    def code() -> None:
        for x in (k, v):
            quantise(x, SCHEME)

    timings = interleaved([append, code], max(3, reps))
    layer.append(*tensors)
    layer.commit()
    rate = (k.size + v.size) / 1e6 / timings.seconds(0)
    return [
        Row(GROUP, f"{mode}, append", rate, "Mvalues/s", "from float32, all threads, no commit"),
        Row(GROUP, f"{mode}, append / quantise", timings.ratio(0, 1), "x", "of times"),
    ]


def _read(layer: FlatLayer, mode: str, k: F32, v: F32, reps: int) -> list[Row]:
    coded = [quantise(x, SCHEME) for x in (k, v)]
    whole = [_heads(dequantise(x, SCHEME)) for x in coded]
    rng = np.random.default_rng(0)
    picks = [rng.integers(0, len(k), n) for n in (FEW_ROWS, MANY_ROWS)]
    _check(layer.read_rows(0, len(k)), whole, mode)
    for places in picks:
        _check(layer.gather(places), [x[:, places] for x in whole], mode)

    def plain(dtype: str) -> list[npt.NDArray[Any]]:
        for x in coded:
            crc32c(x)
        return [dequantise(x, SCHEME, dtype, n_threads=1) for x in coded]

    actions: list[Callable[[], object]] = [partial(layer.gather, places) for places in picks]
    for dtype in DTYPES:
        read = partial(layer.read_rows, 0, len(k), dtype=dtype, n_threads=1)
        actions += [read, partial(plain, dtype)]
    timings = interleaved(actions, max(3, reps))
    rows = []
    for index, places in enumerate(picks):
        rate = 2 * len(places) / timings.seconds(index, "cpu")
        name = f"{mode}, gather of {len(places)}"
        rows.append(Row(GROUP, name, rate, "rows/s", f"K and V, {_ONE}"))
    for dtype, index in zip(DTYPES, (2, 4), strict=True):
        rate = (k.size + v.size) / 1e6 / timings.seconds(index, "cpu")
        name = f"{mode}, read_rows to {dtype}"
        ratio = timings.ratio(index, index + 1, "cpu")
        rows += [
            Row(GROUP, name, rate, "Mvalues/s", _ONE),
            Row(GROUP, f"{name} / (checksum + dequantise)", ratio, "x", _ORDER),
        ]
    return rows


def _check(found: Sequence[npt.NDArray[Any] | None], want: Sequence[F32], mode: str) -> None:
    for x, y in zip(found, want, strict=True):
        if x is None or not np.array_equal(x, y):
            raise Corrupt(f"{mode}: other rows than were appended")


def _pages(layer: FlatLayer, mode: str, path: Path) -> list[Row]:
    layer.advise_random()
    layer.release()
    before = pages_in_memory(path)
    if before.mean() > 0.5:  # a file system of memory
        return []
    layer.gather(np.arange(FEW_ROWS) * (layer.stop // FEW_ROWS))
    touched = np.count_nonzero(pages_in_memory(path) & ~before)
    note = "of K or V, page cache was empty"
    return [Row(GROUP, f"{mode}, pages read for a row", touched / FEW_ROWS / 2, "pages", note)]


def _heads(x: F32) -> F32:
    return x.reshape(len(x), HEADS, HEAD_DIM).transpose(1, 0, 2)


def _sized(x: F32) -> F32:
    tokens, channels = np.arange(N_TOKENS) % len(x), np.arange(HEADS * HEAD_DIM) % x.shape[1]
    return np.ascontiguousarray(x[tokens][:, channels])
