"""Rotations of FibQuant books: a dense Haar-random matrix, or signs of two Hadamard transforms.

FORMAT.md section 11.3.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from .._core import fib_draws, fib_haar_columns
from ..digests import document_digest
from ..plan import available_cpus
from .profile import Profile

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

_SCHEMA: Final = "fib_rotation_v1"


def build_rotation(profile: Profile) -> F32:
    """Return the rotation of a valid profile.

    Returns
    -------
    Array
        Haar: the matrix Q ``(d, d)``, of which ``Q @ u`` is coded; Hadamard: the signs ``(2, d)``
        of its two rounds. C order.
    """
    build = haar if profile.rotation == "haar" else hadamard_signs
    return np.ascontiguousarray(build(profile.rotation_seed, profile.ambient_dim), np.float32)


def haar(seed: int, d: int) -> F64:
    """Return a random rotation ``(d, d)``: Q of the QR factors of normals, R's diagonal positive.

    The same bits whatever the number of threads.
    """
    return fib_haar_columns(seed, d, available_cpus()).T


def hadamard_signs(seed: int, d: int) -> F32:
    """Return random signs ``(2, d)``."""
    words = fib_draws(seed, (2 * d + 63) // 64, "bits").astype("<u8")
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: 2 * d]
    return np.float32(1) - np.float32(2) * bits.reshape(2, d).astype(np.float32)


def rotation_shape(profile: Profile) -> tuple[int, int]:
    """Return the shape of what `build_rotation` returns."""
    d = profile.ambient_dim
    return (d if profile.rotation == "haar" else 2, d)


def rotation_digest(profile: Profile, rotation: F32) -> str:
    """Return the digest of a rotation as built or stored."""
    return document_digest(
        _SCHEMA,
        {
            "rotation_schema": _SCHEMA,
            "algorithm_version": profile.rotation_algorithm_version,
            "dim": profile.ambient_dim,
            "seed": profile.rotation_seed,
            "matrix": list(rotation.reshape(-1)),
        },
    )
