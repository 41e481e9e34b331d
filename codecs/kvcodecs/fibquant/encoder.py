"""Blocks of FibQuant under construction."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import _core
from ..errors import Corrupt
from ..frame import BytesLike, ErrorStats
from ..spec import F32
from .params import FibParams
from .payload import CODED, PROTECTED, U8, U16, Vectors, build_payload, parse_payload

_MANY_VALUES = 1 << 14


class _Tokens(NamedTuple):
    """Successive tokens as they are stored: norms and indices of all, whatever is coded.

    `states` and `norms` are ``(heads, n)``, `indices` ``(heads, n, index_bytes)``; `raw` are the
    raw vectors' values, head by head.
    """

    states: U8
    norms: U16
    indices: U8
    raw: F32

    @property
    def n(self) -> int:
        return int(self.states.shape[1])

    @classmethod
    def join(cls, parts: list[_Tokens]) -> _Tokens:
        if len(parts) == 1:
            return parts[0]
        total, at, places = sum(part.n for part in parts), 0, []
        for part in parts:
            head, token = np.nonzero(part.states)
            places.append(head * total + at + token)
            at += part.n
        order = np.argsort(np.concatenate(places))
        states, norms, indices = (np.concatenate([p[i] for p in parts], axis=1) for i in range(3))
        return cls(states, norms, indices, np.concatenate([p.raw for p in parts])[order])

    @classmethod
    def of_vectors(cls, vectors: Vectors, heads: int, n: int) -> _Tokens:
        """Return the first `n` tokens of a block of any number."""
        n_tokens, rest = divmod(len(vectors.states), heads)
        if rest or n_tokens < n:
            raise Corrupt(f"FibQuant block: {len(vectors.states)} vectors of {heads} heads")
        is_coded = vectors.states == CODED
        norms = np.zeros(is_coded.shape, np.uint16)
        indices = np.zeros((*is_coded.shape, vectors.indices.shape[1]), np.uint8)
        norms[is_coded], indices[is_coded] = vectors.norms, vectors.indices
        states = vectors.states.reshape(heads, n_tokens)[:, :n]
        raw = vectors.raw[np.nonzero(~is_coded)[0] % n_tokens < n]
        norms, indices = norms.reshape(heads, n_tokens), indices.reshape(heads, n_tokens, -1)
        return cls(states, norms[:, :n], indices[:, :n], raw)


class FibEncoder:
    """`KeepingEncoder` of vectors."""

    def __init__(self, params: FibParams, first_token: int) -> None:
        self._params, self._first_token = params, first_token
        self._parts: list[_Tokens] = []
        self._error = ErrorStats.none()

    @property
    def n_tokens(self) -> int:
        return sum(part.n for part in self._parts)

    @property
    def error(self) -> ErrorStats:
        return self._error

    def push(self, x: F32, n_threads: int = 1) -> None:
        keep = self._params.keep(self._first_token + self.n_tokens, x.shape[1])
        self._add(x, keep, n_threads)

    def keep(self, x: F32) -> None:
        keep = self._params.keep(self._first_token + self.n_tokens, x.shape[1])
        keep[keep == CODED] = PROTECTED
        self._add(x, keep, 1)

    def payload(self) -> bytes:
        if not self._parts:
            return build_payload(parse_payload(b"\0", 0, self._params.index_bytes, 2))
        self._parts = [_Tokens.join(self._parts)]
        states, norms, indices, raw = self._parts[0]
        is_coded = states == CODED
        return build_payload(Vectors(states.reshape(-1), norms[is_coded], indices[is_coded], raw))

    def resume(self, values: F32, payload: BytesLike, error: ErrorStats) -> None:
        # Coding decoded values again would move them: vectors are taken as they are.
        spec = self._params.spec
        vectors = parse_payload(payload, None, self._params.index_bytes, spec.head_dim)
        self._parts.append(_Tokens.of_vectors(vectors, spec.heads, values.shape[1]))
        self._error = self._error.merge(error)

    def _add(self, x: F32, keep: U8, n_threads: int) -> None:
        coded = encode_vectors(self._params, x, keep, n_threads)
        raw = x[coded.states != CODED]
        self._parts.append(_Tokens(coded.states, coded.norms, coded.indices, raw))
        error = ErrorStats(coded.max_error, coded.sum_squares, x.size)
        self._error = self._error.merge(error)


class Encoded(NamedTuple):
    """What `encode_vectors` returns: see `_core.fib_encode`."""

    states: U8
    norms: U16
    indices: U8
    max_error: float
    sum_squares: float


def encode_vectors(params: FibParams, x: F32, keep: U8, n_threads: int = 1) -> Encoded:
    """Code the vectors ``(heads, n, head_dim)`` that are not kept.

    Parameters
    ----------
    keep : (heads, n)
        Why a vector is kept raw; `CODED` if it is not.

    Returns
    -------
    Encoded
        `states` are those of `keep`, or why a vector cannot be coded.
    """
    if params.book is None:
        norms = np.zeros(keep.shape, np.uint16)
        return Encoded(keep, norms, np.zeros((*keep.shape, 0), np.uint8), 0.0, 0.0)
    n_threads = n_threads if x.size > _MANY_VALUES else 1
    x = np.ascontiguousarray(x)
    found = _core.fib_encode(params.book.core, x, params.mean, params.scale, keep, n_threads)
    return Encoded(*found)
