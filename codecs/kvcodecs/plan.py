"""The plan of a decode: which lanes go into which output rows, and its CPU executor.

Blocks of any number of streams, layers and kinds are added, then one `run` decodes all of them
on n threads without the GIL. The tables are plain arrays: the GPU executes the same ones.
A codec without lanes (raw) hands over its values instead, and the plan places them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .blocks import SIMD_LEVELS, Blocks, BlockTables
from .errors import Corrupt, InvalidArgument, Truncated
from .frame import BytesLike
from .lanes import Lanes, LaneTables
from .rope import RopeTable, from_coded
from .rows import Rows, RowTables
from .spec import F32, FLOAT_DTYPES, KState, StreamSpec

if TYPE_CHECKING:
    from .codec import BlockCodec

_OUTPUT_TYPES = {FLOAT_DTYPES[name]: i for i, name in enumerate(("float32", "float16", "bfloat16"))}
_MOST_THREADS = 4096
# csrc/lane.hpp Status.
_OVERFLOW = 3
_DAMAGE = {
    1: "a residual of 2^24 or more; the block does not decode",
    2: "a value of 2^24 or more; the block does not decode",
    4: "the block does not decode",
}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the wanted tokens of one block go.

    Attributes
    ----------
    start, stop
        Absolute positions wanted, inside the block.
    n_tokens
        Tokens of the block.
    out : (heads, stop - start, head_dim)
        View of the caller's memory, tensor channel order.
    rope
        Rotate on write with these cosines and sines; None writes the coded domain.
    where
        Prefix of error messages, empty or ending in ``": "``.
    """

    start: int
    stop: int
    n_tokens: int
    out: npt.NDArray[Any]
    rope: RopeTable | None
    where: str

    @property
    def n_rows(self) -> int:
        return self.stop - self.start

    def of_block(self, first_token: int, target: int, rope: int) -> tuple[int, ...]:
        """Return the fields that the blocks of all codecs without lanes end in.

        These are payload, output, n_tokens, stop, skip, row, rope_row, rope and reserved;
        `target` and `rope` are indices into the plan's `Targets`.
        """
        rope_row = 0 if self.rope is None else self.start - self.rope.first_token
        stop, skip = self.stop - first_token, self.start - first_token
        return target, target, self.n_tokens, stop, skip, 0, rope_row, rope, 0


@dataclass(slots=True)
class Targets:
    """What the tables of a plan refer to by index: of each block, and the RoPE tables."""

    payloads: list[BytesLike] = field(default_factory=list)
    outputs: list[npt.NDArray[Any]] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    ropes: list[tuple[F32, F32]] = field(default_factory=list)
    _rope_index: dict[int, int] = field(default_factory=dict)

    def add(self, payload: BytesLike, placement: Placement) -> tuple[int, int]:
        """Return the indices of a block and of its RoPE table, -1 for none."""
        self.payloads.append(payload)
        self.outputs.append(placement.out)
        self.where.append(placement.where)
        if placement.rope is None:
            return len(self.outputs) - 1, -1
        cos, sin = placement.rope.cos, placement.rope.sin
        rope = self._rope_index.setdefault(id(cos), len(self.ropes))
        if rope == len(self.ropes):
            self.ropes.append((cos, sin))
        return len(self.outputs) - 1, rope

    def arguments(
        self,
    ) -> tuple[list[BytesLike], list[npt.NDArray[Any]], list[int], list[tuple[F32, F32]]]:
        """Payloads, outputs, output types and RoPE tables as the core takes them."""
        outputs = [out if out.dtype == np.float32 else out.view(np.uint16) for out in self.outputs]
        types = [_OUTPUT_TYPES[out.dtype] for out in self.outputs]
        return self.payloads, outputs, types, self.ropes


class Plan:
    """Blocks to decode and where their values go.

    The plan refers to the payloads and outputs it was given; both must live until `run`
    returns.
    """

    def __init__(self) -> None:
        self._targets = Targets()
        self._lanes = Lanes()
        self._blocks = Blocks()
        self._rows = Rows()
        self._copies: list[tuple[npt.NDArray[Any], StreamSpec, Placement]] = []

    def add(
        self,
        codec: BlockCodec,
        params: Any,
        payload: BytesLike,
        *,
        first_token: int,
        n_tokens: int,
        start: int,
        stop: int,
        out: npt.NDArray[Any],
        rope: RopeTable | None = None,
        where: str = "",
    ) -> None:
        """Decode tokens ``[start, stop)`` of one block into `out`.

        Parameters
        ----------
        codec, params
            The codec and what the stream header says.
        payload
            The block; referred to until `run` returns.
        first_token, n_tokens
            The block holds ``[first_token, first_token + n_tokens)``.
        start, stop
            Absolute positions wanted, inside the block.
        out : (heads, stop - start, head_dim) float32, float16 or bfloat16
            Any positive strides with the last axis contiguous; tensor channel order.
        rope
            Table that covers ``[start, stop)``: rotate K on write. None: as coded.
        where
            Name of the block for error messages, for example ``"layer 3 k block 7"``.

        Raises
        ------
        InvalidArgument
            A range outside the block, or an output of the wrong shape or dtype.
        Truncated, Corrupt
            The payload's structure is damaged.
        """
        prefix = f"{where}: " if where else ""
        spec: StreamSpec = params.spec
        if not first_token <= start <= stop <= first_token + n_tokens:
            raise InvalidArgument(
                f"{prefix}tokens [{start}, {stop}) are not inside the block "
                f"[{first_token}, {first_token + n_tokens})"
            )
        _check_output(out, (spec.heads, stop - start, spec.head_dim), prefix)
        if rope is not None:
            rope.rows(start, stop)
        placement = Placement(start, stop, n_tokens, out, rope, prefix)
        try:
            codec.schedule(self, params, payload, first_token, placement)
        except (Corrupt, Truncated) as error:
            raise type(error)(f"{prefix}{error}") from error

    def copy(self, values: npt.NDArray[Any], spec: StreamSpec, placement: Placement) -> None:
        """Place values that a codec has at hand: ``[heads][rows][head_dim]``, coded order."""
        self._copies.append((values, spec, placement))

    def decode_lanes(
        self,
        tables: LaneTables,
        entries: npt.NDArray[np.uint64],
        payload: BytesLike,
        first_token: int,
        placement: Placement,
    ) -> None:
        """Add one block's lanes.

        Parameters
        ----------
        tables
            Of the stream; added once however many blocks use them.
        entries : (n_lanes, 2) uint64
            Offset and length of each lane in `payload`, bytes.
        """
        target, rope = self._targets.add(payload, placement)
        self._lanes.add(tables, entries, first_token, placement, target, rope)

    def decode_block(
        self, tables: BlockTables, payload: BytesLike, first_token: int, placement: Placement
    ) -> None:
        """Add one KVR1 block; `tables` are its stream's, added once for all its blocks."""
        target, rope = self._targets.add(payload, placement)
        self._blocks.add(tables, first_token, placement, target, rope)

    def decode_rows(
        self, tables: RowTables, payload: BytesLike, first_token: int, placement: Placement
    ) -> None:
        """Add one frame of fixed-rate rows; `tables` are its stream's, added once for all."""
        target, rope = self._targets.add(payload, placement)
        self._rows.add(tables, first_token, placement, target, rope)

    def run(self, n_threads: int | None = None, simd: str | None = None) -> None:
        """Decode everything into the outputs.

        Parameters
        ----------
        n_threads
            None: one per CPU this process may use. The result does not depend on it.
        simd
            Instruction set for KVR1 blocks and fixed-rate rows, one of `SIMD_LEVELS`; None: the
            fastest. The result does not depend on it.

        Raises
        ------
        Corrupt, Truncated
            A block that does not decode, named. The outputs are then undefined.
        InvalidArgument
            A value beyond the range of a float16 or bfloat16 output; ask for float32.
        """
        n_threads = check_threads(n_threads) or available_cpus()
        if simd is not None and simd not in SIMD_LEVELS:
            raise InvalidArgument(f"simd {simd!r}: None, or one of {', '.join(SIMD_LEVELS)}")
        for values, spec, placement in self._copies:
            _place(values, spec, placement)
        failures = self._lanes.run(self._targets, n_threads)
        failures += self._blocks.run(self._targets, n_threads, simd or SIMD_LEVELS[0])
        failures += self._rows.run(self._targets, n_threads, simd or SIMD_LEVELS[0])
        if failures:
            self._raise(failures)

    def _raise(self, failures: list[tuple[int, int, str]]) -> None:
        # Damage is reported before an overflow, which it may have caused; else in plan order.
        status, target, what = min(failures, key=lambda f: (f[0] == _OVERFLOW, f[1]))
        where = self._targets.where[target]
        if status == _OVERFLOW:
            raise _overflow(where, self._targets.outputs[target].dtype)
        raise Corrupt(f"{where}{what}{_DAMAGE[status]}")


def check_payload(
    codec: BlockCodec,
    params: Any,
    payload: BytesLike,
    first_token: int,
    n_tokens: int,
    where: str = "",
) -> None:
    """Check that a payload can hold so many tokens, before memory is taken for them.

    Raises
    ------
    Truncated, Corrupt
        It cannot, or its structure is damaged.
    """
    nothing = np.empty((params.spec.heads, 0, params.spec.head_dim), np.float32)
    Plan().add(
        codec,
        params,
        payload,
        first_token=first_token,
        n_tokens=n_tokens,
        start=first_token,
        stop=first_token,
        out=nothing,
        where=where,
    )


def check_threads(n_threads: object, name: str = "n_threads") -> int | None:
    """Return a number of threads, None for one per CPU; else `InvalidArgument`."""
    if n_threads is None:
        return None
    is_number = isinstance(n_threads, int | np.integer) and not isinstance(n_threads, bool)
    if not is_number or not 1 <= n_threads <= _MOST_THREADS:  # type: ignore[operator]
        raise InvalidArgument(f"{name} {n_threads!r}: expected 1 to {_MOST_THREADS}, or None")
    return int(n_threads)  # type: ignore[call-overload, no-any-return]


def available_cpus() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_output(out: npt.NDArray[Any], shape: tuple[int, int, int], prefix: str) -> None:
    if out.shape != shape:
        raise InvalidArgument(f"{prefix}output of shape {out.shape}, expected {shape}")
    if out.dtype not in _OUTPUT_TYPES:
        raise InvalidArgument(
            f"{prefix}output of dtype {out.dtype}, expected float32, float16 or bfloat16"
        )
    if not out.flags.writeable:
        raise InvalidArgument(f"{prefix}output is read-only")
    if out.size and (out.strides[2] != out.itemsize or min(out.strides) < 0):
        raise InvalidArgument(f"{prefix}output: the last axis must be contiguous, strides positive")


def _place(values: npt.NDArray[Any], spec: StreamSpec, placement: Placement) -> None:
    in_order = spec.rope is None or spec.rope.keeps_order(spec.head_dim)
    if placement.rope is None and in_order and values.dtype == placement.out.dtype:
        placement.out[...] = values
        return
    state: KState = "pre" if placement.rope is None else "post"
    x = from_coded(
        values.astype(np.float32),
        spec,
        state,
        placement.start,
        placement.rope,
    )
    with np.errstate(over="ignore"):
        placement.out[...] = x.astype(placement.out.dtype)
    may_overflow = placement.out.dtype != np.float32 or placement.rope is not None
    if may_overflow and not np.isfinite(placement.out.astype(np.float32)).all():
        raise _overflow(placement.where, placement.out.dtype)


def _overflow(where: str, dtype: np.dtype[Any]) -> InvalidArgument:
    if dtype == np.float32:
        return InvalidArgument(f"{where}a value overflows float32 when it is rotated; read it pre")
    return InvalidArgument(f"{where}a value overflows {dtype.name}; ask for float32")
