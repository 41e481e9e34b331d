"""A plan as bytes for the device: its tables, its payloads, and the arguments of the kernels.

Pointers are offsets until `Image.place` is told where the bytes will be.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from kvcodecs import _core
from kvcodecs.blocks import BlockArrays, failed_blocks
from kvcodecs.errors import InvalidArgument
from kvcodecs.frame import byte_view
from kvcodecs.lanes import LaneArrays, failed_lanes
from kvcodecs.plan import Plan
from kvcodecs.targets import OUTPUT_TYPES, Failure, is_device_output

from . import structs
from .arrays import Pages, View
from .device import Device
from .host import host_values
from .image import ALL, Image
from .interfaces import Resident, bytes_of
from .launches import WARP, Grid, Kernel, Launch, Limits, block_grid, lane_grid
from .vectors import VectorWork

# csrc/lane.hpp kClassModels.
_CLASS_MODELS: Final = 147
_COPY_THREADS: Final = 128
_MOST_CTAS: Final = 1 << 16
# What payloads mostly are; a million of them are told apart faster this way.
_ON_HOST: Final = (memoryview, bytes, bytearray, np.ndarray)
_NONE: Final = np.empty(0, np.uint8)


class Staging:
    """Everything that goes up for one plan.

    Parameters
    ----------
    plan
        Checked here: no kernel will touch anything outside its tables, payloads and outputs.
    payloads
        In place of the plan's: the same bytes, as buffers of the host or arrays of the device.
    outputs
        In the order of the plan's additions.
    device
        Where it will run.

    Attributes
    ----------
    image
        What to upload; before it in the device memory lie statuses, from the start, and scratch.
    n_status
        Bytes of the statuses.
    launches
        The kernels to run, one after the other.
    producers
        Streams in which the caller's arrays are still worked on.

    Raises
    ------
    InvalidArgument
        Payloads that do not fit the plan or are nowhere where the device can read them, tables
        out of range, a value at hand that overflows.
    """

    def __init__(
        self,
        plan: Plan,
        payloads: Sequence[Any],
        outputs: Sequence[View],
        device: Device,
        n_threads: int,
    ) -> None:
        self._constants, limits = device.constants, device.limits
        lanes = plan.lanes.arrays() if plan.lanes.rows else None
        blocks = plan.blocks.arrays() if plan.blocks.rows else None
        self._lanes = _NONE if lanes is None else lanes[1]
        self._blocks = _NONE if blocks is None else blocks[0]
        self._vectors = VectorWork(plan, limits) if plan.vectors.rows else None
        self.n_status = len(self._lanes) + len(self._blocks)
        if self._vectors is not None:
            self.n_status += self._vectors.n_pieces
        # Launches follow each other: they share the scratch.
        scratch = -(-self.n_status // 256) * 256
        lane_threads = None if lanes is None else _lane_grid(lanes, limits)
        block_warps = None if blocks is None else _block_grid(blocks, plan, limits)
        work = (lane_threads, block_warps, self._vectors)
        self.image = Image(scratch + max(0 if w is None else w.scratch_bytes for w in work))
        self.launches: list[Launch] = []

        # Blocks without a kernel are decoded here: what fails of them is told with the others.
        values, self._failures = host_values(plan, outputs, n_threads)
        parts = [b"" if at in values else part for at, part in enumerate(payloads)]
        resident = _resident(parts, device)
        sources, n_bytes = _sources(self.image, parts, resident)
        self._keep = resident
        streams = {view.stream for view in outputs} | {part.stream for part in resident.values()}
        self.producers = {stream for stream in streams if stream is not None}
        shared = {
            "sources": sources,
            "targets": _targets(self.image, outputs),
            "rotations": _rotations(self.image, plan),
        }
        shapes = np.array([view.shape for view in outputs], np.uint64).reshape(-1, 3)
        ropes = np.array([cos.shape for cos, _ in plan.targets.ropes], np.uint64).reshape(-1, 2)
        if lanes is not None and lane_threads is not None:
            _core.check_lanes(*lanes, n_bytes, shapes, ropes)
            self._decode_lanes(lanes, lane_threads, shared | {"scratch": scratch})
        if blocks is not None and block_warps is not None:
            _core.check_blocks(*blocks, n_bytes, shapes, ropes)
            place = {"scratch": scratch, "status": len(self._lanes)}
            self._decode_blocks(blocks, plan, block_warps, shared | place)
        if self._vectors is not None:
            self._vectors.check(n_bytes, shapes, ropes)
            status = len(self._lanes) + len(self._blocks)
            self.launches += self._vectors.add(self.image, shared, scratch, status)
        if values:
            self._copy_rows(values, shared["targets"])

    def failures(self, status: npt.NDArray[np.uint8]) -> list[Failure]:
        """Return the lanes and blocks that do not decode, given what the kernels say of theirs."""
        n_lanes, n = len(self._lanes), len(self._lanes) + len(self._blocks)
        failures = failed_lanes(status[:n_lanes], self._lanes)
        failures += failed_blocks(status[n_lanes:n], self._blocks)
        if self._vectors is not None:
            worst = self._vectors.of_blocks(status[n:])
            failures += failed_blocks(worst, self._vectors.blocks)
        return failures + self._failures

    def _decode_lanes(self, tables: LaneArrays, grid: Grid, shared: dict[str, int]) -> None:
        prior, lanes, channels, classes = tables
        pointers = shared | {
            "lanes": self.image.add(lanes),
            "channels": self.image.add(channels),
            "classes": self.image.add(classes),
            "status": 0,
        }
        numbers = {
            "prior": self._constants.address(prior, "prior", lambda: prior),
            "n_lanes": len(lanes),
            "scratch_words": grid.scratch_words,
            "n_threads": grid.n,
        }
        arguments = self.image.add_struct(structs.LANE_ARGUMENTS, pointers, numbers)
        n_ctas = -(-grid.n // grid.block_threads)
        self.launches.append(Launch("kv_decode_lanes", arguments, n_ctas, grid.block_threads))

    def _decode_blocks(
        self, tables: BlockArrays, plan: Plan, grid: Grid, shared: dict[str, int]
    ) -> None:
        rans = plan.blocks.rans
        blocks, streams, mean, rho, classes, order = tables
        components = np.empty(len(mean), structs.COMPONENT)
        components["mean"] = mean
        components["rho_class"] = rho + (classes.astype(np.uint32) << np.uint32(8))
        pointers = shared | {
            "blocks": self.image.add(blocks),
            "streams": self.image.add(streams),
            "components": self.image.add(components),
            "order": self.image.add(order),
        }
        shared_bytes = 4 * grid.shared_words * (grid.block_threads // WARP)
        numbers = {
            "slots": self._constants.address(rans, "slots", lambda: rans.slots),
            "n_blocks": len(blocks),
            "shared_words": grid.shared_words,
            "scratch_words": grid.scratch_words,
            "n_warps": grid.n,
        }
        kernel: Kernel = "kv_decode_blocks"
        if grid.compact:
            kernel = "kv_decode_blocks_compact"
            address = self._constants.address(rans, "compact", lambda: rans.compact)
            numbers["compact"] = address
            shared_bytes += 4 * _compact_words(rans)
        arguments = self.image.add_struct(structs.BLOCK_ARGUMENTS, pointers, numbers)
        n_ctas = -(-grid.n * WARP // grid.block_threads)
        self.launches.append(Launch(kernel, arguments, n_ctas, grid.block_threads, shared_bytes))

    def _copy_rows(self, values: dict[int, npt.NDArray[Any]], targets: int) -> None:
        copies = np.zeros(len(values), structs.COPY)
        copies["target"] = list(values)
        for axis, name in enumerate(("heads", "rows", "channels")):
            copies[name] = [array.shape[axis] for array in values.values()]
        n_rows = np.cumsum(copies["heads"].astype(np.uint64) * copies["rows"])
        copies["first_row"][1:] = n_rows[:-1]
        copies["values"] = [self.image.add(array) for array in values.values()]
        pointers = {"copies": self.image.add(copies, values=ALL), "targets": targets}
        total = int(n_rows[-1])
        if total == 0:
            return
        numbers = {"n_copies": len(copies), "n_rows": total}
        arguments = self.image.add_struct(structs.COPY_ARGUMENTS, pointers, numbers)
        n_ctas = min(-(-total // _COPY_THREADS), _MOST_CTAS)
        self.launches.append(Launch("kv_copy_rows", arguments, n_ctas, _COPY_THREADS))


@cache
def _compact_words(rans: _core.RansTables) -> int:
    return rans.compact.size


def _lane_grid(tables: LaneArrays, limits: Limits) -> Grid:
    lanes = tables[1]
    words = lanes["n_classes"].astype(np.int64) * _CLASS_MODELS + 3 * lanes["width"].astype(
        np.int64
    )
    return lane_grid(len(lanes), int(words.max()), limits)


def _block_grid(tables: BlockArrays, plan: Plan, limits: Limits) -> Grid:
    blocks, streams = tables[:2]
    components = streams["heads"].astype(np.int64) * streams["head_dim"]
    return block_grid(components[blocks["stream"]], _compact_words(plan.blocks.rans), limits)


def _resident(payloads: Sequence[Any], device: Device) -> dict[int, Resident]:
    """Return the payloads that lie on the device, by index."""
    resident = {
        at: bytes_of(part, device.from_dlpack)
        for at, part in enumerate(payloads)
        if not isinstance(part, _ON_HOST) and is_device_output(part)
    }
    for at, part in resident.items():
        if part.n_bytes:
            device.check_address(part.address, f"payload {at}")
    return resident


def _host_bytes(at: int, payload: Any) -> memoryview:
    try:
        return byte_view(payload)
    except (BufferError, TypeError, ValueError) as error:
        raise InvalidArgument(f"payload {at}: expected bytes without gaps: {error}") from error


def _sources(
    image: Image, payloads: Sequence[Any], resident: dict[int, Resident]
) -> tuple[int, npt.NDArray[np.uint64]]:
    """Add payloads and the table of them; return its offset, and their sizes."""
    n = len(payloads)
    parts = [b"" if at in resident else _host_bytes(at, part) for at, part in enumerate(payloads)]
    n_bytes = np.fromiter((len(part) for part in parts), np.uint64, n)
    table = np.zeros(n, structs.SOURCE)
    table["bytes"] = image.add_all(parts, n_bytes)
    on_host = np.ones(n, np.bool_)
    for at, part in resident.items():
        table[at], n_bytes[at], on_host[at] = (part.address, 0), part.n_bytes, False
    table["n_bytes"] = n_bytes
    return image.add(table, bytes=on_host), n_bytes


def _targets(image: Image, outputs: Sequence[View]) -> int:
    """Add the table of outputs, and the block tables of those that have pages."""
    tables: dict[int, tuple[Pages, int]] = {}
    for pages in (view.pages for view in outputs):
        if pages is not None and id(pages) not in tables:
            tables[id(pages)] = (pages, image.add(pages.numbers))
    table = np.array([_target(view, tables) for view in outputs], structs.TARGET)
    return image.add(table, pages=table["page_rows"] > 0)


def _target(view: View, tables: dict[int, tuple[Pages, int]]) -> tuple[int, ...]:
    kind = OUTPUT_TYPES[view.dtype]
    if view.pages is None:
        return (view.address, 0, view.head_stride, view.row_stride, 0, 0, 0, kind)
    pages, offset = tables[id(view.pages)]
    return (
        view.address, offset, view.head_stride, view.row_stride, pages.stride, view.first_row,
        pages.rows, kind,
    )  # fmt: skip


def _rotations(image: Image, plan: Plan) -> int:
    table = np.array(
        [(*(image.add(part) for part in pair), pair[0].shape[1]) for pair in plan.targets.ropes],
        structs.ROTATION,
    )
    return image.add(table, cos=ALL, sin=ALL)
