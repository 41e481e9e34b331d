"""Decoders of the block-quantised schemes: the core, the readable ones and `gguf` agree."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, quants
from kvcodecs import _core
from kvcodecs.errors import InvalidArgument
from kvcodecs.ggml import dequantise
from kvcodecs.ggml.reference import decoders as reference
from kvcodecs.ggml.reference.fields import U8
from kvcodecs.ggml.schemes import SCHEMES, Scheme, scheme_by_name
from kvcodecs.ggml.tables import GRIDS, IQ4_VALUES, Grid, grids, sign_masks


def test_the_grids_are_frozen() -> None:
    raw = resources.files("kvcodecs.ggml").joinpath("grids.bin").read_bytes()
    digest = "09b7593242bd052668b975959cdcfd43942fee2c1d75b7b9d4e2535c3c53d33e"
    assert hashlib.sha256(raw).hexdigest() == digest


def test_the_format_document_lists_the_schemes() -> None:
    document = Path(__file__).parents[1].joinpath("codecs", "FORMAT.md").read_text()
    for s in SCHEMES:
        names = ", ".join(f"`{alias}`" for alias in s.aliases)
        sizes = f"{s.block_values} | {s.block_bytes} | {s.bits_per_value:g}"
        assert f"| `{s.name}` | {s.number} | {names} | {sizes} |" in document


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_the_grids_are_those_of_gguf(grid: Grid) -> None:
    owner = getattr(quants, grid.source)
    owner.init_grid()
    assert np.array_equal(grids()[grid.name], owner.grid.reshape(grid.entries, grid.width))


def test_the_small_tables_are_those_of_gguf() -> None:
    assert sign_masks().tobytes() == quants.IQ2_XXS.ksigns
    assert quants.IQ4_NL.kvalues == IQ4_VALUES


LEVELS = [level for level in range(3) if _core.level_supported(level)]
KNOWN_TO_GGUF = [s for s in SCHEMES if s.name not in ("q8_k", "q1_0", "q2_0", "q2_0_128")]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)


def random_blocks(scheme: Scheme, n: int = 300, seed: int = 6) -> U8:
    """Return blocks of any bytes: scales of every kind, infinite ones and NaN among them."""
    rng = np.random.default_rng([seed, scheme.number])
    return rng.integers(0, 256, (n, scheme.block_bytes), dtype=np.uint8)


def bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """Return the bits of values, all NaN alike: which NaN comes out is nobody's promise."""
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)


@every_scheme
def test_the_core_decodes_as_the_reference(scheme: Scheme) -> None:
    blocks = random_blocks(scheme)
    expected = reference.decode(blocks, scheme)
    assert np.isfinite(expected).mean() > 0.8
    for level in LEVELS:
        values = _core.ggml_decode(scheme.number, blocks, level)
        assert np.array_equal(bits(values), bits(expected.ravel()))


@pytest.mark.parametrize("scheme", KNOWN_TO_GGUF, ids=lambda s: s.name)
def test_the_core_decodes_as_gguf(scheme: Scheme) -> None:
    blocks = random_blocks(scheme, seed=7)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(blocks, GGMLQuantizationType(scheme.number))
    for level in LEVELS:
        values = _core.ggml_decode(scheme.number, blocks, level)
        assert np.array_equal(bits(values), bits(expected.ravel()))


@every_scheme
def test_halves_are_the_narrowed_values(scheme: Scheme) -> None:
    blocks = random_blocks(scheme, n=3000)
    values = reference.decode(blocks, scheme)
    blocks = blocks[np.all(np.abs(values) < 65520, axis=1)]
    expected = reference.decode(blocks, scheme).astype(np.float16).view(np.uint16)
    assert len(expected) > 200
    for level in LEVELS:
        halves = _core.ggml_decode_half(scheme.number, blocks, level)
        assert np.array_equal(halves, expected.ravel())


@every_scheme
def test_halves_tell_of_an_overflow_anywhere(scheme: Scheme) -> None:
    blocks = random_blocks(scheme, n=3000)
    values = reference.decode(blocks, scheme)
    fit = np.all(np.abs(values) < 65520, axis=1)
    good, bad = blocks[fit], blocks[~fit][:8]
    for level in LEVELS:
        for block in bad:
            for place in (0, len(good) // 2, len(good)):
                data = np.insert(good, place, block, axis=0)
                assert _core.ggml_decode_half(scheme.number, data, level) is None


@every_scheme
def test_halves_tell_of_the_smallest_overflow(scheme: Scheme) -> None:
    """Around every power of two, with the largest codes: no scale counts as small that is not."""
    powers = np.arange(1 << 10, 31 << 10, 1 << 10, dtype=np.uint16)
    for filler in (0x00, 0x7F, 0x80, 0xFF):
        blocks = np.full((2 * len(powers), scheme.block_bytes), filler, np.uint8)
        scales = np.concatenate([powers - 1, powers]).view(np.uint8).reshape(-1, 2)
        for place in (0, 2, scheme.block_bytes - 4, scheme.block_bytes - 2):
            if 0 <= place < scheme.block_bytes:
                blocks[:, place : place + 2] = scales
        fit = np.all(np.abs(reference.decode(blocks, scheme)) < 65520, axis=1)
        for level in LEVELS:
            for block, fits in zip(blocks, fit, strict=True):
                halves = _core.ggml_decode_half(scheme.number, block, level)
                assert (halves is not None) == fits


@every_scheme
def test_a_scale_that_is_no_number_is_refused_in_narrow_types(scheme: Scheme) -> None:
    for place in (0, 35, 69):
        blocks = np.zeros((70, scheme.block_bytes), np.uint8)
        blocks[place] = 0xFF  # NaN in every field that is a float
        out = np.empty(len(blocks) * scheme.block_values, np.float32)
        for level in LEVELS:
            assert not _core.ggml_decode_values(scheme.number, blocks, out, 0, 1, level)
            finite = np.isfinite(out.reshape(70, -1)).all(axis=1)
            assert list(np.flatnonzero(~finite)) == [place]
            for kind in (1, 2):
                halves = np.empty(out.shape, np.uint16)
                assert _core.ggml_decode_values(scheme.number, blocks, halves, kind, 1, level)
    for dtype in ("float16", "bfloat16"):
        with pytest.raises(InvalidArgument, match=f"overflows {dtype}; ask for float32"):
            dequantise(blocks, scheme, dtype)


@every_scheme
def test_blocks_may_lie_anywhere(scheme: Scheme) -> None:
    blocks = random_blocks(scheme, n=5)
    for level in LEVELS:
        expected = bits(_core.ggml_decode(scheme.number, blocks, level))
        for offset in (1, 3, 6):
            data = memoryview(bytes(offset) + blocks.tobytes())[offset:]
            assert np.array_equal(bits(_core.ggml_decode(scheme.number, data, level)), expected)


@every_scheme
def test_no_blocks_and_parts_of_blocks(scheme: Scheme) -> None:
    for level in LEVELS:
        assert _core.ggml_decode(scheme.number, b"", level).shape == (0,)
        halves = _core.ggml_decode_half(scheme.number, b"", level)
        assert halves is not None
        assert halves.shape == (0,)
    assert reference.decode(np.zeros((0, scheme.block_bytes), np.uint8), scheme).size == 0
    for wrong in (scheme.block_bytes - 1, 2 * scheme.block_bytes + 1):
        with pytest.raises(InvalidArgument, match="not whole blocks"):
            _core.ggml_decode(scheme.number, bytes(wrong))
        with pytest.raises(InvalidArgument, match="not whole blocks"):
            _core.ggml_decode_half(scheme.number, bytes(wrong))


def test_a_number_without_a_scheme() -> None:
    with pytest.raises(InvalidArgument, match="scheme 4"):
        _core.ggml_decode(4, b"")


X32 = (np.arange(32) * 7 % 32 - 16) / 8
X256 = (np.arange(256) * 37 % 256 - 128) / 64

#: Blocks that other implementations wrote, what they were made of, and how far off values may be.
GOLDEN = [
    ("q8_0", X32, 2 / 254, "082481b9f0285f99d0084077b1e8205791c800386fa9e0184f89c0f83067a1d81047"),
    ("q4_0", X32, 1 / 4, "003480c4f73b6ea2d5194c8fb3f72a6e91d5"),
    ("q4_1", X32, 1 / 8, "223400c080b3f72a6e91d5084c7fb3e62a5d91c4"),
    ("q5_0", X32, 1 / 8, "0030983367cc0077ee55cc33aa1188ff66dd44bb2299"),
    ("q5_1", X32, 1 / 16, "003000c0983367cc0077ee55cc33aa1188ff66dd44bb2299"),
    (
        "tq1_0",
        X256,
        1.0,
        "24449a656c88cc2e449a656c88cf2e449a656c88cf2e449a656ccccf2e449a65"
        "3186769465bbd73186769465bb2e318688decb2d0040",
    ),
    (
        "tq2_0",
        X256,
        1.0,
        "841819516165469418195161658694181951616586941819516146869418195161654686941819616546869418"
        "516165468694185161654686941951616546860040",
    ),
    ("q1_0", X256[:128], 1.2, "083c70381c0e87e3f1783c1e8fc3e170381c"),
    (
        "q2_0_128",
        X256[:128],
        1.0,
        "0040502554095542a55029540a9542a55029544a9552a554095542955029540a9542",
    ),
    ("q2_0", X256[:64], 1.0, "0040502554095542a55029540a9542a55029"),
]


@pytest.mark.parametrize(("name", "x", "error", "block"), GOLDEN, ids=[g[0] for g in GOLDEN])
def test_golden_blocks(name: str, x: npt.NDArray[np.float64], error: float, block: str) -> None:
    scheme = scheme_by_name(name)
    for level in LEVELS:
        values = _core.ggml_decode(scheme.number, bytes.fromhex(block), level)
        assert np.abs(values - x).max() <= error * 1.001


def test_the_ternary_schemes_hold_the_same_values() -> None:
    one = _core.ggml_decode(34, bytes.fromhex(GOLDEN[5][3]))
    other = _core.ggml_decode(35, bytes.fromhex(GOLDEN[6][3]))
    assert np.array_equal(one, other)
    assert np.array_equal(one, np.sign(X256) * (np.abs(X256) >= 1) * 2)


def test_schemes_that_gguf_lacks_by_hand() -> None:
    half = np.float16(0.5).tobytes()
    q1 = _core.ggml_decode(41, half + bytes([0b00000101]) + bytes(15))
    assert q1[:4].tolist() == [0.5, -0.5, 0.5, -0.5]
    assert q1[4:].tolist() == [-0.5] * 124
    for number, n in ((42, 16), (170, 32)):
        q2 = _core.ggml_decode(number, half + bytes([0b11100100]) + bytes(n - 1))
        assert q2[:5].tolist() == [-0.5, 0.0, 0.5, 1.0, -0.5]
    codes = np.arange(-128, 128).astype(np.int8)
    q8 = _core.ggml_decode(15, np.float32(0.25).tobytes() + codes.tobytes() + b"\xff" * 32)
    assert q8.tolist() == (codes * 0.25).tolist()
