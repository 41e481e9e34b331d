"""TKV1 as a block codec: the lane layout in frames."""

from __future__ import annotations

from .. import _core
from ..codec import Chunks
from ..errors import Corrupt
from ..fitting import CoreEncoder, QuantisingCodec
from ..frame import BytesLike, byte_view
from ..plan import Plan
from ..quantiser import QuantiserParams
from ..shared import Shared, nothing_shared
from ..spec import KState, StreamSpec
from ..targets import Placement
from .params import (
    CLASS_OF_ONE,
    N_CLASSES,
    TKV1,
    TKV1Params,
    config_from_fields,
    lane_width,
    pack_params,
    prior_table,
    unpack_params,
)

__all__ = ["CODEC", "TKV1Codec", "config_from_fields"]


class TKV1Codec(QuantisingCodec[TKV1, TKV1Params]):
    """`BlockCodec` of number 1."""

    number = 1
    name = "tkv1"

    class_of_one = CLASS_OF_ONE
    n_classes = N_CLASSES
    pairs_share = True
    sinks_apart = False

    def fit(
        self, config: TKV1, spec: StreamSpec, chunks: Chunks, k_state: KState = "pre"
    ) -> TKV1Params:
        lane_width(spec.head_dim, config.lane_channels)  # refused before any value is looked at
        return super().fit(config, spec, chunks, k_state)

    def pack(self, params: TKV1Params) -> bytes:
        return pack_params(params)

    def unpack(
        self, spec: StreamSpec, data: BytesLike, shared: Shared = nothing_shared
    ) -> TKV1Params:
        return unpack_params(spec, data)

    def encoder(self, params: TKV1Params, first_token: int) -> CoreEncoder:
        spec = params.spec
        return CoreEncoder(
            _core.block_encoder(
                prior_table(),
                spec.heads,
                spec.head_dim,
                params.width,
                params.unit,
                params.sink,
                params.sink_div,
                first_token,
                params.mean,
                params.rho,
                params.cls,
            )
        )

    def schedule(
        self,
        plan: Plan,
        params: TKV1Params,
        payload: BytesLike,
        first_token: int,
        placement: Placement,
    ) -> None:
        entries, stop = _core.scan_entries(payload, 0, params.n_lanes)
        size = byte_view(payload).nbytes
        if stop != size:
            raise Corrupt(f"{size - stop} bytes after the last lane")
        if placement.n_rows:
            plan.decode_lanes(params.lane_tables, entries, payload, first_token, placement)

    def worst_case_bytes(self, params: TKV1Params, n_tokens: int) -> int:
        # csrc/encoder.hpp kMaxResidualBytes; a lane adds its length and four bytes of coder state.
        return params.spec.n_values(n_tokens) * 48 + params.n_lanes * 14

    def _params(self, config: TKV1, quantiser: QuantiserParams) -> TKV1Params:
        width = lane_width(quantiser.spec.head_dim, config.lane_channels)
        return TKV1Params.extend(quantiser, width=width)


CODEC = TKV1Codec()
