"""FibQuant without streams: vectors to norms and indices, and back. FORMAT.md 11.6 to 11.8."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .._core import fib_decode, fib_encode
from ..errors import Corrupt, InvalidArgument
from ..plan import available_cpus
from ..tensor import as_array, as_float32, is_float
from .book import Book
from .documents import check_type
from .payload import NORM_RANGE, ZERO_NORM
from .reference.packing import unpack_indices

F32 = npt.NDArray[np.float32]

_FAILURES: Final = {
    ZERO_NORM: "has norm 0, which has no direction; keep it raw",
    NORM_RANGE: "has a norm that float16 cannot hold as a positive number; scale it or keep it raw",
}


class Codes(NamedTuple):
    """Coded vectors.

    Attributes
    ----------
    norms
        float16 ``(n,)``, finite and positive.
    indices
        uint8 ``(n, index_bytes)``: each vector's indices, packed.
    """

    norms: npt.NDArray[np.float16]
    indices: npt.NDArray[np.uint8]


class Quantiser:
    """Codes vectors by a book.

    There is no bound on the error of a value: a vector's error is, on average over directions, the
    share of its norm that the book's report tells.

    Parameters
    ----------
    book
        Rotation and codewords.

    Raises
    ------
    InvalidArgument
        `book` is no `Book`.
    """

    def __init__(self, book: Book) -> None:
        check_type(book, Book, "FibQuant: book")
        self.book = book

    def encode(self, x: F32) -> Codes:
        """Return the codes of vectors ``(n, d)``.

        Raises
        ------
        InvalidArgument
            Vectors of another length or not finite, or one whose norm is 0 or leaves float16; the
            message names it. Values that are no floats.
        """
        given = as_array(x, "FibQuant: vectors")
        if not is_float(given.dtype):
            raise InvalidArgument(f"FibQuant: vectors of {given.dtype}; floats expected")
        vectors = as_float32(given)
        if vectors.ndim != 2 or vectors.shape[1] != self.book.d:
            raise InvalidArgument(
                f"FibQuant: vectors of shape {vectors.shape}; (n, {self.book.d}) expected"
            )
        finite = np.isfinite(vectors)
        if not finite.all():
            vector, channel = np.argwhere(~finite)[0]
            raise InvalidArgument(
                f"FibQuant: {vectors[vector, channel]} in vector {vector}, channel {channel}"
            )
        states, norms, indices, _, _ = fib_encode(
            self.book.core,
            vectors[None],
            None,
            None,
            np.zeros((1, len(vectors)), np.uint8),
            available_cpus(),
        )
        failed = np.flatnonzero(states[0])
        if failed.size:
            raise InvalidArgument(f"FibQuant: vector {failed[0]} {_FAILURES[states[0, failed[0]]]}")
        return Codes(norms[0].view(np.float16), indices[0])

    def decode(self, codes: Codes) -> F32:
        """Return the vectors ``(n, d)`` of codes, float32.

        Raises
        ------
        InvalidArgument
            No `Codes`, or arrays of other types.
        Corrupt
            Codes that no encoder writes: norms that are not positive and finite, indices of
            another length or beyond the codewords, bits that are not 0 behind them.
        """
        check_type(codes, Codes, "FibQuant: codes")
        norms, indices = as_array(codes.norms, "norms"), as_array(codes.indices, "indices")
        if norms.dtype != np.float16 or indices.dtype != np.uint8:
            raise InvalidArgument(
                f"FibQuant: norms of {norms.dtype} and indices of {indices.dtype}; float16 and "
                "uint8 expected"
            )
        norms, indices = np.ascontiguousarray(norms), np.ascontiguousarray(indices)
        if norms.ndim != 1 or indices.shape != (len(norms), self.book.index_bytes):
            raise Corrupt(
                f"FibQuant: norms {norms.shape} and indices {indices.shape}; (n,) and "
                f"(n, {self.book.index_bytes}) expected"
            )
        good = np.isfinite(norms) & (norms > 0)
        if not good.all():
            vector = np.flatnonzero(~good)[0]
            raise Corrupt(f"FibQuant: norm {norms[vector]} of vector {vector}")
        values, bad = fib_decode(self.book.core, norms.view(np.uint16), indices, available_cpus())
        if bad >= 0:
            self._raise_indices(indices[bad : bad + 1], bad)
        return values

    def _raise_indices(self, packed: npt.NDArray[np.uint8], vector: int) -> None:
        book = self.book
        try:
            largest = unpack_indices(packed, book.index_bits, book.d // book.k).max()
        except Corrupt as error:
            raise Corrupt(f"FibQuant: bits behind the indices of vector {vector}") from error
        raise Corrupt(
            f"FibQuant: index {largest} of vector {vector}; there are {book.n_codewords} codewords"
        )
