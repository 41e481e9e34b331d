"""Migrations whose streams the workers of a Dask cluster move and code; the client publishes.

Workers write frames that no record names yet, through the backend, as the client would. Each opens
the source itself: what it finds of a session must be what the client found. Nothing of Dask is
imported before it is asked for.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from socket import gethostname
from typing import Any, Final

from kvcodecs.codec import CodecConfig
from kvcodecs.errors import InvalidArgument, Locked, NotFound, Unsupported
from kvcodecs.spec import Kind

from ..pieces import count_frames
from ..session_record import SessionRecord, StreamName, StreamState
from .ends import Ends, close_idle
from .interpreter import keep_from_freezing
from .moving import Mover, compare
from .needed import Item, Ranges
from .recoding import recode_stream, recoded_record
from .work import first_frames

#: Frames of a session that are worth a task of their own.
_FRAMES_A_TASK: Final = 256
_CONNECT_SECONDS: Final = 10
#: How often it is looked whether workers live, after how long a silent one is given up, and after
#: how long a cluster without any.
_LOOK_SECONDS = 2.0
_SILENT_SECONDS = 60.0
_NOBODY_SECONDS = 300.0
#: How long workers may take to close archives.
_CLOSE_SECONDS: Final = 5.0
#: Into how many tasks for each worker the streams of a session go that is coded anew.
_TASKS_OF_WORKER: Final = 4
#: Sessions that are under way for each worker.
_AHEAD: Final = 4


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
    keep_from_freezing()
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
    streams: Sequence[StreamName],
    keep: frozenset[int],
) -> list[tuple[StreamState, int]]:
    """Code streams of a session anew. Runs in a worker."""
    keep_from_freezing()
    with ends.open(name, value) as (mover, item):
        mover.target.moved.update(keep)
        new = recoded_record(item, codecs)
        return [
            recode_stream(
                mover.source, item, new, stream, mover.target, advance=_ignore, n_threads=1
            )
            for stream in streams
        ]


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
        keep_from_freezing()
        try:
            # A client that cannot make out the address waits for itself when it is collected.
            self._dask.comm.resolve_address(scheduler)
            self._client = self._dask.Client(
                scheduler, timeout=_CONNECT_SECONDS, set_as_default=False
            )
        except (OSError, ValueError, TypeError) as error:
            raise InvalidArgument(f"{scheduler}: no Dask scheduler answers: {error}") from error
        self._scheduler = scheduler
        #: When a worker last told that it lives, and when that was noticed here: clocks differ.
        self._heard: dict[str, tuple[object, float]] = {}
        self._somebody = time.monotonic()

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
            Workers died of it again and again, one does not answer, there are none, or the
            scheduler went away.
        """
        dask = self._dask
        lost = dask.KilledWorker, dask.CancelledError, dask.comm.CommClosedError
        try:
            left = list(futures)
            while left and not any(future.status == "error" for future in futures):
                try:
                    left = self._wait(left, _LOOK_SECONDS, "FIRST_COMPLETED")
                except TimeoutError:
                    self._check_workers({future.key for future in left})
            return list(self._client.gather(list(futures)))
        except lost as error:
            raise Locked(
                f"{self._scheduler}: workers of the cluster were lost: {error}; go on with "
                "resume=True"
            ) from error
        except BaseException:
            self._client.cancel(list(futures))  # while they are held by the error
            raise

    def _wait(self, futures: list[Any], seconds: float, until: str) -> list[Any]:
        """Return the futures that are not done; `TimeoutError` if nothing happened."""
        with self._client.as_current():
            return list(self._dask.wait(futures, seconds, until).not_done)

    def _check_workers(self, keys: set[object]) -> None:
        """Raise `Locked` if tasks wait for workers that do not live."""
        now = time.monotonic()
        seen = self._last_seen()
        for address, when in seen.items():
            if address not in self._heard or self._heard[address][0] != when:
                self._heard[address] = when, now
        if seen:
            self._somebody = now
        elif now - self._somebody > _NOBODY_SECONDS:
            raise Locked(
                f"{self._scheduler}: the cluster has had no workers for {_NOBODY_SECONDS:g} s; "
                "start some, and go on with resume=True"
            )
        silent = [a for a in seen if now - self._heard[a][1] > _SILENT_SECONDS]
        for address in silent:
            n_tasks = len(keys.intersection(self._client.processing().get(address, ())))
            if n_tasks:
                raise Locked(
                    f"{self._scheduler}: worker {address} has {n_tasks} of the tasks and has not "
                    f"been heard of for {_SILENT_SECONDS:g} s; end it, and go on with resume=True"
                )

    def _last_seen(self) -> dict[str, object]:
        ask = self._client.scheduler_info
        options = {"n_workers": -1} if "n_workers" in inspect.signature(ask).parameters else {}
        return {address: of["last_seen"] for address, of in ask(**options)["workers"].items()}

    def everywhere(self, work: Callable[..., Any], *args: Any) -> None:
        """Let every worker do something; does not wait long, nor for who cannot."""
        with suppress(TimeoutError, OSError, self._dask.CancelledError):
            futures = [
                self._client.submit(work, *args, pure=False, workers=[address])
                for address in self._last_seen()
            ]
            if futures:
                self._wait(futures, _CLOSE_SECONDS, "ALL_COMPLETED")

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

    def end(self) -> None:
        """Let workers close what they have open for it."""
        self._futures.clear()
        self.cluster.everywhere(close_idle, self.ends.run)

    def move(self, item: Item) -> int:
        """Wait until a session has been moved; return the bytes."""
        if item.name not in self._futures:
            self.start(item)
        return sum(self.cluster.results(self._futures.pop(item.name)))

    def recode(
        self, item: Item, new: SessionRecord, streams: Sequence[StreamName]
    ) -> dict[StreamName, tuple[StreamState, int]]:
        """Code streams anew."""
        n_tasks = min(len(streams), _TASKS_OF_WORKER * self.cluster.n_workers)
        groups = [streams[i::n_tasks] for i in range(n_tasks)]
        keep = frozenset(self.moved)
        futures = [
            self.cluster.submit(recode, self.ends, item.name, item.value, new.codecs, group, keep)
            for group in groups
        ]
        done: dict[StreamName, tuple[StreamState, int]] = {}
        for group, states in zip(groups, self.cluster.results(futures), strict=True):
            done.update(zip(group, states, strict=True))
        return done
