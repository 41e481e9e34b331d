"""Groups `import` and `memory`: numbers that need a fresh process each."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from kvcodecs.errors import InvalidArgument, KvError

from kvtools.bench.rows import Row
from kvtools.sample import Sample
from kvtools.tensorfile import TensorWriter

# Prints the peak of this process's resident memory, in kB, before and after the work. The peak is
# set back before it, where the system lets us: what the start-up needed would hide the work's.
_PEAK = """
import contextlib, sys
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
def fresh_peak():
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak()
"""
_READ = (
    _PEAK
    + """
import kvstore
path, start, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with kvstore.open(path) as archive:
    session = archive.session("bench")
    session.read_all(0, 1)
    before = fresh_peak()
    k, v = session.read_all(start, stop)
    after = peak()
print(before, after, k.nbytes + v.nbytes)
"""
)
_PACK = (
    _PEAK
    + """
import kvstore
import kvtools.pack
from kvtools.cli import main
before = fresh_peak()
code = main(["pack", sys.argv[1], sys.argv[2], "--session", "bench", *sys.argv[3:]])
print(before, peak(), code)
"""
)


def run_python(code: str, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    """Run `code` in a fresh interpreter, with `env` on top, and return what it prints."""
    command = [sys.executable, "-P", "-c", code, *arguments]
    around = {**os.environ, **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=around)
    if done.returncode:
        raise KvError(f"a measuring process failed: {done.stderr.strip()}")
    return done.stdout


def measure_import(reps: int) -> list[Row]:
    """Time of ``import kvstore`` and of ``import numpy`` alone, both beyond the interpreter's."""
    times: dict[str, list[float]] = {"": [], "numpy": [], "kvstore": []}
    for name in times:
        run_python(f"import {name}" if name else "")  # fills the file cache
    for _ in range(reps):
        for name, samples in times.items():
            start = time.perf_counter()
            run_python(f"import {name}" if name else "")
            samples.append(time.perf_counter() - start)
    bare = statistics.median(times.pop(""))
    return [
        Row("import", name, statistics.median(samples) - bare, "s", "beyond a bare interpreter")
        for name, samples in times.items()
    ]


def write_tiled(path: Path, sample: Sample, megabytes: int) -> int:
    """Write a file of about `megabytes` MB of float16 K and V; return its number of tokens."""
    for tensors in (sample.k, sample.v):
        if len({x.shape for x in tensors}) > 1:
            raise InvalidArgument(
                f"{sample.label}: layers differ in shape, which the group memory does not measure; "
                "choose other groups with --only"
            )
    n_tokens = max(1, megabytes * 1_000_000 // (2 * sample.n_values // sample.n_tokens))
    n_layers = sample.model.n_layers
    shapes: dict[str, tuple[np.dtype[np.float16], tuple[int, ...]]] = {}
    for name, tensors in (("k_pre", sample.k), ("v", sample.v)):
        heads, _, head_dim = tensors[0].shape
        shapes[name] = (np.dtype(np.float16), (n_layers, heads, n_tokens, head_dim))
    with TensorWriter(path, shapes) as writer:
        for name, tensors in (("k_pre", sample.k), ("v", sample.v)):
            for layer, values in enumerate(tensors):
                for first in range(0, n_tokens, sample.n_tokens):
                    part = writer.array(name)[layer, :, first : first + sample.n_tokens]
                    part[...] = values[:, : part.shape[1]]
                writer.release()
    return n_tokens


def measure_memory(sample: Sample, folder: Path, megabytes: int, options: list[str]) -> list[Row]:
    """Peak memory of packing a big file, and of reading ranges from the archive."""
    source, archive = folder / "big.safetensors", str(folder / "big.kv")
    n_tokens = write_tiled(source, sample, megabytes)
    size = source.stat().st_size / 1e6
    printed = run_python(_PACK, str(source), archive, *options)
    before, after, code = map(int, printed.splitlines()[-1].split())
    if code:
        raise KvError("pack failed in a measuring process")
    source.unlink()
    rows = [
        Row("memory", "pack", _growth(before, after), "MB", f"input of {size:.0f} MB"),
    ]
    for count in sorted({1, min(1000, n_tokens), n_tokens}):
        before, after, output = map(int, run_python(_READ, archive, "0", str(count)).split())
        note = f"output of {output / 1e6:.1f} MB"
        extra = _growth(before, after, output)
        rows.append(Row("memory", f"read {count} tokens, beyond output", extra, "MB", note))
    return rows


def _growth(before: int, after: int, wanted: int = 0) -> float:
    """Return the growth of a peak in kB, less `wanted` bytes, in MB.

    A small output may fit into memory that was free already; no growth is 0, not less.
    """
    return max(0, (after - before) * 1024 - wanted) / 1e6
