"""Tensors to stored rows and back, rotated as asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import InvalidArgument
from kvcodecs.ggml import quantise
from kvcodecs.ggml.codec import CODEC, GGMLParams
from kvcodecs.plan import Plan
from kvcodecs.rope import RopeTable, from_coded, to_coded
from kvcodecs.spec import Kind, KState, StreamSpec, float_dtype
from kvcodecs.tensor import check_tensor

from .file import Bytes
from .layout import Header

Tensor: TypeAlias = npt.NDArray[Any]


def decode_rows(
    header: Header,
    kind: Kind,
    rows: Bytes,
    positions: int | Sequence[int],
    k_state: KState,
    dtype: str | np.dtype[Any] | type,
    n_threads: int | None,
) -> Tensor:
    """Return rows as ``(heads, n, head_dim)``.

    Parameters
    ----------
    rows : (n, row_bytes) uint8
    positions
        Of the first row, or of each.
    """
    if k_state not in ("pre", "post"):
        raise InvalidArgument(f"k_state {k_state!r}, expected 'pre' or 'post'")
    spec, n = header.spec(kind), len(rows)
    out = np.empty((spec.heads, n, spec.head_dim), float_dtype(dtype))
    turned = kind == "k" and spec.rope is not None and k_state != header.k_state
    if kind == "k" and header.k_state == "post":
        spec = StreamSpec("k", spec.heads, spec.head_dim)
        if turned:
            return _turned_back(header, rows, positions, out)
    table = _table(header, positions, n) if turned else None
    _run(GGMLParams(spec, header.scheme(kind)), rows, out, table, n_threads)
    return out


def encode_rows(
    header: Header, kind: Kind, x: object, k_state: KState, start: int, where: str
) -> Bytes:
    """Return ``(heads, n, head_dim)`` as rows, from position `start` on; `InvalidArgument`."""
    spec, where = header.spec(kind), f"{where} {kind}"
    if k_state not in ("pre", "post"):
        raise InvalidArgument(f"{where}: k_state {k_state!r}, expected 'pre' or 'post'")
    if x is None:
        raise InvalidArgument(f"{where}: missing")
    tensor = np.asarray(x)
    check_tensor(tensor, spec, where)
    if spec.rope is None:  # as a layer without one in a model that has it
        k_state = header.k_state
    if kind == "k" and header.k_state == "post":
        plain = StreamSpec("k", spec.heads, spec.head_dim)
        if k_state == "pre":
            tensor = from_coded(to_coded(tensor, spec, "pre", start), spec, "post", start)
        coded = to_coded(tensor, plain)
    else:
        coded = to_coded(tensor, spec, k_state, start)
    rows = np.ascontiguousarray(coded.transpose(1, 0, 2)).reshape(coded.shape[1], spec.channels)
    try:
        return quantise(rows, header.scheme(kind))
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error}") from error


def _run(
    params: GGMLParams, rows: Bytes, out: Tensor, table: RopeTable | None, n_threads: int | None
) -> None:
    plan, n = Plan(), len(rows)
    payload = np.ascontiguousarray(rows).reshape(-1)
    plan.add(
        CODEC, params, payload.data, first_token=0, n_tokens=n, start=0, stop=n, out=out, rope=table
    )
    plan.run(n_threads)


def _table(header: Header, positions: int | Sequence[int], n: int) -> RopeTable:
    """Return cosines and sines of the positions, as those of rows 0 to n."""
    rope = header.k.rope
    if rope is None:
        raise InvalidArgument("the layer has no RoPE")
    if isinstance(positions, int):
        return rope.table(positions, positions + n)._replace(first_token=0)
    tables = [rope.table(p, p + 1) for p in positions]
    if not tables:
        return rope.table(0, 0)
    cos, sin = (np.concatenate([getattr(t, x) for t in tables]) for x in ("cos", "sin"))
    return RopeTable(0, cos, sin)


def _turned_back(
    header: Header, rows: Bytes, positions: int | Sequence[int], out: Tensor
) -> Tensor:
    plain = StreamSpec("k", header.k.heads, header.k.head_dim)
    values = np.empty(out.shape, np.float32)
    _run(GGMLParams(plain, header.k_scheme), rows, values, None, None)
    table = _table(header, positions, len(rows))
    coded = to_coded(values, header.k, "post", 0, table)
    with np.errstate(over="ignore"):
        out[...] = from_coded(coded, header.k, "pre").astype(out.dtype)
    if not np.isfinite(out.astype(np.float32)).all():
        raise InvalidArgument(f"a value overflows {out.dtype.name}; ask for float32")
    return out
