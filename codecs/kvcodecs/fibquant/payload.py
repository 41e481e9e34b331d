"""The payload of a FibQuant block: which vectors are coded and which are raw. FORMAT.md 11.6.

Vectors are numbered ``head * n_tokens + token``.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import Corrupt, Truncated, Unsupported
from ..frame import BytesLike, byte_view
from ..spec import F32, FLOAT_DTYPES
from ..varints import read_varints, varint

U8: TypeAlias = npt.NDArray[np.uint8]
U16: TypeAlias = npt.NDArray[np.uint16]

#: Gap, length and reason of a run of raw vectors.
_Run: TypeAlias = tuple[int, int, int]

#: States of vectors: coded, or kept raw for a reason.
CODED: Final = 0
PROTECTED, RAW_AXIS, ZERO_NORM, NORM_RANGE, BUDGET = 1, 2, 3, 4, 5
#: Reasons as receipts name them.
REASONS: Final[dict[int, str]] = {
    PROTECTED: "protected_region",
    RAW_AXIS: "raw_axis_policy",
    ZERO_NORM: "encode_fallback:zero norm",
    NORM_RANGE: "encode_fallback:norm leaves float16",
    BUDGET: "quality_budget",
}

_ALL_CODED, _ALL_RAW, _MIXED = 0, 1, 2
_DTYPES: Final = tuple(FLOAT_DTYPES[name] for name in ("float32", "float16", "bfloat16"))
_NARROWEST: Final = (1, 2, 0)


class Vectors(NamedTuple):
    """The vectors of a block.

    Attributes
    ----------
    states : (n_vectors,)
        `CODED`, or the reason why a vector is raw.
    norms : (n_coded,)
        Of coded vectors, bits of float16.
    indices : (n_coded, index_bytes)
        Of coded vectors, packed.
    raw : (n_raw, head_dim)
        Values of the others.
    """

    states: U8
    norms: U16
    indices: U8
    raw: F32


def build_payload(vectors: Vectors) -> bytes:
    """Return the payload."""
    states, norms, indices, raw = vectors
    coded = norms.astype("<u2").tobytes() + indices.tobytes()
    if not states.any():
        return bytes([_ALL_CODED]) + coded
    dtype = next(code for code in _NARROWEST if _holds(_DTYPES[code], raw))
    if (states == states[0]).all():
        head = bytes([_ALL_RAW, states[0], dtype])
    else:
        head = bytes([_MIXED]) + _runs(states) + bytes([dtype])
    return head + coded + _little_endian(raw.astype(_DTYPES[dtype])).tobytes()


def parse_payload(
    payload: BytesLike, n_vectors: int | None, index_bytes: int, head_dim: int
) -> Vectors:
    """Read a payload.

    Parameters
    ----------
    n_vectors
        None: as many as there are.

    Raises
    ------
    Truncated, Corrupt, Unsupported
        Its structure is damaged. Indices and values are not looked at.
    """
    view = byte_view(payload)
    form, at = _byte(view, 0)
    dtype, reason = _DTYPES[0], 0
    runs: list[_Run] = []
    if form == _ALL_RAW:
        reason, at = _byte(view, at)
        _check_reason(reason)
    elif form == _MIXED:
        runs, at = _read_runs(view, at, n_vectors)
    elif form != _ALL_CODED:
        raise Unsupported(f"FibQuant block: form {form}; upgrade to read it")
    if form != _ALL_CODED:
        code, at = _byte(view, at)
        if code >= len(_DTYPES):
            raise Unsupported(f"FibQuant block: dtype {code} of raw values; upgrade to read it")
        dtype = _DTYPES[code]
    coded_bytes, raw_bytes = 2 + index_bytes, head_dim * dtype.itemsize
    n_raw = sum(length for _, length, _ in runs)
    rest = view.nbytes - at - n_raw * raw_bytes
    if rest < 0:
        raise Truncated(f"FibQuant block: {view.nbytes} bytes with {n_raw} raw vectors")
    if n_vectors is None:
        n_vectors = n_raw + rest // (raw_bytes if form == _ALL_RAW else coded_bytes)
    if form == _ALL_RAW:
        n_raw = n_vectors
        runs = [(0, n_vectors, reason)]
    n_coded = n_vectors - n_raw
    expected = at + n_coded * coded_bytes + n_raw * raw_bytes
    if view.nbytes != expected:
        kind = Truncated if view.nbytes < expected else Corrupt
        raise kind(f"FibQuant block: {view.nbytes} bytes, expected {expected}")
    states = _states(runs, n_vectors)
    if np.count_nonzero(states) != n_raw:
        raise Corrupt(f"FibQuant block: raw vectors behind the last of {n_vectors}")
    norms = np.frombuffer(view, "<u2", n_coded, at).astype(np.uint16)
    at += 2 * n_coded
    indices = np.frombuffer(view, np.uint8, n_coded * index_bytes, at).reshape(n_coded, index_bytes)
    raw = _values(view[at + indices.size :], dtype).reshape(n_raw, head_dim)
    return Vectors(states, norms, indices, raw)


def count_raw(payload: BytesLike, n_vectors: int) -> int:
    """Return how many vectors of a payload are raw; errors of `parse_payload`."""
    view = byte_view(payload)
    form, at = _byte(view, 0)
    if form == _MIXED:
        return sum(length for _, length, _ in _read_runs(view, at, n_vectors)[0])
    return n_vectors if form == _ALL_RAW else 0


def _runs(states: U8) -> bytes:
    edges = np.flatnonzero(np.diff(states)) + 1
    starts, stops = [0, *edges.tolist()], [*edges.tolist(), len(states)]
    runs = [(a, b, int(states[a])) for a, b in zip(starts, stops, strict=True) if states[a]]
    parts, before = [varint(len(runs))], 0
    for start, stop, reason in runs:
        parts += [varint(start - before), varint(stop - start), bytes([reason])]
        before = stop
    return b"".join(parts)


def _read_runs(view: memoryview, at: int, n_vectors: int | None) -> tuple[list[_Run], int]:
    runs: list[_Run] = []
    seen, where = 0, "FibQuant block"
    most = sys.maxsize if n_vectors is None else n_vectors
    (n_runs,), at = read_varints(view, at, 1, where)
    if not 1 <= n_runs <= most:
        raise Corrupt(f"FibQuant block: {n_runs} runs of raw vectors")
    for _ in range(n_runs):
        (gap, length), at = read_varints(view, at, 2, where)
        seen += gap + length
        if length == 0 or seen > most:
            raise Corrupt(f"FibQuant block: raw vectors {seen - length} to {seen} of {most}")
        reason, at = _byte(view, at)
        _check_reason(reason)
        runs.append((gap, length, reason))
    return runs, at


def _states(runs: list[_Run], n_vectors: int) -> U8:
    states, at = np.zeros(n_vectors, np.uint8), 0
    for gap, length, reason in runs:
        states[at + gap : at + gap + length] = reason
        at += gap + length
    return states


def _byte(view: memoryview, at: int) -> tuple[int, int]:
    if at >= view.nbytes:
        raise Truncated(f"FibQuant block ends after {view.nbytes} bytes")
    return view[at], at + 1


def _check_reason(reason: int) -> None:
    if reason not in REASONS:
        raise Unsupported(f"FibQuant block: reason {reason} of raw vectors; upgrade to read it")


def _holds(dtype: np.dtype[Any], values: F32) -> bool:
    """Whether values are the same, bit for bit, after they were of a narrower type."""
    with np.errstate(over="ignore"):
        kept = values.astype(dtype).astype(np.float32)
    return bool(np.array_equal(kept.view(np.uint32), values.view(np.uint32)))


def _little_endian(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    # NumPy cannot swap the bytes of bfloat16.
    bits = x.view(f"=u{x.itemsize}")
    return bits.astype(f"<u{x.itemsize}", copy=False)


def _values(view: memoryview, dtype: np.dtype[Any]) -> F32:
    bits = np.frombuffer(view, f"<u{dtype.itemsize}").astype(f"=u{dtype.itemsize}")
    values: F32 = bits.view(dtype).astype(np.float32)
    return values
