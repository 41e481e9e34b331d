"""Flat layers: rows in mapped files, before and after RoPE, views of them, and who sees what."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from kvcodecs.errors import (
    Corrupt,
    InvalidArgument,
    Locked,
    NotFound,
)
from kvcodecs.ggml import dequantise, quantise

import kvstore
from kvstore import flat
from kvstore.flat import FlatLayer, coding

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


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "a.kvf")


def make(path, **options):
    options = {"heads": HEADS, "head_dim": DIM, "scheme": SCHEMES, "capacity": 64, **options}
    return FlatLayer.anonymous(**options) if path is None else FlatLayer.create(path, **options)


@pytest.mark.parametrize("store_k", ["pre", "post"])
def test_nothing_rotates_unasked(store_k):
    k, v = values(40)
    k_rows = stored(k, "q8_0")
    model = kvstore.Model.uniform(name="m", n_layers=1, n_kv_heads=HEADS, head_dim=DIM, rope=ROPE)
    with flat.anonymous(model, scheme="q8_0", store_k=store_k) as session:
        layer = session.layer(0)
        session.append([k[:, :20]], [v[:, :20]], start=700)
        layer.append(k[:, 20:], v[:, 20:])
        for found in (
            layer.read_rows(700, 740)[0],
            layer.read_window(40)[0],
            layer.read_all()[0],
            layer.gather(range(700, 740))[0],
            session.read(0, "k", dtype="float32"),
            session.read_all(dtype="float32")[0][0],
        ):
            np.testing.assert_array_equal(found, k_rows)
        other = "pre" if store_k == "post" else "post"
        assert np.abs(layer.read_all(k_state=other)[0] - k_rows).max() > 0.5


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


def test_rows_by_hand():
    (example,) = (x for x in doctest.DocTestFinder().find(FlatLayer) if x.examples)
    assert doctest.DocTestRunner().run(example).failed == 0


def test_views_of_a_ring_and_positions(path):
    k, v = values(100)
    with make(path, max_rows=20) as layer:
        assert layer.max_rows == 20
        layer.append(k[:, :15], v[:, :15], start=700)
        for at in range(15, 100, 5):
            layer.drop_front(5)
            layer.append(k[:, at : at + 5], v[:, at : at + 5])
        (view,) = layer.raw_rows("k")
        assert len(view) == layer.capacity
        rows = quantise(k.transpose(1, 0, 2).reshape(100, -1), "q8_0")
        assert (layer.origin, layer.start, layer.stop) == (700, 785, 800)
        slots = (np.arange(layer.start, layer.stop) - layer.origin) % len(view)
        assert np.array_equal(view[slots], rows[85:])
    with make(None) as layer:
        assert layer.max_rows is None


def test_k_is_turned_back_a_few_rows_at_a_time(monkeypatch):
    k, v = values(100)
    with make(None, rope=ROPE, store_k="post", scheme="f16", max_rows=60) as layer:
        layer.append(k[:, :50], v[:, :50])
        layer.drop_front(40)
        layer.append(k[:, 50:], v[:, 50:])
        whole = layer.read_all(k_state="pre", dtype="float16")[0]
        monkeypatch.setattr(coding, "_TURNED_VALUES", 7 * HEADS * DIM)
        np.testing.assert_array_equal(layer.read_all(k_state="pre", dtype="float16")[0], whole)
        np.testing.assert_array_equal(
            layer.gather(range(40, 100), k_state="pre")[0], layer.read_all(k_state="pre")[0]
        )
