"""Group `normal`: FibQuant's error on independent normal values, beside NumPy and scalars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from kvcodecs import _core
from kvcodecs.errors import Corrupt
from kvcodecs.fibquant import FibQuant, Profile, book_for
from kvcodecs.fibquant.codebook import initial_codewords, training_vectors
from kvcodecs.fibquant.lloyd import rotated
from kvcodecs.fibquant.quality import F64
from kvcodecs.spec import F32

from kvtools.bench.rows import Row
from kvtools.bench.tables import show_by_name

GROUP = "normal"
HEAD_DIM = 64
CODEBOOKS = ((2, 16), (2, 64), (4, 32), (4, 256), (8, 256))
N_VECTORS = 1 << 13
#: How far errors of the same recipe may be apart.
TOLERANCE = 0.01
_AT_ONCE = 1 << 13
_UNITS = {
    "indices": "bits per value",
    "with norms": "bits per value",
    "MSE": "",
    "MSE, NumPy": "",
    "MSE / NumPy": "x",
    "MSE, scalars": "",
    "MSE, scalars with norms' bits": "",
}
_LEGEND = (
    f"Mean squared errors of N(0, I), vectors of {HEAD_DIM}. NumPy: the same recipe in float64.\n"
    "Scalars: the best quantiser of single normal values (Lloyd-Max), which needs no norm, at the\n"
    "bits of the indices and at those with norms; between two whole numbers of levels some values\n"
    "have one and some the other."
)


def measure_normal() -> list[Row]:
    """Measure the error of every codebook, which must be that of NumPy within `TOLERANCE`."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N_VECTORS, HEAD_DIM), dtype=np.float32)
    rotation, _ = np.linalg.qr(rng.standard_normal((HEAD_DIM, HEAD_DIM)))
    rows = []
    for k, n in CODEBOOKS:
        profile = FibQuant(k, n).profile(HEAD_DIM)
        mse, plain = coded_mse(profile, x), plain_mse(profile, x, rotation)
        name, bits = f"{k}x{n}", profile.paper_rate_bits_per_coord
        if not abs(mse / plain - 1) <= TOLERANCE:
            raise Corrupt(f"{name}: a mean squared error of {mse:g}, NumPy's is {plain:g}")
        with_norms = bits + 16 / HEAD_DIM
        found = (
            bits,
            with_norms,
            mse,
            plain,
            mse / plain,
            scalar_mse(bits),
            scalar_mse(with_norms),
        )
        rows += [
            Row(GROUP, f"{name}, {what}", value, unit)
            for (what, unit), value in zip(_UNITS.items(), found, strict=True)
        ]
    return rows


def show_normal(rows: Sequence[Row]) -> None:
    """Print one line per codebook, and what the columns are."""
    show_by_name("codebook", rows, _UNITS, _LEGEND)


def coded_mse(profile: Profile, x: F32) -> float:
    """Return the mean squared error of vectors ``(n, d)``, coded and decoded."""
    book = book_for(profile).core
    states, norms, indices, *_ = _core.fib_encode(
        book, x[None], None, None, np.zeros((1, len(x)), np.uint8), 1
    )
    decoded, bad = _core.fib_decode(book, norms[0], indices[0])
    if states.any() or bad >= 0:
        raise Corrupt("a normal vector that cannot be coded")
    return float(np.square(decoded.astype(np.float64) - x).mean())


def plain_mse(profile: Profile, x: F32, rotation: F64) -> float:
    """Do the same in float64 with NumPy, from training the codewords on."""
    codewords = _trained(profile)
    norms = np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)
    parts = (x / norms @ rotation.T).reshape(-1, profile.block_dim)
    decoded = codewords[_nearest(parts, codewords)].reshape(x.shape) @ rotation
    return float(np.square(decoded * norms.astype(np.float16) - x).mean())


def scalar_mse(bits: float) -> float:
    """Return the error of the best scalar quantiser of normal values at a rate."""
    few = math.floor(2**bits + 1e-9)
    share = (bits - math.log2(few)) / (math.log2(few + 1) - math.log2(few))
    return (1 - share) * _lloyd_max(few) + share * _lloyd_max(few + 1)


def _lloyd_max(n_levels: int) -> float:
    """Return the mean squared error of `n_levels` levels for normal values, where all is best."""
    normal = NormalDist()
    inner = np.array([normal.inv_cdf(i / n_levels) for i in range(1, n_levels)])
    for _ in range(1000):
        limits = [-math.inf, *inner.tolist(), math.inf]
        mass = np.diff([normal.cdf(t) for t in limits])
        levels = -np.diff([math.exp(-t * t / 2) for t in limits]) / math.sqrt(2 * math.pi) / mass
        inner = (levels[1:] + levels[:-1]) / 2
    return float(1 - (mass * levels * levels).sum())


def _trained(profile: Profile) -> F64:
    """Return the best codewords of Lloyd's algorithm, started again from other orientations."""
    samples = training_vectors(profile)
    start = initial_codewords(profile.ambient_dim, profile.block_dim, profile.codebook_size)
    found = []
    for restart in range(profile.lloyd_restarts):
        codewords = rotated(start, profile, restart) if restart else start
        for _ in range(profile.lloyd_iterations):
            codewords = _refined(samples, codewords)
        mse = np.square(samples - codewords[_nearest(samples, codewords)]).mean()
        found.append((float(mse), codewords))
    return min(found, key=lambda each: each[0])[1]


def _refined(samples: F64, codewords: F64) -> F64:
    cells = _nearest(samples, codewords)
    counts = np.bincount(cells, minlength=len(codewords))
    sums = np.stack([np.bincount(cells, x, len(codewords)) for x in samples.T], 1)
    refined: F64 = sums / np.maximum(counts, 1)[:, None]
    # Where there is nothing to take the mean of, the codeword goes where most is to be gained.
    empty = np.flatnonzero(counts == 0)
    far = np.square(samples - codewords[cells]).sum(1).argsort()[::-1]
    refined[empty] = samples[far[: len(empty)]]
    return refined


def _nearest(parts: F64, codewords: F64) -> npt.NDArray[np.int64]:
    half = np.square(codewords).sum(1) / 2
    chunks = [parts[at : at + _AT_ONCE] for at in range(0, len(parts), _AT_ONCE)]
    return np.concatenate([(chunk @ codewords.T - half).argmax(1) for chunk in chunks])
