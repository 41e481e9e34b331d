"""Decoding of whole tensors, with a receipt."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..digests import tensor_digest
from ..errors import Corrupt
from ..plan import available_cpus, check_threads
from ..receipts import Receipt
from ..spec import F32
from .coded_vectors import Tally, check_finite, decode_vectors
from .documents import check_type
from .pages import Page
from .payload import CODED, U8
from .tensor import WHERE, EncodedTensor


class DecodedTensor(NamedTuple):
    """What `decode_tensor` returns.

    Attributes
    ----------
    values : (batch, layers, kv_heads, tokens, head_dim) float32
    receipt
        Of the decompression.
    """

    values: F32
    receipt: Receipt


def decode_tensor(
    encoded: EncodedTensor, *, n_threads: int | None = None, now: Callable[[], float] = time.time
) -> DecodedTensor:
    """Decode a whole tensor.

    Parameters
    ----------
    n_threads
        None: one per CPU. The values do not depend on it.
    now
        Returns the time that the receipt records, in seconds since 1970.

    Raises
    ------
    Corrupt, Truncated, Unsupported
        Pages that do not cover every vector exactly once or are not those of the receipt; a
        digest of profile, shape, codebook or rotation that is not that of what is there; damaged
        payloads; or vectors that are not coded and raw as the receipt counts them.
    """
    check_type(encoded, EncodedTensor, WHERE)
    n_threads = check_threads(n_threads) or available_cpus()
    encoded.validate()
    values = np.empty(encoded.shape.array_shape, np.float32)
    streams = values.reshape(-1, *values.shape[2:])
    receipt, tally = encoded.receipt, Tally()
    for page in encoded.pages:
        for stream, out in enumerate(streams):
            tally.add(_decode_block(encoded, page, stream, out, n_threads))
    found = tally.n_coded, tally.n_raw, tuple(tally.reasons)
    expected = receipt.compressed_blocks, receipt.raw_fallback_blocks, receipt.fallback_reasons
    if found != expected:
        raise Corrupt(
            f"{WHERE}: {found[0]} vectors coded and {found[1]} raw for {list(found[2])}, the "
            f"receipt says {expected[0]} and {expected[1]} for {list(expected[2])}"
        )
    done = replace(
        receipt,
        operation="decode",
        values_digest=tensor_digest(values),
        max_error=None,
        rms=None,
        recorded_unix_seconds=int(now()),
    )
    return DecodedTensor(values, done)


def _decode_block(encoded: EncodedTensor, page: Page, stream: int, out: F32, n_threads: int) -> U8:
    """Decode one layer of a page into `out`, ``(kv_heads, tokens, head_dim)``; return states."""
    vectors, where = encoded.vectors_of(page, stream), encoded.place(page, stream)
    is_coded = (vectors.states == CODED).reshape(encoded.shape.kv_heads, page.n_tokens)
    rows = out[:, page.first_token : page.first_token + page.n_tokens]
    check_finite(vectors.raw, where)
    rows[~is_coded] = vectors.raw
    rows[is_coded] = decode_vectors(
        encoded.book,
        vectors.norms,
        vectors.indices,
        np.nonzero(is_coded)[0],
        encoded.statistics(stream),
        n_threads=n_threads,
        where=where,
    )
    return vectors.states
