"""Group `zarr`: archives that zarr opens, next to plain arrays, LMDB and a copy of the file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.codec import CodecConfig
from kvcodecs.errors import Corrupt, InvalidArgument

import kvstore
from kvtools.bench.archive import PureDecode, fill
from kvtools.bench.rows import Row, interleaved
from kvtools.sample import Sample

#: Tokens of one layer that a plain read takes.
READ_TOKENS = 128
#: What is migrated: long enough that the frames count, not the records.
MIGRATED_TOKENS, MIGRATED_LAYERS = 8192, 12
LEAST_SECONDS = 0.02


def measure_zarr(config: CodecConfig, sample: Sample, folder: Path, reps: int) -> list[Row]:
    """Migrate and read; every value is compared before anything is timed."""
    long = sample.tiled(MIGRATED_TOKENS, MIGRATED_LAYERS)
    with kvstore.open(folder / "lmdb.kv", mode="a") as archive:
        session = fill(archive, "bench", long, config)
        block = session.info().streams[0].block_tokens
        if block % READ_TOKENS:
            raise InvalidArgument(f"blocks of {block} tokens; expected a multiple of {READ_TOKENS}")
    rows = _migration(folder, reps)
    kvstore.migrate(str(folder / "lmdb.kv"), f"zarr:{folder / 'zarr.kv'}")
    rows += _backends(folder, block, reps)
    return rows + _plain(config, long, folder, block, reps)


def _migration(folder: Path, reps: int) -> list[Row]:
    """Move all frames from LMDB to chunks; copy the file; put chunks of that size with zarr."""
    source = folder / "lmdb.kv"
    streams = _frame_sizes(source)
    runs = iter(range(1 << 30))
    chunks = [(n, np.frombuffer(os.urandom(n * size), np.uint8)) for n, size in streams]

    def migrate() -> None:
        to = folder / f"m{next(runs)}"
        kvstore.migrate(str(source), f"zarr:{to}", verify=False)
        shutil.rmtree(to)

    def copy() -> None:
        to = folder / "copy.mdb"
        with open(source / "data.mdb", "rb") as old, open(to, "wb") as new:
            shutil.copyfileobj(old, new, 1 << 20)
            new.flush()
            os.fsync(new.fileno())
        to.unlink()

    def put() -> None:
        to = folder / f"p{next(runs)}"
        _put_chunks(to, chunks)
        shutil.rmtree(to)

    times = interleaved([migrate, copy, put], reps)
    both = (times.wall[1] + times.wall[2]) / times.wall[0]
    n_bytes = sum(n * size for n, size in streams)
    note = f"{sum(n for n, _ in streams)} frames, {n_bytes / 1e6:.1f} MB, durable"
    return [
        Row("zarr", "migrate LMDB to zarr", n_bytes / times.seconds(0) / 1e6, "MB/s", note),
        Row("zarr", "copy of the file", n_bytes / times.seconds(1) / 1e6, "MB/s", "with fsync"),
        Row(
            "zarr",
            "plain zarr, chunks as large",
            n_bytes / times.seconds(2) / 1e6,
            "MB/s",
            "no fsync",
        ),
        Row("zarr", "(copy + plain zarr) / migrate", float(np.median(both)), "ratio"),
    ]


def _put_chunks(path: Path, streams: list[tuple[int, npt.NDArray[np.uint8]]]) -> None:
    import zarr

    group = zarr.open_group(str(path), mode="w", zarr_format=3)
    for i, (n_chunks, data) in enumerate(streams):
        array = group.create_array(
            str(i),
            shape=data.shape,
            chunks=(data.size // n_chunks,),
            dtype="uint8",
            compressors=None,
        )
        array[:] = data


def _frame_sizes(path: Path) -> list[tuple[int, int]]:
    """Return number and mean bytes of the frames of each stream."""
    with kvstore.open(path) as archive:
        streams = archive.session("bench").info().streams
        return [(s.n_frames, s.frame_bytes // max(s.n_frames, 1)) for s in streams]


def _backends(folder: Path, block: int, reps: int) -> list[Row]:
    """Read one block of one stream through the engine, from LMDB and from chunks."""
    with (
        kvstore.open(folder / "lmdb.kv") as one,
        kvstore.open(f"zarr:{folder / 'zarr.kv'}") as other,
    ):
        a, b = one.session("bench"), other.session("bench")
        if not np.array_equal(a.read(0, "v"), b.read(0, "v")):
            raise Corrupt("the migrated session differs")
        at = MIGRATED_TOKENS // block // 2 * block
        read: list[Callable[[], object]] = [
            lambda: a.read(1, "v", at, at + block),
            lambda: b.read(1, "v", at, at + block),
        ]
        times = interleaved(read, max(reps, 20), least_seconds=LEAST_SECONDS)
    note = f"one block of {block} tokens, one stream"
    return [
        Row("zarr", "engine, LMDB", 1e6 * times.seconds(0), "us", note),
        Row("zarr", "engine, zarr", 1e6 * times.seconds(1), "us", note),
        Row("zarr", "engine, zarr / LMDB", times.ratio(1, 0), "ratio"),
    ]


def _plain(config: CodecConfig, sample: Sample, folder: Path, block: int, reps: int) -> list[Row]:
    """Read tokens of one layer through plain zarr: from our array, and from an uncompressed one."""
    import zarr

    array: Any = zarr.open_group(str(folder / "zarr.kv"), mode="r")["bench/v_001"]
    values = np.asarray(array[:])
    raw = zarr.create_array(
        str(folder / "raw.zarr"),
        shape=array.shape,
        chunks=array.chunks,
        dtype=array.dtype,
        compressors=None,
    )
    raw[:] = values
    plain: Any = zarr.open_array(str(folder / "raw.zarr"), mode="r")
    start = MIGRATED_TOKENS // block // 2 * block
    span = slice(start, start + READ_TOKENS)
    with kvstore.open(folder / "lmdb.kv") as archive:
        session = archive.session("bench")
        expected = session.read(1, "v", span.start, span.stop, dtype=str(array.dtype))
        if not np.array_equal(np.asarray(array[:, span]), expected):
            raise Corrupt("zarr reads other values than the engine")
        decode = PureDecode(config, sample, (start, start + block), session)
        pure = decode.plan({(1, "v"): decode.outputs("float32")[1, "v"]})
    times = interleaved(
        [lambda: array[:, span], lambda: plain[:, span], lambda: pure.run(1)],
        max(reps, 20),
        least_seconds=LEAST_SECONDS,
    )
    both = times.wall[0] / (times.wall[1] + times.wall[2])
    note = f"{READ_TOKENS} tokens of one layer's V, one chunk of {block}"
    return [
        Row("zarr", "plain zarr, our codec", 1e6 * times.seconds(0), "us", note),
        Row("zarr", "plain zarr, uncompressed", 1e6 * times.seconds(1), "us", note),
        Row("zarr", "pure decode of the block", 1e6 * times.seconds(2), "us", "one thread"),
        Row("zarr", "ours / (uncompressed + decode)", float(np.median(both)), "ratio"),
    ]
