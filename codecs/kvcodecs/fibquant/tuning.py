"""Which heads of a prefill break a quality budget when they are coded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from ..codec import Chunks
from ..fitting import first_tokens_of
from ..spec import F32
from .coded_vectors import decoded_rows
from .encoder import encode_vectors
from .params import FibParams
from .quality import QualityBudget, QualityReport, key_quality, own_probes, value_quality

#: Tokens of K that are looked at, and tokens of V that are looked at together.
_KEYS: Final = 1024
_VALUES_AT_ONCE: Final = 1024


def broken_heads(
    params: FibParams, budget: QualityBudget, chunks: Chunks
) -> dict[int, tuple[str, ...]]:
    """Return the heads that break limits, and which, in order; heads that are raw do not.

    K is measured on the first tokens of the prefill, with some of the keys in place of queries; V
    on all tokens, by the largest error of one, which no weighted sum of them exceeds.
    """
    broken: dict[int, tuple[str, ...]] = {}
    for head, report in _reports(params, chunks):
        limits = budget.broken(report)
        if limits and head not in broken:
            broken[head] = limits
    return dict(sorted(broken.items()))


def _reports(params: FibParams, chunks: Chunks) -> Iterator[tuple[int, QualityReport]]:
    is_keys = params.spec.kind == "k"
    first = 0
    for x in [first_tokens_of(chunks, _KEYS)] if is_keys else _pieces(chunks):
        decoded = _decoded(params, x, first)
        first += x.shape[1]
        for head in range(params.spec.heads):
            if head in params.raw_heads or not x.shape[1]:
                continue
            before, after = x[head], decoded[head]
            if is_keys:
                yield head, key_quality(own_probes(before), before, after)
            else:
                yield head, value_quality(before, after)


def _pieces(chunks: Chunks) -> Iterator[F32]:
    for chunk in chunks():
        for at in range(0, chunk.shape[1], _VALUES_AT_ONCE):
            yield chunk[:, at : at + _VALUES_AT_ONCE]


def _decoded(params: FibParams, x: F32, first_token: int) -> F32:
    """Return what values ``(heads, n, head_dim)`` decode to."""
    book, spec = params.book, params.spec
    if book is None:
        return x
    found = encode_vectors(params, x, params.keep(first_token, x.shape[1]))
    statistics = None
    if params.mean is not None and params.scale is not None:
        statistics = np.stack([params.mean, params.scale]).reshape(2, spec.heads, -1)
    states, norms, indices = found.states, found.norms, found.indices
    return decoded_rows(book, x, states, norms, indices, statistics, where="quality budget")
