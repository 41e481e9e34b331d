"""ggml's schemes as a block codec: a frame is the rows of its tokens, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from .. import _core
from ..codec import Chunks, CodedRows
from ..errors import Corrupt, InvalidArgument, Truncated, Unsupported
from ..frame import BytesLike, ErrorStats, byte_view
from ..plan import Plan
from ..rows import RowTables
from ..shared import NothingShared, Shared, nothing_shared
from ..spec import F32, KState, StreamSpec, describe_value
from ..targets import Placement
from .config import GGML, config_from_fields, scheme_of
from .schemes import Scheme, scheme_by_number

__all__ = ["CODEC", "GGMLCodec", "GGMLParams", "config_from_fields"]

_VERSION: Final = 1
#: Blocks of values below this have a scale in float16 whatever the scheme; above, `check` tries.
_SURE: Final = 16384.0
_MANY_VALUES: Final = 1 << 14


@dataclass(frozen=True, eq=False)
class GGMLParams:
    """What a stream header stores, the scheme, and the stream."""

    spec: StreamSpec
    scheme: Scheme

    @property
    def row_bytes(self) -> int:
        """Of one token, all heads."""
        return self.scheme.row_bytes(self.spec.channels)

    def check_size(self, n_bytes: int, n_tokens: int) -> None:
        """Raise `Truncated` or `Corrupt` unless that many bytes are the rows of the tokens."""
        expected = n_tokens * self.row_bytes
        if n_bytes != expected:
            kind = Truncated if n_bytes < expected else Corrupt
            raise kind(f"{n_bytes} bytes of rows, expected {expected}")

    @cached_property
    def row_tables(self) -> RowTables:
        """The plan's tables of this stream."""
        spec, rope = self.spec, self.spec.rope
        order = np.arange(spec.head_dim) if rope is None else rope.channel_order(spec.head_dim)
        n_pairs = 0 if rope is None else rope.n_pairs
        return RowTables(
            self.scheme.number, spec.heads, spec.head_dim, order.astype(np.uint32), n_pairs
        )


class GGMLEncoder:
    """`BlockEncoder` of rows."""

    def __init__(self, params: GGMLParams) -> None:
        self._params = params
        spec = params.spec
        self._core = _core.row_encoder(params.scheme.number, spec.heads, spec.head_dim)

    @property
    def n_tokens(self) -> int:
        return self._core.n_tokens

    @property
    def error(self) -> ErrorStats:
        error = ErrorStats(*self._core.error)
        return error if error.is_known else ErrorStats.unknown()

    def push(self, x: F32, n_threads: int = 1) -> None:
        self._core.push(np.ascontiguousarray(x), n_threads if x.size > _MANY_VALUES else 1)

    def append_rows(self, rows: CodedRows) -> None:
        self._params.check_size(rows.data.nbytes, rows.n_tokens)
        self._core.resume(self.payload() + rows.data, *self.error.merge(rows.error))

    def payload(self) -> bytes:
        return self._core.payload()

    def resume(self, values: F32, payload: BytesLike, error: ErrorStats) -> None:
        # Coding decoded values again would move them: the rows are taken as they are.
        n_bytes = values.shape[1] * self._params.row_bytes
        self._core.resume(byte_view(payload)[:n_bytes], *error)


class GGMLCodec(NothingShared):
    """`BlockCodec` of number 3, for all schemes."""

    number = 3
    name = "ggml"
    lossless = False
    header_at_once = True
    rows_stand_alone = True

    def check_stream(self, config: GGML, spec: StreamSpec) -> None:
        scheme_of(config).row_bytes(spec.channels)

    def fit(
        self, config: GGML, spec: StreamSpec, chunks: Chunks, k_state: KState = "pre"
    ) -> GGMLParams:
        self.check_stream(config, spec)
        return GGMLParams(spec, scheme_of(config))

    def pack(self, params: GGMLParams) -> bytes:
        return bytes([_VERSION, params.scheme.number])

    def unpack(
        self, spec: StreamSpec, data: BytesLike, shared: Shared = nothing_shared
    ) -> GGMLParams:
        view = byte_view(data)
        if view.nbytes < 2:
            raise Truncated(f"ggml stream header: {view.nbytes} of 2 bytes")
        if view[0] == 0:
            raise Corrupt("ggml stream header: version 0 does not exist")
        if view[0] > _VERSION:
            raise Unsupported(f"ggml stream header: version {view[0]}; upgrade to read it")
        if view.nbytes > 2:
            raise Corrupt(f"ggml stream header: {view.nbytes} bytes, expected 2")
        scheme = scheme_by_number(view[1])
        if scheme is None:
            raise Unsupported(f"ggml stream header: scheme {view[1]} is unknown; upgrade")
        try:
            scheme.row_bytes(spec.channels)
        except InvalidArgument as error:
            raise Corrupt(f"ggml stream header: {error}") from error
        return GGMLParams(spec, scheme)

    def check(self, params: GGMLParams, x: F32, first_token: int) -> None:
        at = _core.find_beyond(x, _SURE)
        if at < 0:
            return
        spec, scheme = params.spec, params.scheme
        at = _core.find_beyond(x, np.inf)
        if at >= 0:
            raise InvalidArgument(f"{describe_value(x, at, spec, first_token)} is not finite")
        rows = np.ascontiguousarray(x.transpose(1, 0, 2))
        _, _, block = _core.ggml_encode_values(scheme.number, rows.reshape(-1), 0, 1)
        if block < 0:
            return
        token, lo = divmod(block * scheme.block_values, spec.channels)
        values = rows[token].reshape(-1)[lo : lo + scheme.block_values]
        head, channel = divmod(lo + int(np.argmax(np.abs(values))), spec.head_dim)
        flat = int(np.ravel_multi_index((head, token, channel), x.shape))
        raise InvalidArgument(
            f"{describe_value(x, flat, spec, first_token)} is too large for ggml.{scheme.name}: "
            "the scale of its block leaves float16"
        )

    def encoder(self, params: GGMLParams, first_token: int) -> GGMLEncoder:
        return GGMLEncoder(params)

    def schedule(
        self,
        plan: Plan,
        params: GGMLParams,
        payload: BytesLike,
        first_token: int,
        placement: Placement,
    ) -> None:
        params.check_size(byte_view(payload).nbytes, placement.n_tokens)
        if placement.n_rows:
            plan.decode_rows(params.row_tables, payload, first_token, placement)

    def step(self, params: GGMLParams) -> float | None:
        return None

    def name_of(self, params: GGMLParams) -> str:
        return f"{self.name}.{params.scheme.name}"

    def worst_case_bytes(self, params: GGMLParams, n_tokens: int) -> int:
        return n_tokens * params.row_bytes


CODEC = GGMLCodec()
