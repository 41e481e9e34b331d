"""Training vectors and nearest codewords of FibQuant books, in NumPy. FORMAT.md 11.4."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .generator import Generator

F64 = npt.NDArray[np.float64]


def spherical_beta(seed: int, d: int, k: int, n: int) -> F64:
    """Return `n` vectors of k: the first k values of random unit vectors of d."""
    generator = Generator(seed)
    out = np.empty((n, k))
    for row in out:
        a = generator.gamma(k / 2)
        b = generator.gamma((d - k) / 2)
        normals = [generator.normal() for _ in range(k)]
        length = math.sqrt(_sum_squares(normals))
        radius = math.sqrt(a / (a + b))
        row[:] = [radius * (x / length) for x in normals]
    return out


def nearest(samples: F64, codewords: F64) -> tuple[npt.NDArray[np.uint32], F64]:
    """Return each sample's nearest codeword, the first of equals, and its squared distance."""
    distances = np.zeros((len(samples), len(codewords)))
    for x, c in zip(samples.T, codewords.T, strict=True):
        distances += (x[:, None] - c) ** 2
    cells = distances.argmin(1)
    return cells.astype(np.uint32), distances[np.arange(len(samples)), cells]


def _sum_squares(values: list[float]) -> float:
    total = 0.0
    for x in values:
        total += x * x
    return total
