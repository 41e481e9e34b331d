"""The plan of a decode: which lanes go into which output rows, and its CPU executor.

Blocks of any number of streams, layers and kinds are added, then one `run` decodes all of them
on n threads without the GIL. The tables are plain arrays: the GPU executes the same ones.
A codec without lanes (raw) hands over its values instead, and the plan places them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .blocks import SIMD_LEVELS, Blocks, BlockTables
from .errors import Corrupt, InvalidArgument, Truncated, Unsupported
from .frame import BytesLike
from .lanes import Lanes, LaneTables
from .rope import RopeTable, from_coded
from .rows import Rows, RowTables
from .spec import KState, StreamSpec
from .targets import Failure, Output, Placement, Targets, check_output, dtype_name
from .vectors import Vectors, VectorTables

if TYPE_CHECKING:
    from .codec import BlockCodec

_MOST_THREADS = 4096
# csrc/lane.hpp Status.
_OVERFLOW = 3
_DAMAGE = {
    1: "a residual of 2^24 or more; the block does not decode",
    2: "a value of 2^24 or more; the block does not decode",
    4: "the block does not decode",
}


class Plan:
    """Blocks to decode and where their values go.

    The plan refers to the payloads and outputs it was given; both must live until `run`
    returns.

    Attributes
    ----------
    targets
        Payload and output of each block, in the order of `add`.
    lanes, blocks, rows, vectors, copies
        What decodes them: TKV1 lanes, KVR1 blocks, rows of fixed rate, FibQuant's vectors, and
        values at hand.
    """

    def __init__(self) -> None:
        self.targets = Targets()
        self.lanes = Lanes()
        self.blocks = Blocks()
        self.rows = Rows()
        self.vectors = Vectors()
        self.copies: list[Copy] = []

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
        out: Output,
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
            Any positive strides with the last axis contiguous; tensor channel order. Either every
            output is a NumPy array, for `run`, or all are arrays of a device, for `kvgpu.decode`.
        rope
            Table that covers ``[start, stop)``: rotate K on write. None: as coded.
        where
            Name of the block for error messages, for example ``"layer 3 k block 7"``.

        Raises
        ------
        InvalidArgument
            A range outside the block, an output of the wrong shape or dtype, or no such `rope`.
        Truncated, Corrupt, Unsupported
            The payload's structure is damaged, or of a newer release.
        """
        prefix = f"{where}: " if where else ""
        spec: StreamSpec = params.spec
        if not first_token <= start <= stop <= first_token + n_tokens:
            raise InvalidArgument(
                f"{prefix}tokens [{start}, {stop}) are not inside the block "
                f"[{first_token}, {first_token + n_tokens})"
            )
        check_output(out, (spec.heads, stop - start, spec.head_dim), prefix)
        if rope is not None:
            rope = rope.checked()
            rope.rows(start, stop)
        placement = Placement(start, stop, n_tokens, out, rope, prefix)
        try:
            codec.schedule(self, params, payload, first_token, placement)
        except (Corrupt, Truncated, Unsupported) as error:
            raise type(error)(f"{prefix}{error}") from error

    def copy(self, values: npt.NDArray[Any], spec: StreamSpec, placement: Placement) -> None:
        """Place values that a codec has at hand: ``[heads][rows][head_dim]``, coded order."""
        target, _ = self.targets.add(b"", placement)
        self.copies.append(Copy(target, values, spec, placement))

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
        target, rope = self.targets.add(payload, placement)
        self.lanes.add(tables, entries, first_token, placement, target, rope)

    def decode_block(
        self, tables: BlockTables, payload: BytesLike, first_token: int, placement: Placement
    ) -> None:
        """Add one KVR1 block; `tables` are its stream's, added once for all its blocks."""
        target, rope = self.targets.add(payload, placement)
        self.blocks.add(tables, first_token, placement, target, rope)

    def decode_rows(
        self, tables: RowTables, payload: BytesLike, first_token: int, placement: Placement
    ) -> None:
        """Add one frame of fixed-rate rows; `tables` are its stream's, added once for all."""
        target, rope = self.targets.add(payload, placement)
        self.rows.add(tables, first_token, placement, target, rope)

    def decode_vectors(
        self, tables: VectorTables, payload: BytesLike, first_token: int, placement: Placement
    ) -> None:
        """Add one FibQuant frame; `tables` are its stream's, added once for all its frames."""
        target, rope = self.targets.add(payload, placement)
        self.vectors.add(tables, first_token, placement, target, rope)

    def run(self, n_threads: int | None = None, simd: str | None = None) -> None:
        """Decode everything into the outputs.

        Parameters
        ----------
        n_threads
            None: one per CPU this process may use. The result does not depend on it.
        simd
            Instruction set for all but TKV1's lanes, one of `SIMD_LEVELS`; None: the fastest. The
            result does not depend on it.

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
        outputs, simd = self.targets.on_host(), simd or SIMD_LEVELS[0]
        arguments = self.targets.arguments(outputs)
        self.place_copies(outputs)
        failures = self.lanes.run(arguments, n_threads)
        failures += self.blocks.run(arguments, n_threads, simd)
        failures += self.rows.run(arguments, n_threads, simd)
        failures += self.vectors.run(arguments, n_threads, simd)
        self.check(failures)

    def place_copies(self, outputs: list[npt.NDArray[Any]]) -> None:
        """Write the values at hand into `outputs`, host arrays for all of the plan's targets."""
        for copy in self.copies:
            copy.place(outputs[copy.target])

    def check(self, failures: list[Failure]) -> None:
        """Raise what the first of `failures` is, if there are any."""
        if not failures:
            return
        # Damage is reported before an overflow, which it may have caused; else in plan order.
        status, target, what = min(failures, key=lambda f: (f[0] == _OVERFLOW, f[1]))
        where = self.targets.where[target]
        if status == _OVERFLOW:
            raise _overflow(where, dtype_name(self.targets.outputs[target].dtype))
        raise Corrupt(f"{where}{what}{_DAMAGE[status]}")


class Copy(NamedTuple):
    """Values that need no decoding: ``[heads][rows][head_dim]`` of the coded domain."""

    target: int
    values: npt.NDArray[Any]
    spec: StreamSpec
    placement: Placement

    def place(self, out: npt.NDArray[Any]) -> None:
        """Write the values, rotated if they are to be, into a host array."""
        values, spec, rope = self.values, self.spec, self.placement.rope
        in_order = spec.rope is None or spec.rope.keeps_order(spec.head_dim)
        if rope is None and in_order and values.dtype == out.dtype:
            out[...] = values
            return
        state: KState = "pre" if rope is None else "post"
        x = from_coded(values.astype(np.float32), spec, state, self.placement.start, rope)
        with np.errstate(over="ignore"):
            out[...] = x.astype(out.dtype)
        may_overflow = out.dtype != np.float32 or rope is not None
        if may_overflow and not np.isfinite(out.astype(np.float32)).all():
            raise _overflow(self.placement.where, out.dtype.name)


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


def _overflow(where: str, dtype: str) -> InvalidArgument:
    if dtype == "float32":
        return InvalidArgument(f"{where}a value overflows float32 when it is rotated; read it pre")
    return InvalidArgument(f"{where}a value overflows {dtype}; ask for float32")
