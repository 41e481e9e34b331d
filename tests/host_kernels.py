"""The GPU kernels on the host: their text compiled by g++, threads and warps one after the other.

`HostKernels.run_lanes`, `run_blocks` and `run_fib_blocks` take what the core's functions of these
names take, so that every test of the core's decoder can be a test of the kernels.
"""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from kvcodecs import _core
from kvcodecs.blocks import BLOCK_DTYPE, STREAM_DTYPE
from kvcodecs.errors import InvalidArgument
from kvcodecs.lanes import CHANNEL_DTYPE, LANE_DTYPE
from kvcodecs.rows import BLOCK_DTYPE as ROW_DTYPE
from kvcodecs.vectors import STREAM_DTYPE as VECTOR_STREAM_DTYPE
from kvgpu import structs
from kvgpu.host_device import compile_kernels

CLASS_MODELS = 3 * 49
_SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1")


def build(folder: Path) -> ctypes.CDLL:
    """Compile the kernels; with sanitizers where Python was started with them."""
    sanitize = _SANITIZE if "libasan" in os.environ.get("LD_PRELOAD", "") else ()
    preload = os.environ.pop("LD_PRELOAD", None)  # not for the compiler
    try:
        options = ("-Wall", "-Wextra", "-Werror", *sanitize)
        return ctypes.CDLL(str(compile_kernels(folder, options)))
    finally:
        if preload is not None:
            os.environ["LD_PRELOAD"] = preload


def struct_sizes(library: ctypes.CDLL) -> list[int]:
    """Return the sizes of the kernels' structs, in the order of the shim."""
    return list((ctypes.c_uint32 * 13).in_dll(library, "kv_sizes"))


def as_targets(outputs, types):
    """Return TARGET rows of NumPy arrays."""
    rows = np.zeros(len(outputs), structs.TARGET)
    for row, out, kind in zip(rows, outputs, types, strict=True):
        head, line, _ = (s // out.itemsize for s in out.strides)
        row["data"], row["head_stride"], row["row_stride"] = out.ctypes.data, head, line
        row["type"] = kind
    return rows


class HostKernels:
    """The kernels; each call draws a grid, and where payloads and tables lie."""

    def __init__(self, library: ctypes.CDLL, seed: int = 0) -> None:
        self._library = library
        self._rng = np.random.default_rng(seed)

    def run_lanes(
        self, prior, lanes, channels, classes, payloads, outputs, types, ropes, n_threads, wide=True
    ):
        """Decode lanes as the kernel does; the arguments are those of the core's function."""
        keep, sources, rotations = self._uploads(payloads, ropes)
        lanes = np.frombuffer(lanes, LANE_DTYPE)
        channels = np.frombuffer(channels, CHANNEL_DTYPE)
        shapes = _shapes(payloads, outputs, ropes)
        _core.check_lanes(prior, lanes, channels, classes, *shapes)
        targets = as_targets(outputs, types)
        words = int((lanes["n_classes"] * CLASS_MODELS + 3 * lanes["width"]).max(initial=1))
        n = int(self._rng.choice([1, 2, 3, len(lanes) + 1]))
        scratch = np.empty(n * words, np.uint32)
        scratch.fill(0xDEADBEEF)
        status = np.full(len(lanes), 0xEE, np.uint8)
        self._call(
            "kv_host_decode_lanes",
            structs.LANE_ARGUMENTS,
            lanes=lanes,
            n_lanes=len(lanes),
            channels=channels,
            classes=classes,
            prior=prior,
            sources=sources,
            targets=targets,
            rotations=rotations,
            status=status,
            scratch=scratch,
            scratch_words=words,
            n_threads=n,
        )
        del keep
        return status

    def run_blocks(
        self,
        tables,
        blocks,
        streams,
        mean,
        rho,
        classes,
        order,
        payloads,
        outputs,
        types,
        ropes,
        n_threads,
        level,
    ):
        """Decode blocks as the kernel does; the arguments are those of the core's function."""
        keep, sources, rotations = self._uploads(payloads, ropes)
        blocks = np.frombuffer(blocks, BLOCK_DTYPE)
        streams = np.frombuffer(streams, STREAM_DTYPE)
        shapes = _shapes(payloads, outputs, ropes)
        _core.check_blocks(blocks, streams, mean, rho, classes, order, *shapes)
        targets = as_targets(outputs, types)
        components = np.zeros(len(mean), structs.COMPONENT)
        components["mean"] = mean
        components["rho_class"] = rho | classes.astype(np.uint32) << 8
        sizes = (streams["heads"] * streams["head_dim"])[blocks["stream"]]
        # All in shared memory, none, or the smaller ones.
        shared = int(self._rng.choice([0, sizes.min(initial=0), sizes.max(initial=0)]))
        words = int(sizes.max(initial=0)) if sizes.max(initial=0) > shared else 0
        n = int(self._rng.choice([1, 2, 3, len(blocks) + 1]))
        scratch = np.empty(n * words, np.uint32)
        scratch.fill(0xDEADBEEF)
        status = np.full(len(blocks), 0xEE, np.uint8)
        compact = bool(self._rng.integers(2))
        self._call(
            "kv_host_decode_blocks_compact" if compact else "kv_host_decode_blocks",
            structs.BLOCK_ARGUMENTS,
            blocks=blocks,
            n_blocks=len(blocks),
            streams=streams,
            components=components,
            order=order,
            slots=tables.slots,
            compact=tables.compact if compact else 0,
            sources=sources,
            targets=targets,
            rotations=rotations,
            status=status,
            shared_words=shared,
            scratch=scratch,
            scratch_words=words,
            n_warps=n,
        )
        del keep
        return status

    def run_fib_blocks(
        self,
        books,
        blocks,
        streams,
        order,
        channels,
        payloads,
        outputs,
        types,
        ropes,
        n_threads,
        level,
    ):
        """Decode FibQuant blocks as the kernels do; the arguments are those of the core."""
        keep, sources, rotations = self._uploads(payloads, ropes)
        blocks = np.frombuffer(blocks, ROW_DTYPE)
        streams = np.frombuffer(streams, VECTOR_STREAM_DTYPE)
        shapes = _shapes(payloads, outputs, ropes)
        _core.check_fib_blocks(books, blocks, streams, order, channels, *shapes)
        heads = streams["heads"][blocks["stream"]].astype(np.int64)
        pieces = heads * -(-(blocks["stop"] - blocks["skip"]).astype(np.int64) // 16)
        marks = -(-heads * blocks["n_tokens"] // 32)
        spans = np.zeros(len(blocks), structs.SPAN)
        spans["first_piece"] = np.cumsum(pieces) - pieces
        spans["first_mark"] = np.cumsum(marks) - marks
        table = np.zeros(len(books), structs.BOOK)
        for row, book in zip(table, books, strict=True):
            rotation, codewords = book.rotation_data, book.codewords
            keep += [rotation, codewords]
            power = 1 << (book.d.bit_length() - 1)
            row["rotation"], row["codewords"] = rotation.ctypes.data, codewords.ctypes.data
            row["rotation_kind"], row["power"], row["factor"] = book.rotation, power, power**-0.5
            for name in ("d", "k", "n_codewords", "index_bits", "index_bytes"):
                row[name] = getattr(book, name)
        sizes = 8 * streams["head_dim"][blocks["stream"]]
        # All in shared memory, none, or the smaller ones.
        shared = int(self._rng.choice([0, sizes.min(initial=0), sizes.max(initial=0)]))
        words = int(sizes.max(initial=0)) if sizes.max(initial=0) > shared else 0
        n = int(self._rng.choice([1, 2, 3, int(pieces.sum()) + 1]))
        scratch = np.full(n * words + 4, 0xDEADBEEF, np.uint32)
        scratch = scratch[-scratch.ctypes.data // 4 % 4 :]  # what the kernels load at once
        contents = np.full(len(blocks) * structs.CONTENTS_BYTES // 8, 0xA5A5A5A5, np.uint64)
        found = np.full(int(marks.sum()), 0xA5A5A5A5A5, np.uint64)
        status = np.full(int(pieces.sum()), 0xEE, np.uint8)
        for kernel in ("kv_host_look_through_payloads", "kv_host_decode_vectors"):
            self._call(
                kernel,
                structs.VECTOR_ARGUMENTS,
                blocks=blocks,
                n_blocks=len(blocks),
                streams=streams,
                books=table,
                order=order,
                channels=channels,
                sources=sources,
                targets=as_targets(outputs, types),
                rotations=rotations,
                spans=spans,
                contents=contents,
                marks=found,
                status=status,
                n_pieces=len(status),
                shared_words=shared,
                scratch=scratch,
                scratch_words=words,
                n_warps=n,
            )
        del keep
        worst = np.zeros(len(blocks), np.uint8)
        np.maximum.at(worst, np.repeat(np.arange(len(blocks)), pieces), status)
        return worst

    def _uploads(self, payloads, ropes):
        """Copy payloads, at even and odd addresses, with nothing behind; rows that point there."""
        sources = np.zeros(len(payloads), structs.SOURCE)
        keep = []
        for row, payload in zip(sources, payloads, strict=True):
            data = np.frombuffer(payload, np.uint8)
            at = int(self._rng.integers(2))
            copy = np.empty(at + data.size, np.uint8)
            copy[at:] = data
            keep.append(copy)
            row["bytes"], row["n_bytes"] = copy.ctypes.data + at, data.size
        rotations = np.zeros(len(ropes), structs.ROTATION)
        for row, (cos, sin) in zip(rotations, ropes, strict=True):
            row["cos"], row["sin"], row["pairs"] = cos.ctypes.data, sin.ctypes.data, cos.shape[1]
        return keep, sources, rotations

    def _call(self, name, dtype, **fields):
        arguments = np.zeros(1, dtype)
        for field, value in fields.items():
            arguments[field] = value.ctypes.data if isinstance(value, np.ndarray) else value
        getattr(self._library, name)(ctypes.c_void_p(arguments.ctypes.data))


def _shapes(payloads, outputs, ropes):
    return (
        np.array([len(memoryview(p).cast("B")) for p in payloads], np.uint64),
        np.array([out.shape for out in outputs], np.uint64).reshape(-1, 3),
        np.array([cos.shape for cos, _ in ropes], np.uint64).reshape(-1, 2),
    )


class CheckedKernels:
    """Run the kernels and the core: the same statuses, the same bits of all that decodes."""

    def __init__(self, kernels: HostKernels) -> None:
        self._kernels = kernels
        self._run_lanes, self._run_blocks = _core.run_lanes, _core.run_blocks
        self._run_fib_blocks = _core.run_fib_blocks
        self.n_compared = 0
        self.statuses: set[int] = set()

    def run_lanes(
        self, prior, lanes, channels, classes, payloads, outputs, types, ropes, *rest, **k
    ):
        given = (prior, lanes, channels, classes, payloads)
        expected = _fresh(outputs)
        with self._refusing(self._kernels.run_lanes, *given, outputs, types, ropes, *rest):
            core = self._run_lanes(*given, expected, types, ropes, *rest, **k)
        status = self._kernels.run_lanes(*given, outputs, types, ropes, *rest)
        self._compare_status(status, core)
        channels = np.frombuffer(channels, CHANNEL_DTYPE)
        for lane in np.frombuffer(lanes, LANE_DTYPE)[status == 0]:
            first, width = int(lane["channels"]), int(lane["width"])
            rows = slice(int(lane["row"]), int(lane["row"] + lane["n_tokens"] - lane["skip"]))
            where = int(lane["head"]), rows, channels["output"][first : first + width]
            self._compare(outputs, expected, int(lane["output"]), where)
        return status

    def run_blocks(
        self,
        tables,
        blocks,
        streams,
        mean,
        rho,
        classes,
        order,
        payloads,
        outputs,
        types,
        ropes,
        *rest,
    ):
        given = (tables, blocks, streams, mean, rho, classes, order, payloads)
        expected = _fresh(outputs)
        with self._refusing(self._kernels.run_blocks, *given, outputs, types, ropes, *rest):
            core = self._run_blocks(*given, expected, types, ropes, *rest)
        status = self._kernels.run_blocks(*given, outputs, types, ropes, *rest)
        self._compare_status(status, core)
        streams = np.frombuffer(streams, STREAM_DTYPE)
        for block in np.frombuffer(blocks, BLOCK_DTYPE)[status == 0]:
            stream = streams[block["stream"]]
            rows = slice(int(block["row"]), int(block["row"] + block["stop"] - block["skip"]))
            first = int(stream["order"])
            where = slice(int(stream["heads"])), rows, order[first : first + stream["head_dim"]]
            self._compare(outputs, expected, int(block["output"]), where)
        return status

    def run_fib_blocks(
        self, books, blocks, streams, order, channels, payloads, outputs, types, ropes, *rest
    ):
        given = (books, blocks, streams, order, channels, payloads)
        expected = _fresh(outputs)
        with self._refusing(self._kernels.run_fib_blocks, *given, outputs, types, ropes, *rest):
            core = self._run_fib_blocks(*given, expected, types, ropes, *rest)
        status = self._kernels.run_fib_blocks(*given, outputs, types, ropes, *rest)
        self._compare_status(status, core)
        streams = np.frombuffer(streams, VECTOR_STREAM_DTYPE)
        for block in np.frombuffer(blocks, ROW_DTYPE)[status == 0]:
            stream = streams[block["stream"]]
            rows = slice(int(block["row"]), int(block["row"] + block["stop"] - block["skip"]))
            first = int(stream["order"])
            where = slice(int(stream["heads"])), rows, order[first : first + stream["head_dim"]]
            self._compare(outputs, expected, int(block["output"]), where)
        return status

    @contextmanager
    def _refusing(self, run, *arguments):
        """Refuse what the core refuses."""
        try:
            yield
        except InvalidArgument as error:
            with pytest.raises(InvalidArgument, match=re.escape(str(error))):
                run(*arguments)
            raise

    def _compare_status(self, status, core):
        np.testing.assert_array_equal(status, core)
        self.statuses |= set(status.tolist())

    def _compare(self, outputs, expected, at, where):
        bits = np.dtype(f"u{outputs[at].itemsize}")
        found, wanted = outputs[at][where].view(bits), expected[at][where].view(bits)
        np.testing.assert_array_equal(found, wanted)
        self.n_compared += found.size


def _fresh(outputs):
    return [np.zeros(out.shape, out.dtype) for out in outputs]
