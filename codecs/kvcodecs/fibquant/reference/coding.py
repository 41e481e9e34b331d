"""Readable NumPy version of the arithmetic of FibQuant: what the core must equal, bit for bit.

FORMAT.md sections 11.3 and 11.7. Every operation is rounded to float32 by itself. Slow; tests and
readers of the format use it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import Corrupt
from ...frame import BytesLike
from ...spec import F32
from ..payload import CODED, NORM_RANGE, U8, U16, ZERO_NORM, parse_payload
from .packing import pack_indices, unpack_indices

if TYPE_CHECKING:
    from ..book import Book
    from ..params import FibParams

U32 = npt.NDArray[np.uint32]


class Encoded(NamedTuple):
    """Vectors as they are stored.

    Attributes
    ----------
    states : (n,)
        `CODED`, or the reason why not.
    norms : (n,)
        Bits of float16; 0 where not coded.
    indices : (n, index_bytes)
        Packed; 0 where not coded.
    """

    states: U8
    norms: U16
    indices: U8


def rotate(book: Book, u: F32) -> F32:
    """Return ``Q u`` of each row of `u`."""
    matrix = book.rotation_data
    if book.rotation == "haar":
        y = matrix[:, 0] * u[:, :1]
        for j in range(1, book.d):
            y = y + matrix[:, j] * u[:, j : j + 1]
        return y
    x = u.copy()
    for signs in matrix:
        x = x * signs
        _transform(x, 0)
        if _width(book.d) < book.d:
            _transform(x, book.d - _width(book.d))
    return x


def rotate_back(book: Book, g: F32) -> F32:
    """Return ``Q^T g`` of each row of `g`."""
    matrix = book.rotation_data
    if book.rotation == "haar":
        v = np.zeros(0, np.float32)
        for at in range(0, book.d, book.k):
            part = matrix[at] * g[:, at : at + 1]
            for i in range(at + 1, at + book.k):
                part = part + matrix[i] * g[:, i : i + 1]
            v = v + part if at else part
        return v
    x = g.copy()
    for signs in matrix[::-1]:
        if _width(book.d) < book.d:
            _transform(x, book.d - _width(book.d))
        _transform(x, 0)
        x = x * signs
    return x


def nearest(codewords: F32, t: F32) -> U32:
    """Return the index of the codeword that is nearest to each row of `t`, of equals the lowest."""
    squares = np.zeros(len(codewords), np.float64)
    for column in codewords.T.astype(np.float64):
        squares = squares + column * column
    score = np.broadcast_to((-squares / 2).astype(np.float32), (len(t), len(codewords)))
    for j in range(t.shape[1]):
        score = score + t[:, j : j + 1] * codewords[:, j]
    return score.argmax(axis=1).astype(np.uint32)


def encode(book: Book, u: F32) -> Encoded:
    """Return the vectors ``(n, d)``, any mean and scale of channels taken away, as stored."""
    squares = np.zeros(len(u), np.float64)
    for column in u.T.astype(np.float64):
        squares = squares + column * column
    with np.errstate(over="ignore"):
        norm = np.sqrt(squares).astype(np.float32).astype(np.float16)
    states = np.where(np.isfinite(norm) & (norm > 0), CODED, NORM_RANGE).astype(np.uint8)
    states[squares == 0] = ZERO_NORM
    coded = states == CODED
    unit = u[coded]
    t = rotate(book, unit) * (np.float32(1) / norm[coded].astype(np.float32))[:, None]
    chosen = nearest(book.codewords, t.reshape(-1, book.k)).reshape(-1, book.d // book.k)
    norms, indices = np.zeros(len(u), np.uint16), np.zeros((len(u), book.index_bytes), np.uint8)
    norms[coded] = norm[coded].view(np.uint16)
    indices[coded] = pack_indices(chosen, book.index_bits)
    return Encoded(states, norms, indices)


def decode(book: Book, norms: U16, indices: U8) -> F32:
    """Return the values ``(n, d)`` of coded vectors; `Corrupt` if a norm or an index is none."""
    if not ((norms > 0) & (norms < 0x7C00)).all():
        raise Corrupt("FibQuant block: a norm is not finite, or not above 0")
    chosen = unpack_indices(indices, book.index_bits, book.d // book.k)
    if (chosen >= book.n_codewords).any():
        raise Corrupt(f"FibQuant block: index {chosen.max()} of {book.n_codewords} codewords")
    g = book.codewords[chosen].reshape(len(norms), book.d)
    scale = norms.view(np.float16).astype(np.float32)
    return rotate_back(book, g) * scale[:, None]


def decode_block(params: FibParams, payload: BytesLike, n_tokens: int) -> F32:
    """Return the values ``(heads, n_tokens, head_dim)`` of a block, coded channel order."""
    spec, book = params.spec, params.book
    index_bytes = 0 if book is None else book.index_bytes
    vectors = parse_payload(payload, spec.heads * n_tokens, index_bytes, spec.head_dim)
    values = np.empty((spec.heads * n_tokens, spec.head_dim), np.float32)
    coded = vectors.states == CODED
    values[~coded] = vectors.raw
    if book is not None:
        decoded = decode(book, vectors.norms, vectors.indices)
        if params.mean is not None and params.scale is not None:
            head = np.flatnonzero(coded) // n_tokens
            mean, scale = (x.reshape(spec.heads, -1) for x in (params.mean, params.scale))
            decoded = decoded * scale[head] + mean[head]
        values[coded] = decoded
    return values.reshape(spec.heads, n_tokens, spec.head_dim)


def centred(params: FibParams, x: F32) -> F32:
    """Return ``(heads, n, head_dim)`` without the channels' means, in their scales."""
    if params.mean is None or params.scale is None:
        return x
    shape = (params.spec.heads, 1, params.spec.head_dim)
    with np.errstate(over="ignore"):
        u: F32 = (x - params.mean.reshape(shape)) * (np.float32(1) / params.scale).reshape(shape)
    return u


def _width(d: int) -> int:
    """Return the largest power of two up to `d`."""
    return 1 << (d.bit_length() - 1)


def _transform(x: F32, at: int) -> None:
    """Transform the `_width` channels from `at` of each row in place: Hadamard, orthonormal."""
    width = _width(x.shape[1])
    part, h = x[:, at : at + width].copy(), 1
    while h < width:
        pairs = part.reshape(len(x), width // (2 * h), 2, h)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        part = np.stack([a + b, a - b], axis=2).reshape(len(x), width)
        h *= 2
    x[:, at : at + width] = part * np.float32(1 / math.sqrt(width))
