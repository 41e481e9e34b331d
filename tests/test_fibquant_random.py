"""Random numbers and rotations of FibQuant books: published vectors, and C++ against Python."""

import numpy as np
import pytest
from kvcodecs import _core
from kvcodecs.errors import InvalidArgument
from kvcodecs.fibquant import Profile
from kvcodecs.fibquant.reference import codebook, rotation
from kvcodecs.fibquant.reference.generator import Generator
from kvcodecs.fibquant.rotation import build_rotation, haar, hadamard_signs, rotation_digest

SEEDS = (0, 7, (1 << 64) - 1)
#: The seed that the published gamma variates have.
GAMMA_SEED = 11400714819323198492 ^ 0x465155414E54


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        (0, "b585f767a79a3b6c 7746a55fbad8c037 b2fb0d3281e2a6e6 0f6760a48f9b887c"),
        (7, "2865533423d743bb 2b0159d32e9b293a b44b70b945249531 ba0bb7b6093e3ae3"),
        (42, "ae90bfb5395d5ba1 f3453fc625799188 6d71b708c5b6538c a09ab2f958166752"),
    ],
)
def test_bits_are_those_of_chacha8(seed, words):
    generator = Generator(seed)
    assert [f"{generator.bits():016x}" for _ in range(4)] == words.split()


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (
            7,
            [
                -0.7753719332177971,
                -1.3834217200084091,
                0.8897130187430372,
                0.3597790583440233,
                0.30000900340094644,
                -0.6499864550087331,
            ],
        ),
        (
            42,
            [
                0.47798123835102174,
                1.3340706102318078,
                -0.21086668327103028,
                0.4763469238088213,
                -0.5120906220561634,
            ],
        ),
    ],
)
def test_normals_are_those_of_the_rust_crates(seed, expected):
    generator = Generator(seed)
    assert [generator.normal() for _ in expected] == expected


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ((1, 3), [2.183305906066842, 2.1259375605314066, 0.45640245828639003, 4.014547936171397]),
        ((2, 30), [0.5005481494624419, 37.97096307251998]),
        ((0.5, 2), [0.08137705452618638, 2.1543521652796778]),
    ],
)
def test_gammas_are_those_of_the_rust_crates(shapes, expected):
    generator = Generator(GAMMA_SEED)
    assert [generator.gamma(shapes[i % 2]) for i in range(len(expected))] == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_core_draws_what_the_reference_draws(seed):
    # Enough to pass through the tails of both ziggurats.
    for what, n in (("bits", 40), ("normal", 5000), ("exponential", 3000)):
        generator = Generator(seed)
        expected = [getattr(generator, what)() for _ in range(n)]
        assert _core.fib_draws(seed, n, what).tolist() == expected
    for shape in (0.5, 1.0, 1.5, 31.0):
        generator = Generator(seed)
        expected = [generator.gamma(shape) for _ in range(300)]
        assert _core.fib_draws(seed, 300, "gamma", shape).tolist() == expected


def test_normals_and_exponentials_are_distributed_so():
    normal = _core.fib_draws(1, 200_000, "normal")
    exponential = _core.fib_draws(1, 200_000, "exponential")
    moments = [np.mean(normal**p) for p in (1, 2, 3, 4)]
    assert np.allclose(moments, [0, 1, 0, 3], atol=0.05)
    assert np.allclose([exponential.mean(), (exponential**2).mean()], [1, 2], rtol=0.02)
    assert np.abs(normal).max() > 3.66
    assert exponential.max() > 7.7


@pytest.mark.parametrize(("d", "k"), [(8, 2), (9, 3), (16, 1)])
def test_training_vectors_are_those_of_the_reference(d, k):
    expected = codebook.spherical_beta(GAMMA_SEED, d, k, 300)
    assert np.array_equal(_core.fib_training_vectors(GAMMA_SEED, d, k, 300), expected)


def test_training_vectors_are_parts_of_unit_vectors():
    vectors = _core.fib_training_vectors(3, 16, 4, 50_000)
    assert (vectors**2).sum(1).mean() == pytest.approx(4 / 16, rel=0.01)
    assert (vectors**2).sum(1).max() < 1
    assert np.allclose(vectors.mean(0), 0, atol=0.01)


@pytest.mark.parametrize("d", [1, 2, 3, 31, 33, 70])
def test_haar_is_the_rotation_of_the_reference(d):
    q = haar(5, d)
    assert np.allclose(q, rotation.haar(5, d), rtol=0, atol=1e-12)
    assert np.allclose(q @ q.T, np.eye(d), rtol=0, atol=1e-13)


def test_haar_is_q_of_normals_with_a_positive_diagonal_of_r():
    generator = Generator(9)
    normals = np.array([generator.normal() for _ in range(24 * 24)]).reshape(24, 24).T
    r = haar(9, 24).T @ normals
    assert np.allclose(np.tril(r, -1), 0, atol=1e-13)
    assert (np.diag(r) > 0).all()


def test_haar_does_not_depend_on_threads():
    one = _core.fib_haar_columns(1, 75, 1)
    assert np.array_equal(one, _core.fib_haar_columns(1, 75, 3))


def test_haar_is_uniform():
    # The first column of a Haar-random matrix is a random direction.
    columns = np.array([haar(seed, 4)[:, 0] for seed in range(2000)])
    assert np.allclose(columns.mean(0), 0, atol=0.05)
    assert np.allclose(columns.T @ columns / 2000, np.eye(4) / 4, atol=0.03)


@pytest.mark.parametrize("d", [2, 31, 64, 100])
def test_signs_are_those_of_the_reference(d):
    signs = hadamard_signs(42, d)
    assert signs.shape == (2, d)
    assert np.array_equal(signs, rotation.hadamard_signs(42, d))
    assert np.array_equal(np.abs(signs), np.ones((2, d)))


@pytest.mark.parametrize(("kind", "shape"), [("haar", (12, 12)), ("hadamard", (2, 12))])
def test_a_profile_has_one_rotation(kind, shape):
    profile = Profile.paper_default(12, 3, 4, 1, rotation=kind)
    built = build_rotation(profile)
    assert (built.shape, built.dtype, built.flags.c_contiguous) == (shape, np.float32, True)
    assert np.array_equal(built, build_rotation(profile))
    other = Profile.paper_default(12, 3, 4, 2, rotation=kind)
    assert not np.array_equal(built, build_rotation(other))
    assert rotation_digest(profile, built) != rotation_digest(other, built)
    assert rotation_digest(profile, built) != rotation_digest(profile, -built)


def test_core_refuses_what_it_cannot_draw():
    for call in (
        lambda: _core.fib_draws(1, 1, "cauchy"),
        lambda: _core.fib_draws(1, 1, "gamma"),
        lambda: _core.fib_draws(1, 1 << 60, "normal"),
        lambda: _core.fib_training_vectors(1, 4, 4, 1),
        lambda: _core.fib_training_vectors(1, 4, 0, 1),
        lambda: _core.fib_haar_columns(1, 0),
        lambda: _core.fib_haar_columns(1, 4097),
        lambda: _core.fib_nearest_float64(np.zeros((1, 2)), np.zeros((1, 3))),
        lambda: _core.fib_nearest_float64(np.zeros((1, 2)), np.zeros((0, 2))),
    ):
        with pytest.raises(InvalidArgument):
            call()
