"""What an attention is asked with: queries, checked, and the positions that they see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from kvcodecs.attention import Attention, check_scale
from kvcodecs.errors import InvalidArgument
from kvcodecs.spec import F32, KState, StreamSpec, float_dtype
from kvcodecs.tensor import as_array, as_float32

from .token_range import check_token

_LAST_QUERY: Final = 1 << 53


class Asked(NamedTuple):
    """What the caller asks, not checked yet."""

    q: npt.ArrayLike
    scale: float | None
    causal: bool
    window: int | None
    first_query: int | None
    start: int | None
    stop: int | None
    k_state: KState


@dataclass(frozen=True)
class Query:
    """What is attended with, checked: rows by KV head, and the positions they see."""

    rows: F32
    shape: tuple[int, ...]
    scale: float
    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    start: int
    stop: int

    def begin(self, head_dim_v: int, order: npt.NDArray[np.int32] | None) -> Attention:
        return Attention(
            self.rows, head_dim_v, scale=self.scale, first=self.first, last=self.last, order=order
        )

    def finish(self, attention: Attention, where: str) -> F32:
        try:
            out = attention.result()
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {error}") from error
        return out.reshape(*self.shape[:-1], out.shape[-1])


def check_query(asked: Asked, spec: StreamSpec, start: int, stop: int, where: str) -> Query:
    """Check queries for a layer that has positions ``[start, stop)``."""
    q = as_array(asked.q, f"{where}: q")
    if q.ndim not in (2, 3) or q.shape[-1] != spec.head_dim or q.shape[0] % spec.heads:
        raise InvalidArgument(
            f"{where}: q of shape {q.shape}, expected (n_heads, head_dim={spec.head_dim}) or "
            f"(n_heads, n_queries, head_dim={spec.head_dim}), n_heads a multiple of the "
            f"{spec.heads} KV heads"
        )
    if q.shape[0] == 0:
        raise InvalidArgument(f"{where}: q of shape {q.shape} has no heads")
    float_dtype(q.dtype)
    n_queries = 1 if q.ndim == 2 else q.shape[1]
    values = as_float32(q.reshape(q.shape[0], n_queries, spec.head_dim))
    if not np.isfinite(values).all():
        at = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise InvalidArgument(f"{where}: q is not finite at head, query, channel {at}")
    scale = spec.head_dim**-0.5 if asked.scale is None else check_scale(asked.scale, where)
    first_query = stop - n_queries
    if asked.first_query is not None:
        first_query = check_token(asked.first_query, f"{where}: first_query")
        if not 0 <= first_query <= _LAST_QUERY:
            raise InvalidArgument(f"{where}: first_query {first_query}: 0 to {_LAST_QUERY}")
    positions = first_query + np.arange(n_queries, dtype=np.int64)
    last = np.full(n_queries, stop - 1, np.int64)
    first = np.full(n_queries, start, np.int64)
    if asked.causal:
        last = np.minimum(last, positions)
    if asked.window is not None:
        window = check_token(asked.window, f"{where}: window")
        if window < 1:
            raise InvalidArgument(f"{where}: window {window}: must be positive, or None")
        first = np.maximum(first, positions - min(window, _LAST_QUERY) + 1)
    group = q.shape[0] // spec.heads
    seen = first <= last
    return Query(
        rows=values.reshape(spec.heads, group * n_queries, spec.head_dim),
        shape=q.shape,
        scale=scale,
        first=np.tile(first, group),
        last=np.tile(last, group),
        start=int(first[seen].min()) if seen.any() else stop,
        stop=int(last[seen].max()) + 1 if seen.any() else stop,
    )
