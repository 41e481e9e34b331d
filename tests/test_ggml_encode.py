"""Encoders of ggml's schemes: bytes of `gguf`, golden bytes, the search against the simple encoders."""

import numpy as np
import pytest
from kvcodecs import _core
from kvcodecs.ggml.schemes import scheme_by_name

LEVELS = range(3)
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


def level_skip(level):
    try:
        encode("f16", X32, level)
    except Exception:
        pytest.skip("this CPU lacks the instruction set")


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


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", IN_GGUF)
def test_the_bytes_are_those_of_gguf(name, level):
    gguf = pytest.importorskip("gguf")
    level_skip(level)
    rng = np.random.default_rng(3)
    kind = gguf.GGMLQuantizationType[name.upper()]
    for _ in range(60):
        x = special(rng, scheme_by_name(name).block_values * int(rng.integers(1, 6)))
        with np.errstate(all="ignore"):
            expected = gguf.quants.quantize(x[None], kind).view(np.uint8).ravel()
        np.testing.assert_array_equal(encode(name, x, level), expected)


@pytest.mark.parametrize("name", [*IN_GGUF, "q1_0", "q2_0", "q2_0_128"])
def test_a_scale_beyond_float16_is_refused(name):
    x = np.zeros(2 * scheme_by_name(name).block_values, np.float32)
    x[-1] = 3.4e38
    for level in LEVELS:
        level_skip(level)
        assert encode(name, x, level) is None
        assert encode(name, -x, level) is None
