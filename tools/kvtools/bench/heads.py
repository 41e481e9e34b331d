"""Heads of all layers side by side, and what attention reads from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import InvalidArgument
from kvcodecs.fibquant.quality import F64, softmax
from kvcodecs.ggml.schemes import SCHEMES
from kvcodecs.rope import Rope, from_coded, to_coded
from kvcodecs.spec import F32, StreamSpec

from kvtools.sample import Sample

#: The last tokens ask; where the file has no queries, their K does.
N_QUERIES = 64
#: Rows of whole blocks of every scheme are a multiple of it wide.
WIDEST_BLOCK = max(scheme.block_values for scheme in SCHEMES)


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of several layers side by side.

    Attributes
    ----------
    k, v : (heads, tokens, head_dim) float32
        K before RoPE, in coded channel order, and V.
    q : (heads, queries, head_dim) float32
        Queries of the last tokens after RoPE, those of all query heads that share a KV head in one.
    position : (queries,) int64
        Of the query: it sees the tokens before it, and its own.
    rope
        Of K.
    """

    k: F32
    v: F32
    q: F32
    position: npt.NDArray[np.int64]
    rope: Rope | None


def heads_of(sample: Sample, block_values: int = WIDEST_BLOCK) -> Heads:
    """Put as many heads of all layers side by side as make rows of whole blocks of values.

    Raises
    ------
    InvalidArgument
        Layers differ in their geometry, or all heads together are too narrow.
    """
    shapes = {x.shape for x in (*sample.k, *sample.v)}
    if len(shapes) != 1:
        raise InvalidArgument(f"{sample.label}: K and V of all layers must have one shape here")
    rope, n_tokens = sample.model.rope, sample.n_tokens
    k = np.concatenate([_coded(x, rope) for x in sample.k])
    v = np.concatenate(sample.v).astype(np.float32)
    head_dim = k.shape[2]
    n_heads = len(k)
    while n_heads and n_heads * head_dim % block_values:
        n_heads -= 1
    if not n_heads:
        raise InvalidArgument(
            f"{sample.label}: {len(k)} heads of {head_dim} channels make no rows of whole blocks "
            f"of {block_values} values"
        )
    first = max(0, n_tokens - N_QUERIES)
    if sample.q is None:
        q = _rotated(k[:, first:], rope, first)
        group = 1
    else:
        asked = np.concatenate([_coded(x, rope) for x in sample.q])
        first = n_tokens - asked.shape[1]
        q = _rotated(asked, rope, first)
        group = len(q) // len(k)
    n_queries = n_tokens - first
    q = q[: n_heads * group].reshape(n_heads, group * n_queries, head_dim)
    position = np.tile(np.arange(first, n_tokens), group)
    return Heads(k[:n_heads], v[:n_heads], q, position, rope)


def attention_weights(heads: Heads, k: F32) -> F64:
    """Return how much of each token the queries read, in float64: (heads, queries, tokens)."""
    rotated = _rotated(k, heads.rope, 0).astype(np.float64)
    scores = heads.q.astype(np.float64) @ rotated.transpose(0, 2, 1) / np.sqrt(k.shape[2])
    beyond = np.arange(k.shape[1]) > heads.position[:, None]
    return softmax(np.where(beyond, -np.inf, scores))


def attention(heads: Heads, k: F32, v: F32) -> F64:
    """Return what the queries read from `k` and `v`, in float64: (heads, queries, head_dim)."""
    mixed: F64 = attention_weights(heads, k) @ v.astype(np.float64)
    return mixed


def rows_of(x: F32) -> F32:
    """Return (heads, tokens, head_dim) as rows: (tokens, channels)."""
    return np.ascontiguousarray(x.transpose(1, 0, 2)).reshape(x.shape[1], -1)


def _coded(x: npt.NDArray[np.generic], rope: Rope | None) -> F32:
    return to_coded(x, StreamSpec("k", x.shape[0], x.shape[2], rope))


def _rotated(x: F32, rope: Rope | None, first: int) -> F32:
    if rope is None:
        return x
    return from_coded(x, StreamSpec("k", x.shape[0], x.shape[2], rope), "post", first)
