"""Codewords of FibQuant books: where they start, and what they are refined on. FORMAT.md 11.4."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from .._core import fib_training_vectors
from ..errors import InvalidArgument
from .beta import beta_quantile
from .lloyd import LloydReport, refine
from .profile import CODEBOOK_VERSION, Profile

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

GOLDEN_RATIO: Final = 1.618033988749895
_TRAINING_SEED: Final = 0x465155414E54
_CLIP: Final = 1e-12
_BISECTIONS: Final = 128
#: Training vectors and distances are held in memory, in float64.
_MOST_TRAINING_VALUES: Final = 1 << 28


def build_codewords(profile: Profile) -> tuple[F32, LloydReport]:
    """Return the codewords ``(N, k)`` of a valid profile, and how they were found.

    Raises
    ------
    InvalidArgument
        A profile that can be stored but not built: sub-blocks of one value, which have no
        directions, an unknown `codebook_version`, or too much to train on; or an empty cell that
        cannot be mended, or may not be.
    """
    d, k, n = profile.ambient_dim, profile.block_dim, profile.codebook_size
    if k == 1:
        raise InvalidArgument("block_dim 1: there is no direction method for it; use 2 or more")
    if profile.codebook_version != CODEBOOK_VERSION:
        raise InvalidArgument(
            f"codebook_version {profile.codebook_version!r}: only {CODEBOOK_VERSION} can be built"
        )
    if profile.training_samples * k > _MOST_TRAINING_VALUES:
        raise InvalidArgument(
            f"training_samples {profile.training_samples} of {k} values: at most "
            f"{_MOST_TRAINING_VALUES} values; use fewer"
        )
    codewords, report = refine(profile, training_vectors(profile), initial_codewords(d, k, n))
    return np.ascontiguousarray(codewords, np.float32), report


def training_vectors(profile: Profile) -> F64:
    """Return what codewords are refined on ``(n, k)``: parts of random unit vectors."""
    n = max(profile.training_samples, profile.codebook_size)
    seed = profile.codebook_seed ^ _TRAINING_SEED
    return fib_training_vectors(seed, profile.ambient_dim, profile.block_dim, n)


def initial_codewords(d: int, k: int, n: int) -> F64:
    """Return `n` directions spread over the sphere, each with the radius of its quantile."""
    return radii(d, k, n)[:, None] * directions(k, n)


def radii(d: int, k: int, n: int) -> F64:
    """Return the radii of `n` equally likely shells of k values of a unit vector of d."""
    q = (np.arange(1, n + 1) - 0.5) / n
    if k == 2:
        square: F64 = 1.0 - (1.0 - q) ** (4.0 / d)
        return np.sqrt(square)
    return np.sqrt(beta_quantile(q, k / 2.0, paper_beta(d, k)))


def paper_beta(d: int, k: int) -> float:
    """Return the second parameter of the squared radii's beta distribution."""
    return k / (k + 2.0) * ((d - k - 2.0) / 2.0) + 1.0


def directions(k: int, n: int) -> F64:
    """Return `n` unit vectors of `k` >= 2 values, spread evenly."""
    index = np.arange(n, dtype=np.float64)
    angle = 2.0 * math.pi * index * (1.0 - 1.0 / GOLDEN_RATIO)
    if k == 2:
        return np.stack([np.cos(angle), np.sin(angle)], 1)
    if k == 3:
        z = 1.0 - (2.0 * (index + 1.0) - 1.0) / n
        r = np.sqrt(1.0 - z * z)
        return np.stack([r * np.cos(angle), r * np.sin(angle), z], 1)
    from statistics import NormalDist  # slow to import, and only builders need it

    phi = _roberts_constant(k)
    steps = np.array([phi**-j for j in range(1, k + 1)])
    u = np.clip(np.modf((index[:, None] + 0.5) * steps)[0], _CLIP, 1.0 - _CLIP)
    normal = NormalDist().inv_cdf
    points = np.array([normal(value) for value in u.reshape(-1).tolist()]).reshape(n, k)
    lengths: F64 = np.sqrt((points * points).sum(1, keepdims=True))
    return points / lengths


def _roberts_constant(k: int) -> float:
    """Return the root of ``x^(k+1) = x + 1`` between 1 and 2."""
    low, high = 1.0, 2.0
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if middle ** (k + 1) > middle + 1.0:
            high = middle
        else:
            low = middle
    return 0.5 * (low + high)
