"""Vectors to codes and back: every error that is told, packing, and the error of the values."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs.errors import Corrupt, InvalidArgument
from kvcodecs.fibquant import Codes, Profile, Quantiser, book_for
from kvcodecs.fibquant.reference.packing import pack_indices, packed_bytes, unpack_indices

#: Mean squared error of the best scalar quantiser of normal values, by bits a value (Max, 1960).
SCALAR_LLOYD_MAX = {1: 0.3634, 2: 0.1175}


def quantiser(d, k, n, rotation="haar"):
    return Quantiser(book_for(Profile.paper_default(d, k, n, 42, rotation=rotation)))


@pytest.fixture(scope="module")
def small():
    return quantiser(8, 2, 5)  # 4 indices of 3 bits, and 4 bits behind them


def normal(n, d, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)


def test_codes_have_a_norm_and_whole_bytes(small):
    x = normal(20, 8)
    codes = small.encode(x)
    assert (codes.norms.shape, codes.norms.dtype) == ((20,), np.float16)
    assert (codes.indices.shape, codes.indices.dtype) == ((20, 2), np.uint8)
    assert np.allclose(codes.norms, np.linalg.norm(x, axis=1), rtol=1e-3)
    y = small.decode(codes)
    assert (y.shape, y.dtype) == (x.shape, np.float32)
    assert ((x - y) ** 2).mean() < 0.7


def test_no_vectors_are_no_codes(small):
    codes = small.encode(np.zeros((0, 8), np.float32))
    assert codes.norms.shape == (0,)
    assert small.decode(codes).shape == (0, 8)


@pytest.mark.parametrize("shape", [(8,), (3, 7), (3, 9), (1, 3, 8)])
def test_vectors_of_another_length_are_refused(small, shape):
    with pytest.raises(InvalidArgument, match=r"\(n, 8\) expected"):
        small.encode(np.ones(shape, np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_name(small, value):
    x = normal(5, 8)
    x[3, 6] = value
    x[4, 0] = np.nan
    with pytest.raises(InvalidArgument, match="in vector 3, channel 6"):
        small.encode(x)


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (0.0, "has norm 0"),
        (1e-8, "float16 cannot hold"),
        (65520.0, "float16 cannot hold"),
        (1e30, "float16 cannot hold"),
    ],
)
def test_norms_that_cannot_be_stored_are_refused(small, length, text):
    x = normal(4, 8)
    x[2] = 0
    x[2, 5] = length
    with pytest.raises(InvalidArgument, match=f"vector 2 .*{text}"):
        small.encode(x)


@pytest.mark.parametrize("length", [2.0**-24, 65504.0, 65519.0])
def test_extreme_norms_that_can_be_stored_are(small, length):
    x = np.zeros((1, 8), np.float32)
    x[0, 5] = length
    assert np.isfinite(small.decode(small.encode(x))).all()


@pytest.mark.parametrize("norm", [0.0, -1.0, np.nan, np.inf])
def test_norms_that_no_encoder_writes_are_corrupt(small, norm):
    codes = small.encode(normal(3, 8))
    norms = codes.norms.copy()
    norms[1] = norm
    with pytest.raises(Corrupt, match=r"norm .* of vector 1"):
        small.decode(Codes(norms, codes.indices))


def test_indices_that_no_encoder_writes_are_corrupt(small):
    codes = small.encode(normal(3, 8))
    with pytest.raises(Corrupt, match=r"\(n, 2\) expected"):
        small.decode(Codes(codes.norms, codes.indices[:, :1]))
    with pytest.raises(Corrupt, match=r"\(n, 2\) expected"):
        small.decode(Codes(codes.norms, codes.indices[:2]))
    indices = codes.indices.copy()
    indices[2] = pack_indices(np.array([[0, 1, 5, 2]], np.uint32), 3)
    with pytest.raises(Corrupt, match="index 5 of vector 2; there are 5"):
        small.decode(Codes(codes.norms, indices))
    for bit in range(4, 8):
        indices = codes.indices.copy()
        indices[1, 1] |= 1 << bit
        with pytest.raises(Corrupt, match="bits behind the indices of vector 1"):
            small.decode(Codes(codes.norms, indices))


def test_packing_is_the_published_one():
    indices = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 3, 1]], np.uint32)
    assert pack_indices(indices, 3).tobytes().hex() == "88c6fa0b"


@given(st.integers(1, 32), st.integers(0, 20), st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_packed_indices_come_back(width, count, seed):
    indices = np.random.default_rng(seed).integers(0, 1 << width, (3, count), np.uint32)
    packed = pack_indices(indices, width)
    assert packed.shape == (3, packed_bytes(width, count))
    number = int.from_bytes(packed[1].tobytes(), "little")
    assert number == sum(int(index) << i * width for i, index in enumerate(indices[1]))
    assert np.array_equal(unpack_indices(packed, width, count), indices)


def test_no_rows_are_packed_to_no_rows():
    assert pack_indices(np.zeros((0, 5), np.uint32), 3).shape == (0, 2)
    assert unpack_indices(np.zeros((0, 2), np.uint8), 3, 5).shape == (0, 5)


def test_packing_checks_what_it_is_given():
    one = np.array([[8]], np.uint32)
    for width in (0, 33):
        with pytest.raises(InvalidArgument, match="1 to 32"):
            pack_indices(one, width)
    with pytest.raises(InvalidArgument, match="index 8 does not fit 3 bits"):
        pack_indices(one, 3)
    with pytest.raises(InvalidArgument, match=r"at most 2\^34 bits"):
        unpack_indices(np.zeros((1, 0), np.uint8), 32, (1 << 29) + 1)
    for length in (0, 2):
        with pytest.raises(Corrupt, match=f"take 1 bytes, not {length}"):
            unpack_indices(np.zeros((1, length), np.uint8), 3, 2)
    with pytest.raises(Corrupt, match="vector 0: bits"):
        unpack_indices(np.array([[0x40]], np.uint8), 3, 2)


def plain_model(book, x):
    """The same recipe in float64 throughout, but for the norm."""
    norms = np.linalg.norm(x.astype(np.float64), axis=1)
    rotation = book.rotation_data.astype(np.float64)
    if book.rotation == "hadamard":  # as a matrix, by its fast form on unit vectors
        rotation = hadamard_matrix(rotation)
    codewords = book.codewords.astype(np.float64)
    t = (x / norms[:, None] @ rotation.T).reshape(-1, book.k)
    distances = (codewords**2).sum(1) - 2 * t @ codewords.T
    g = codewords[distances.argmin(1)].reshape(len(x), book.d)
    return g @ rotation * norms.astype(np.float16).astype(np.float64)[:, None]


def hadamard_matrix(signs):
    """Two rounds of signs and a transform, for d a power of two."""
    d = signs.shape[1]
    transform = np.ones((1, 1))
    while len(transform) < d:
        transform = np.block([[transform, transform], [transform, -transform]])
    transform /= np.sqrt(d)
    return transform @ np.diag(signs[1]) @ transform @ np.diag(signs[0])


@pytest.mark.parametrize("rotation", ["haar", "hadamard"])
@pytest.mark.parametrize(
    ("k", "n", "bits"),
    [
        (2, 16, 2),
        (4, 16, 1),
        pytest.param(4, 256, 2),
        pytest.param(8, 256, 1, marks=pytest.mark.slow),
    ],
)
def test_error_is_the_plain_models_and_below_scalar_quantisers(k, n, bits, rotation):
    """At equal bits for indices alone, as the paper counts; the norm costs 16 / d bits a value."""
    coder = quantiser(64, k, n, rotation)
    x = normal(800, 64, seed=1)
    error = ((coder.decode(coder.encode(x)) - x) ** 2).mean()
    plain = ((plain_model(coder.book, x) - x) ** 2).mean()
    assert error == pytest.approx(plain, rel=0.01)
    assert error < SCALAR_LLOYD_MAX[bits]


@pytest.mark.parametrize("d", [24, 64])
def test_fast_rotations_are_as_good_as_dense_ones(d):
    """Also on vectors that a rotation is needed for: all in one channel."""
    x = np.concatenate([normal(1500, d), np.eye(d, dtype=np.float32)])
    errors = {}
    for rotation in ("haar", "hadamard"):
        coder = quantiser(d, 2, 16, rotation)
        error = ((coder.decode(coder.encode(x)) - x) ** 2).sum(1) / (x**2).sum(1)
        errors[rotation] = np.array([error[:1500].mean(), error[1500:].mean()])
    assert (errors["hadamard"] < 1.1 * errors["haar"]).all()


@pytest.mark.parametrize(
    "x", [None, "x", [["1"] * 8], np.ones((2, 8), int), np.ones((2, 8), complex), [[1], [1, 2]]]
)
def test_what_are_no_floats_is_refused(small, x):
    with pytest.raises(InvalidArgument, match="FibQuant: vectors"):
        small.encode(x)


def test_float64_beyond_float32_is_refused_as_not_finite(small):
    with pytest.raises(InvalidArgument, match="vector 1, channel 0"):
        small.encode(np.array([[1.0] * 8, [1e300] * 8]))


def test_codes_of_other_types_are_refused(small):
    norms, indices = small.encode(normal(2, 8))
    for wrong in (
        Codes(norms.astype(np.float32), indices),
        Codes(norms, indices.astype(np.int16)),
        Codes(norms, None),
        (norms, indices),
        None,
    ):
        with pytest.raises(InvalidArgument, match=r"float16 and uint8|give a Codes"):
            small.decode(wrong)


def test_a_profile_is_no_book(small):
    with pytest.raises(InvalidArgument, match="is a Profile: give a Book"):
        Quantiser(small.book.profile)
