"""What a session needs of its archive, read and checked value by value, as it is stored.

For whoever moves or compares sessions without decoding them: every frame is checked (checksum and
place), since damage must not move on in silence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvcodecs.errors import Corrupt, KvError
from kvcodecs.frame import open_frame, open_frames
from kvcodecs.plan import available_cpus

from .. import keys
from ..backend import Snapshot
from ..catalog import Catalog
from ..identity import Model
from ..pieces import Piece, all_pieces
from ..reader import Reader
from ..receipts import checked_receipts
from ..session_record import SessionRecord, StreamName
from ..shared_objects import needs_of, objects_of
from ..sharing import Claim, claims_of
from ..token_ids import read_id_chunk

#: About how many bytes are on their way at a time.
BATCH_BYTES: Final = 16 << 20
# Frames asked for at a time, at most; how many depends on how large they have been so far.
_MOST_FRAMES: Final = 1024


@dataclass(frozen=True, slots=True)
class Item:
    """A session as its archive has it.

    Attributes
    ----------
    value
        Its record as stored.
    where
        Archive and session, for messages.
    claims
        What it needs of which owner.
    receipts
        Its receipts as stored, by key.
    """

    name: str
    value: bytes
    record: SessionRecord
    model: Model
    where: str
    claims: dict[int, Claim]
    receipts: Mapping[bytes, bytes] = field(default_factory=dict)


class Stored(NamedTuple):
    """A value that has been read and checked: the view is valid while its snapshot is."""

    key: bytes
    value: memoryview

    @property
    def owner(self) -> int:
        return int.from_bytes(self.key[1:9], "big")

    @property
    def is_frame(self) -> bool:
        return self.key[:1] in (keys.FRAME, keys.TAIL, keys.HEAD)

    @property
    def is_object(self) -> bool:
        """Whether it is an object that stream headers share, which belongs to no owner."""
        return self.key[:1] == keys.SHARED

    @property
    def is_numbered(self) -> bool:
        """Whether it is one of many of its stream or owner: a frame of a block, a chunk of ids."""
        return self.key[:1] in (keys.FRAME, keys.TOKENS)


def load_item(snapshot: Snapshot, catalog: Catalog, name: str) -> Item:
    """Read a session's record."""
    record = catalog.record(snapshot, name, fresh=True)
    value = bytes(snapshot.get(keys.session_key(name)) or b"")
    model = catalog.model(snapshot, record.model)
    where = f"{catalog.path}: session {name!r}"
    return make_item(name, value, record, model, where, checked_receipts(snapshot, record, where))


def make_item(
    name: str,
    value: bytes,
    record: SessionRecord,
    model: Model,
    where: str,
    receipts: Mapping[bytes, bytes] | None = None,
) -> Item:
    """Return a session with this record, which is stored as `value`."""
    return Item(name, value, record, model, where, claims_of(record), receipts or {})


class Ranges:
    """Sets of whole numbers that mostly come in runs: a few bytes for each run."""

    def __init__(self) -> None:
        self._runs: dict[bytes, list[list[int]]] = {}

    def add(self, key: bytes) -> None:
        """Add a key: what it ends in is its number."""
        runs = self._runs.setdefault(key[:-8], [])
        number = int.from_bytes(key[-8:], "big")
        at = bisect_right(runs, [number, 1 << 64])
        if at and runs[at - 1][1] >= number:
            runs[at - 1][1] = max(runs[at - 1][1], number + 1)
        else:
            runs.insert(at, [number, number + 1])
        if at < len(runs) and at and runs[at - 1][1] == runs[at][0]:
            runs[at - 1][1] = runs.pop(at)[1]

    def __contains__(self, key: bytes) -> bool:
        if len(key) < 17:  # no number at its end
            return False
        runs = self._runs.get(key[:-8], [])
        number = int.from_bytes(key[-8:], "big")
        at = bisect_right(runs, [number, 1 << 64])
        return bool(at) and number < runs[at - 1][1]


def values_of(
    snapshot: Snapshot, item: Item, stream: StreamName, skip: Callable[[bytes], bool]
) -> Iterator[list[Stored]]:
    """Yield what a session needs of a stream, checked, a few MB at a time.

    Raises
    ------
    Truncated, Corrupt, Unsupported
        A value is missing, damaged or of another place; the message says which.
    """
    reader = Reader(item.model, item.where)
    layer, kind = stream
    headers = []
    for owner, claim in item.claims.items():
        key = keys.stream_key(keys.HEADER, owner, layer, kind)
        if stream in claim.headers and not skip(key):
            reader.coding(snapshot, owner, layer, kind)
            header = _stored(snapshot, key, item.where)
            where = f"{item.where} layer {layer} {kind} header"
            objects = objects_of(snapshot, needs_of(header.value, where), where)
            headers += [*(Stored(*found) for found in objects.items()), header]
    if headers:
        yield headers
    pieces, n = all_pieces(item.record, layer, kind), 1
    while chosen := _next(pieces, n, skip):
        snapshot.prefetch([key for piece in chosen for key in piece.keys])
        found = _checked(snapshot, reader, chosen)
        yield found
        n_bytes = sum(value.nbytes for _, value in found)
        n = min(max(BATCH_BYTES * len(found) // max(n_bytes, 1), 1), _MOST_FRAMES)


def ids_of(snapshot: Snapshot, item: Item, skip: Callable[[bytes], bool]) -> Iterator[list[Stored]]:
    """Yield the chunks of token ids that a session needs, as `values_of` does."""
    for owner, claim in item.claims.items():
        for first, stop in claim.chunks:
            found = []
            for chunk in range(first, stop):
                key = keys.tokens_key(owner, chunk)
                if not skip(key):
                    read_id_chunk(snapshot, item.record, chunk, item.where)
                    found.append(_stored(snapshot, key, item.where))
            if found:
                yield found


def _next(pieces: Iterator[Piece], n: int, skip: Callable[[bytes], bool]) -> list[Piece]:
    """Return the next `n` pieces that are not there, if there are so many."""
    chosen: list[Piece] = []
    for piece in pieces:
        if not any(skip(key) for key in piece.keys):
            chosen.append(piece)
            if len(chosen) == n:
                break
    return chosen


def _checked(snapshot: Snapshot, reader: Reader, pieces: list[Piece]) -> list[Stored]:
    wheres = [f"{reader.where} {piece.name}" for piece in pieces]
    found = [_of_piece(snapshot, piece, where) for piece, where in zip(pieces, wheres, strict=True)]
    try:
        opened = open_frames([value for _, value in found], wheres, available_cpus())
        for piece, (header, _), where in zip(pieces, opened, wheres, strict=True):
            reader._check_place(snapshot, piece, piece.layer, piece.kind, header, where)
    except KvError:
        # What is wrong with the first frame in order, and the advice that goes with it.
        for piece in pieces:
            reader.open(snapshot, piece, piece.layer, piece.kind)
        raise
    return found


def _of_piece(snapshot: Snapshot, piece: Piece, where: str) -> Stored:
    """Return what is stored of a frame; of one that may be in two places the right one."""
    for key in piece.keys[:-1]:
        value = snapshot.get(key)
        if value is not None:
            header, _ = open_frame(value, where)
            if header.first_token == piece.first_token - piece.offset:
                return Stored(key, value)
    return _stored(snapshot, piece.keys[-1], where)


def _stored(snapshot: Snapshot, key: bytes, where: str) -> Stored:
    value = snapshot.get(key)
    if value is None:
        raise Corrupt(f"{where}: missing; the archive has lost a value, restore a copy")
    return Stored(key, value)
