"""From a token range to values: which frames cover it, are they what they should be, decode.

Every frame of a range is checked before the first output byte is written. The cost depends on
the range alone: frames are found by key, never by searching. FORMAT.md sections 4 and 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from kvcodecs.codec import codec_by_number
from kvcodecs.errors import Corrupt, KvError, Truncated, Unsupported
from kvcodecs.frame import (
    ErrorStats,
    FrameHeader,
    header_tag,
    open_frame,
    open_frames,
    open_record,
)
from kvcodecs.plan import Plan, available_cpus, check_payload
from kvcodecs.raw import Raw
from kvcodecs.rope import Rope, RopeTable, to_coded
from kvcodecs.spec import F32, Kind, KState, StreamSpec

from . import keys
from .backend import Snapshot
from .codings import MOST_OWNERS, Coding, Codings
from .destination import Destination, Host
from .forklock import ForkLock
from .identity import Model
from .passing import Passing
from .pieces import Piece, pieces
from .records import HEADER_MAGIC, located
from .session_record import SessionRecord, StreamName
from .shared_objects import objects_in
from .stored_frame import first_value

# Frames that are checked at a time: mapped pages count as memory once touched.
_CHECK_BYTES: Final = 16 << 20
# RoPE tables that a walk over one stream after the other keeps.
_TABLE_BYTES: Final = 16 << 20
# Frames that are announced to the backend at a time.
_MOST_AHEAD: Final = 256


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens ``[start, stop)`` of one stream, and the output for them.

    `out` is an array of the host, or what a `Destination` views one of a device as.
    """

    layer: int
    kind: Kind
    start: int
    stop: int
    out: Any


class Reader:
    """Reads streams of one session. Safe to use from many threads.

    Parameters
    ----------
    model
        The session's.
    where
        Prefix of error messages: archive and session.
    codings
        Of the archive; None for a reader that takes nothing on trust.
    """

    def __init__(self, model: Model, where: str, codings: Codings | None = None) -> None:
        self.model, self.where = model, where
        self._codings = Codings() if codings is None else codings
        # Those of the archive that this reader has met: found without a lock for every frame.
        self._owners: dict[int, dict[StreamName, Coding]] = {}
        self._lock = ForkLock()
        self._n_frames = 0
        self._raw: dict[StreamSpec, Coding] = {}

    @property
    def n_frames_read(self) -> int:
        """Frames decoded by `read` so far."""
        return self._n_frames

    def coding(self, snapshot: Snapshot, owner: int, layer: int, kind: Kind) -> Coding:
        """Return how the blocks that an owner stores of a stream are decoded."""
        codings = self._owners.get(owner)
        if codings is None:
            codings = self._codings.of(self.model, owner)
            if len(self._owners) >= MOST_OWNERS:
                self._owners.clear()
            self._owners[owner] = codings
        found = codings.get((layer, kind))
        if found is None:
            number, header = self.header(snapshot, owner, layer, kind)
            codec = codec_by_number(number)
            where = f"{self.where} layer {layer} {kind} header"
            with located(where):
                spec = self.model.stream(layer, kind)
                params = codec.unpack(spec, header, objects_in(snapshot, where))
            found = Coding(codec, params, header_tag(header))
            codings[layer, kind] = found
        return found

    def header(self, snapshot: Snapshot, owner: int, layer: int, kind: Kind) -> tuple[int, bytes]:
        """Return codec number and header of an owner's stream; a copy."""
        where = f"{self.where} layer {layer} {kind} header"
        value = snapshot.get(keys.stream_key(keys.HEADER, owner, layer, kind))
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
        value = first_value(snapshot, piece, where)
        if value is None:
            raise _missing(where)
        try:
            header, payload = open_frame(value, where)
        except (Corrupt, Truncated) as error:
            raise type(error)(f"{error}; restore a copy of the archive, or do without") from error
        return self._check_place(snapshot, piece, layer, kind, header, where), header, payload

    def _check_place(
        self,
        snapshot: Snapshot,
        piece: Piece,
        layer: int,
        kind: Kind,
        header: FrameHeader,
        where: str,
    ) -> Coding:
        """Check that a frame is the one that belongs here; return how it is decoded."""
        coding = self._coding_of(snapshot, piece, layer, kind)
        n_tokens = piece.n_tokens if piece.exact else max(piece.n_tokens, header.n_tokens)
        is_right = (
            header.owner == piece.owner
            and header.layer == layer
            and header.kind == kind
            and header.first_token == piece.first_token - piece.offset
            and header.n_tokens == n_tokens
            and header.codec == coding.codec.number
            and header.header_tag == coding.tag
            and not header.unplaced
        )
        if is_right:
            return coding
        for what, found, expected in (
            ("unplaced", header.unplaced, False),
            ("owner", header.owner, piece.owner),
            ("layer", header.layer, layer),
            ("kind", header.kind, kind),
            ("first token", header.first_token, piece.first_token - piece.offset),
            ("number of tokens", header.n_tokens, n_tokens),
            ("codec", header.codec, coding.codec.number),
            ("stream header tag", header.header_tag, coding.tag),
        ):
            if found != expected:
                raise Corrupt(
                    f"{where}: another frame is stored here: {what} {found}, expected {expected}"
                )
        return coding

    def open_all(
        self,
        snapshot: Snapshot,
        todo: Sequence[tuple[Request, Piece]],
        k_state: KState,
        n_threads: int,
    ) -> Iterator[list[Work]]:
        """Yield frames checked as `open` does, about `_CHECK_BYTES` at a time, in order.

        Whoever decodes them says so to `note_read`.
        """
        start = stop = 0
        ahead = 0 if len(todo) > 1 else 1
        while stop < len(todo):
            frames: list[memoryview] = []
            wheres: list[str] = []
            works: list[Work] = []
            n_bytes = 0
            try:
                while stop < len(todo) and n_bytes < _CHECK_BYTES:
                    if stop == ahead:
                        ahead += _MOST_AHEAD
                        self._announce(snapshot, todo[stop:ahead])
                    piece = todo[stop][1]
                    stop += 1
                    where = f"{self.where} {piece.name}"
                    value = first_value(snapshot, piece, where)
                    if value is None:
                        raise _missing(where)
                    frames.append(value)
                    wheres.append(where)
                    n_bytes += value.nbytes
                opened = open_frames(frames, wheres, n_threads)
                for i, (header, payload) in enumerate(opened, start):
                    request, piece = todo[i]
                    where = wheres[i - start]
                    coding = self._check_place(
                        snapshot, piece, request.layer, request.kind, header, where
                    )
                    rope = coding.params.spec.rope if k_state == "post" else None
                    works.append(
                        Work(request, piece, coding, header.n_tokens, payload, rope, where)
                    )
            except (Corrupt, Truncated, Unsupported):
                # What is wrong with the first frame in order, whichever check found something.
                for request, piece in todo[start:stop]:
                    self.open(snapshot, piece, request.layer, request.kind)
                raise
            yield works
            start = stop

    def _announce(self, snapshot: Snapshot, todo: Sequence[tuple[Request, Piece]]) -> None:
        """Say which frames and stream headers are read next: they may have a long way."""
        wanted = [key for _, piece in todo for key in piece.keys]
        streams = {(piece.owner, piece.layer, piece.kind) for _, piece in todo if not piece.raw}
        for owner, layer, kind in streams:
            if (layer, kind) not in self._owners.get(owner, ()):
                wanted.append(keys.stream_key(keys.HEADER, owner, layer, kind))
        snapshot.prefetch(wanted)

    def check_end(
        self, snapshot: Snapshot, record: SessionRecord, layer: int, kind: Kind, stop: int
    ) -> None:
        """Check that the frame of the last token before `stop` is whole, before memory is taken.

        Raises
        ------
        Truncated, Corrupt, Unsupported
            It is not, or is missing: the record promises tokens that are not there.
        """
        first = max(stop - 1, record.streams[layer, kind].start, record.first)
        for piece in pieces(record, layer, kind, first, stop):
            self._open_whole(snapshot, piece, layer, kind)

    def read(
        self,
        snapshot: Snapshot,
        record: SessionRecord,
        requests: Sequence[Request],
        k_state: KState,
        n_threads: int | None,
        position_offset: int = 0,
        into: Destination | None = None,
    ) -> None:
        """Check every frame of the requests, then decode them into their outputs.

        K after RoPE is rotated for positions shifted by `position_offset`. The outputs are of
        `into`, or of the host.

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
            for piece in pieces(record, request.layer, request.kind, request.start, request.stop)
        ]
        into = into or Host()
        checked: list[Work] = []
        many = False  # a short range is read once and stays mapped
        passing = Passing(snapshot)
        for works in self.open_all(snapshot, todo, k_state, n_threads or available_cpus()):
            checked += works
            many = many or len(checked) < len(todo)
            if many:
                for work in works:
                    passing.add(work.payload)
            passing.release()
        batches = _batches(checked, into.batch_bytes)
        many = many or len(batches) > 1
        tables = Tables(into.batch_bytes)
        with into.queue(n_threads) as queue:
            for batch in batches:
                plan = Plan()
                for work in batch:
                    self.schedule(plan, work, tables, position_offset)
                queue.add(plan)
                if many:
                    for work in batch:
                        passing.add(work.payload)
                    passing.release()
        self.note_read(len(todo))

    def decode(self, snapshot: Snapshot, piece: Piece, layer: int, kind: Kind) -> Decoded:
        """Decode tokens ``[start, stop)`` of a piece to the coded domain."""
        coding, header, payload = self._open_whole(snapshot, piece, layer, kind)
        spec, n_tokens = coding.params.spec, piece.stop - piece.start
        out = np.empty((spec.heads, n_tokens, spec.head_dim), np.float32)
        request = Request(layer, kind, piece.start, piece.stop, out)
        plan = Plan()
        where = f"{self.where} {piece.name}"
        work = Work(request, piece, coding, header.n_tokens, payload, None, where)
        self.schedule(plan, work, Tables(), 0)
        plan.run(1)
        dtype = "float32"
        if piece.raw:
            dtype = codec_by_number(0).unpack(spec, bytes(payload[:1])).dtype.name
        error = header.error.share(n_tokens, header.n_tokens)
        return Decoded(to_coded(out, spec, "pre"), error, dtype, payload)

    def _open_whole(
        self, snapshot: Snapshot, piece: Piece, layer: int, kind: Kind
    ) -> tuple[Coding, FrameHeader, memoryview]:
        """Open a frame whose payload can hold the tokens that it claims."""
        coding, header, payload = self.open(snapshot, piece, layer, kind)
        where = f"{self.where} {piece.name}"
        check_payload(
            coding.codec, coding.params, payload, header.first_token, header.n_tokens, where
        )
        return coding, header, payload

    def note_read(self, n_frames: int) -> None:
        """Count frames that were decoded."""
        with self._lock:
            self._n_frames += n_frames

    def schedule(self, plan: Plan, work: Work, tables: Tables, position_offset: int) -> None:
        """Put the decoding of a frame into a plan: into the output of its request."""
        piece = work.piece
        # The codec counts tokens as they were when the frame was written.
        start, stop = piece.start - piece.offset, piece.stop - piece.offset
        table = None
        if work.rope is not None:
            shift = piece.offset + position_offset
            table = tables.get(work.rope, start + shift, stop + shift)._replace(first_token=start)
        lo, hi = piece.start - work.request.start, piece.stop - work.request.start
        try:
            plan.add(
                work.coding.codec,
                work.coding.params,
                work.payload,
                first_token=piece.first_token - piece.offset,
                n_tokens=work.n_tokens,
                start=start,
                stop=stop,
                out=work.request.out[:, lo:hi],
                rope=table,
                where=work.where,
            )
        except KvError:
            with located(work.where):
                raise

    def _coding_of(self, snapshot: Snapshot, piece: Piece, layer: int, kind: Kind) -> Coding:
        if not piece.raw:
            return self.coding(snapshot, piece.owner, layer, kind)
        spec = self.model.stream(layer, kind)
        if spec not in self._raw:
            codec = codec_by_number(0)
            self._raw[spec] = Coding(codec, codec.fit(Raw(), spec, lambda: ()), 0)
        return self._raw[spec]


class Decoded(NamedTuple):
    """Tokens of a frame, decoded.

    Attributes
    ----------
    coded : (heads, n_tokens, head_dim) float32
        Coded domain.
    error
        As measured when they were coded. Of a part of a frame, its share of the sum of squares: an
        estimate; the largest error stays a bound.
    dtype
        What a raw frame stores its values in; "float32" for others.
    payload
        Of the whole frame, as stored; valid as long as the snapshot.
    """

    coded: F32
    error: ErrorStats
    dtype: str
    payload: memoryview


class Work(NamedTuple):
    """One frame to decode, checked: what of it goes where."""

    request: Request
    piece: Piece
    coding: Coding
    n_tokens: int
    payload: memoryview
    rope: Rope | None
    where: str


def _batches(works: Iterable[Work], limit: int) -> list[list[Work]]:
    """Return what plans of at most `limit` bytes decode.

    Payloads count, and RoPE tables: once where blocks share them.
    """
    batches: list[list[Work]] = [[]]
    n_bytes, spans = 0, set[tuple[Rope, int, int]]()
    for work in works:
        n_payload, n_table = work.payload.nbytes, 0
        if work.rope is not None:
            span = (work.rope, work.piece.start, work.piece.stop)
            n_table = 2 * 4 * work.rope.n_pairs * (work.piece.stop - work.piece.start)
        n_new = 0 if n_table and span in spans else n_table
        if n_bytes and n_bytes + n_payload + n_new > limit:
            batches.append([])
            n_bytes, n_new = 0, n_table
            spans.clear()
        batches[-1].append(work)
        n_bytes += n_payload + n_new
        if n_table:
            spans.add(span)
    return batches


def _missing(where: str) -> Corrupt:
    return Corrupt(f"{where}: missing; the archive has lost a frame, restore a copy")


class Tables:
    """RoPE tables of one read, shared by the layers; the oldest go when there are many."""

    def __init__(self, limit: int = _TABLE_BYTES) -> None:
        self._limit = limit
        self._tables: dict[tuple[Rope, int, int], RopeTable] = {}
        self._n_bytes = 0

    def get(self, rope: Rope, start: int, stop: int) -> RopeTable:
        """Return the table of positions ``[start, stop)``."""
        span = (rope, start, stop)
        table = self._tables.get(span)
        if table is None:
            table = self._tables[span] = rope.table(start, stop)
            self._n_bytes += _n_bytes(table)
            while self._n_bytes > self._limit and len(self._tables) > 1:
                self._n_bytes -= _n_bytes(self._tables.pop(next(iter(self._tables))))
        return table


def _n_bytes(table: RopeTable) -> int:
    return table.cos.nbytes + table.sin.nbytes
