"""RoPE: the coded domain against an independent float64 model, every pairing and state."""

import ml_dtypes
import numpy as np
import pytest
from kvcodecs.errors import Corrupt, InvalidArgument, Unsupported
from kvcodecs.rope import MAX_POSITION, Rope, from_coded, to_coded
from kvcodecs.spec import StreamSpec

STYLES = ["half", "interleaved"]
GEOMETRIES = [(64, 64), (64, 32), (80, 32), (96, 96), (2, 2), (6, 4), (192, 64)]
EPS = 2.0**-24  # half an ulp of a float32 in [1, 2)


def make_spec(style, head_dim, rotary_dim, scaling=1.0, heads=2):
    rope = Rope.from_theta(1e4, rotary_dim, style=style, scaling=scaling)
    return StreamSpec("k", heads, head_dim, rope)


def make_tensor(spec, n_tokens, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(0, 3, (spec.heads, n_tokens, spec.head_dim)).astype(np.float32)


def pairs_of(rope):
    n = rope.n_pairs
    if rope.style == "half":
        return [(i, i + n) for i in range(n)]
    return [(2 * i, 2 * i + 1) for i in range(n)]


def rotate_model(x, rope, start, sign=1):
    """Rotate tensor channels as complex numbers in float64, angles in float32 as models do."""
    out = x.astype(np.float64)
    for i, (a, b) in enumerate(pairs_of(rope)):
        for t in range(x.shape[1]):
            angle = float(np.float32(start + t) * rope.inv_freq[i])
            turn = np.exp(1j * sign * angle) * rope.scaling**sign
            z = (x[:, t, a].astype(np.float64) + 1j * x[:, t, b].astype(np.float64)) * turn
            out[:, t, a], out[:, t, b] = z.real, z.imag
    return out


def assert_bits_equal(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("scaling", [1.0, 1.25])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), GEOMETRIES)
@pytest.mark.parametrize("style", STYLES)
def test_rotation_matches_float64_model(style, head_dim, rotary_dim, scaling):
    spec = make_spec(style, head_dim, rotary_dim, scaling)
    pre = make_tensor(spec, 9)
    start = 5000
    bound = 8 * EPS * np.abs(pre).max() * max(scaling, 1.0)
    post = from_coded(to_coded(pre, spec), spec, "post", start)
    assert np.abs(post - rotate_model(pre, spec.rope, start)).max() <= bound
    coded = to_coded(post, spec, "post", start)
    model = rotate_model(post, spec.rope, start, sign=-1)[..., spec.rope.channel_order(head_dim)]
    assert np.abs(coded - model).max() <= bound


@pytest.mark.parametrize(("head_dim", "rotary_dim"), GEOMETRIES)
@pytest.mark.parametrize("style", STYLES)
def test_post_and_back_stays_within_rounding(style, head_dim, rotary_dim):
    spec = make_spec(style, head_dim, rotary_dim, scaling=1.1)
    post = make_tensor(spec, 50, seed=1)
    again = from_coded(to_coded(post, spec, "post", 77), spec, "post", 77)
    assert np.abs(again - post).max() <= 8 * EPS * np.abs(post).max()


@pytest.mark.parametrize(("head_dim", "rotary_dim"), GEOMETRIES)
@pytest.mark.parametrize("style", STYLES)
def test_pre_only_permutes_channels(style, head_dim, rotary_dim):
    spec = make_spec(style, head_dim, rotary_dim)
    x = make_tensor(spec, 3)
    order = spec.rope.channel_order(head_dim)
    assert order.dtype == np.int32
    assert sorted(order) == list(range(head_dim))
    assert_bits_equal(to_coded(x, spec), np.ascontiguousarray(x[..., order]))
    assert_bits_equal(from_coded(to_coded(x, spec), spec), x)
    for i, (a, b) in enumerate(pairs_of(spec.rope)):
        assert (order[i], order[head_dim // 2 + i]) == (a, b)
    rest = [*order[rotary_dim // 2 : head_dim // 2], *order[head_dim // 2 + rotary_dim // 2 :]]
    assert rest == list(range(rotary_dim, head_dim))
    assert spec.rope.keeps_order(head_dim) == (list(order) == list(range(head_dim)))


def test_channel_order_pinned():
    assert list(Rope.from_theta(1e4, 4).channel_order(8)) == [0, 1, 4, 5, 2, 3, 6, 7]
    rope = Rope.from_theta(1e4, 4, style="interleaved")
    assert list(rope.channel_order(8)) == [0, 2, 4, 5, 1, 3, 6, 7]


@pytest.mark.parametrize("style", STYLES)
def test_every_operation_rounds_by_itself(style):
    spec = make_spec(style, 6, 4, scaling=0.75, heads=1)
    x = make_tensor(spec, 20, seed=3)
    g = np.float32(0.75)
    table = spec.rope.table(40, 60)
    rotated, coded = from_coded(x, spec, "post", 40), to_coded(x, spec, "post", 40)
    for t in range(20):
        for i, (first, second) in enumerate(pairs_of(spec.rope)):
            c, s = table.cos[t, i], table.sin[t, i]
            a, b = x[0, t, i], x[0, t, 3 + i]
            assert rotated[0, t, first] == (a * c) - (b * s)
            assert rotated[0, t, second] == (b * c) + (a * s)
            a, b = x[0, t, first], x[0, t, second]
            assert coded[0, t, i] == ((a * c) + (b * s)) / (g * g)
            assert coded[0, t, 3 + i] == ((b * c) - (a * s)) / (g * g)


def test_table_takes_float32_angles_and_carries_the_scaling():
    rope = Rope.from_theta(1e4, 8, scaling=1.5)
    table = rope.table(8190, 8192)
    assert table.first_token == 8190
    angle = np.float32(8191) * rope.inv_freq
    cos = np.cos(angle.astype(np.float64)).astype(np.float32) * np.float32(1.5)
    sin = np.sin(angle.astype(np.float64)).astype(np.float32) * np.float32(1.5)
    assert_bits_equal(table.cos[1], cos)
    assert_bits_equal(table.sin[1], sin)
    # The float64 angle of the same position is visibly another one.
    exact = np.cos(8191.0 * 1e4 ** (-np.arange(0, 8, 2) / 8.0))
    assert np.abs(rope.table(8191, 8192).cos / 1.5 - exact).max() > 1e-5


def test_positions_are_absolute_and_ranges_are_slices():
    spec = make_spec("half", 16, 16)
    y = make_tensor(spec, 5000)
    whole = from_coded(y, spec, "post", 100)
    assert_bits_equal(from_coded(y[:, 7:4321], spec, "post", 107), whole[:, 7:4321].copy())
    table = spec.rope.table(50, 6000)
    assert_bits_equal(from_coded(y, spec, "post", 100, table), whole)
    assert_bits_equal(to_coded(whole, spec, "post", 100, table), to_coded(whole, spec, "post", 100))
    with pytest.raises(InvalidArgument, match="covers positions"):
        from_coded(y, spec, "post", 1001, table)


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, ">f2", ">f4", ">f8"]
)
@pytest.mark.parametrize("rope", [True, False])
def test_any_float_dtype_and_stride(dtype, rope):
    spec = make_spec("interleaved", 8, 8) if rope else StreamSpec("v", 2, 8)
    x = make_tensor(spec, 11).astype(dtype)
    x.flags.writeable = False
    want = to_coded(x.astype(np.float32), spec, "post" if rope else "pre", 3)
    for form in (x, np.asfortranarray(x), np.repeat(x, 2, axis=1)[:, ::2], x[:, ::-1][:, ::-1]):
        got = to_coded(form, spec, "post" if rope else "pre", 3)
        assert_bits_equal(got, want)
        assert got.flags.c_contiguous


def test_nothing_to_do_copies_nothing():
    for spec in (StreamSpec("v", 2, 8), StreamSpec("k", 2, 8), make_spec("half", 8, 8)):
        x = make_tensor(spec, 4)
        assert to_coded(x, spec) is x
        assert from_coded(x, spec) is x
    x = make_tensor(StreamSpec("v", 2, 8), 4)
    assert to_coded(x, StreamSpec("v", 2, 8), "post", 5) is x


def test_no_tokens():
    spec = make_spec("interleaved", 8, 4)
    x = np.empty((2, 0, 8), np.float16)
    assert to_coded(x, spec, "post").shape == (2, 0, 8)
    assert from_coded(to_coded(x, spec), spec, "post").shape == (2, 0, 8)


def test_last_exact_position_is_the_limit():
    spec = make_spec("half", 4, 4)
    x = make_tensor(spec, 1)
    assert np.isfinite(from_coded(x, spec, "post", MAX_POSITION)).all()
    with pytest.raises(InvalidArgument, match="16777217"):
        from_coded(x, spec, "post", MAX_POSITION + 1)
    with pytest.raises(InvalidArgument):
        to_coded(x, spec, "post", -1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Rope([]),
        lambda: Rope([[1.0]]),
        lambda: Rope([1.0, np.nan]),
        lambda: Rope([1e300]),
        lambda: Rope([1.0], style="gptj"),
        lambda: Rope([1.0], scaling=0.0),
        lambda: Rope([1.0], scaling=float("nan")),
        lambda: Rope.from_theta(0.0, 4),
        lambda: Rope.from_theta(1e4, 3),
        lambda: Rope.from_theta(1e4, 0),
        lambda: Rope.from_theta(1e4, 8).channel_order(6),
        lambda: Rope.from_theta(1e4, 8).table(5, 4),
        lambda: Rope([3e38]).table(0, 1000),
        lambda: to_coded(np.zeros((2, 3, 8), np.float32), StreamSpec("k", 2, 8), "post"),
        lambda: to_coded(np.zeros((2, 3, 8), np.float32), StreamSpec("k", 2, 8), "after"),
        lambda: to_coded(np.zeros((2, 3, 8), np.int32), StreamSpec("k", 2, 8)),
        lambda: to_coded(np.zeros((2, 3, 8), np.complex64), StreamSpec("k", 2, 8)),
        lambda: to_coded(np.zeros((2, 8), np.float32), StreamSpec("k", 2, 8)),
        lambda: to_coded(np.zeros((3, 3, 8), np.float32), StreamSpec("k", 2, 8)),
        lambda: from_coded(np.zeros((2, 3, 6), np.float32), StreamSpec("k", 2, 8)),
    ],
)
def test_refused(call):
    with pytest.raises(InvalidArgument):
        call()


def test_ropes_compare_and_hash_by_value():
    a, b = Rope.from_theta(1e5, 64), Rope.from_theta(1e5, 64)
    assert a == b
    assert hash(a) == hash(b)
    assert len({a, b, Rope(a.inv_freq, "interleaved"), Rope(a.inv_freq, "half", 2.0)}) == 3
    assert a != Rope(a.inv_freq * np.float32(1.0000002))
    assert a != "rope"


def test_inv_freq_is_a_frozen_copy():
    given = np.array([1.0, 0.5])
    rope = Rope(given)
    given[0] = 7.0
    assert rope.inv_freq.dtype == np.float32
    assert rope.inv_freq[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        rope.inv_freq[0] = 2.0


def test_json_round_trip_is_exact():
    rope = Rope(np.float32([1.0, 0.1, 3e-7]), style="interleaved", scaling=1.1)
    assert Rope.from_json(rope.to_json()) == rope


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"inv_freq": None}, Corrupt),
        ({"inv_freq": "A"}, Corrupt),
        ({"inv_freq": "AAAA"}, Corrupt),
        ({"inv_freq": ""}, Corrupt),
        ({"inv_freq": "AADAfw=="}, Corrupt),  # a NaN
        ({"scaling": "1"}, Corrupt),
        ({"scaling": True}, Corrupt),
        ({"scaling": -1.0}, Corrupt),
        ({"style": None}, Corrupt),
        ({"style": "spiral"}, Unsupported),
    ],
)
def test_malformed_json_is_refused(change, kind):
    data = Rope.from_theta(1e4, 4).to_json()
    with pytest.raises(kind):
        Rope.from_json({**data, **change})
    for key in data:
        with pytest.raises(Corrupt):
            Rope.from_json({k: v for k, v in data.items() if k != key})
