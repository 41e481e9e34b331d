"""The attention kernel against float64, on every instruction set."""

from itertools import pairwise

import numpy as np
import pytest
from kvcodecs import Rope, _core
from kvcodecs.attention import SIMD_LEVELS, Attention, Rows
from kvcodecs.errors import InvalidArgument
from kvcodecs.ggml.schemes import scheme_by_name

ALL = 1 << 40


def reference(q, k, v, scale, first=None, last=None, position=0):
    """Attention in float64, ``[heads][rows][head_dim_v]``; zeros where nothing is seen."""
    scores = np.einsum("hrd,htd->hrt", q.astype(np.float64), k.astype(np.float64)) * scale
    at = position + np.arange(k.shape[1])
    if first is not None:
        seen = (at >= np.asarray(first)[:, None]) & (at <= np.asarray(last)[:, None])
        scores[:, ~seen] = -np.inf
    most = scores.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(most), most, 0.0))
    total = weights.sum(-1, keepdims=True)
    out = np.einsum("hrt,htd->hrd", weights, v.astype(np.float64))
    return np.divide(out, total, out=np.zeros_like(out), where=total > 0)


def noise(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def attend(q, k, v, scale, first=None, last=None, position=0, simd=None, n_threads=1):
    n = q.shape[1]
    first, last = (0, ALL) if first is None else (first, last)
    attention = Attention(
        q,
        v.shape[2],
        scale=scale,
        first=np.broadcast_to(first, n),
        last=np.broadcast_to(last, n),
        simd=simd,
    )
    attention.add(k, v, position, n_threads=n_threads)
    return attention.result()


@pytest.mark.parametrize("simd", SIMD_LEVELS)
@pytest.mark.parametrize("n_rows", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 50])
def test_numbers_of_query_rows(simd, n_rows):
    q, k, v = noise(2, n_rows, 64), noise(2, 130, 64, seed=1), noise(2, 130, 64, seed=2)
    np.testing.assert_allclose(
        attend(q, k, v, 0.125, simd=simd), reference(q, k, v, 0.125), atol=5e-6
    )


@pytest.mark.parametrize("simd", SIMD_LEVELS)
@pytest.mark.parametrize(
    ("dim_k", "dim_v"),
    [(2, 2), (6, 4), (34, 18), (48, 48), (80, 64), (64, 80), (96, 2), (126, 256), (256, 130)],
)
@pytest.mark.parametrize("n_rows", [3, 20])
def test_head_dims(simd, dim_k, dim_v, n_rows):
    q, k, v = noise(2, n_rows, dim_k), noise(2, 77, dim_k, seed=1), noise(2, 77, dim_v, seed=2)
    scale = dim_k**-0.5
    np.testing.assert_allclose(
        attend(q, k, v, scale, simd=simd), reference(q, k, v, scale), atol=5e-6
    )


@pytest.mark.parametrize("simd", SIMD_LEVELS)
@pytest.mark.parametrize("n", [0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 500])
def test_ends_of_tiles_and_masks(simd, n):
    rng = np.random.default_rng(n)
    for n_rows in (5, 21):
        q, k, v = noise(3, n_rows, 32), noise(3, n, 32, seed=1), noise(3, n, 32, seed=2)
        first = rng.integers(90, 110 + n, n_rows)
        last = first + rng.integers(-5, n + 10, n_rows)
        found = attend(q, k, v, 0.3, first, last, 100, simd)
        np.testing.assert_allclose(found, reference(q, k, v, 0.3, first, last, 100), atol=5e-6)
        np.testing.assert_array_equal(found[:, (last < 100) | (first >= 100 + n)], 0.0)


@pytest.mark.parametrize("simd", SIMD_LEVELS)
@pytest.mark.parametrize("n_rows", [2, 17])
def test_scores_beyond_what_float32_resolves(simd, n_rows):
    # Scores of about 1e4 that differ by some units, and ties: float32 would be off by 1e-3.
    q, k, v = noise(2, n_rows, 64), noise(2, 200, 64, seed=1), noise(2, 200, 64, seed=2)
    q[..., 0], k[..., 0] = 100.0, 800.0
    k[:, 50:60] = k[:, 49:50]
    for sign in (1, -1):
        k[..., 0] *= sign
        expected = reference(q, k, v, 0.125)
        np.testing.assert_allclose(attend(q, k, v, 0.125, simd=simd), expected, atol=5e-6)


@pytest.mark.parametrize("simd", SIMD_LEVELS)
def test_one_huge_score(simd):
    q, k, v = noise(2, 6, 64), noise(2, 300, 64, seed=1), noise(2, 300, 64, seed=2)
    for at in (0, 130, 299):
        huge = k.copy()
        huge[:, at] = q.mean(1) * 1e5
        np.testing.assert_allclose(
            attend(q, huge, v, 0.125, simd=simd), reference(q, huge, v, 0.125), atol=5e-6
        )


def test_long_sums_lose_nothing():
    n = 1 << 18
    q, k = noise(1, 1, 2), np.zeros((1, 1, 2), np.float32)
    v = np.full((1, n, 2), 1.03, np.float32)
    v[:, ::2, 1] = 0.1
    attention = Attention(q, 2, scale=1.0, first=[0], last=[ALL])
    for at in range(0, n, 1 << 16):
        keys = np.broadcast_to(k, (1, 1 << 16, 2))
        attention.add(keys, v[:, at : at + (1 << 16)], at, n_threads=1)
    expected = v.mean(1, dtype=np.float64)[:, None]
    np.testing.assert_allclose(attention.result(), expected, rtol=2e-6)


@pytest.mark.parametrize("simd", SIMD_LEVELS)
def test_pieces_threads_and_strides_change_rounding_alone(simd):
    n, rows = 4000, 6
    q, k, v = noise(2, rows, 64), noise(n, 2, 64, seed=1), noise(n, 2, 64, seed=2)
    k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
    expected = reference(q, k, v, 0.2)
    for n_threads in (1, 2, 5):
        np.testing.assert_allclose(
            attend(q, k, v, 0.2, simd=simd, n_threads=n_threads), expected, atol=5e-6
        )
    attention = Attention(q, 64, scale=0.2, first=[0] * rows, last=[ALL] * rows, simd=simd)
    cuts = [0, 1, 65, 129, 1000, 1000, 3999, n]
    for lo, hi in reversed(list(pairwise(cuts))):
        attention.add(k[:, lo:hi], v[:, lo:hi], lo, n_threads=2)
    np.testing.assert_allclose(attention.result(), expected, atol=5e-6)


def rows_of(x, scheme):
    """Rows of blocks for ``[heads][n][head_dim]``, and what they decode to."""
    scheme = scheme_by_name(scheme)
    data = _core.ggml_encode(scheme.number, np.ascontiguousarray(x.transpose(1, 0, 2)).ravel())
    values = _core.ggml_decode(scheme.number, data).reshape(x.shape[1], x.shape[0], x.shape[2])
    return Rows(data, scheme), values.transpose(1, 0, 2)


@pytest.mark.parametrize("simd", SIMD_LEVELS)
@pytest.mark.parametrize(("dim_k", "dim_v"), [(64, 64), (128, 32), (80, 16), (24, 96), (2, 4)])
@pytest.mark.parametrize(("k_scheme", "v_scheme"), [("q8_0", "f16"), ("f16", "q8_0")])
def test_rows_of_blocks(simd, dim_k, dim_v, k_scheme, v_scheme):
    heads, n, rows = 16, 150, 5
    q, x, y = noise(heads, rows, dim_k), noise(heads, n, dim_k, seed=1), noise(heads, n, dim_v)
    (k, k_values), (v, v_values) = rows_of(x, k_scheme), rows_of(y, v_scheme)
    expected = reference(q, k_values, v_values, 0.2)
    for keys, values in ((k, v), (k, v_values), (k_values, v)):
        attention = Attention(q, dim_v, scale=0.2, first=[0] * rows, last=[ALL] * rows, simd=simd)
        attention.add(keys, values, 0, n_threads=2)
        np.testing.assert_allclose(attention.result(), expected, atol=5e-6)


@pytest.mark.parametrize("simd", SIMD_LEVELS)
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (64, 32), (96, 80)])
def test_rows_are_rotated(simd, style, dim, rotary):
    heads, n, rows, at = 2, 100, 3, 123_456
    rope = Rope.from_theta(1e6, rotary, style=style, scaling=1.25)
    order = rope.channel_order(dim)
    q, v = noise(heads, rows, dim), noise(heads, n, dim)
    k, coded = rows_of(noise(heads, n, dim, seed=1), "q8_0")
    half, pairs = dim // 2, rope.n_pairs
    angles = ((at + np.arange(n)).astype(np.float32)[:, None] * rope.inv_freq).astype(np.float64)
    cos, sin = np.cos(angles) * 1.25, np.sin(angles) * 1.25
    turned = coded.astype(np.float64)
    a, b = coded[..., :pairs], coded[..., half : half + pairs]
    turned[..., :pairs], turned[..., half : half + pairs] = a * cos - b * sin, b * cos + a * sin
    keys = np.empty_like(turned)
    keys[..., order] = turned
    attention = Attention(
        q, dim, scale=0.2, first=[0] * rows, last=[ALL] * rows, order=order, simd=simd
    )
    attention.add(k, v, at, rope=rope, n_threads=1)
    np.testing.assert_allclose(attention.result(), reference(q, keys, v, 0.2), atol=4e-6)


def test_angles_of_far_positions():
    rope = Rope(np.array([3.0, 1e-3], np.float32))
    k = np.tile(np.array([1, 0.5, -0.25, 2], np.float32), (1, 1, 1))
    data = _core.ggml_encode(1, k.ravel())
    q, v = np.eye(4, dtype=np.float32)[None], np.ones((1, 2, 4), np.float32)
    v[:, 1] = 0
    for at in (0, 1, 99_999, 11_184_811, 1 << 24):
        cos, sin = (part.astype(np.float64) for part in rope.table(at, at + 1).rows(at, at + 1))
        a, b = k[0, :, :2].astype(np.float64), k[0, :, 2:].astype(np.float64)
        turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)[None]
        both = np.concatenate([turned, np.zeros_like(turned)], axis=1)
        attention = Attention(q, 4, scale=1.0, first=[0] * 4, last=[ALL] * 4)
        attention.add(Rows(data, scheme_by_name("f16")), v[:, :1], at, rope=rope)
        attention.add(np.zeros((1, 1, 4), np.float32), v[:, 1:], at + 1)
        np.testing.assert_allclose(attention.result(), reference(q, both, v, 1.0), atol=1e-6)


def test_nothing_seen_is_zero():
    attention = Attention(noise(2, 3, 8), 4, scale=1.0, first=[0] * 3, last=[-1] * 3)
    np.testing.assert_array_equal(attention.result(), np.zeros((2, 3, 4), np.float32))
    attention.add(noise(2, 9, 8), noise(2, 9, 4), 0)
    np.testing.assert_array_equal(attention.result(), np.zeros((2, 3, 4), np.float32))
    assert Attention(noise(2, 0, 8), 4, scale=1.0, first=[], last=[]).result().shape == (2, 0, 4)


def test_sums_beyond_float32_are_refused():
    attention = Attention(noise(1, 1, 8) + 5, 8, scale=1.0, first=[0], last=[ALL])
    attention.add(np.full((1, 3, 8), 3e38, np.float32), noise(1, 3, 8), 0)
    with pytest.raises(InvalidArgument, match="beyond float32"):
        attention.result()


def test_arguments_are_checked():
    q = noise(2, 3, 32)
    good = {"scale": 1.0, "first": [0] * 3, "last": [9] * 3}
    for wrong in (
        {"scale": np.nan}, {"scale": 1e39}, {"first": [0] * 2}, {"last": [[0] * 3]},
        {"order": np.zeros(32, np.int32)}, {"order": np.arange(31, dtype=np.int32)},
        {"order": np.arange(1, 33, dtype=np.int32)}, {"simd": "mmx"}, {"order": "x"},
        {"order": [1 << 40] * 32}, {"first": [0.5] * 3}, {"first": [1 << 70] * 3}, {"first": None},
        {"scale": "x"}, {"scale": None}, {"scale": 10**5000},
    ):  # fmt: skip
        with pytest.raises(InvalidArgument):
            Attention(q, 32, **(good | wrong))
    for wrong_q in (
        q[0], q * np.nan, np.zeros((0, 3, 32), np.float32), q[:, :, :0], q.astype("f8"), [[1], []],
    ):  # fmt: skip
        with pytest.raises(InvalidArgument):
            Attention(wrong_q, 32, **good)
    for head_dim in (0, -1, 1.5, 1 << 40, 1 << 70, None, True):
        with pytest.raises(InvalidArgument):
            Attention(q, head_dim, **good)
    attention = Attention(q, 32, **good)
    k, v = noise(2, 4, 32), noise(2, 4, 32)
    rows, _ = rows_of(k, "q8_0")
    rope = Rope.from_theta(1e4, 32)
    scheme = rows.scheme
    for k_rows, v_rows, at in (
        (k[:1], v, 0), (k, v[:, :3], 0), (k[..., ::2], v, 0), (k, v[..., :9], 0),
        (k[..., ::-1], v, 0), (k.astype(np.float64), v, 0), (rows, v, 1 << 60),
        (Rows(rows.data[:-1], scheme), v, 0), (Rows(rows.data[:68], scheme), v, 0),
        (Rows(rows.data, scheme_by_name("q4_k")), v, 0), (k, v, 1 << 70), (k, v, 1.5), (k, v, -1),
        (Rows(None, scheme), v, 0), (Rows(rows.data, "q8_0"), v, 0), ([1], v, 0), (k, None, 0),
        (Rows(np.zeros((8, 68), np.uint8)[:, ::2], scheme), v, 0),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument):
            attention.add(k_rows, v_rows, at)
    for wrong in ({"n_threads": -1}, {"n_threads": 1 << 32}, {"rope": "x"}):
        with pytest.raises(InvalidArgument):
            attention.add(rows, v, 0, **wrong)
    wide, far = Rope.from_theta(1e4, 64), Rope(np.array([3e38], np.float32))
    for k_rows, at, angle in (
        (k, 0, rope), (rows, -1, rope), (rows, 1 << 24, rope), (rows, 0, wide), (rows, 9, far),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument):
            attention.add(k_rows, v, at, rope=angle)
    attention.add(rows, v, 0)
    assert np.isfinite(attention.result()).all()
