"""Codewords of FibQuant books: where they start, their refinement, and books in bytes and files."""

import os
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs import _core
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, Truncated, Unsupported
from kvcodecs.fibquant import Book, Profile, book, book_for, book_of
from kvcodecs.fibquant.beta import beta_cdf, beta_quantile
from kvcodecs.fibquant.book import build_book
from kvcodecs.fibquant.codebook import (
    build_codewords,
    directions,
    initial_codewords,
    paper_beta,
    radii,
)
from kvcodecs.fibquant.lloyd import refine
from kvcodecs.fibquant.reference import codebook as reference
from kvcodecs.fibquant.reference.rotation import haar

SMALL = Profile.paper_default(8, 2, 8, 7)


def test_first_codewords_are_the_published_ones():
    assert np.allclose(
        initial_codewords(8, 2, 8)[:3],
        [
            (0.17819697934630022, 0),
            (-0.23155282608463576, 0.21212135645950686),
            (0.03613589831681299, -0.41174992321066317),
        ],
        rtol=0,
        atol=1e-16,
    )


def test_paper_beta():
    assert paper_beta(4, 3) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("q", "a", "b", "x"),  # scipy.special.betaincinv
    [
        (0.5, 1.5, 0.7, 0.7424922109365377),
        (0.0625, 2, 20.333333333333332, 0.019189106256370044),
        (0.998, 2, 20.333333333333332, 0.33410096883193396),
        (1e-06, 0.5, 0.5, 2.46740110027031e-12),
        (0.3, 4, 4, 0.405240644007458),
        (0.999, 128, 8000, 0.020355747785656044),
        (0.01, 1.5, 600, 9.564875221346516e-05),
    ],
)
def test_beta_quantiles(q, a, b, x):
    assert beta_quantile(np.array([q]), a, b)[0] == pytest.approx(x, rel=2e-12)


@given(st.floats(0.3, 60), st.floats(0.3, 900), st.floats(1e-6, 1 - 1e-6))
@settings(max_examples=15, deadline=None)
def test_beta_quantile_is_the_inverse(a, b, q):
    x = beta_quantile(np.array([q]), a, b)
    steps = beta_cdf(np.clip([x[0] * (1 - 1e-9), x[0] * (1 + 1e-9)], 0, 1 - 2**-53), a, b)
    assert steps[0] <= q * (1 + 1e-9)
    assert steps[1] >= q * (1 - 1e-9)


def test_radii_of_pairs_are_the_quantiles_of_their_distribution():
    # Squared radius of a pair out of d values: Beta(1, d/2 - 1); the paper spreads by d/4.
    q = (np.arange(1, 17) - 0.5) / 16
    assert np.allclose(radii(8, 2, 16) ** 2, 1 - (1 - q) ** 0.5)
    assert np.allclose(beta_quantile(q, 1.0, 2.0), 1 - (1 - q) ** 0.5)


@pytest.mark.parametrize(("k", "n"), [(2, 50), (3, 100), (4, 200), (8, 300)])
def test_directions_are_spread_evenly(k, n):
    points = directions(k, n)
    assert points.shape == (n, k)
    assert np.allclose((points**2).sum(1), 1)
    assert np.allclose(points.mean(0), 0, atol=0.1)
    assert np.allclose(points.T @ points / n, np.eye(k) / k, atol=0.05)
    apart = np.sort(((points[:, None] - points) ** 2).sum(2), 1)[:, 1]
    assert apart.min() > 1e-4 * apart.mean()  # no two are the same


@given(
    st.integers(1, 6), st.integers(1, 90), st.sampled_from([1, 3, 7, 1000]), st.integers(0, 1000)
)
@settings(max_examples=60, deadline=None)
def test_tree_search_finds_what_a_look_at_all_finds(k, n, levels, seed):
    """Also where many codewords are equal or equally far."""
    random = np.random.default_rng(seed)
    codewords = random.integers(-levels, levels + 1, (n, k)) / levels
    samples = random.integers(-2 * levels, 2 * levels + 1, (70, k)) / (2 * levels)
    cells, distances = _core.fib_nearest_float64(samples, codewords, 2)
    expected_cells, expected_distances = reference.nearest(samples, codewords)
    assert np.array_equal(cells, expected_cells)
    assert np.array_equal(distances, expected_distances)


def test_refinement_is_that_of_a_plain_model():
    samples = reference.spherical_beta(3, 12, 3, 300)
    profile = replace(Profile.paper_default(12, 3, 6, 5), lloyd_restarts=1, lloyd_iterations=4)
    codewords = initial = initial_codewords(12, 3, 6)
    for _ in range(4):
        cells, _ = reference.nearest(samples, codewords)
        codewords = np.array([samples[cells == cell].mean(0) for cell in range(6)])
    found, report = refine(profile, samples, initial)
    assert np.allclose(found, codewords, rtol=0, atol=1e-15)
    assert report.init_mse == pytest.approx(reference.nearest(samples, initial)[1].mean())
    assert report.best_mse == pytest.approx(reference.nearest(samples, codewords)[1].mean())
    assert (report.training_samples, report.empty_cells_repaired) == (300, 0)


@pytest.mark.parametrize("sizes", [(8, 2, 8), (12, 3, 6), (16, 4, 8)])
def test_codewords_are_those_of_the_recipe_in_plain_numpy(sizes):
    d, k, n = sizes
    profile = Profile.paper_default(d, k, n, 7)
    samples = reference.spherical_beta(profile.codebook_seed ^ 0x465155414E54, d, k, 256)
    initial = initial_codewords(d, k, n)
    best, best_mse = initial, reference.nearest(samples, initial)[1].mean()
    for restart in range(4):
        codewords = initial
        if restart:
            seed = (profile.codebook_seed + restart * 0x9E3779B9) % 2**64
            codewords = initial @ haar(seed, k).T
        for _ in range(25):
            cells, _ = reference.nearest(samples, codewords)
            codewords = np.array([samples[cells == cell].mean(0) for cell in range(n)])
        mse = reference.nearest(samples, codewords)[1].mean()
        if mse < best_mse:
            best, best_mse = codewords, mse
    found, report = build_codewords(profile)
    assert report.empty_cells_repaired == 0
    assert np.allclose(found, best, rtol=0, atol=1e-6)
    assert report.best_mse == pytest.approx(best_mse)


def test_restarts_are_never_worse_than_the_first_codewords():
    samples = reference.spherical_beta(3, 12, 3, 200)
    for restarts in (1, 2, 5):
        profile = replace(Profile.paper_default(12, 3, 8, 5), lloyd_restarts=restarts)
        found, report = refine(profile, samples, initial_codewords(12, 3, 8))
        assert report.best_mse <= report.init_mse
        assert reference.nearest(samples, found)[1].mean() == report.best_mse
        assert report.best_restart < restarts


def test_optimal_codewords_are_kept():
    samples = np.repeat([[0.5, 0.0], [-0.5, 0.0]], 4, 0)
    profile = Profile.paper_default(8, 2, 2, 1)
    initial = samples[[0, 4]]
    found, report = refine(profile, samples, initial)
    assert found is initial
    assert (report.init_mse, report.best_mse, report.best_restart) == (0.0, 0.0, 0)


def test_an_empty_cell_goes_beside_the_worst_one():
    # Cell 0 has distortion, cell 1 has none, cell 2 is nobody's nearest.
    samples = np.array([[0.5, 0.0], [0.6, 0.0], [0.9, 0.0], [-0.5, 0.0]])
    initial = np.array([[0.5, 0.0], [-0.5, 0.0], [0.0, -0.9]])
    profile = replace(Profile.paper_default(8, 2, 3, 1), lloyd_restarts=1, lloyd_iterations=1)
    found, report = refine(profile, samples, initial)
    (event,) = report.repair_events
    mean = 2 / 3
    assert (event.restart, event.iteration) == (0, 0)
    assert (event.empty_cell, event.donor_cell, event.donor_count_before) == (2, 0, 3)
    assert event.donor_distortion == pytest.approx(0.1**2 + 0.4**2)
    assert event.residual_norm == pytest.approx(0.9 - mean)
    assert event.split_epsilon == 1e-6
    assert report.empty_cells_repaired == 1
    assert found[0] == pytest.approx([mean - 1e-6, 0], abs=1e-12)
    assert found[2] == pytest.approx([mean + 1e-6, 0], abs=1e-12)
    assert found[1].tolist() == [-0.5, 0]


def test_the_last_of_equally_bad_cells_gives():
    samples = np.array([[0.5, 0.1], [0.5, -0.1], [-0.5, 0.1], [-0.5, -0.1]])
    initial = np.array([[0.5, 0.0], [-0.5, 0.0], [0.0, 0.9], [0.0, -0.9]])
    profile = replace(Profile.paper_default(8, 2, 4, 1), lloyd_restarts=1, lloyd_iterations=1)
    _, report = refine(profile, samples, initial)
    # The first repair takes all distortion of its donor away, so that the other one comes next.
    assert [(e.empty_cell, e.donor_cell) for e in report.repair_events] == [(2, 1), (3, 0)]


def test_repair_may_be_forbidden_or_impossible():
    initial = np.array([[0.5, 0.0], [-0.5, 0.0], [0.0, 0.9]])
    profile = replace(Profile.paper_default(8, 2, 3, 1), empty_cell_policy="fail_closed")
    samples = np.array([[0.5, 0.1], [0.5, -0.1], [-0.5, 0.0]])
    with pytest.raises(InvalidArgument, match="codeword 2 of 3 has no training vectors"):
        refine(profile, samples, initial)
    profile = Profile.paper_default(8, 2, 3, 1)
    with pytest.raises(InvalidArgument, match="no cell has two to give"):
        refine(profile, samples[1:], initial)
    equal = np.repeat(samples[2:], 3, 0)
    with pytest.raises(InvalidArgument, match="all equal"):
        refine(profile, np.concatenate([equal, samples[:1]]), initial)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"codebook_version": "fib-quant:paper-core-v2"}, "codebook_version"),
        ({"ambient_dim": 512, "block_dim": 256, "training_samples": 2_000_000}, "training_samples"),
    ],
)
def test_some_profiles_can_be_stored_but_not_built(changes, text):
    with pytest.raises(InvalidArgument, match=text):
        build_codewords(replace(SMALL, **changes))
    with pytest.raises(InvalidArgument, match="no direction method"):
        book_for(Profile.paper_default(8, 1, 8, 7))


@pytest.fixture(scope="module", params=["haar", "hadamard"])
def small(request):
    return build_book(Profile.paper_default(8, 2, 5, 7, rotation=request.param))


def test_books_come_back_from_their_bytes(small):
    read = Book.unpack(small.pack())
    assert (read.profile, read.report) == (small.profile, small.report)
    assert np.array_equal(read.rotation_data, small.rotation_data)
    assert np.array_equal(read.codewords, small.codewords)
    assert read.pack() == small.pack()
    assert read.digest == small.digest
    assert read.codebook_digest == small.codebook_digest
    assert (read.d, read.k, read.n_codewords, read.index_bits, read.index_bytes) == (8, 2, 5, 3, 2)
    assert not read.codewords.flags.writeable
    assert not read.rotation_data.flags.writeable


def test_building_again_gives_the_same_book(small):
    assert build_book(small.profile).digest == small.digest


def test_every_truncation_of_a_book_is_told(small):
    packed = small.pack()
    for n in range(len(packed)):
        with pytest.raises((Truncated, Corrupt)):
            Book.unpack(packed[:n])
    with pytest.raises(Corrupt, match="behind its end"):
        Book.unpack(packed + b"\0")


def test_flipped_bits_of_a_book_are_told_or_change_its_digest(small):
    packed = small.pack()
    for at in range(len(packed)):
        damaged = bytearray(packed)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(Corrupt, match="another digest"):
            book_of(small.digest, damaged)
        try:
            read = Book.unpack(damaged)
        except (Corrupt, Truncated, Unsupported):
            continue
        assert read.digest != small.digest
        assert np.isfinite(read.codewords).all()
        assert np.isfinite(read.rotation_data).all()


def test_values_that_could_overflow_are_refused(small):
    for value in (np.nan, np.inf, 2.5):
        codewords = small.codewords.copy()
        codewords[1, 1] = value
        with pytest.raises(Corrupt, match="is beyond"):
            Book.unpack(replace(small, codewords=codewords).pack())
    with pytest.raises(Unsupported, match="version 2"):
        Book.unpack(b"\x02" + small.pack()[1:])
    with pytest.raises(Corrupt, match="version 0"):
        Book.unpack(b"\x00" + small.pack()[1:])


def test_a_stored_book_is_read_once(small):
    first = book_of(small.digest, small.pack())
    assert book_of(small.digest, memoryview(small.pack())) is first


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Another folder of books, and a process that remembers none."""
    monkeypatch.setenv("KVSTORE_CACHE", str(tmp_path / "books"))
    _forget(monkeypatch)
    return tmp_path / "books"


def _forget(monkeypatch):
    monkeypatch.setattr(book, "_of_profiles", book._Remembered())


def _count_builds(monkeypatch):
    built = []

    def build(profile):
        built.append(profile)
        return build_book(profile)

    monkeypatch.setattr(book, "build_book", build)
    return built


def test_a_book_is_built_once(folder, monkeypatch):
    built = _count_builds(monkeypatch)
    first = book_for(SMALL)
    assert book_for(SMALL) is first
    _forget(monkeypatch)
    second = book_for(SMALL)
    assert second is not first
    assert second.digest == first.digest
    assert built == [SMALL]
    assert [p.name for p in folder.iterdir()] == [SMALL.digest()[7:] + ".kvbook"]


def test_damaged_cached_books_are_built_again(folder, monkeypatch):
    good = book_for(SMALL)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    other = build_book(replace(SMALL, lloyd_iterations=1)).pack()
    built = _count_builds(monkeypatch)
    for damaged in (b"", whole[:40], whole[:-1], bytes(len(whole)), whole[:-1] + b"\x7f"):
        path.write_bytes(damaged)
        _forget(monkeypatch)
        assert book_for(SMALL).digest == good.digest
        assert path.read_bytes() == whole
    assert len(built) == 5
    book.cache.save(SMALL.digest(), other)  # whole, but another profile's
    _forget(monkeypatch)
    assert book_for(SMALL).digest == good.digest
    book.cache.save(SMALL.digest(), b"\x09" + other[1:])  # of a newer release
    _forget(monkeypatch)
    assert book_for(SMALL).digest == good.digest


def test_a_pipe_in_the_place_of_a_cached_book_is_not_waited_for(folder, monkeypatch):
    good = book_for(SMALL)
    (path,) = folder.iterdir()
    path.unlink()
    os.mkfifo(path)
    _forget(monkeypatch)
    assert book_for(SMALL).digest == good.digest


def test_a_folder_that_cannot_be_written_is_no_error(folder, monkeypatch):
    folder.write_text("a file in its place")
    assert book_for(SMALL).k == 2
    monkeypatch.delenv("KVSTORE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    _forget(monkeypatch)
    assert book_for(SMALL).k == 2


def test_a_full_disk_leaves_nothing_behind(folder, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(book.cache.Path, "replace", full)
    assert book_for(SMALL).k == 2
    assert os.listdir(folder) == []


def test_the_folder_of_books_follows_the_environment(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("KVSTORE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    book_for(SMALL)
    assert len(list((tmp_path / "xdg" / "kvstore").iterdir())) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    _forget(monkeypatch)
    book_for(SMALL)
    assert len(list((tmp_path / "home" / ".cache" / "kvstore").iterdir())) == 1


def test_threads_that_build_the_same_book_agree(folder):
    found = []
    threads = [threading.Thread(target=lambda: found.append(book_for(SMALL))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.digest for one in found}) == 1
    assert len(list(folder.iterdir())) == 1


def test_invalid_profiles_have_no_book():
    with pytest.raises(KvError, match="lloyd_restarts"):
        book_for(replace(SMALL, lloyd_restarts=0))
