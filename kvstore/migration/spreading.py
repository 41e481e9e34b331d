"""Migrations whose streams the workers of a Dask cluster move and code; the client publishes.

Workers write frames that no record names yet, through the backend, as the client would. Each opens
the source itself: what it finds of a session must be what the client found. Nothing of Dask is
imported before it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from socket import gethostname
from typing import Any, Final

from kvcodecs.codec import CodecConfig
from kvcodecs.errors import InvalidArgument, Locked, NotFound, Unsupported
from kvcodecs.spec import Kind

from ..catalog import Catalog
from ..opening import open as open_archive
from ..pieces import count_frames
from ..place import Place, open_backend
from ..session_record import SessionRecord, StreamName, StreamState
from .moving import Mover, Target, compare
from .needed import Item, Ranges, load_item
from .recoding import recode_stream, recoded_record
from .work import first_frames

#: Frames of a session that are worth a task of their own.
_FRAMES_A_TASK: Final = 256
_CONNECT_SECONDS: Final = 10
#: Sessions that are under way for each worker.
_AHEAD: Final = 4


@dataclass(frozen=True, slots=True)
class Ends:
    """Where sessions come from and go to, as workers open both.

    Attributes
    ----------
    source_options
        Of `kvstore.open`.
    backend_options
        Of `open_backend`, for an archive that is being built.
    archive_options
        Of `kvstore.open`, for one that is there; None for one that is being built.
    """

    source: str
    target: str
    source_options: Mapping[str, Any]
    backend_options: Mapping[str, Any]
    archive_options: Mapping[str, Any] | None
    timeout: float

    @contextmanager
    def open(self, name: str, value: bytes) -> Iterator[tuple[Mover, Item]]:
        """Open both; yield what moves values between them, and the session.

        Raises
        ------
        Locked
            The session is not what the client found.
        """
        options = {"snapshot_seconds": math.inf, **self.source_options}
        with (
            open_archive(self.source, **options) as source,
            source._read() as snapshot,
            self._open_target() as target,
        ):
            item = load_item(snapshot, Catalog(source.path), name)
            if item.value != value:
                raise Locked(
                    f"{item.where}: has changed since the migration began; go on with resume=True"
                )
            mover = Mover(snapshot, target, resume=True)
            yield mover, item

    @contextmanager
    def _open_target(self) -> Iterator[Target]:
        if self.archive_options is not None:
            with open_archive(self.target, "a", **self.archive_options) as archive:
                yield Target(archive._backend, archive._catalog, archive._room, archive._timeout)
            return
        folder = Place.of(self.target).folder
        if folder is not None and not folder.is_dir():
            raise NotFound(f"{self.target}: not there on {gethostname()}, where a worker runs")
        backend = open_backend(self.target, "a", **self.backend_options)
        try:
            yield Target(backend, Catalog(backend.path), None, self.timeout)
        finally:
            backend.close()


def move_streams(
    ends: Ends,
    name: str,
    value: bytes,
    streams: Sequence[StreamName],
    ids: bool,
    verify: bool,
    keep: frozenset[int],
) -> int:
    """Move streams of a session, and compare them; return the bytes. Runs in a worker."""
    with ends.open(name, value) as (mover, item):
        mover.target.moved.update(keep)
        if ends.archive_options is not None:
            mover.begin(item)
        _check_place(mover, item, ends)
        mover.move(item, streams, ids=ids)
        mover.flush()
        if verify:
            backend = mover.target.backend
            compare(mover.source, backend, item, (), Ranges(), _ignore, streams=streams, ids=ids)
        return mover.n_bytes


def recode(
    ends: Ends,
    name: str,
    value: bytes,
    codecs: Mapping[Kind, CodecConfig],
    stream: StreamName,
    keep: frozenset[int],
) -> tuple[StreamState, int]:
    """Code a stream of a session anew. Runs in a worker."""
    with ends.open(name, value) as (mover, item):
        mover.target.moved.update(keep)
        new = recoded_record(item, codecs)
        return recode_stream(
            mover.source, item, new, stream, mover.target, advance=_ignore, n_threads=1
        )


def _check_place(mover: Mover, item: Item, ends: Ends) -> None:
    """Make sure that this worker writes to where the client looks: its first frames are there."""
    with mover.target.backend.read() as there:
        for _, key in first_frames(item):
            if mover.source.get(key) is not None and there.get(key) is None:
                raise NotFound(
                    f"{ends.target}: of worker {gethostname()} is another one than the client's; "
                    "workers must reach both archives under the same names"
                )


def _ignore(n_frames: int, n_bytes: int) -> None:
    pass


class Cluster:
    """The workers of a Dask cluster.

    Raises
    ------
    Unsupported
        Dask is not installed.
    InvalidArgument
        No scheduler answers.
    """

    def __init__(self, scheduler: str) -> None:
        try:
            # By name: whoever checks types may not have it.
            self._dask: Any = import_module("distributed")
        except ImportError as error:
            raise Unsupported(
                f"{scheduler}: Dask is not installed; pip install 'kvstore[dask]'"
            ) from error
        try:
            self._client = self._dask.Client(
                scheduler, timeout=_CONNECT_SECONDS, set_as_default=False
            )
        except (OSError, ValueError, TypeError) as error:
            raise InvalidArgument(f"{scheduler}: no Dask scheduler answers: {error}") from error
        self._scheduler = scheduler

    @property
    def n_workers(self) -> int:
        """How many tasks run at a time."""
        return max(1, sum(int(n) for n in self._client.nthreads().values()))

    def submit(self, work: Callable[..., Any], *args: Any) -> Any:
        """Let a worker do something; the same arguments again are done again."""
        return self._client.submit(work, *args, pure=False)

    def results(self, futures: Sequence[Any]) -> list[Any]:
        """Wait for what workers return; raises what they raise.

        Raises
        ------
        Locked
            Workers died of it again and again, or the scheduler went away.
        """
        dask = self._dask
        lost = dask.KilledWorker, dask.CancelledError, dask.comm.CommClosedError
        try:
            return list(self._client.gather(list(futures)))
        except lost as error:
            raise Locked(
                f"{self._scheduler}: workers of the cluster were lost: {error}; go on with "
                "resume=True"
            ) from error

    def close(self) -> None:
        """Let go of the cluster, and of what it still has to do."""
        self._client.close()


@dataclass(slots=True)
class Spread:
    """Lets a cluster do the work on streams of one migration."""

    cluster: Cluster
    ends: Ends
    verify: bool
    #: Ids of sessions that have come in; see `Target`.
    moved: set[int]
    _futures: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def n_ahead(self) -> int:
        """How many sessions may be under way."""
        return _AHEAD * self.cluster.n_workers

    def start(self, item: Item) -> None:
        """Begin to move a session."""
        streams = list(item.record.streams)
        n_tasks = min(len(streams), 1 + count_frames(item.record) // _FRAMES_A_TASK)
        groups = [streams[i::n_tasks] for i in range(n_tasks)]
        keep = frozenset(self.moved)
        self._futures[item.name] = [
            self.cluster.submit(
                move_streams, self.ends, item.name, item.value, group, i == 0, self.verify, keep
            )
            for i, group in enumerate(groups)
        ]

    def move(self, item: Item) -> int:
        """Wait until a session has been moved; return the bytes."""
        if item.name not in self._futures:
            self.start(item)
        return sum(self.cluster.results(self._futures.pop(item.name)))

    def recode(
        self, item: Item, new: SessionRecord, streams: Sequence[StreamName]
    ) -> dict[StreamName, tuple[StreamState, int]]:
        """Code streams anew."""
        keep = frozenset(self.moved)
        futures = [
            self.cluster.submit(recode, self.ends, item.name, item.value, new.codecs, stream, keep)
            for stream in streams
        ]
        return dict(zip(streams, self.cluster.results(futures), strict=True))
