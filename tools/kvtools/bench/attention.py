"""Group `attention`: attending to quantised rows, against NumPy on rows that are floats already.

Measured in a process of its own: OpenBLAS reads the number of its threads when it is loaded.
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.attention import Attention, Rows
from kvcodecs.errors import Corrupt
from kvcodecs.ggml import dequantise, quantise
from kvcodecs.ggml.schemes import scheme_by_name
from kvcodecs.spec import F32

from kvtools.bench.heads import heads_of, rows_of
from kvtools.bench.processes import run_python
from kvtools.bench.rows import Row, interleaved
from kvtools.sample import Sample

GROUP = "attention"
SCHEME = scheme_by_name("q8_0")
N_TOKENS, KV_HEADS, HEAD_DIM = 1 << 14, 8, 128
#: Query heads of a KV head, and queries.
SHAPES = ((1, 1), (4, 1), (8, 1), (4, 16))
#: Room for more memory that is tried, kB.
ROOMS = (128, 256, 512, 1024, 2048, 4096, 8192)
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def measure_attention(sample: Sample, reps: int, folder: Path) -> list[Row]:
    """Attend to 16k rows of the sample's K and V, 8 heads of 128 channels, on one thread."""
    heads = heads_of(sample)
    paths = []
    for name, x in (("k", rows_of(heads.k)), ("v", rows_of(heads.v))):
        channels = np.arange(KV_HEADS * HEAD_DIM) % x.shape[1]
        tokens = np.arange(N_TOKENS) % len(x)
        paths.append(str(folder / f"attention_{name}.bin"))
        quantise(x[tokens][:, channels], SCHEME.name).tofile(paths[-1])
    env = dict.fromkeys(_ONE_THREAD, "1")
    shape = [str(N_TOKENS), str(reps)]
    code = "from kvtools.bench.attention import {0}; {0}()"
    rows = [
        Row(GROUP, *row)
        for row in json.loads(run_python(code.format("_time"), *paths, *shape, env=env))
    ]
    for group, n_queries in SHAPES:
        room = run_python(code.format("_fit"), *paths, *shape, str(group), str(n_queries), env=env)
        name = f"{_name(group, n_queries)}, extra memory, at most"
        rows.append(Row(GROUP, name, float(room), "kB", "q and the result included"))
    return rows


def _name(group: int, n_queries: int) -> str:
    return f"16k rows of q8_0, {n_queries} x {group} queries a KV head"


def _time() -> None:
    """Print rows, as JSON; runs in the process of `measure_attention`."""
    k_path, v_path, n_tokens, reps = sys.argv[1:5]
    k, v = _mapped(k_path, int(n_tokens)), _mapped(v_path, int(n_tokens))
    floats = [_by_head(dequantise(x, SCHEME.name)) for x in (k, v)]
    rows: list[tuple[str, float, str, str]] = []
    for group, n_queries in SHAPES:
        q = _queries(group * n_queries)
        ours, theirs = _attend(q, k, v), _numpy(q, *floats)
        if not np.abs(ours - theirs).max() <= 1e-4 * max(1.0, np.abs(theirs).max()):
            raise Corrupt("attention differs from NumPy's")
        actions: list[Callable[[], object]] = [
            partial(_attend, q, k, v),
            partial(_read, k, v),
            partial(_numpy, q, *floats),
        ]
        timings = interleaved(actions, max(3, int(reps)))
        name = _name(group, n_queries)
        for index, what in enumerate(("attend", "reading the bytes once", "NumPy on floats")):
            seconds = timings.seconds(index, "cpu")
            rows.append((f"{name}, {what}", 1e3 * seconds, "ms", "CPU time, one thread"))
        ratio = np.median(timings.cpu[0] / (timings.cpu[1] + timings.cpu[2]))
        rows.append((f"{name}, attend / (reading + NumPy)", float(ratio), "x", ""))
    print(json.dumps(rows))


def _fit() -> None:
    """Print how much more memory, in kB, one call can do with; in a process of its own."""
    k_path, v_path, n_tokens, _, group, n_queries = sys.argv[1:7]
    k, v = _mapped(k_path, int(n_tokens)), _mapped(v_path, int(n_tokens))
    q = _queries(int(group) * int(n_queries))
    _attend(q[:, :1], k[:64], v[:64])
    libc, (_, most) = ctypes.CDLL(None), resource.getrlimit(resource.RLIMIT_DATA)
    for room in ROOMS:
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
        resource.setrlimit(resource.RLIMIT_DATA, ((_data_kb() + room) << 10, most))
        try:
            _attend(q, k, v)
        except MemoryError:
            continue
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        print(room)
        return
    print("nan")


def _data_kb() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmData"))


def _mapped(path: str, n_tokens: int) -> npt.NDArray[np.uint8]:
    row_bytes = SCHEME.row_bytes(KV_HEADS * HEAD_DIM)
    return np.memmap(path, np.uint8, "r", shape=(n_tokens, row_bytes))


def _queries(n: int) -> F32:
    rng = np.random.default_rng(n)
    return rng.standard_normal((KV_HEADS, n, HEAD_DIM), np.float32)


def _by_head(rows: npt.NDArray[Any]) -> F32:
    x = rows.reshape(len(rows), KV_HEADS, HEAD_DIM)
    return np.ascontiguousarray(x.transpose(1, 0, 2), np.float32)


def _attend(q: F32, k: npt.NDArray[np.uint8], v: npt.NDArray[np.uint8]) -> F32:
    n = q.shape[1]
    seen = np.zeros(n, np.int64), np.full(n, len(k) - 1)
    attention = Attention(q, HEAD_DIM, scale=HEAD_DIM**-0.5, first=seen[0], last=seen[1])
    attention.add(Rows(k, SCHEME), Rows(v, SCHEME), 0, n_threads=1)
    return attention.result()


def _read(*parts: npt.NDArray[np.uint8]) -> list[int]:
    return [int(np.add.reduce(part.reshape(-1).view(np.uint64))) for part in parts]


def _numpy(q: F32, k: F32, v: F32) -> F32:
    out = np.empty_like(q)
    for head in range(KV_HEADS):
        scores = (q[head] * np.float32(HEAD_DIM**-0.5)) @ k[head].T
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=1, keepdims=True)
        np.matmul(scores, v[head], out=out[head])
    return out
