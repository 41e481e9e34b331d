"""Encoders of ggml's schemes: bytes of `gguf`, golden bytes, searches against simple encoders."""

import numpy as np
import pytest
from kvcodecs import _core
from kvcodecs.errors import InvalidArgument
from kvcodecs.ggml.reference import decoders, encoders
from kvcodecs.ggml.schemes import SCHEMES, scheme_by_name
from kvtools.sample import load_sample

SEARCHED = tuple(s.name for s in SCHEMES if s.name not in encoders.EXACT)
IN_GGUF = ("f16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq1_0", "tq2_0")

X32 = ((7 * np.arange(32) % 32) - 16).astype(np.float32) / 8
X256 = ((37 * np.arange(256) % 256) - 128).astype(np.float32) / 64
GOLDEN = {
    "q8_0": (X32, "082481b9f0285f99d0084077b1e8205791c800386fa9e0184f89c0f83067a1d81047"),
    "q4_0": (X32, "003480c4f73b6ea2d5194c8fb3f72a6e91d5"),
    "q4_1": (X32, "223400c080b3f72a6e91d5084c7fb3e62a5d91c4"),
    "q5_0": (X32, "0030983367cc0077ee55cc33aa1188ff66dd44bb2299"),
    "q5_1": (X32, "003000c0983367cc0077ee55cc33aa1188ff66dd44bb2299"),
    "tq1_0": (
        X256,
        "24449a656c88cc2e449a656c88cf2e449a656c88cf2e449a656ccccf2e449a65"
        "3186769465bbd73186769465bb2e318688decb2d0040",
    ),
    "tq2_0": (
        X256,
        "841819516165469418195161658694181951616586941819516146869418195161654686941819616546869418"
        "516165468694185161654686941951616546860040",
    ),
    "q1_0": (X256[:128], "083c70381c0e87e3f1783c1e8fc3e170381c"),
    "q2_0_128": (
        X256[:128],
        "0040502554095542a55029540a9542a55029544a9552a554095542955029540a9542",
    ),
    "q2_0": (X256[:64], "0040502554095542a55029540a9542a55029"),
}


def encode(name, x, level=-1):
    return _core.ggml_encode(scheme_by_name(name).number, np.ascontiguousarray(x.ravel()), level)


def decode(name, blocks):
    return _core.ggml_decode(scheme_by_name(name).number, blocks)


def levels_here():
    """Return the instruction sets that this CPU has."""
    found = []
    for level in range(3):
        try:
            encode("f16", X32, level)
        except InvalidArgument:
            continue
        found.append(level)
    return found


@pytest.fixture(scope="module")
def streams():
    """Return K and V of every layer of the packaged sample, row after row."""
    sample = load_sample()
    found = []
    for x in (*sample.k, *sample.v):
        rows = np.asarray(x)[:, :256].astype(np.float32).transpose(1, 0, 2)
        found.append(np.ascontiguousarray(rows).ravel())
    return found


@pytest.fixture
def level_values(streams):
    """Return a function: arrays of whole blocks, real and special ones."""

    def draw(n):
        rng = np.random.default_rng(9)
        real = [x[: len(x) // n * n][: 3 * n * 41] for x in streams]
        return real + [special(rng, n * int(rng.integers(1, 6))) for _ in range(40)]

    return draw


def special(rng, n):
    """Draw values at every scale, with ties, zeros of both signs, equal magnitudes, denormals."""
    x = rng.normal(0, 10.0 ** rng.integers(-45, 4), n)
    kind = rng.integers(8)
    if kind == 0:
        x = rng.integers(-9, 9, n) * 0.125
    elif kind == 1:
        x[rng.random(n) < 0.5] = 0
    elif kind == 2:
        x = np.abs(x)
    elif kind == 3:
        x = np.where(rng.random(n) < 0.5, -0.0, 0.0)
    elif kind == 4:
        x = rng.choice([1e-45, -1e-45, 3e-39, -3e-39, 1e-38, 0, -0.0], n)
    elif kind == 5:
        x = rng.choice([2.5, -2.5], n)
    elif kind == 6:
        x = np.where(rng.random(n) < 0.7, -0.0, np.abs(x))
    return x.astype(np.float32)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name):
    x, expected = GOLDEN[name]
    assert bytes(encode(name, x)).hex() == expected


@pytest.mark.parametrize("name", IN_GGUF)
def test_the_bytes_are_those_of_gguf(name, level_values):
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name.upper()]
    for x in level_values(scheme_by_name(name).block_values):
        with np.errstate(all="ignore"):
            expected = gguf.quants.quantize(x[None], kind).view(np.uint8).ravel()
        for level in levels_here():
            np.testing.assert_array_equal(encode(name, x, level), expected)


@pytest.mark.parametrize("name", sorted(encoders.EXACT))
def test_the_bytes_are_those_of_the_reference(name, level_values):
    scheme = scheme_by_name(name)
    for x in level_values(scheme.block_values):
        expected = encoders.encode(x.reshape(-1, scheme.block_values), scheme).ravel()
        for level in levels_here():
            np.testing.assert_array_equal(encode(name, x, level), expected)


@pytest.mark.parametrize("name", SEARCHED)
def test_the_search_finds_the_same_on_every_instruction_set(name, level_values):
    for x in level_values(scheme_by_name(name).block_values):
        first, *others = (encode(name, x, level) for level in levels_here())
        for other in others:
            np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("name", SEARCHED)
def test_the_search_errs_less_than_the_simple_encoder(name, streams):
    scheme = scheme_by_name(name)
    ratios = []
    for x in streams:
        blocks = encode(name, x).reshape(-1, scheme.block_bytes)
        simple = encoders.encode(x.reshape(-1, scheme.block_values), scheme)
        errors = [
            np.square(decoders.decode(b, scheme).ravel() - x, dtype=np.float64).sum()
            for b in (blocks, simple)
        ]
        ratios.append(errors[0] / errors[1])
    assert max(ratios) <= 1
    assert np.mean(ratios) < 0.97


@pytest.mark.parametrize("name", SEARCHED)
def test_the_search_errs_less_on_made_up_values_too(name):
    scheme = scheme_by_name(name)
    rng = np.random.default_rng(4)
    shape = (24, scheme.block_values)
    normal = rng.normal(0, 1, shape)
    scales = np.repeat(10.0 ** rng.uniform(-6, 3, (24, shape[1] // 16)), 16, axis=1)
    for values in (
        normal * scales,
        np.clip(rng.standard_cauchy(shape), -6e4, 6e4),
        normal + 5,
        normal * 10.0 ** rng.uniform(-9, 3, (24, 1)),
        np.where(rng.random(shape) < 0.9, 0, normal),
        rng.integers(-3, 4, shape) / 2,
    ):
        x = values.astype(np.float32)
        found = decode(name, encode(name, x)).reshape(shape)
        simple = decoders.decode(encoders.encode(x, scheme), scheme)
        assert np.isfinite(found).all()
        error, simple_error = (np.square(y - x, dtype=np.float64).sum() for y in (found, simple))
        assert error <= simple_error


def one_of(n, at, value, others=0.0):
    x = np.full(n, others)
    x[at] = value
    return x


def hard_shapes(rng, n):
    """Yield values of magnitude 1 that leave a fit of scales and offsets little to go by."""
    ramp = np.linspace(0, 1, n)
    for sign in (1, -1):
        yield np.full(n, sign)
        yield from (sign * (1 + 10.0**k * rng.uniform(-1, 1, n)) for k in range(-7, 1))
        yield from (sign * one_of(n, n // 3, 1, others) for others in (0, 1e-6, 1e-3, 0.9, -0.9))
        yield from (sign * (low + (1 - low) * ramp) for low in (-1, 0, 0.5, 0.99))
        yield sign * np.abs(rng.normal(0, 0.3, n))
    yield from (np.where(np.arange(n) % 2, 1, other) for other in (-1, 0, 0.999, -0.5))
    yield rng.choice([-1, 1, 0], n)


def hard_blocks(n):
    """Return such blocks of all magnitudes, and others whose parts are of several shapes."""
    rng = np.random.default_rng(12)
    powers = [-40, *range(-27, -9), -3, 0, 10, 17, 22, 26, 39]
    shapes = list(hard_shapes(rng, n))
    blocks = [x * 2.0**k for x in shapes for k in rng.choice(powers, 3, replace=False)]
    parts = [x for part in (16, 32) for x in hard_shapes(rng, part)]
    for _ in range(60):
        few = [parts[i] for i in rng.integers(0, len(parts), 4)]
        signs = rng.choice([-1, 1, 2.0**-20], 4)
        drawn = [few[i] * signs[i] for i in rng.integers(0, 4, n // 16)]
        blocks.append(np.concatenate(drawn)[:n] * 2.0 ** rng.choice(powers))
    return np.stack(blocks).astype(np.float32)


@pytest.mark.parametrize("name", SEARCHED)
def test_no_block_errs_more_than_with_the_simple_encoder_or_as_zeros(name):
    scheme = scheme_by_name(name)
    blocks = hard_blocks(scheme.block_values)
    simple = decoders.decode(encoders.encode(blocks, scheme), scheme)
    squares = np.square(blocks, dtype=np.float64).sum(axis=1)
    with np.errstate(all="ignore"):
        allowed = np.square(simple.astype(np.float64) - blocks).sum(axis=1)
    allowed = np.where(np.isfinite(allowed), np.minimum(allowed, squares), squares)
    # What is summed in float32; gains of rows of grids are differences of large numbers.
    allowed = allowed * 1.00001 + squares * (
        1e-6 if name.startswith(("iq1", "iq2", "iq3")) else 1e-12
    )
    for x, limit, other in zip(blocks, allowed, simple, strict=True):
        first, *rest = (encode(name, x, level) for level in levels_here())
        if first is None:
            assert rest.count(None) == len(rest)
            assert not np.isfinite(other).all()
            continue
        assert all(np.array_equal(more, first) for more in rest)
        error = np.square(decode(name, first).astype(np.float64) - x).sum()
        assert error <= limit, x


@pytest.mark.parametrize("name", ["q2_k", "q4_k", "q5_k"])
@pytest.mark.parametrize("sign", [1, -1])
def test_sub_blocks_of_almost_equal_values_stay_themselves(name, sign):
    rng = np.random.default_rng(13)
    for spread in (0, 1e-7, 1e-5, 1e-3, 0.02, 0.1):
        x = np.concatenate([rng.normal(0, 1, 128), np.zeros(128)])
        for where in (slice(0, 32), slice(64, 128), slice(0, 256)):
            x[where] = sign * (2 + 2 * spread * rng.random(where.stop - where.start))
            decoded = decode(name, encode(name, x.astype(np.float32)))
            # A sixteenth or a 64th part of the largest scale is what the others are multiples of.
            step = 0.001 if where.stop == 256 else 0.15 if name == "q2_k" else 0.035
            assert np.abs(decoded - x)[where].max() <= 2 * (spread + step)


@pytest.mark.parametrize("name", [*SEARCHED, *sorted(encoders.EXACT)])
def test_one_block_alone_is_the_same_as_among_others(name, streams):
    scheme = scheme_by_name(name)
    n = scheme.block_values
    x = streams[0][: 37 * n]
    for many in (1, 2, 3, 17, 37):
        expected = np.concatenate([encode(name, x[i * n : (i + 1) * n]) for i in range(many)])
        np.testing.assert_array_equal(encode(name, x[: many * n]), expected)
    assert encode(name, x[:0]).size == 0


@pytest.mark.parametrize("name", [*SEARCHED, *sorted(encoders.EXACT)])
def test_extreme_blocks(name):
    scheme = scheme_by_name(name)
    n = scheme.block_values
    rng = np.random.default_rng(5)
    for level in levels_here():
        zeros = encode(name, np.zeros(2 * n, np.float32), level)
        assert not decode(name, zeros).any()
        for magnitude in (1e-45, 1e-30, 1e-8, 6e-8, 1e-6, 1e-3, 1.0, 3e3):
            x = (rng.normal(0, 1, n) * magnitude).astype(np.float32)
            decoded = decode(name, encode(name, x, level))
            assert np.isfinite(decoded).all()
            # A scale may be as small as the least float16, which is far above the values.
            assert np.abs(decoded - x).max() <= max(8 * magnitude, 2e-5)
        one = np.zeros(2 * n, np.float32)
        one[n + n // 3] = 3000
        decoded = decode(name, encode(name, one, level))
        assert not decoded[:n].any()
        assert abs(decoded[n + n // 3] - 3000) < 3000 or name in ("iq1_s", "iq1_m", "q1_0")
        if name not in ("f16", "q8_k"):
            one[: n // 2] = 1e-7  # sub-blocks far below the others
            assert np.isfinite(decode(name, encode(name, one, level))).all()


@pytest.mark.parametrize("name", SEARCHED)
def test_coding_decoded_values_again_stays_near_them(name, streams):
    x = streams[1]
    once = decode(name, encode(name, x))
    twice = decode(name, encode(name, once))
    first = np.square(once - x, dtype=np.float64).sum()
    assert np.square(twice - once, dtype=np.float64).sum() <= first


@pytest.mark.parametrize(
    "name", [*SEARCHED, *IN_GGUF, "q1_0", "q2_0", "q2_0_128"], ids=lambda name: name
)
def test_a_scale_beyond_float16_is_refused(name):
    x = np.zeros(2 * scheme_by_name(name).block_values, np.float32)
    for at in (0, -1):
        for value in (3.4e38, -3.4e38, 1e13, -1e10):
            y = x.copy()
            y[at] = value
            assert all(encode(name, y, level) is None for level in levels_here())
    for value in (2.0**39, -(2.0**39), 1e10):  # no less so where all of a block are equal
        y = np.full(len(x), value, np.float32)
        assert all(encode(name, y, level) is None for level in levels_here())
