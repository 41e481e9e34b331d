"""Flat layers: rows in mapped files, against a plain model; damage, truncation, other processes."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from kvcodecs.errors import (
    Closed,
    Corrupt,
    Full,
    InvalidArgument,
    KvError,
    Locked,
    NotFound,
    Truncated,
)
from kvcodecs.ggml import dequantise, quantise

import kvstore
from kvstore.flat import FlatLayer

HEADS, DIM = 2, 32
SCHEMES = {"k": "q8_0", "v": "q4_0"}
ROPE = kvstore.Rope.from_theta(10_000.0, DIM)


def values(n, seed=0):
    return np.random.default_rng(seed).standard_normal((2, HEADS, n, DIM), dtype=np.float32)


def stored(x, scheme):
    """What is read back of (heads, n, head_dim)."""
    rows = x.transpose(1, 0, 2).reshape(x.shape[1], -1)
    back = dequantise(quantise(rows, scheme), scheme)
    return back.reshape(x.shape[1], HEADS, DIM).transpose(1, 0, 2)


def verify(path, pread):
    with FlatLayer.open(path, pread=pread) as layer:
        layer.verify()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "a.kvf")


def make(path, **options):
    options = {"heads": HEADS, "head_dim": DIM, "scheme": SCHEMES, "capacity": 64, **options}
    return FlatLayer.anonymous(**options) if path is None else FlatLayer.create(path, **options)


@pytest.mark.parametrize("kind", ["mapped", "pread", "anonymous", "ring"])
@pytest.mark.parametrize("seed", range(3))
def test_against_a_model(tmp_path, kind, seed):
    """Any order of appends, drops, commits, roll-backs and openings."""
    rng = random.Random(f"{kind} {seed}")
    path = None if kind == "anonymous" else str(tmp_path / "a.kvf")
    options = {"max_rows": 300} if kind == "ring" else {}
    if path is not None:
        options["pread"] = kind == "pread"
    layer = make(path, **options)
    k, v = values(3000, seed)
    want = stored(k, "q8_0"), stored(v, "q4_0")
    start = stop = 0
    for _ in range(60):
        step = rng.choice(["append", "append", "append", "drop", "commit", "open", "back", "read"])
        if step == "append":
            n = min(rng.choice([0, 1, 3, 40, 150]), 3000 - stop)
            if kind == "ring" and stop - start + n > 300:
                with pytest.raises(Full):
                    layer.append(k[:, stop : stop + n], v[:, stop : stop + n])
            else:
                layer.append(k[:, stop : stop + n], v[:, stop : stop + n], start=stop)
                stop += n
        elif step == "drop":
            n = rng.choice([0, 1, 30, 200])
            layer.drop_front(n)
            start = min(start + n, stop)
        elif step == "commit":
            layer.commit()
        elif step == "back":
            stop = rng.randint(start, stop)
            layer.take_back(stop)
        elif step == "open" and path is not None:
            with FlatLayer.open(path, pread=kind == "pread") as reader:
                lo, hi = reader.start, reader.stop
                got = reader.read_all()
                for x, y in zip(got, want, strict=True):
                    assert np.array_equal(x, y[:, lo:hi])
            layer.close()
            layer = FlatLayer.open(path, "a", pread=kind == "pread")
            start, stop = lo, hi
        assert (layer.start, layer.stop, len(layer)) == (start, stop, stop - start)
        layer.verify()
        lo = rng.randint(start, stop)
        hi = rng.randint(lo, stop)
        for x, y in zip(layer.read_rows(lo, hi), want, strict=True):
            assert np.array_equal(x, y[:, lo:hi])
        some = [rng.randrange(start, stop) for _ in range(5)] if start < stop else []
        for x, y in zip(layer.gather(some), want, strict=True):
            assert np.array_equal(x, y[:, some])
        pieces = list(layer.pieces(start, stop))
        assert [p[0] for p in pieces] + [stop] == [start] + [p[1] for p in pieces]
        layer.prefetch_rows(start, stop)
        layer.release()
    layer.close()
    with pytest.raises(Closed):
        layer.read_all()


@pytest.mark.parametrize("store_k", ["pre", "post"])
def test_k_before_and_after_rope(path, store_k):
    k, v = values(40)
    spec_pre = k
    with make(path, scheme="f16", rope=ROPE, store_k=store_k) as layer:
        layer.append(k, v, k_state="pre", start=100)
        pre, _ = layer.read_rows(100, 140, k_state="pre")
        post, _ = layer.read_rows(100, 140, k_state="post")
        assert np.abs(pre - spec_pre).max() < 5e-3
        table = ROPE.table(100, 140)
        half = DIM // 2
        a, b = k[..., :half], k[..., half:]
        turned = np.concatenate(
            [a * table.cos - b * table.sin, b * table.cos + a * table.sin], axis=2
        )
        assert np.abs(post - turned).max() < 5e-3
        one, _ = layer.gather([139, 100], k_state="post")
        assert np.allclose(one, post[:, [39, 0]], atol=1e-6)
        q = values(1)[0][:, 0]
        seen = kvstore.attend(q, layer)
        layer.append(post, v, k_state="post")
        assert np.abs(layer.read_rows(140, 180, k_state="post")[0] - post).max() < 2e-2
        scores = np.einsum("hd,hnd->hn", q, post) / DIM**0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        want = np.einsum("hn,hnd->hd", weights, layer.read_rows(100, 140)[1])
        assert np.abs(seen - want).max() < 1e-4


def test_what_is_not_committed_is_seen_here_only(path):
    k, v = values(50)
    with make(path) as layer, FlatLayer.open(path) as reader:
        layer.append(k, v)
        assert (len(layer), len(reader)) == (50, 0)
        layer.commit()
        assert len(reader) == 50
        with pytest.raises(Locked, match="appending"):
            FlatLayer.open(path, "a")
        with pytest.raises(InvalidArgument, match="mode='a'"):
            reader.append(k, v)
        layer.drop_front(20)
        layer.commit()
        with pytest.raises(NotFound, match="begin at 20"):
            reader.read_rows(0, 30)
    with FlatLayer.open(path, "a") as layer:
        assert (layer.start, layer.stop) == (20, 50)


def test_views_are_of_the_file_and_outlive_growth(path):
    k, v = values(400)
    layer = make(path)
    layer.append(k[:, :50], v[:, :50])
    (before,) = layer.raw_rows("k")
    rows = quantise(k.transpose(1, 0, 2).reshape(400, -1), "q8_0")
    assert np.array_equal(before, rows[:50])
    assert not before.flags.writeable
    layer.append(k[:, 50:], v[:, 50:])
    views = layer.raw_rows("k")
    assert len(views) > 1
    assert np.array_equal(np.concatenate(views), rows)
    layer.close()
    assert np.array_equal(before, rows[:50])


def test_every_flipped_byte_is_found(path):
    """In the header, the commit records and the rows; not in room that nobody uses yet."""
    k, v = values(300)
    with make(path) as layer:
        layer.append(k, v)
        layer.commit()
        segment = layer._segments._segments[0]
        spans = [(0, 400), (8192, 8192 + 512), (12288, 12288 + 512)]
        for kind in ("k", "v"):
            area, sums = segment.areas[kind]
            n_rows = min(segment.rows, 300)
            spans.append((area, area + n_rows * layer.header.row_bytes(kind)))
            spans.append((sums, sums + 4 * (n_rows // layer.header.block_rows)))
    with open(path, "rb") as file:
        whole = file.read()
    rng = random.Random(0)
    for lo, hi in spans:
        for at in {lo, hi - 1, *(rng.randrange(lo, hi) for _ in range(25))}:
            with open(path, "r+b") as file:
                file.seek(at)
                file.write(bytes([whole[at] ^ 1 << rng.randrange(8)]))
            for pread in (False, True):
                with pytest.raises((Corrupt, Truncated)):
                    verify(path, pread)
            with open(path, "r+b") as file:
                file.seek(at)
                file.write(whole[at : at + 1])
    with FlatLayer.open(path) as layer:
        layer.verify()


def test_a_damaged_block_is_refused_where_blocks_are_read(path):
    k, v = values(64)
    with make(path) as layer:
        layer.append(k, v)
        layer.commit()
        at = layer._segments._segments[0].areas["v"][0] + 3
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    for pread in (False, True):
        with FlatLayer.open(path, pread=pread) as layer:
            with pytest.raises(Corrupt, match=r"v rows \[0, "):
                layer.read_rows(0, 1)
            with pytest.raises(Corrupt, match="v rows"):
                kvstore.attend(np.ones((HEADS, DIM), np.float32), layer)
            assert np.array_equal(layer.read_rows(0, 64, kinds=("k",))[0], stored(k, "q8_0"))
            layer.gather([0])  # not checked, as documented


@pytest.mark.parametrize("pread", [False, True])
def test_a_file_that_is_cut(path, pread):
    k, v = values(300)
    with make(path) as layer:
        layer.append(k, v)
        layer.commit()
    size = os.stat(path).st_size
    layer = FlatLayer.open(path, pread=pread)
    layer.read_all()
    for keep in (size - 1, size // 2, 70_000, 9000, 8192, 100, 0):
        os.truncate(path, keep)
        with pytest.raises(KvError):
            layer.verify()
        for read in (layer.read_all, lambda: layer.gather([0, 299])):
            try:
                got = read()
            except (Truncated, Corrupt):
                continue
            assert got[0].shape[1] in (2, 300)
        with pytest.raises((Truncated, Corrupt)), FlatLayer.open(path, "a", pread=pread):
            pass
    layer.close()


def test_a_large_sparse_file_touches_few_pages(path):
    """10 GB of rows; each of 100 rows costs at most three pages of K and three of V."""
    import resource

    heads, dim, n = 8, 128, 4_600_000
    layer = FlatLayer.create(
        path, heads=heads, head_dim=dim, scheme="q8_0", capacity=n, sparse=True
    )
    header = layer.header
    # As if so many rows of zeros had been committed: a hole reads as zeros.
    layer._commits.store(layer._state._replace(end=n))
    layer.close()
    layer = FlatLayer.open(path)
    assert len(layer) * header.bytes_per_row > 10**10
    layer.advise_random()
    layer.gather([0])
    rng = np.random.default_rng(0)
    rows = np.sort(rng.choice(n, 100, replace=False))
    base = _resident(layer)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    k, v = layer.gather(rows)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert not k.any()
    assert not v.any()
    # Faults of the result's own memory are among them.
    own = (k.nbytes + v.nbytes + 2 * 100 * header.bytes_per_row) // 4096 + 200
    assert faults <= 100 * 2 * 3 + own
    assert _resident(layer) - base <= 100 * 2 * 3
    layer.close()


def _resident(layer):
    """Pages of the file's maps that this process has touched."""
    total = None
    name = os.path.realpath(layer._file.where)
    with open("/proc/self/smaps") as smaps:
        here = False
        for line in smaps:
            if "-" in line.split()[0] and not line.split()[0].endswith(":"):
                here = line.rstrip().endswith(name)
            elif here and line.startswith("Rss:"):
                total = (total or 0) + int(line.split()[1]) // 4
    assert total is not None
    return total


def test_wrong_arguments(path):
    k, v = values(10)
    with pytest.raises(InvalidArgument, match="these fit: f16, q8_0"):
        make(path, scheme="q4_k", heads=3)
    with make(path) as layer:
        for wrong in (
            lambda: layer.append(k, v[:, :5]),
            lambda: layer.append(k[:1], v),
            lambda: layer.append(k, None),
            lambda: layer.append(k * np.nan, v),
            lambda: layer.append(k, v, k_state="mid"),
            lambda: layer.read_rows(0, 1),
            lambda: layer.read_rows(2, 1),
            lambda: layer.drop_front(-1),
            lambda: layer.take_back(1),
            lambda: layer.raw_rows("q"),
        ):
            with pytest.raises(InvalidArgument):
                wrong()
        assert len(layer) == 0
        with pytest.raises(InvalidArgument, match="exists already"):
            make(path)
    with pytest.raises(NotFound):
        FlatLayer.open(path + ".no")
    with pytest.raises(InvalidArgument, match="mode"):
        FlatLayer.open(path, "w")
