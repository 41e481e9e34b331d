"""KVR1 as a block codec."""

from __future__ import annotations

from typing import Final

from .. import _core
from ..errors import Corrupt, Truncated
from ..fitting import CoreEncoder, QuantisingCodec
from ..frame import BytesLike, byte_view
from ..plan import Plan
from ..quantiser import QuantiserParams
from ..shared import Shared, nothing_shared
from ..spec import StreamSpec
from ..targets import Placement
from .params import (
    KVR1,
    KVR1Params,
    config_from_fields,
    pack_params,
    rans_tables,
    unpack_params,
)
from .tables import CLASS_OF_ONE, N_CLASSES

__all__ = ["CODEC", "KVR1Codec", "config_from_fields"]

#: What a payload has before its words: the number of bare steps, and 32 states.
_FIXED_BYTES: Final = 1 + 32 * 4
#: A value writes at most a word for its symbol, one for its low bits and two for its escape.
_MAX_VALUE_BYTES: Final = 8


class KVR1Codec(QuantisingCodec[KVR1, KVR1Params]):
    """`BlockCodec` of number 2."""

    number = 2
    name = "kvr1"

    class_of_one = CLASS_OF_ONE
    n_classes = N_CLASSES
    pairs_share = False
    sinks_apart = True

    def pack(self, params: KVR1Params) -> bytes:
        return pack_params(params)

    def unpack(
        self, spec: StreamSpec, data: BytesLike, shared: Shared = nothing_shared
    ) -> KVR1Params:
        return unpack_params(spec, data)

    def encoder(self, params: KVR1Params, first_token: int) -> CoreEncoder:
        spec = params.spec
        return CoreEncoder(
            _core.kvr1_encoder(
                rans_tables(),
                spec.heads,
                spec.head_dim,
                params.unit,
                params.sink,
                params.sink_div,
                params.sink_classes,
                first_token,
                params.mean,
                params.rho,
                params.cls,
            )
        )

    def schedule(
        self,
        plan: Plan,
        params: KVR1Params,
        payload: BytesLike,
        first_token: int,
        placement: Placement,
    ) -> None:
        size = byte_view(payload).nbytes
        if size < _FIXED_BYTES:
            raise Truncated(f"{size} bytes, a block has at least {_FIXED_BYTES}")
        if size % 2 != _FIXED_BYTES % 2:
            raise Corrupt(f"{size} bytes: half a word at the end")
        if placement.n_rows:
            plan.decode_block(params.block_tables, payload, first_token, placement)

    def worst_case_bytes(self, params: KVR1Params, n_tokens: int) -> int:
        return _FIXED_BYTES + _MAX_VALUE_BYTES * params.spec.n_values(n_tokens)

    def _params(self, config: KVR1, quantiser: QuantiserParams) -> KVR1Params:
        return KVR1Params.extend(quantiser)


CODEC = KVR1Codec()
