"""TKV1's stream layout in containers: a record that holds a `.tkv` file. FORMAT.md section 8."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ..container import FILE_MAGIC, MAGIC, Head, check_overflow, next_record
from ..errors import Corrupt, InvalidArgument
from ..frame import seal_record
from ..quantiser import QuantiserConfig
from ..spec import F32
from .tkvencoder import encode_stream, step_for_bpv
from .tkvfile import TkvFile


def encode_file(
    head: Head, y: F32, asked: QuantiserConfig, *, theta: float, pre_rope: bool
) -> bytes:
    """Return the container of `y`, ``(heads, n_tokens, head_dim)``.

    Raises
    ------
    InvalidArgument
        Values that the step cannot code, or that may leave the range of their dtype.
    """
    rotated = head.kind == "k" and pre_rope
    fields: dict[str, Any] = {
        "kind": head.kind,
        "layout": "stream",
        "theta": theta,
        "pre_rope": pre_rope,
        "sink": asked.sink,
        "sink_div": asked.sink_div,
        "block_tokens": head.block_tokens,
        "ar": asked.ar,
    }
    step = _step(asked, y, rotated, fields)
    check_overflow(y, head.dtype, step / math.sqrt(2.0) if rotated else step / 2)
    file = encode_stream(y, step=step, **fields)
    return seal_record(MAGIC, head.pack()) + seal_record(FILE_MAGIC, file)


def read_file(head: Head, data: memoryview) -> TkvFile:
    """Check what follows the head of a container, and return the file in it, a view of `data`.

    Raises
    ------
    Truncated, Corrupt, Unsupported
        It is not what was written.
    """
    content, rest = next_record(FILE_MAGIC, data)
    if rest.nbytes:
        raise Corrupt("container: bytes after its end")
    file = TkvFile.parse(content)
    p = file.params
    found = (p.layout, p.kind, p.heads, p.head_dim, p.block_tokens, file.n_tokens)
    if found != (head.layout, head.kind, *head[4:]):
        raise Corrupt(f"container: its head says {head}, its file {found}")
    return file


def decode_file(file: TkvFile, out: npt.NDArray[Any]) -> None:
    """Decode a file into `out`, ``(heads, n_tokens, head_dim)`` of any float dtype.

    Raises
    ------
    Corrupt
        A block that does not decode; `out` is then undefined.
    InvalidArgument
        A value overflows the dtype of `out`.
    """
    if out.dtype == np.float32:
        file.decode(0, file.n_tokens, out=out)
        return
    with np.errstate(over="ignore"):
        out[...] = file.decode(0, file.n_tokens).astype(out.dtype)
    if not np.isfinite(out.astype(np.float32)).all():
        raise InvalidArgument(f"container: a value overflows {out.dtype.name}")


def _step(asked: QuantiserConfig, y: F32, rotated: bool, fields: dict[str, Any]) -> float:
    policy, value = asked.policy
    if policy == "rel_step":
        rms = math.sqrt(float(np.mean(np.square(y, dtype=np.float64))))
        return value * (rms or 1.0)
    if policy == "rmse":
        return value * math.sqrt(12.0)
    if policy == "max_error":
        return value * (math.sqrt(2.0) if rotated else 2.0)
    return value if policy == "step" else step_for_bpv(y, value, **fields)
