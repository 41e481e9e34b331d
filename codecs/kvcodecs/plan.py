"""The plan of a decode: which lanes go into which output rows, and its CPU executor.

Blocks of any number of streams, layers and kinds are added, then one `run` decodes all of them
on n threads without the GIL. The tables are plain arrays: the GPU executes the same ones.
A codec without lanes (raw) hands over its values instead, and the plan places them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import _core
from .errors import Corrupt, InvalidArgument, Truncated
from .frame import BytesLike
from .rope import RopeTable, from_coded
from .spec import FLOAT_DTYPES, KState, StreamSpec

if TYPE_CHECKING:
    from .codec import BlockCodec

# The structs of csrc/executor.hpp and csrc/lane.hpp, field by field.
LANE_DTYPE = np.dtype(
    [
        ("offset", "u8"),
        ("n_bytes", "u8"),
        ("first_token", "u8"),
        ("sink", "u8"),
        ("channels", "u8"),
        ("classes", "u8"),
        ("payload", "u4"),
        ("output", "u4"),
        ("head", "u4"),
        ("n_tokens", "u4"),
        ("skip", "u4"),
        ("row", "u4"),
        ("width", "u4"),
        ("n_classes", "u4"),
        ("sink_div", "u4"),
        ("unit", "f4"),
        ("rope", "i4"),
        ("rope_row", "u4"),
        ("first_pair", "u4"),
        ("n_pairs", "u4"),
    ]
)
CHANNEL_DTYPE = np.dtype([("mean", "i4"), ("rho", "u4"), ("models", "u4"), ("output", "u4")])

_OUTPUT_TYPES = {FLOAT_DTYPES[name]: i for i, name in enumerate(("float32", "float16", "bfloat16"))}
_OK, _BAD_RESIDUAL, _BAD_VALUE, _OVERFLOW = range(4)


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


@dataclass(frozen=True, slots=True)
class LaneTables:
    """Channel and class tables of one stream's lanes, in lane order; built once per stream.

    Attributes
    ----------
    lanes : (n_lanes,) LANE_DTYPE
        With everything set that does not depend on the block; ``channels`` and ``classes``
        count from the start of the tables here.
    channels : (n,) CHANNEL_DTYPE
    classes : (n,) uint8
        Classes present in each lane.
    prior : (7056,) uint32
        Initial bit models of every class.
    """

    lanes: npt.NDArray[Any]
    channels: npt.NDArray[Any]
    classes: npt.NDArray[np.uint8]
    prior: npt.NDArray[np.uint32]


class Plan:
    """Blocks to decode and where their values go.

    The plan refers to the payloads and outputs it was given; both must live until `run`
    returns.
    """

    def __init__(self) -> None:
        self._payloads: list[BytesLike] = []
        self._outputs: list[npt.NDArray[Any]] = []
        self._ropes: list[tuple[Any, Any]] = []
        self._rope_index: dict[int, int] = {}
        self._lanes: list[npt.NDArray[Any]] = []
        self._where: list[str] = []
        self._tables: dict[int, tuple[LaneTables, int, int]] = {}
        self._n_channels = 0
        self._n_classes = 0
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
        if id(tables) not in self._tables:
            self._tables[id(tables)] = (tables, self._n_channels, self._n_classes)
            self._n_channels += len(tables.channels)
            self._n_classes += len(tables.classes)
        _, channels, classes = self._tables[id(tables)]
        lanes = tables.lanes.copy()
        lanes["offset"], lanes["n_bytes"] = entries[:, 0], entries[:, 1]
        lanes["channels"] += np.uint64(channels)
        lanes["classes"] += np.uint64(classes)
        lanes["first_token"] = first_token
        lanes["payload"] = len(self._payloads)
        lanes["output"] = len(self._outputs)
        lanes["n_tokens"] = placement.stop - first_token
        lanes["skip"] = placement.start - first_token
        lanes["rope"] = -1
        if placement.rope is not None:
            lanes["rope"] = self._add_rope(placement.rope)
            lanes["rope_row"] = placement.start - placement.rope.first_token
        self._payloads.append(payload)
        self._outputs.append(placement.out)
        self._where.append(placement.where)
        self._lanes.append(lanes)

    def _add_rope(self, table: RopeTable) -> int:
        if id(table.cos) not in self._rope_index:
            self._rope_index[id(table.cos)] = len(self._ropes)
            self._ropes.append((table.cos, table.sin))
        return self._rope_index[id(table.cos)]

    def run(self, n_threads: int | None = None) -> None:
        """Decode everything into the outputs.

        Parameters
        ----------
        n_threads
            None or 0: one per CPU this process may use. The result does not depend on it.

        Raises
        ------
        Corrupt, Truncated
            A block that does not decode, named. The outputs are then undefined.
        InvalidArgument
            A value beyond the range of a float16 or bfloat16 output; ask for float32.
        """
        if n_threads is not None and not (isinstance(n_threads, int) and 0 <= n_threads <= 4096):
            raise InvalidArgument(f"n_threads {n_threads!r}: None, or 0 to 4096")
        for values, spec, placement in self._copies:
            _place(values, spec, placement)
        if not self._lanes:
            return
        lanes = np.concatenate(self._lanes)
        tables = [entry[0] for entry in self._tables.values()]
        outputs = [out if out.dtype == np.float32 else out.view(np.uint16) for out in self._outputs]
        status = _core.run_plan(
            tables[0].prior,
            lanes,
            np.concatenate([t.channels for t in tables]),
            np.concatenate([t.classes for t in tables]),
            self._payloads,
            outputs,
            [_OUTPUT_TYPES[out.dtype] for out in self._outputs],
            self._ropes,
            n_threads or available_cpus(),
        )
        if status.any():
            self._raise(lanes, status)

    def _raise(self, lanes: npt.NDArray[Any], status: npt.NDArray[np.uint8]) -> None:
        # Damage is reported before an overflow, which it may have caused.
        bad = np.flatnonzero(status)
        first = min(bad, key=lambda i: (status[i] == _OVERFLOW, i))
        lane, code = lanes[first], status[first]
        where = self._where[int(lane["output"])]
        if code == _OVERFLOW:
            raise _overflow(where, self._outputs[int(lane["output"])].dtype)
        what = f"{where}lane of head {lane['head']}"
        fault = "residual" if code == _BAD_RESIDUAL else "value"
        raise Corrupt(f"{what}: a {fault} of 2^24 or more; the block does not decode")


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
