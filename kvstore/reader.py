"""From a token range to values: which frames cover it, are they what they should be, decode.

Every frame of a range is checked before the first output byte is written. The cost depends on
the range alone: frames are found by key, never by searching. FORMAT.md sections 4 and 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from kvcodecs.codec import BlockCodec, codec_by_number
from kvcodecs.errors import Corrupt, InvalidArgument, Truncated
from kvcodecs.frame import (
    ErrorStats,
    FrameHeader,
    header_tag,
    open_frame,
    open_record,
)
from kvcodecs.plan import Plan
from kvcodecs.raw import Raw
from kvcodecs.rope import Rope, RopeTable, to_coded
from kvcodecs.spec import F32, Kind, KState, StreamSpec

from . import keys
from .backend import Passing, Snapshot
from .forklock import ForkLock
from .identity import Model
from .pieces import Piece, pieces
from .records import HEADER_MAGIC, SessionRecord, located

# Payloads and RoPE tables that are at hand at a time: mapped pages count as memory once touched.
_BATCH_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Coding:
    """How a stream's frames are decoded: its codec and header, or raw for its head."""

    codec: BlockCodec
    params: Any
    tag: int


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens ``[start, stop)`` of one stream, and the output for them."""

    layer: int
    kind: Kind
    start: int
    stop: int
    out: npt.NDArray[Any]


class Reader:
    """Reads streams of one session. Safe to use from many threads.

    Parameters
    ----------
    model
        The session's.
    owner
        Under which its frames are stored.
    where
        Prefix of error messages: archive and session.
    """

    def __init__(self, model: Model, owner: int, where: str) -> None:
        self.model, self.owner, self.where = model, owner, where
        # Headers are fixed once, so what was read stays true.
        self._codings: dict[tuple[int, Kind], Coding] = {}
        self._lock = ForkLock()
        self._n_frames = 0
        self._raw: dict[StreamSpec, Coding] = {}

    @property
    def n_frames_read(self) -> int:
        """Frames decoded by `read` so far."""
        return self._n_frames

    def coding(self, snapshot: Snapshot, layer: int, kind: Kind) -> Coding:
        """Return how the blocks of a stream with a header are decoded."""
        found = self._codings.get((layer, kind))
        if found is None:
            number, header = self.header(snapshot, layer, kind)
            codec = codec_by_number(number)
            with located(f"{self.where} layer {layer} {kind} header"):
                params = codec.unpack(self.model.stream(layer, kind), header)
            found = Coding(codec, params, header_tag(header))
            self._codings[layer, kind] = found
        return found

    def header(self, snapshot: Snapshot, layer: int, kind: Kind) -> tuple[int, bytes]:
        """Return codec number and header of a stream; a copy."""
        where = f"{self.where} layer {layer} {kind} header"
        value = snapshot.get(keys.stream_key(keys.HEADER, self.owner, layer, kind))
        if value is None:
            raise Corrupt(f"{where}: missing")
        body = bytes(open_record(HEADER_MAGIC, value, where))
        if not body:
            raise Corrupt(f"{where}: empty")
        return body[0], body[1:]

    def open(
        self, snapshot: Snapshot, piece: Piece, layer: int, kind: Kind
    ) -> tuple[Coding, FrameHeader, memoryview]:
        """Return a checked frame: coding, header and a view of the payload.

        Raises
        ------
        Truncated, Corrupt, Unsupported
            The frame is missing, damaged, or not the one that belongs here.
        """
        where = f"{self.where} {piece.name}"
        value = snapshot.get(piece.key)
        if value is None:
            raise _missing(where)
        try:
            header, payload = open_frame(value, where)
        except (Corrupt, Truncated) as error:
            raise type(error)(f"{error}; restore a copy of the archive, or do without") from error
        coding = self._coding_of(snapshot, piece, layer, kind)
        for what, found, expected in (
            ("owner", header.owner, self.owner),
            ("layer", header.layer, layer),
            ("kind", header.kind, kind),
            ("first token", header.first_token, piece.first_token),
            ("number of tokens", header.n_tokens, piece.n_tokens),
            ("codec", header.codec, coding.codec.number),
            ("stream header tag", header.header_tag, coding.tag),
        ):
            if found != expected:
                raise Corrupt(
                    f"{where}: another frame is stored here: {what} {found}, expected {expected}"
                )
        return coding, header, payload

    def check_end(
        self, snapshot: Snapshot, record: SessionRecord, layer: int, kind: Kind, stop: int
    ) -> None:
        """Check that the frame of the last token before `stop` exists, before memory is taken.

        Raises
        ------
        Corrupt
            It does not: the record promises tokens that are not there.
        """
        state = record.streams[layer, kind]
        first = max(stop - 1, state.start)
        for piece in pieces(self.owner, layer, kind, state, record.n_tokens, first, stop):
            if snapshot.get(piece.key) is None:
                raise _missing(f"{self.where} {piece.name}")

    def read(
        self,
        snapshot: Snapshot,
        record: SessionRecord,
        requests: Sequence[Request],
        k_state: KState,
        n_threads: int | None,
    ) -> None:
        """Check every frame of the requests, then decode them into their outputs.

        Raises
        ------
        Truncated, Corrupt, Unsupported
            Found while checking: outputs are untouched. A payload that passes its checksum and
            still does not decode leaves them undefined.
        InvalidArgument
            A value beyond the range of a float16 output.
        """
        todo = [
            (request, piece)
            for request in requests
            for piece in pieces(
                self.owner,
                request.layer,
                request.kind,
                record.streams[request.layer, request.kind],
                record.n_tokens,
                request.start,
                request.stop,
            )
        ]
        batches: list[list[tuple[Request, Piece, Coding, memoryview, Rope | None]]] = [[]]
        n_batch = 0
        passing = Passing(snapshot)
        for request, piece in todo:
            coding, _, payload = self.open(snapshot, piece, request.layer, request.kind)
            passing.add(payload)
            n_bytes = payload.nbytes
            rope = coding.params.spec.rope if k_state == "post" else None
            if rope is not None:
                n_bytes += 2 * 4 * rope.n_pairs * (piece.stop - piece.start)
            if n_batch and n_batch + n_bytes > _BATCH_BYTES:
                batches.append([])
                n_batch = 0
            batches[-1].append((request, piece, coding, payload, rope))
            n_batch += n_bytes
        many = len(batches) > 1  # a short range is read once and stays mapped
        if many:
            passing.release()
        tables = _Tables()
        for batch in batches:
            plan = Plan()
            for request, piece, coding, payload, rope in batch:
                table = None if rope is None else tables.get(rope, piece.start, piece.stop)
                lo, hi = piece.start - request.start, piece.stop - request.start
                out = request.out[:, lo:hi]
                self._schedule(plan, piece, coding, payload, out, table)
                if many:
                    passing.add(payload)
            plan.run(n_threads)
            if many:
                passing.release()
        with self._lock:
            self._n_frames += len(todo)

    def decode(
        self, snapshot: Snapshot, piece: Piece, layer: int, kind: Kind
    ) -> tuple[F32, ErrorStats, str]:
        """Decode one whole frame to the coded domain.

        Returns
        -------
        coded : (heads, n_tokens, head_dim) float32
        error
            As measured when it was coded.
        dtype
            What a raw frame stores its values in; "float32" for others.
        """
        coding, header, payload = self.open(snapshot, piece, layer, kind)
        whole = replace(piece, start=piece.first_token, stop=piece.first_token + piece.n_tokens)
        spec = coding.params.spec
        out = np.empty((spec.heads, piece.n_tokens, spec.head_dim), np.float32)
        plan = Plan()
        self._schedule(plan, whole, coding, payload, out, None)
        plan.run(1)
        dtype = "float32"
        if piece.raw:
            dtype = codec_by_number(0).unpack(spec, bytes(payload[:1])).dtype.name
        return to_coded(out, spec, "pre"), header.error, dtype

    def _schedule(
        self,
        plan: Plan,
        piece: Piece,
        coding: Coding,
        payload: memoryview,
        out: npt.NDArray[Any],
        table: RopeTable | None,
    ) -> None:
        where = f"{self.where} {piece.name}"
        with located(where):
            plan.add(
                coding.codec,
                coding.params,
                payload,
                first_token=piece.first_token,
                n_tokens=piece.n_tokens,
                start=piece.start,
                stop=piece.stop,
                out=out,
                rope=table,
                where=where,
            )

    def _coding_of(self, snapshot: Snapshot, piece: Piece, layer: int, kind: Kind) -> Coding:
        if not piece.raw:
            return self.coding(snapshot, layer, kind)
        spec = self.model.stream(layer, kind)
        if spec not in self._raw:
            codec = codec_by_number(0)
            self._raw[spec] = Coding(codec, codec.fit(Raw(), spec, lambda: ()), 0)
        return self._raw[spec]


def _missing(where: str) -> Corrupt:
    return Corrupt(f"{where}: missing; the archive has lost a frame, restore a copy")


class _Tables:
    """RoPE tables of one read, shared by the layers; the oldest go when there are many."""

    def __init__(self) -> None:
        self._tables: dict[tuple[Rope, int, int], RopeTable] = {}
        self._n_bytes = 0

    def get(self, rope: Rope, start: int, stop: int) -> RopeTable:
        """Return the table of positions ``[start, stop)``."""
        span = (rope, start, stop)
        table = self._tables.get(span)
        if table is None:
            table = self._tables[span] = rope.table(start, stop)
            self._n_bytes += _n_bytes(table)
            while self._n_bytes > _BATCH_BYTES and len(self._tables) > 1:
                self._n_bytes -= _n_bytes(self._tables.pop(next(iter(self._tables))))
        return table


def _n_bytes(table: RopeTable) -> int:
    return table.cos.nbytes + table.sin.nbytes


def check_range(
    record: SessionRecord,
    layer: int,
    kind: Kind,
    start: int,
    stop: int | None,
    where: str,
    n_appended: int | None = None,
) -> tuple[int, int]:
    """Return a token range that can be read.

    Raises
    ------
    InvalidArgument
        Not a range, or beyond what is committed, or before the stream's first token.
    """
    n = record.n_tokens
    stop = n if stop is None else stop
    what = f"{where} layer {layer} {kind}: tokens [{start}, {stop})"
    if not 0 <= start <= stop:
        raise InvalidArgument(f"{what} are not a range")
    if stop > n:
        more = ""
        if n_appended is not None and n_appended > n:
            more = f" of {n_appended} appended; commit first"
        raise InvalidArgument(f"{what}: {n} tokens are committed{more}")
    first = record.streams[layer, kind].start
    if start < min(first, stop):
        raise InvalidArgument(f"{what}: this layer has a window and starts at token {first}")
    return start, stop
