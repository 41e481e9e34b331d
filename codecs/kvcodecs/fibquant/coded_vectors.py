"""Coded vectors: decoded, and counted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .. import _core
from ..errors import Corrupt
from ..spec import F32
from .book import Book
from .payload import CODED, REASONS, U8, U16


class Tally:
    """Counts coded and raw vectors, and why they are raw: each reason once, first one first."""

    def __init__(self) -> None:
        self.n_coded = self.n_raw = 0
        self.reasons: list[str] = []

    def add(self, states: U8) -> None:
        """Count the vectors of a payload, in their order."""
        counts = np.bincount(states, minlength=CODED + 1)
        self.n_coded += int(counts[CODED])
        self.n_raw += len(states) - int(counts[CODED])
        kinds = [int(kind) for kind in np.flatnonzero(counts) if kind != CODED]
        for kind in sorted(kinds, key=lambda kind: int((states == kind).argmax())):
            if REASONS[kind] not in self.reasons:
                self.reasons.append(REASONS[kind])


def decode_vectors(
    book: Book,
    norms: U16,
    indices: U8,
    heads: npt.NDArray[np.intp],
    statistics: F32 | None,
    *,
    n_threads: int = 1,
    where: str,
) -> F32:
    """Return coded vectors ``(n, head_dim)`` of heads ``(n,)``; `Corrupt` if they are none."""
    values, bad = _core.fib_decode(book.core, norms, indices, n_threads)
    if bad >= 0:
        raise Corrupt(f"{where}: coded vector {bad} has no such norm or codeword")
    if statistics is not None:
        mean, scale = statistics
        values *= scale[heads]
        values += mean[heads]
    check_finite(values, where)
    return values


def decoded_rows(
    book: Book,
    rows: F32,
    states: U8,
    norms: U16,
    indices: U8,
    statistics: F32 | None,
    *,
    n_threads: int = 1,
    where: str,
) -> F32:
    """Return what `rows` ``(heads, n, head_dim)`` decode to, as `_core.fib_encode` coded them."""
    is_coded = states == CODED
    decoded = rows.copy()
    decoded[is_coded] = decode_vectors(
        book,
        norms[is_coded],
        indices[is_coded],
        np.nonzero(is_coded)[0],
        statistics,
        n_threads=n_threads,
        where=where,
    )
    return decoded


def check_finite(values: F32, where: str) -> None:
    if not np.isfinite(values).all():
        raise Corrupt(f"{where}: a value is not finite")
