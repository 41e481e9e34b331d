"""Which pages of a flat layer's file are read, kept and given back: what the kernel says."""

from __future__ import annotations

import mmap
import os
import time

import numpy as np
import pytest
from kvtools.bench.flat import pages_in_memory

from kvstore.flat import FlatLayer
from kvstore.flat import file as flat_file

PAGE = mmap.PAGESIZE


def sure(path):
    """Skip where the kernel keeps pages that it was told to let go: a file system of memory."""
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    if pages_in_memory(path).any():
        pytest.skip("this file system keeps every page in memory")


def make(path, n, **options):
    layer = FlatLayer.create(path, heads=8, head_dim=128, scheme="q8_0", capacity=n, **options)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 50, (n, layer.header.row_bytes("k")), np.uint8)
    layer.append_rows({"k": rows, "v": rows})
    layer.commit()
    return layer


def rows_span(layer, kind, lo, hi):
    """Return the pages of rows ``[lo, hi)`` of the first segment."""
    area, row_bytes = layer._segments._segments[0].areas[kind][0], layer.header.row_bytes(kind)
    return slice((area + lo * row_bytes) // PAGE, -(-(area + hi * row_bytes) // PAGE))


@pytest.mark.parametrize("pread", [False, True])
def test_a_row_of_a_large_sparse_file_reads_few_pages(tmp_path, pread):
    """10 GB of rows; each of 100 rows costs at most three pages of K and three of V."""
    path, n = str(tmp_path / "a.kvf"), 4_600_000
    layer = FlatLayer.create(path, heads=8, head_dim=128, scheme="q8_0", capacity=n, sparse=True)
    # As if so many rows of zeros had been committed: a hole reads as zeros.
    layer._commits.store(layer._state._replace(end=n))
    layer.close()
    sure(path)
    with FlatLayer.open(path, pread=pread) as layer:
        assert layer.n_bytes > 10**10
        layer.advise_random()
        layer.gather([0])
        before = pages_in_memory(path)
        rows = np.random.default_rng(0).choice(n, 100, replace=False)
        k, v = layer.gather(rows)
        touched = int(np.count_nonzero(pages_in_memory(path) & ~before))
        assert not k.any()
        assert not v.any()
        assert 100 * 2 <= touched <= 100 * 2 * 3
        at = [0, n - 1]
        one, _ = layer.gather(at)
        assert one.shape[1] == 2


@pytest.mark.parametrize("pread", [False, True])
def test_release_and_prefetch(tmp_path, pread):
    path = str(tmp_path / "a.kvf")
    layer = make(path, 4096, pread=pread)
    sure(path)
    with layer:
        want = layer.read_all()
        spans = [rows_span(layer, kind, 16, 4080) for kind in "kv"]
        # Where memory is short the kernel lets some of them go by itself.
        assert all(pages_in_memory(path)[span].mean() > 0.5 for span in spans)
        layer.release()
        assert all(pages_in_memory(path)[span].mean() < 0.01 for span in spans)
        layer.advise_random()
        layer.read_rows(2048, 2049)
        assert all(pages_in_memory(path)[span].mean() < 0.05 for span in spans)  # its block
        layer.release()
        layer.prefetch_rows(1000, 1500)
        wanted = [rows_span(layer, kind, 1000, 1500) for kind in "kv"]
        until = time.monotonic() + 20  # it returns at once
        while not all(pages_in_memory(path)[span].mean() > 0.5 for span in wanted):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert all(
            pages_in_memory(path)[rows_span(layer, kind, 3000, 4000)].mean() < 0.1 for kind in "kv"
        )
        assert np.array_equal(layer.read_all(), want)


def test_advice_without_a_file():
    with FlatLayer.anonymous(heads=2, head_dim=256, scheme="f16") as layer:
        x = np.random.default_rng(0).standard_normal((2, 500, 256)).astype(np.float16)
        layer.append(x, x)
        layer.release()
        layer.prefetch_rows(0, 500)
        layer.advise_random()
        layer.flush()
        assert np.array_equal(layer.read_all(dtype="float16"), [x, x])


def test_room_of_dropped_rows_is_given_back(tmp_path, monkeypatch):
    """Also where what is dropped at a time is less than a page; and after a kill."""
    path = str(tmp_path / "a.kvf")
    layer = FlatLayer.create(path, heads=1, head_dim=32, scheme="q4_0", capacity=65536)
    block = layer.header.block_rows
    assert block * layer.header.row_bytes("k") % PAGE  # no whole pages
    rows = np.zeros((60_000, layer.header.row_bytes("k")), np.uint8)
    layer.append_rows({"k": rows, "v": rows})
    layer.commit()
    full = layer._file.disk_bytes
    for _ in range(20):
        layer.drop_front(block)
        layer.commit()
    dropped = 20 * block * layer.bytes_per_row
    assert full - layer._file.disk_bytes >= dropped - 2 * PAGE
    monkeypatch.setattr(flat_file, "punch", lambda *args: True)
    layer.drop_front(20 * block)
    layer.commit()
    layer.close()
    monkeypatch.undo()
    assert os.stat(path).st_blocks * 512 > full - dropped - 3 * PAGE
    with FlatLayer.open(path, "a") as layer:
        assert full - layer._file.disk_bytes >= 2 * dropped - 2 * PAGE
        layer.verify()
