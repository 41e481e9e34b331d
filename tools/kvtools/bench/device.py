"""Group `device`: decoding on a GPU, from one lane to a million, next to plain copies there.

A plan of a million blocks would take longer to build than to decode: its tables are those of the
sample's blocks, repeated. Every block has payload and output of its own in the device's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from kvcodecs.codec import CodecConfig, codec_for
from kvcodecs.errors import Corrupt, InvalidArgument
from kvcodecs.fibquant import FibQuant
from kvcodecs.frame import open_frame
from kvcodecs.plan import Plan

from kvtools.bench.codec import encode_all, rivals, sources_of
from kvtools.bench.rows import Row
from kvtools.sample import Sample
from kvtools.terminal import note, number_text, show_table

if TYPE_CHECKING:
    from kvgpu.device import Device

GROUP = "device"
#: Measured beside KVR1 and TKV1.
FIBQUANT = FibQuant()
#: Lanes of TKV1, or blocks of the others, that are decoded at once.
SIZES = (1, 64, 4_096, 65_536, 1_000_000)
#: Of a block: a million of them fit the memory of a large device.
BLOCK_TOKENS = 64
#: What is copied to see how fast the device and the way to it are.
COPY_BYTES = 1 << 30
UPLOAD_BYTES = 64 << 20
#: No action is repeated for longer.
MOST_SECONDS = 5.0

_DECODED = ("kvr1", "tkv1", "fibquant")
_COLUMNS = {
    "upload": "ms", "decode": "ms", "total": "ms", "decoded": "GB/s", "end to end": "GB/s",
    "of copy": "ratio", "of raw upload": "ratio",
}  # fmt: skip
_NOTES = {
    "upload": "payloads and tables from memory of the host, as they lie there",
    "decode": "payloads on the device",
    "total": "from memory of the host to values on the device",
    "decoded": "float16 that decode writes",
    "end to end": "float16 that total writes",
    "of copy": "decoded, to float16 copied from device memory to device memory",
    "of raw upload": "end to end, to float16 uploaded from pinned memory",
}


@dataclass(frozen=True)
class Blocks:
    """The sample's whole blocks of one geometry, and what they decode to on the CPU.

    Attributes
    ----------
    plan
        Decodes them one after the other.
    truth : (heads, blocks * BLOCK_TOKENS, head_dim) float16
    """

    plan: Plan
    truth: npt.NDArray[np.float16]

    @property
    def lanes_per_block(self) -> int:
        rows = self.plan.lanes.rows
        return len(rows[0]) if rows else 1

    @property
    def unit(self) -> str:
        return "lanes" if self.plan.lanes.rows else "blocks"

    def repeated(self, n_lanes: int, out: Any) -> Plan:
        """Return a plan of so many lanes, or of blocks; block `i` goes to the `i`-th rows."""
        plan = Plan()
        of_block = self.plan.targets.payloads
        n_blocks = -(-n_lanes // self.lanes_per_block)
        plan.targets.payloads = (of_block * -(-n_blocks // len(of_block)))[:n_blocks]
        plan.targets.outputs, plan.targets.where = [out], [""]
        if self.plan.lanes.rows:
            lanes = np.concatenate(self.plan.lanes.rows)
            lanes = lanes[np.arange(n_lanes) % len(lanes)]
            block = np.arange(n_lanes) // self.lanes_per_block
            lanes["payload"], lanes["output"], lanes["row"] = block, 0, block * BLOCK_TOKENS
            plan.lanes = replace(self.plan.lanes, rows=[lanes])
        elif self.plan.vectors.rows:
            rows = _repeated(self.plan.vectors.rows, 1, n_blocks)
            plan.vectors = replace(self.plan.vectors, rows=rows)
        else:
            rows = _repeated(self.plan.blocks.rows, 2, n_blocks)
            plan.blocks = replace(self.plan.blocks, rows=rows)
        return plan

    def rows_of(self, head: int, n_lanes: int) -> int:
        """Return how many rows of a head so many lanes write."""
        if not self.plan.lanes.rows:
            return n_lanes * BLOCK_TOKENS
        whole, rest = divmod(n_lanes, self.lanes_per_block)
        per_head = self.lanes_per_block // len(self.truth)
        return (whole + (head < rest // per_head)) * BLOCK_TOKENS


def _repeated(rows: list[tuple[int, ...]], at: int, n: int) -> list[tuple[int, ...]]:
    """Return `n` blocks; the fields of theirs from `at` on are those of `Placement.of_block`."""
    return [
        (*row[:at], i, 0, *row[at + 2 : at + 5], i * BLOCK_TOKENS, *row[at + 6 :])
        for i, row in enumerate((rows * -(-n // len(rows)))[:n])
    ]


def measure_device(
    config: CodecConfig, sample: Sample, reps: int, *, quiet: bool = False
) -> list[Row]:
    """Time decoding on the current device, after comparing every value with the CPU's.

    Unless `quiet`, each result is told as it comes.

    Raises
    ------
    Unsupported
        There is no device.
    InvalidArgument
        `config` is no codec that a device decodes.
    """
    from kvgpu.device import current

    device = current()
    configs = {name: c for name, c in rivals(config).items() if name in _DECODED}
    if not configs:
        raise InvalidArgument(
            f"{config.codec}: devices decode {', '.join(_DECODED)}; give one of them"
        )
    configs.setdefault("fibquant", FIBQUANT)
    copy, upload = _copy_rate(device, reps), _upload_rate(device, reps)
    rows = [
        Row(GROUP, "copy on the device", copy, "GB/s", "bytes copied, each read and written"),
        Row(GROUP, "upload from pinned memory", upload, "GB/s", "bytes copied"),
    ]
    coded = {name: blocks_of(one, sample) for name, one in configs.items()}
    # The largest last: what takes longest, and may be cut short.
    for n, (name, blocks) in product(SIZES, coded.items()):
        what = f"{name}, {n:,} {blocks.unit}"
        found = _measure(device, blocks, n, reps)
        if found is None:
            note(f"{what} do not fit the device", quiet=quiet)
            continue
        found["of copy"] = found["decoded"] / copy
        found["of raw upload"] = found["end to end"] / upload
        rows += [
            Row(GROUP, f"{what}: {column}", found[column], unit, _NOTES[column])
            for column, unit in _COLUMNS.items()
        ]
        numbers = (f"{column} {number_text(found[column])}" for column in _COLUMNS)
        note(f"{what}: {', '.join(numbers)}", quiet=quiet)
    return rows


def show_device(rows: Sequence[Row]) -> None:
    """Print one line for each size, and the copies."""
    lines: dict[str, list[str]] = {}
    others = []
    for row in rows:
        what, found, _ = row.name.partition(": ")
        if found:
            lines.setdefault(what, []).append(number_text(row.value))
        else:
            others.append((what, number_text(row.value), row.unit))
    columns = [f"{name} {unit}".removesuffix(" ratio") for name, unit in _COLUMNS.items()]
    show_table("", ("decoding", *columns), [(what, *line) for what, line in lines.items()])
    print()
    show_table("", ("beside it", "value", "unit"), others)


def blocks_of(config: CodecConfig, sample: Sample) -> Blocks:
    """Code the sample, and decode its whole blocks on the CPU."""
    sources = sources_of(sample)
    shape = sources[0].x.shape
    streams = encode_all(config, [s for s in sources if s.x.shape == shape], BLOCK_TOKENS)
    frames = [
        (stream, *found)
        for stream in streams
        for found in map(open_frame, stream.frames)
        if found[0].n_tokens == BLOCK_TOKENS
    ]
    if not frames:
        raise InvalidArgument(f"{sample.label}: fewer than {BLOCK_TOKENS} tokens")
    truth = np.empty((shape[0], len(frames) * BLOCK_TOKENS, shape[2]), np.float16)
    plan = Plan()
    for i, (stream, header, payload) in enumerate(frames):
        plan.add(
            codec_for(config), stream.params, payload,
            first_token=header.first_token, n_tokens=BLOCK_TOKENS, start=header.first_token,
            stop=header.stop_token, out=truth[:, i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS],
        )  # fmt: skip
    plan.run()
    return Blocks(plan, truth)


def _measure(device: Device, blocks: Blocks, n: int, reps: int) -> dict[str, float] | None:
    """Return times in ms and rates in GB/s of `n` lanes; None if the device has no room."""
    from kvgpu import Decoding, Destination

    heads, _, head_dim = blocks.truth.shape
    n_rows = -(-n // blocks.lanes_per_block) * BLOCK_TOKENS
    try:
        out = Destination().view(device.empty((heads, n_rows, head_dim), blocks.truth.dtype))
        with Decoding(blocks.repeated(n, out)) as decoding:

            def upload() -> None:
                decoding.upload()
                decoding.synchronize()

            def decode() -> None:
                decoding.launch()
                decoding.wait()

            def both() -> None:
                decoding.upload()
                decode()

            both()
            _compare(device, blocks, n, out)
            seconds = [_seconds(action, reps) for action in (upload, decode, both)]
    except MemoryError:
        return None
    written = sum(blocks.rows_of(head, n) for head in range(heads)) * head_dim * 2
    found = dict(zip(("upload", "decode", "total"), (1e3 * s for s in seconds), strict=True))
    return found | {
        "decoded": written / seconds[1] / 1e9,
        "end to end": written / seconds[2] / 1e9,
    }


def _compare(device: Device, blocks: Blocks, n: int, out: Any) -> None:
    """Raise `Corrupt` unless every value is the CPU's."""
    stream = device.stream(None)
    _, n_rows, head_dim = blocks.truth.shape
    row_bytes = head_dim * blocks.truth.itemsize
    repeats = -(-min(blocks.rows_of(0, n), UPLOAD_BYTES // row_bytes) // n_rows)
    step = repeats * n_rows
    host = device.pinned(step * row_bytes)
    for head, one in enumerate(blocks.truth):
        truth = np.tile(one, (repeats, 1)).reshape(-1).view(np.uint8)
        for first in range(0, blocks.rows_of(head, n), step):
            size = min(step, blocks.rows_of(head, n) - first) * row_bytes
            at = out.address + head * out.head_stride * blocks.truth.itemsize + first * row_bytes
            stream.download(at, host[:size])
            stream.record().wait()
            if not np.array_equal(host[:size].view(np.uint16), truth[:size].view(np.uint16)):
                raise Corrupt(f"{n} {blocks.unit}: head {head} differs from the CPU's values")


def _copy_rate(device: Device, reps: int) -> float:
    memory = [device.memory(COPY_BYTES) for _ in range(2)]
    stream = device.stream(None)

    def copy() -> None:
        stream.copy(memory[0].address, memory[1].address, COPY_BYTES)
        stream.record().wait()

    return COPY_BYTES / _seconds(copy, reps) / 1e9


def _upload_rate(device: Device, reps: int) -> float:
    host, memory = device.pinned(UPLOAD_BYTES), device.memory(UPLOAD_BYTES)
    stream = device.stream(None)

    def upload() -> None:
        stream.upload(host, memory.address)
        stream.record().wait()

    return UPLOAD_BYTES / _seconds(upload, reps) / 1e9


def _seconds(action: Callable[[], None], reps: int) -> float:
    """Return the median of the times of an action, after one that is not counted."""
    times: list[float] = []
    action()
    while len(times) < reps and sum(times) < MOST_SECONDS:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return float(np.median(times))
