"""Rotations of FibQuant books, in NumPy. FORMAT.md 11.3."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .generator import Generator

F64 = npt.NDArray[np.float64]


def haar(seed: int, d: int) -> F64:
    """Return Q ``(d, d)`` of the QR factors of normals, with a positive diagonal of R."""
    generator = Generator(seed)
    normals = [generator.normal() for _ in range(d * d)]
    return householder(np.array(normals).reshape(d, d).T.copy())


def householder(a: F64) -> F64:
    """Return Q of ``a = Q R`` with a positive diagonal of R; `a` is overwritten."""
    d = len(a)
    vectors, signs = [], np.ones(d)
    for j in range(d):
        v = np.zeros(d)
        v[j:] = a[j:, j]
        alpha = -np.copysign(np.sqrt(v @ v), v[j])
        signs[j] = np.copysign(1.0, alpha)
        v[j] -= alpha
        a -= np.outer(v, 2.0 / (v @ v) * (v @ a))
        vectors.append(v)
    q = np.eye(d)
    for v in reversed(vectors):
        q -= np.outer(v, 2.0 / (v @ v) * (v @ q))
    return q * signs


def hadamard_signs(seed: int, d: int) -> F64:
    """Return signs ``(2, d)``: -1 where a bit of the generator's numbers is set, lowest first."""
    generator = Generator(seed)
    words = np.array([generator.bits() for _ in range((2 * d + 63) // 64)], "<u8")
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: 2 * d]
    return 1.0 - 2.0 * bits.reshape(2, d).astype(np.float64)
