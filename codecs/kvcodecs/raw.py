"""The raw codec: values as they are, bit-exact in float32, float16 or bfloat16.

FORMAT.md section 7. It also keeps the first tokens of a stream that has no header yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._core import find_beyond
from .codec import Chunks
from .errors import Corrupt, InvalidArgument, Truncated, Unsupported
from .frame import BytesLike, ErrorStats, byte_view
from .plan import Plan
from .shared import NothingShared, Shared, nothing_shared
from .spec import F32, FLOAT_DTYPES, KState, StreamSpec, describe_value, float_dtype
from .targets import Placement

_DTYPES: tuple[np.dtype[Any], ...] = tuple(
    FLOAT_DTYPES[name] for name in ("float32", "float16", "bfloat16")
)


@dataclass(frozen=True, slots=True)
class Raw:
    """Keep values bit-exact.

    Attributes
    ----------
    dtype
        ``"float32"`` (also None), ``"float16"`` or ``"bfloat16"``: what values are stored in.
        Values that it cannot hold exactly are refused, never rounded.
    """

    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", float_dtype(self.dtype).name)

    @property
    def codec(self) -> str:
        return "raw"

    def to_json(self) -> dict[str, object]:
        return {"codec": "raw", "dtype": self.dtype}


def config_from_fields(fields: Mapping[str, object]) -> Raw:
    """Return the configuration with these JSON fields."""
    unknown = set(fields) - {"dtype"}
    dtype = fields.get("dtype")
    if unknown or not (dtype is None or isinstance(dtype, str)):
        raise Corrupt(f"raw codec: configuration {dict(fields)!r}")
    return Raw(dtype)


@dataclass(frozen=True, slots=True)
class RawParams:
    """Stream and stored dtype."""

    spec: StreamSpec
    dtype: np.dtype[Any]


class _RawEncoder:
    def __init__(self, params: RawParams) -> None:
        self._params = params
        self._chunks: list[npt.NDArray[Any]] = []
        self._error = ErrorStats.none()

    @property
    def n_tokens(self) -> int:
        return sum(chunk.shape[1] for chunk in self._chunks)

    @property
    def error(self) -> ErrorStats:
        return self._error

    def push(self, x: F32, n_threads: int = 1) -> None:
        self._chunks.append(x.astype(self._params.dtype))
        self._error = self._error.merge(ErrorStats(0.0, 0.0, x.size))

    def payload(self) -> bytes:
        code = _DTYPES.index(self._params.dtype).to_bytes(1, "little")
        if not self._chunks:
            return code
        self._chunks = [np.concatenate(self._chunks, axis=1)]
        return code + _little_endian(self._chunks[0]).tobytes()

    def resume(self, values: F32, payload: BytesLike, error: ErrorStats) -> None:
        self.push(values)
        self._error = error


class RawCodec(NothingShared):
    """`BlockCodec` of number 0."""

    number = 0
    name = "raw"
    lossless = True
    # It could be, but the raw head of a stream without one keeps values in fewer bytes.
    header_at_once = False
    rows_stand_alone = False

    def check_stream(self, config: Raw, spec: StreamSpec) -> None:
        pass

    def fit(
        self, config: Raw, spec: StreamSpec, chunks: Chunks, k_state: KState = "pre"
    ) -> RawParams:
        return RawParams(spec, float_dtype(config.dtype or "float32"))

    def pack(self, params: RawParams) -> bytes:
        return bytes([_DTYPES.index(params.dtype)])

    def unpack(
        self, spec: StreamSpec, data: BytesLike, shared: Shared = nothing_shared
    ) -> RawParams:
        view = byte_view(data)
        if view.nbytes == 0:
            raise Truncated("raw stream header: 0 of 1 bytes")
        if view.nbytes > 1:
            raise Corrupt(f"raw stream header: {view.nbytes} bytes, expected 1")
        return RawParams(spec, _dtype_of_code(view[0]))

    def check(self, params: RawParams, x: F32, first_token: int) -> None:
        at = find_beyond(x, np.inf)
        if at >= 0:
            raise InvalidArgument(
                describe_value(x, at, params.spec, first_token) + " is not finite"
            )
        if params.dtype == np.float32:
            return
        with np.errstate(over="ignore"):
            kept = x.astype(params.dtype).astype(np.float32)
        inexact = np.flatnonzero(kept.view(np.uint32).ravel() != x.view(np.uint32).ravel())
        if inexact.size:
            what = describe_value(x, int(inexact[0]), params.spec, first_token)
            raise InvalidArgument(
                f"{what} is not exact in {params.dtype.name}; use Raw(dtype='float32')"
            )

    def encoder(self, params: RawParams, first_token: int) -> _RawEncoder:
        return _RawEncoder(params)

    def schedule(
        self,
        plan: Plan,
        params: RawParams,
        payload: BytesLike,
        first_token: int,
        placement: Placement,
    ) -> None:
        view = byte_view(payload)
        if view.nbytes == 0:
            raise Truncated("raw block: empty payload")
        dtype = _dtype_of_code(view[0])
        spec, n_tokens = params.spec, placement.n_tokens
        expected = 1 + spec.n_values(n_tokens) * dtype.itemsize
        if view.nbytes != expected:
            kind = Truncated if view.nbytes < expected else Corrupt
            raise kind(f"raw block: {view.nbytes} bytes, expected {expected}")
        stored = np.frombuffer(view, dtype=_stored_dtype(dtype), offset=1)
        if not stored.dtype.isnative:
            stored = stored.byteswap()
        values = stored.view(dtype).reshape(spec.heads, n_tokens, spec.head_dim)
        lo = placement.start - first_token
        plan.copy(values[:, lo : lo + placement.n_rows], spec, placement)

    def step(self, params: RawParams) -> float | None:
        return None

    def name_of(self, params: RawParams) -> str:
        return self.name

    def worst_case_bytes(self, params: RawParams, n_tokens: int) -> int:
        return 1 + params.spec.n_values(n_tokens) * params.dtype.itemsize


def _dtype_of_code(code: int) -> np.dtype[Any]:
    if code >= len(_DTYPES):
        raise Unsupported(f"raw codec: dtype code {code}, this release knows 0 to 2")
    return _DTYPES[code]


def _stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The little-endian unsigned type of the same size: numpy cannot byte-swap bfloat16."""
    return np.dtype("<u4" if dtype.itemsize == 4 else "<u2")


def _little_endian(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    stored = _stored_dtype(x.dtype)
    return x.view(stored.newbyteorder("=")).astype(stored, copy=False)


CODEC = RawCodec()
