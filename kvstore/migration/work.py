"""The work on one session that is migrated: move or code its streams, and read them again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from kvcodecs.errors import KvError
from kvcodecs.plan import available_cpus

from .. import keys
from ..backend import Snapshot, Transaction
from ..passing import Passing
from ..pieces import count_frames
from ..session_record import SessionRecord, StreamName, StreamState, check_record
from ..sharing import free
from ..token_ids import Ids
from .moving import Mover, Target, compare
from .needed import Item, Ranges, ids_of, make_item, values_of
from .plan import Plan
from .publishing import indexed_ids
from .recoding import recode_ids, recode_stream, recoded_record, recoding_receipt, whole_stream

Progress: TypeAlias = Callable[[int, int], object]


@dataclass(slots=True)
class Migrated:
    """What a migration has done.

    Attributes
    ----------
    moved
        Names of the sessions whose blocks were moved as they are coded.
    recoded
        Those that were coded anew.
    flattened
        Those of `moved` and `recoded` that stand alone now: in another format, which has nothing
        that sessions share, or coded anew after they shared frames or had a raw head.
    skipped
        Those that were there already.
    n_bytes
        Bytes written, keys not counted.
    verified
        Whether all that was written was read again.
    seconds
        How long it took.
    """

    moved: list[str] = field(default_factory=list)
    recoded: list[str] = field(default_factory=list)
    flattened: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    n_bytes: int = 0
    verified: bool = False
    seconds: float = 0.0

    @property
    def names(self) -> list[str]:
        """All sessions asked for, which the target has now."""
        return sorted([*self.moved, *self.recoded, *self.skipped])


class Meter:
    """Tells how much is done; threads may share it."""

    def __init__(self, progress: Progress | None, n_frames: int) -> None:
        self._progress, self._n_frames = progress, n_frames
        # To know how many bytes there are takes as long as to read them: how many frames there are
        # the records say.
        self._n_done = self._n_met = self._n_bytes = 0
        self._lock = threading.Lock()

    def add(self, n_frames: int, n_bytes: int) -> None:
        """Note frames of the source that are done; those of no bytes were done before."""
        with self._lock:
            self._n_done += n_frames
            self._n_met += n_frames if n_bytes else 0
            self._n_bytes += n_bytes
            n_left = max(self._n_frames - self._n_done, 0)
            n_total = self._n_bytes + self._n_bytes * n_left // max(self._n_met, 1)
            if self._progress is not None:
                self._progress(self._n_bytes, n_total)

    def finish(self) -> None:
        """Note that all is done."""
        self.add(max(self._n_frames - self._n_done, 0), 0)


class Elsewhere(Protocol):
    """Does the work on streams in other processes, which have the same snapshot of a session."""

    @property
    def n_ahead(self) -> int:
        """How many sessions may be under way."""
        ...

    def start(self, item: Item) -> None:
        """Begin to move a session."""
        ...

    def move(self, item: Item) -> int:
        """Wait until a session has been moved, and compared where that is wanted."""
        ...

    def recode(
        self, item: Item, new: SessionRecord, streams: Sequence[StreamName]
    ) -> dict[StreamName, tuple[StreamState, int]]:
        """Code streams anew."""
        ...

    def end(self) -> None:
        """Note that there is no more to do."""
        ...


class Migration:
    """What adding to an archive and building one have in common.

    Parameters
    ----------
    workers
        Threads that code streams; None for one per CPU.
    elsewhere
        Who does the work on streams, if not this process.
    """

    def __init__(
        self,
        plan: Plan,
        target: Target,
        *,
        resume: bool,
        verify: bool,
        workers: int | None,
        progress: Progress | None,
        elsewhere: Elsewhere | None,
    ) -> None:
        self.plan, self.target, self.done = plan, target, Migrated(verified=verify)
        self.resume, self.verify = resume, verify
        self._workers = workers or available_cpus()
        self.elsewhere = elsewhere
        self.meter = Meter(progress, plan.n_frames * (2 if verify else 1))
        advance = self.meter.add
        self.mover = Mover(plan.snapshot, target, plan.shared, resume, advance)
        self._seen = Ranges()

    def move(self, item: Item) -> None:
        """Move the values of a session; some may wait in the mover."""
        if self.elsewhere is None:
            self.mover.move(item, item.record.streams, ids=True)
        else:
            settle_homes(self.mover, item)
            n_bytes = self.elsewhere.move(item)
            self.done.n_bytes += n_bytes
            self.meter.add(count_frames(item.record) * (2 if self.verify else 1), n_bytes)

    def compare(self, item: Item) -> None:
        """Compare what was moved of a session, all of it flushed, with the source."""
        if self.elsewhere is None:
            backend, shared = self.target.backend, self.plan.shared
            compare(self.plan.snapshot, backend, item, shared, self._seen, self.meter.add)

    def recode(self, item: Item) -> tuple[Item, Ids | None]:
        """Code a session anew, and read it again; return what it becomes, and its ids."""
        codecs = self.plan.codecs or item.record.codecs
        new = recoded_record(item, codecs)
        where = f"{self.target.backend.path}: session {item.name!r}"
        # Hours of coding should not end with a record that cannot be published.
        fixed = {name: replace(state, has_header=True) for name, state in new.streams.items()}
        check_record(replace(new, streams=fixed), item.name, item.model, where)
        states: dict[StreamName, StreamState] = {}
        if self.resume:
            with self.target.backend.read() as there:
                for stream in new.streams:
                    state = whole_stream(there, new, stream)
                    if state is not None:
                        states[stream] = state
        todo = [stream for stream in new.streams if stream not in states]
        if self.elsewhere is None:
            coded = self._recode_here(item, new, todo)
        else:
            # The first one here: as `settle_homes`.
            coded = self._recode_here(item, new, todo[:1])
            coded |= self.elsewhere.recode(item, new, todo[1:])
            self.meter.add(count_frames(item.record), 0)
        for stream, (state, n_bytes) in coded.items():
            states[stream] = state
            self.done.n_bytes += n_bytes
        self.done.n_bytes += recode_ids(self.plan.snapshot, item, new, self.target)
        new = replace(new, streams={stream: states[stream] for stream in new.streams})
        with self.target.backend.read() as there:
            receipts = recoding_receipt(self.plan.snapshot, item, there, new, where)
        made = make_item(item.name, new.pack(item.name), new, item.model, where, receipts)
        if self.verify:
            with self.target.backend.read() as there:
                check_values(there, made)
            self.meter.add(count_frames(item.record), 0)
        return made, indexed_ids(self.plan.snapshot, item)

    def _recode_here(
        self, item: Item, new: SessionRecord, streams: Sequence[StreamName]
    ) -> dict[StreamName, tuple[StreamState, int]]:
        snapshot = SharedSnapshot(self.plan.snapshot)
        n_workers = max(1, min(self._workers, len(streams)))

        def code(stream: StreamName) -> tuple[StreamState, int]:
            size = new.streams[stream].block_tokens
            told = told_bytes = 0

            def advance(n_tokens: int, n_bytes: int) -> None:
                nonlocal told, told_bytes
                n = -(-n_tokens // size)
                self.meter.add(n - told, n_bytes - told_bytes)
                told, told_bytes = n, n_bytes

            n_threads = 1 if n_workers > 1 else self._workers
            return recode_stream(
                snapshot, item, new, stream, self.target, advance=advance, n_threads=n_threads
            )

        if n_workers == 1:
            return {stream: code(stream) for stream in streams}
        with ThreadPoolExecutor(n_workers) as pool:
            try:
                return dict(zip(streams, pool.map(code, streams), strict=True))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def note_recoded(self, item: Item) -> None:
        """Count a session that was coded anew."""
        self.done.recoded.append(item.name)
        record = item.record
        if record.parts or record.id_parts or any(s.n_head for s in record.streams.values()):
            self.done.flattened.append(item.name)

    @property
    def n_bytes(self) -> int:
        """Bytes stored so far."""
        return self.done.n_bytes + self.mover.n_bytes

    def finish(self) -> Migrated:
        """Return what was done."""
        self.done.n_bytes += self.mover.n_bytes
        self.meter.finish()
        return self.done


class SharedSnapshot:
    """A snapshot that threads share: one of them reads at a time."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot, self._lock = snapshot, threading.Lock()

    def get(self, key: bytes) -> memoryview | None:
        """See `Snapshot.get`."""
        with self._lock:
            return self._snapshot.get(key)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
        """See `Snapshot.scan`; all of it at once."""
        with self._lock:
            found = list(self._snapshot.scan(prefix))
        yield from found

    def sizes(self, prefix: bytes) -> Iterator[tuple[bytes, int]]:
        """See `Snapshot.sizes`; all of them at once."""
        with self._lock:
            found = list(self._snapshot.sizes(prefix))
        yield from found

    def prefetch(self, keys: Iterable[bytes]) -> None:
        """See `Snapshot.prefetch`."""
        with self._lock:
            self._snapshot.prefetch(keys)

    def at_or_after(self, key: bytes) -> bytes | None:
        """See `Snapshot.at_or_after`."""
        with self._lock:
            return self._snapshot.at_or_after(key)

    def before(self, key: bytes) -> bytes | None:
        """See `Snapshot.before`."""
        with self._lock:
            return self._snapshot.before(key)

    def zarr_group(self, owner: int) -> str | None:
        """See `Snapshot.zarr_group`."""
        with self._lock:
            return self._snapshot.zarr_group(owner)

    def release(self, view: memoryview) -> None:
        """See `Snapshot.release`."""
        self._snapshot.release(view)


def first_frames(item: Item) -> Iterator[tuple[int, bytes]]:
    """Yield the owners of a session that have frames, and the key of the first that it needs."""
    for owner, claim in item.claims.items():
        for stream, blocks in claim.blocks.items():
            yield owner, keys.frame_key(owner, *stream, blocks[0][0])
            break


def settle_homes(mover: Mover, item: Item) -> None:
    """Move one frame of each owner: a backend that keeps frames with their session learns here
    which that is, from the lease that this process holds.
    """
    waiting = [
        (key, bytes(value))
        for owner, key in first_frames(item)
        if not mover.is_used(owner) and (value := mover.source.get(key)) is not None
    ]

    def store(transaction: Transaction) -> None:
        for key, value in waiting:
            transaction.put(key, value)

    if waiting:
        mover.target.write(store, n_bytes=sum(len(value) for _, value in waiting))


def check_values(snapshot: Snapshot, item: Item) -> None:
    """Read and check all values of a session, which need not be published.

    Raises
    ------
    Truncated, Corrupt, Unsupported
        As `values_of`.
    """

    def skip(key: bytes) -> bool:
        return False

    passing = Passing(snapshot)
    batches = [values_of(snapshot, item, stream, skip) for stream in item.record.streams]
    for of_stream in (*batches, ids_of(snapshot, item, skip)):
        for batch in of_stream:
            for _, value in batch:
                passing.add(value)
    passing.release()


def remove(target: Target, owners: Iterable[int], cause: BaseException) -> None:
    """Remove what was moved of a session that is not published; if that fails, say so."""
    try:
        target.write(lambda transaction: free(transaction, target.catalog, owners))
    except KvError as error:
        cause.add_note(f"the frames moved so far stay until Archive.gc(): {error}")
