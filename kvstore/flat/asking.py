"""What is asked of a layer, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np
from kvcodecs.errors import InvalidArgument
from kvcodecs.ggml.config import GGML
from kvcodecs.ggml.schemes import Scheme, scheme_by_name
from kvcodecs.rope import Rope
from kvcodecs.spec import Kind, KState, StreamSpec

from .header import MAX_POSITION, Header, auto_block_rows, ring_rows

Schemes: TypeAlias = "str | GGML | Mapping[Kind, str | GGML]"


def make_header(
    k: StreamSpec,
    v: StreamSpec | None,
    scheme: Schemes,
    store_k: KState,
    capacity: int,
    max_rows: int | None,
    session: int = 0,
    layer: int = 0,
) -> Header:
    """Check what is asked of a new layer; `InvalidArgument`."""
    if store_k not in ("pre", "post"):
        raise InvalidArgument(f"store_k {store_k!r}, expected 'pre' or 'post'")
    k_scheme, v_scheme = _scheme(scheme, "k"), _scheme(scheme, "v")
    try:
        row_bytes = k_scheme.row_bytes(k.channels)
        row_bytes += 0 if v is None else v_scheme.row_bytes(v.channels)
    except InvalidArgument as error:
        raise InvalidArgument(f"layer {layer}: {error}") from error
    size = auto_block_rows(row_bytes)
    if max_rows is not None:
        max_rows = check_whole(max_rows, "max_rows", 1, MAX_POSITION)
        capacity = ring_rows(max_rows, size)
    else:
        capacity = -(-check_whole(capacity, "capacity", 1, MAX_POSITION) // size) * size
    return Header(
        k, v, k_scheme, None if v is None else v_scheme, store_k, capacity, size, max_rows,
        session, layer,
    )  # fmt: skip


def check_path(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """Return a path as text; `InvalidArgument` if no file can have it."""
    try:
        text = os.fsdecode(path)
        possible = text and b"\0" not in os.fsencode(text)
    except (TypeError, UnicodeError):
        possible = False
    if not possible:
        raise InvalidArgument(f"path {path!r}: not that of a file")
    return text


def check_whole(value: object, what: str, lo: int, hi: int) -> int:
    """Return an integer from `lo` to `hi` as Python's own, else `InvalidArgument`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidArgument(f"{what} {value!r}: expected an integer")
    if not lo <= value <= hi:
        raise InvalidArgument(f"{what} {value}: must be {lo} to {hi}")
    return int(value)


def make_specs(
    heads: int, head_dim: int, head_dim_v: int | Literal["same"] | None, rope: Rope | None
) -> tuple[StreamSpec, StreamSpec | None]:
    """Return the geometry of K and V; `InvalidArgument`."""
    width = head_dim if head_dim_v == "same" else head_dim_v
    v = None if width is None else StreamSpec("v", heads, width)
    return StreamSpec("k", heads, head_dim, rope), v


def _scheme(scheme: Schemes, kind: Kind) -> Scheme:
    if isinstance(scheme, Mapping):
        if set(scheme) != {"k", "v"}:
            raise InvalidArgument(
                f"scheme: a mapping needs the keys 'k' and 'v', has {list(scheme)}"
            )
        scheme = scheme[kind]
    return scheme_by_name(scheme.scheme if isinstance(scheme, GGML) else scheme)
