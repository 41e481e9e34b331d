"""The header of a safetensors file: dtypes, tensors, metadata, and its validation.

Container: 8 bytes little-endian header length, a JSON object of that length that maps tensor names
to dtype, shape and data offsets, then the tensors' bytes without holes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Corrupt, InvalidArgument, Truncated

from kvtools.terminal import listed

MAX_HEADER_BYTES = 100_000_000
#: Dimensions that an array can have, and one more than sizes and offsets may be. A tensor without
#: elements needs no bytes, so that no file size limits what its shape says.
MAX_DIMENSIONS = 32
MAX_SIZE = 1 << 63

# Bits per element of every dtype the container knows; only those of NUMPY_DTYPES can be read here.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "U64": np.dtype("<u8"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}


def dtype_name(dtype: npt.DTypeLike) -> str:
    """Name of a numpy dtype in a safetensors header, such as ``"BF16"``."""
    wanted = np.dtype(dtype)
    for name, candidate in NUMPY_DTYPES.items():
        if candidate == wanted:
            return name
    raise InvalidArgument(f"dtype {wanted} cannot be written to a safetensors file")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file; `start` and `stop` are absolute byte offsets."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"key {name!r} appears twice")
            seen.add(name)
    return result


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_SIZE


def _parse_entry(where: str, name: str, entry: object, data_start: int) -> TensorInfo:
    here = f"{where}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise Corrupt(f"{here}: description is not an object")
    if set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Corrupt(
            f"{here}: fields {listed(sorted(entry))}; expected dtype, shape and data_offsets"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise Corrupt(f"{here}: dtype is not a string")
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
        raise Corrupt(f"{here}: shape is not a list of sizes")
    if len(shape) > MAX_DIMENSIONS:
        raise Corrupt(f"{here}: {len(shape)} dimensions, at most {MAX_DIMENSIONS}")
    bits = DTYPE_BITS.get(dtype)  # an unknown dtype is refused when the tensor is asked for
    if math.prod(max(1, n) for n in shape) * (bits or 8) >= MAX_SIZE * 8:
        raise Corrupt(f"{here}: shape {shape} is too large")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise Corrupt(f"{here}: data_offsets is not a pair of offsets")
    begin, end = offsets
    if end < begin:
        raise Corrupt(f"{here}: data_offsets {offsets} run backwards")
    if bits is not None and math.prod(shape) * bits != (end - begin) * 8:
        raise Corrupt(f"{here}: {dtype} {shape} does not fill its {end - begin} bytes")
    return TensorInfo(name, dtype, tuple(shape), data_start + begin, data_start + end)


def parse_header(
    text: bytes, *, data_start: int, file_bytes: int, where: str
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Validate a header and return its tensors and its ``__metadata__``.

    Raises
    ------
    Truncated
        The tensors need more bytes than the file has.
    Corrupt
        Not JSON, a duplicate key, a malformed entry, a size that does not match its shape, or
        tensors that overlap or leave holes.
    """
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise Corrupt(
            f"{where}: not a safetensors file, or damaged: header is not valid JSON: {error}"
        ) from error
    if not isinstance(header, dict):
        raise Corrupt(f"{where}: not a safetensors file: header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Corrupt(f"{where}: __metadata__ does not map strings to strings")
    tensors = {name: _parse_entry(where, name, e, data_start) for name, e in header.items()}

    position = data_start
    for info in sorted(tensors.values(), key=lambda t: (t.start, t.stop)):
        if info.start != position:
            fault = "overlaps another tensor" if info.start < position else "follows a hole"
            raise Corrupt(f"{where}: tensor {info.name!r} {fault} (byte {info.start})")
        position = info.stop
    if position > file_bytes:
        raise Truncated(f"{where}: {file_bytes} of {position} bytes; copy the file again")
    if position < file_bytes:
        raise Corrupt(f"{where}: {file_bytes - position} bytes after the last tensor")
    return tensors, metadata
