"""FibQuant as a block codec. FORMAT.md section 11."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from .. import _core
from ..codec import Chunks
from ..errors import Corrupt, InvalidArgument, Truncated, Unsupported
from ..frame import BytesLike, byte_view
from ..plan import Plan
from ..shared import Shared, nothing_shared
from ..spec import F32, KState, StreamSpec, describe_value
from ..targets import Placement
from .book import Book, book_for
from .channels import channel_statistics
from .config import FibQuant
from .encoder import FibEncoder, encode_vectors
from .params import FibParams, book_needed, pack_params, unpack_params
from .payload import (
    BUDGET,
    CODED,
    NORM_RANGE,
    PROTECTED,
    RAW_AXIS,
    REASONS,
    ZERO_NORM,
    count_raw,
    parse_payload,
)
from .tuning import broken_heads

#: Kinds of what `_core.fib_check_payload` finds.
_DAMAGE: Final = {1: Truncated, 2: Corrupt, 3: Unsupported}
#: A run of raw vectors in a payload: two numbers and a reason.
_RUN_BYTES: Final = 2 * 10 + 1


class FibQuantCodec:
    """`BlockCodec` of number 4."""

    number = 4
    name = "fibquant"
    lossless = False
    header_at_once = False
    rows_stand_alone = False

    def check_stream(self, config: FibQuant, spec: StreamSpec) -> None:
        if config.raw_heads and config.raw_heads[-1] >= spec.heads:
            raise InvalidArgument(
                f"FibQuant: raw head {config.raw_heads[-1]}: there are {spec.heads} heads"
            )
        if config.axis != "raw":
            config.profile(spec.head_dim)

    def fit(
        self,
        config: FibQuant,
        spec: StreamSpec,
        chunks: Chunks,
        k_state: KState = "pre",
        *,
        book: Book | None = None,
    ) -> FibParams:
        """See `BlockCodec.fit`; `book` is taken if it is given, instead of that of the profile."""
        self.check_stream(config, spec)
        _check_finite(spec, chunks)
        fail_closed = config.on_failure == "fail_closed"
        if config.axis == "raw":
            reason = PROTECTED if config.raw_layers else RAW_AXIS
            return FibParams(spec, all_raw=reason, fail_closed=fail_closed)
        mean = scale = None
        if config.axis_of(spec.kind) == "per_channel":
            mean, scale = channel_statistics(spec.heads, spec.head_dim, chunks, config.first_tokens)
        params = FibParams(
            spec,
            book or book_for(config.profile(spec.head_dim)),
            mean,
            scale,
            config.first_tokens,
            dict.fromkeys(config.raw_heads, PROTECTED),
            fail_closed=fail_closed,
        )
        if config.budget is None or not config.budget.is_limited:
            return params
        broken = broken_heads(params, config.budget, chunks)
        if broken and (fail_closed or not config.budget.fallback_on_violation):
            head, limits = next(iter(broken.items()))
            raise InvalidArgument(
                f"{spec.kind} stream: head {head} breaks the quality budget: {', '.join(limits)}; "
                "use more bits, a looser budget, or keep_raw"
            )
        raw_heads = {**params.raw_heads, **dict.fromkeys(broken, BUDGET)}
        return replace(params, raw_heads=dict(sorted(raw_heads.items())))

    def pack(self, params: FibParams) -> bytes:
        return pack_params(params)

    def unpack(
        self, spec: StreamSpec, data: BytesLike, shared: Shared = nothing_shared
    ) -> FibParams:
        return unpack_params(spec, data, shared)

    def needs(self, header: BytesLike) -> tuple[bytes, ...]:
        digest = book_needed(header)
        return () if digest is None else (digest,)

    def shared(self, params: FibParams) -> dict[bytes, bytes]:
        return {} if params.book is None else {params.book.digest: params.book.pack()}

    def check(self, params: FibParams, x: F32, first_token: int) -> None:
        at = _core.find_beyond(x, np.inf)
        if at >= 0:
            what = describe_value(x, at, params.spec, first_token)
            raise InvalidArgument(f"{what} is not finite")
        if not params.fail_closed or params.book is None:
            return
        states = encode_vectors(params, x, params.keep(first_token, x.shape[1])).states
        failed = np.argwhere((states == ZERO_NORM) | (states == NORM_RANGE))
        if len(failed):
            head, row = failed[0]
            reason = REASONS[int(states[head, row])].removeprefix("encode_fallback:")
            raise InvalidArgument(
                f"the vector at head {head}, token {first_token + row} cannot be coded: {reason}; "
                "on_failure='keep_raw' would keep it raw"
            )

    def encoder(self, params: FibParams, first_token: int) -> FibEncoder:
        return FibEncoder(params, first_token)

    def schedule(
        self,
        plan: Plan,
        params: FibParams,
        payload: BytesLike,
        first_token: int,
        placement: Placement,
    ) -> None:
        spec, n_vectors = params.spec, params.spec.heads * placement.n_tokens
        if params.tables is None:
            values = parse_payload(payload, n_vectors, 0, spec.head_dim)
            if not values.states.all():
                raise Corrupt("FibQuant block: coded vectors, and the stream has no book")
            lo = placement.start - first_token
            raw = values.raw.reshape(spec.heads, placement.n_tokens, spec.head_dim)
            raw = raw[:, lo : lo + placement.n_rows]
            if not np.isfinite(raw).all():
                raise Corrupt("FibQuant block: a raw value is not finite")
            plan.copy(raw, spec, placement)
            return
        view = byte_view(payload)
        found = _core.fib_check_payload(view, n_vectors, params.index_bytes, spec.head_dim)
        if found:
            # The same again, slowly: it says what is wrong.
            parse_payload(view, n_vectors, params.index_bytes, spec.head_dim)
            raise _DAMAGE[found](f"FibQuant block: {view.nbytes} bytes of no known structure")
        if placement.n_rows:
            plan.decode_vectors(params.tables, payload, first_token, placement)

    def raw_parts(
        self, params: FibParams, payload: BytesLike, n_tokens: int
    ) -> tuple[bool, tuple[str, ...]]:
        """See `kvcodecs.receipts.raw_parts`."""
        spec = params.spec
        n_vectors = spec.heads * n_tokens
        states = parse_payload(payload, n_vectors, params.index_bytes, spec.head_dim).states
        found, first = np.unique(states, return_index=True)
        ordered = found[np.argsort(first)].tolist()
        return CODED in ordered, tuple(REASONS[state] for state in ordered if state != CODED)

    def step(self, params: FibParams) -> float | None:
        return None

    def name_of(self, params: FibParams) -> str:
        book = params.book
        return f"{self.name}.{'raw' if book is None else f'{book.k}x{book.n_codewords}'}"

    def count_raw(self, params: FibParams, payload: BytesLike, n_tokens: int) -> int:
        """Return how many vectors of a block, one head of one token, are kept raw."""
        return count_raw(payload, params.spec.heads * n_tokens)

    def worst_case_bytes(self, params: FibParams, n_tokens: int) -> int:
        spec = params.spec
        vector = max(2 + params.index_bytes, _RUN_BYTES + 4 * spec.head_dim)
        return 1 + 10 + 1 + spec.heads * n_tokens * vector


def _check_finite(spec: StreamSpec, chunks: Chunks) -> None:
    first = 0
    for chunk in chunks():
        at = _core.find_beyond(chunk, np.inf)
        if at >= 0:
            raise InvalidArgument(f"{describe_value(chunk, at, spec, first)} is not finite")
        first += chunk.shape[1]


CODEC = FibQuantCodec()
