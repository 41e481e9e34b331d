"""Moving sessions between backends as stored: frames, headers and ids as bytes, none decoded.

Owners keep their ids, so that a frame is the same bytes in both archives, and forks stay forks:
what several sessions share is moved once. What names a session is left to `publishing`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from kvcodecs.errors import Corrupt, InvalidArgument, Locked

from .. import keys
from ..backend import Backend, Snapshot, Transaction
from ..catalog import Catalog
from ..passing import Passing
from ..pieces import all_pieces
from ..room import Room
from ..session_record import SessionRecord, StreamName
from ..shared_objects import put_all
from ..token_ids import CHUNK_TOKENS
from ..users import users_of
from .needed import BATCH_BYTES, Item, Ranges, Stored, ids_of, values_of

T = TypeVar("T")
#: Takes frames and bytes that are done.
Advance: TypeAlias = Callable[[int, int], None]


class Target:
    """Where sessions go.

    Parameters
    ----------
    room
        Of an archive that is open: its quota holds, and may evict others. None where there is no
        archive yet.
    timeout
        Seconds that a write waits for other writers.
    """

    def __init__(
        self, backend: Backend, catalog: Catalog, room: Room | None, timeout: float
    ) -> None:
        self.backend, self.catalog = backend, catalog
        self._room, self._timeout = room, timeout
        #: Ids of sessions that have come in, which are not evicted for those that follow.
        self.moved: set[int] = set()

    def write(self, work: Callable[[Transaction], T], *, n_bytes: int = 0) -> T:
        """Run `work` in a transaction and commit it; it may run more than once."""
        if self._room is not None:
            return self._room.write(work, keep=self.moved, n_bytes=n_bytes)
        with self.backend.write(self._timeout) as transaction:
            return work(transaction)


@dataclass(slots=True)
class _Use:
    """Who uses an owner in the target: sessions that were there before.

    Attributes
    ----------
    appender
        Name and record of the session that appends to it, if any does.
    """

    names: list[str]
    appender: tuple[str, SessionRecord] | None = None


@dataclass(slots=True)
class Mover:
    """Moves the values of sessions from one snapshot into a target.

    Attributes
    ----------
    shared
        Owners that several of the sessions use: what is moved of them is remembered.
    resume
        Whether frames that are there with the right length, left by a migration that was killed,
        are taken for what they should be.
    advance
        Called with frames and bytes that are done.
    """

    source: Snapshot
    target: Target
    shared: frozenset[int] = frozenset()
    resume: bool = False
    advance: Advance = lambda n_frames, n_bytes: None
    n_bytes: int = 0
    _runs: Ranges = field(default_factory=Ranges)
    _singles: set[bytes] = field(default_factory=set)
    _uses: dict[int, _Use] = field(default_factory=dict)
    _waiting: list[Stored] = field(default_factory=list)
    _n_waiting: int = 0

    def begin(self, item: Item) -> dict[int, int]:
        """Look at what the target has of a session's owners.

        Returns
        -------
        dict
            The number by which the lease of each owner goes, of those that may get more values.

        Raises
        ------
        InvalidArgument
            The session is there under another name.
        """
        self._uses, leases = {}, {}
        with self.target.backend.read() as there:
            for owner in item.claims:
                leases[owner] = owner
                users = users_of(there, owner)
                if not users:
                    continue
                use = self._uses[owner] = _Use([user.name for user in users])
                for user in users:
                    if user.id == item.record.id:
                        raise InvalidArgument(
                            f"{self.target.backend.path}: has {item.where.partition(': ')[2]} "
                            f"already, as {user.name!r}; delete one of them"
                        )
                    record = self.target.catalog.record(there, user.name)
                    if record.owner == owner:
                        use.appender = user.name, record
                        leases[owner] = record.id
        return leases

    def move(self, item: Item, streams: Iterable[StreamName], *, ids: bool) -> None:
        """Move what a session needs of some streams, and its token ids."""
        for stream in streams:
            there = self._present(item, stream)
            for batch in values_of(self.source, item, stream, self._was_moved):
                self._put(item, batch, there)
        if ids:
            for batch in ids_of(self.source, item, self._was_moved):
                self._put(item, batch, {})

    def _present(self, item: Item, stream: StreamName) -> dict[bytes, int]:
        """Return the frames of a stream that an earlier try left, and their lengths."""
        if not self.resume:
            return {}
        with self.target.backend.read() as there:
            return {
                key: n
                for owner in item.claims
                for key, n in there.sizes(keys.stream_key(keys.FRAME, owner, *stream))
            }

    def _was_moved(self, key: bytes) -> bool:
        """Whether this mover has moved a value already, for another session."""
        if int.from_bytes(key[1:9], "big") not in self.shared:
            return False
        known = key in (self._runs if key[:1] in (keys.FRAME, keys.TOKENS) else self._singles)
        if known:
            self.advance(1, 0)
        return known

    def _put(self, item: Item, batch: list[Stored], there: dict[bytes, int]) -> None:
        """Store a batch together with what waits, or let it wait: a few MB to a transaction."""
        objects: list[Stored] = []
        for stored in self._unlike(item, batch):
            if stored.is_object:
                objects.append(stored)  # in one transaction with the header that follows
            elif there.get(stored.key) != stored.value.nbytes:
                known = {key for key, _ in self._waiting} if objects else ()
                new = [*(found for found in objects if found.key not in known), stored]
                self._waiting += new
                self._n_waiting += sum(found.value.nbytes for found in new)
                objects = []
                if self._n_waiting >= BATCH_BYTES:
                    self.flush()
        for stored in batch:
            if stored.owner in self.shared:
                if stored.is_numbered:
                    self._runs.add(stored.key)
                else:
                    self._singles.add(stored.key)
            self.advance(stored.is_frame, stored.value.nbytes)

    def flush(self, more: Callable[[Transaction], None] = lambda transaction: None) -> None:
        """Store what waits, and in the same transaction what `more` has to store."""
        waiting, n_bytes = self._waiting, self._n_waiting

        def store(transaction: Transaction) -> None:
            put_all(transaction, waiting)
            more(transaction)

        self.target.write(store, n_bytes=n_bytes)
        self.n_bytes += n_bytes
        passing = Passing(self.source)
        for _, value in waiting:
            passing.add(value)
        passing.release()
        self._waiting, self._n_waiting = [], 0

    def forget(self) -> None:
        """Drop what waits, and what is remembered of values that are removed again."""
        self._waiting, self._n_waiting = [], 0
        self._runs, self._singles = Ranges(), set()

    def is_used(self, owner: int) -> bool:
        """Whether sessions of the target use an owner of the session that was begun last."""
        return owner in self._uses

    @property
    def waits(self) -> bool:
        """Whether anything waits for `flush`."""
        return bool(self._waiting)

    def check_there(self, transaction: Transaction, item: Item) -> None:
        """Make sure that what others might have deleted meanwhile is there.

        Raises
        ------
        Locked
            It is not.
        """
        for owner in self._uses:
            claim = item.claims[owner]
            found = {
                key for p in keys.OWNED for key, _ in transaction.sizes(keys.owner_prefix(p, owner))
            }
            wanted = [keys.stream_key(keys.HEADER, owner, *stream) for stream in claim.headers]
            wanted += [
                keys.tokens_key(owner, chunk) for lo, hi in claim.chunks for chunk in range(lo, hi)
            ]
            places: list[tuple[bytes, ...]] = [(key,) for key in wanted]
            for stream in claim.heads | claim.headers:
                pieces = all_pieces(item.record, *stream)
                places += [piece.keys for piece in pieces if piece.owner == owner]
            if not all(any(key in found for key in place) for place in places):
                raise Locked(
                    f"{self.target.backend.path}: sessions that share frames with {item.name!r} "
                    "were deleted meanwhile; try again"
                )

    def _unlike(self, item: Item, batch: list[Stored]) -> Iterator[Stored]:
        """Yield what is not there, of owners that others use in the target.

        Raises
        ------
        InvalidArgument
            The target has something else there, or may get it.
        """
        if not any(stored.owner in self._uses for stored in batch):
            yield from batch
            return
        with self.target.backend.read() as there:
            for stored in batch:
                use = self._uses.get(stored.owner)
                if use is None:
                    yield stored
                    continue
                found = there.get(stored.key)
                if found is not None:
                    if bytes(found) != bytes(stored.value):
                        raise self._clash(item, stored, use, "other frames")
                elif use.appender is None or _is_final(use.appender[1], stored.key):
                    yield stored
                else:
                    raise self._clash(item, stored, use, "fewer frames")

    def _clash(self, item: Item, stored: Stored, use: _Use, what: str) -> InvalidArgument:
        return InvalidArgument(
            f"{item.where}: shares frames of owner {stored.owner:016x}, of which "
            f"{self.target.backend.path} has {what}, for session {use.names[0]!r}; migrate the "
            "sessions that share frames together, into an archive that has none of them"
        )


def _is_final(record: SessionRecord, key: bytes) -> bool:
    """Whether the appender of an owner has stored a value for good, so that it never changes."""
    parsed = keys.parse(key)
    index = parsed.index or 0
    if parsed.prefix == keys.TOKENS:
        return index < record.n_tokens // CHUNK_TOKENS
    if parsed.layer is None or parsed.kind is None:
        return False
    state = record.streams[parsed.layer, parsed.kind]
    if parsed.prefix == keys.FRAME:
        return state.has_header and index < (record.n_tokens - state.start) // state.block_tokens
    return state.has_header and parsed.prefix in (keys.HEADER, keys.HEAD)


def compare(
    source: Snapshot,
    backend: Backend,
    item: Item,
    shared: Collection[int],
    seen: Ranges,
    advance: Advance,
    *,
    streams: Iterable[StreamName] | None = None,
    ids: bool = True,
) -> int:
    """Compare every value that a session needs with what a backend has; return their bytes.

    Parameters
    ----------
    shared, seen
        Owners that other sessions use too, and what has been compared of them for these.
    streams, ids
        Which streams, None for all; and whether the token ids as well.

    Raises
    ------
    Corrupt
        Another value, or none; the message says which.
    """
    n_bytes = 0

    def skip(key: bytes) -> bool:
        known = key in seen
        if known:
            advance(1, 0)
        return known

    chosen = item.record.streams if streams is None else streams
    batches = [values_of(source, item, stream, skip) for stream in chosen]
    for of_stream in (*batches, *((ids_of(source, item, skip),) if ids else ())):
        for batch in of_stream:
            with backend.read() as there:
                there.prefetch([key for key, _ in batch])
                _compare(there, batch, item, backend.path)
            passing = Passing(source)
            for stored in batch:
                n_bytes += stored.value.nbytes
                advance(stored.is_frame, stored.value.nbytes)
                passing.add(stored.value)
                if stored.owner in shared and stored.is_numbered:
                    seen.add(stored.key)
            passing.release()
    return n_bytes


def _compare(there: Snapshot, batch: list[Stored], item: Item, path: str) -> None:
    passing = Passing(there)
    for key, value in batch:
        found = there.get(key)
        if found is None or bytes(found) != bytes(value):
            what = "is missing" if found is None else "differs"
            raise Corrupt(f"{path}: {_spot(key)} of {item.where} {what} after it was written")
        passing.add(found)
    passing.release()


def _spot(key: bytes) -> str:
    parsed = keys.parse(key)
    names = {
        keys.FRAME: "block",
        keys.HEADER: "header",
        keys.HEAD: "head",
        keys.TAIL: "tail",
        keys.TOKENS: "token ids chunk",
        keys.SHARED: "a shared object",
    }
    stream = "" if parsed.layer is None else f"layer {parsed.layer} {parsed.kind} "
    number = "" if parsed.index is None else f" {parsed.index}"
    return f"{stream}{names[parsed.prefix]}{number}"
