"""Moving sessions from one archive to another, whatever backends the two have.

With the codec that a session has its frames move byte for byte (`moving`); for another one it is
decoded and coded anew (`recoding`). All of it is of one snapshot of the source. An archive that is
there gets one whole session after the other (`adding`); a new one is built under another name, or
without the record that makes it an archive (`building`), and appears when all of it is there and
has been read again. Killed at any point, it goes on where it was when it is asked to resume.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

from kvcodecs.errors import InvalidArgument, KvError, NotFound
from kvcodecs.plan import check_threads

from ..archive import Archive
from ..backend import check_timeout
from ..catalog import Catalog
from ..layout import Codecs, check_configs
from ..opening import open as open_archive
from ..place import MEMORY_PREFIX, Place, open_backend
from .adding import Adding
from .building import Building
from .destination import check_apart, move_into_place, partial_folder
from .moving import Target
from .plan import Plan
from .work import Elsewhere, Migrated, Progress

#: Options of `kvstore.open` that are not the backend's.
_NOT_OF_BACKENDS = ("lock_timeout", "lease_seconds", "quota_bytes")


def migrate(
    src: str | os.PathLike[str] | Archive,
    dst: str | os.PathLike[str] | Archive,
    *,
    sessions: str | Iterable[str] | None = None,
    codec: Codecs | None = None,
    workers: int | None = None,
    resume: bool = False,
    verify: bool = True,
    dask: str | None = None,
    lock_timeout: float = 10.0,
    src_options: Mapping[str, Any] | None = None,
    dst_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    with_ranges: bool = False,
) -> Migrated:
    """Copy sessions from one archive into another, which begins with them if there is none.

    Parameters
    ----------
    src, dst
        Paths and addresses as `kvstore.open` takes them, or open archives. They may have different
        backends.
    sessions
        Names, or patterns with ``*``, ``?`` and ``[...]``; None for all sessions.
    codec
        What the sessions shall be coded with, as for `Archive.create_session`; those that are keep
        their bytes, others are decoded and coded anew, and their frames then say how large the
        error of both codings can be at most. None keeps every byte of every session.
    workers
        Threads that code streams; None for one per CPU. Moving needs none.
    resume
        Go on with what a migration left that was killed: its new archive in ``DST.partial``, or
        sessions that `dst` has already and that are the same. Without it both are refused.
    verify
        Read everything again before it is published: moved sessions are compared byte for byte,
        others are checked. Without it, frames that an earlier try left are taken for right by
        their length.
    dask
        Address of a Dask scheduler, whose workers move and code streams; they must reach both
        archives under the same names. Needs the extra ``dask``.
    lock_timeout
        Seconds that a write waits for other writers.
    src_options, dst_options
        What else `kvstore.open` is given.
    progress
        Called with bytes of the source that are done, and in all.
    with_ranges
        With `codec`, also code sessions anew that have it and hold ranges of others: so that one
        header and the session's own positions are enough to decode them.

    Returns
    -------
    Migrated
        Names, bytes and seconds.

    Raises
    ------
    NotFound
        No archive or no such session.
    InvalidArgument
        `dst` is `src` or inside it; has other sessions of these names, or other frames of the
        same owners; or is the rest of a migration, and `resume` is False.
    Truncated, Corrupt, Unsupported
        The source is damaged, or what was written is not what is read again. Nothing of that
        session is published, and no new archive appears.
    Full, Locked
        See `Session.commit`.

    Notes
    -----
    While it lasts one snapshot of the source is open, for however long: an LMDB archive that is
    written to meanwhile does not use space again that is freed meanwhile. Last uses and the quota
    stay behind; pins, metadata and times move.

    What was moved into a new archive before an error stays in ``DST.partial`` for another try.
    """
    started = time.perf_counter()
    timeout = check_timeout(lock_timeout)
    codecs = None if codec is None else check_configs(codec)
    options: dict[str, Any] = {
        "resume": bool(resume),
        "verify": bool(verify),
        "workers": check_threads(workers, "workers"),
        "progress": progress,
    }
    to_options = {"lock_timeout": timeout, **(dst_options or {})}
    with ExitStack() as stack:
        spread = None if dask is None else _Spreading(dask, src, dst, src_options, stack)
        if isinstance(src, Archive):
            source = src
        else:
            from_options = {"snapshot_seconds": math.inf, **(src_options or {})}
            source = stack.enter_context(open_archive(src, **from_options))
        place = Place.of(dst.path if isinstance(dst, Archive) else dst)
        check_apart(Place.of(source.path), place)
        plan = Plan(
            source,
            stack.enter_context(source._read()),
            sessions,
            codecs,
            with_ranges=with_ranges,
        )
        if isinstance(dst, Archive):
            done = _add(plan, dst, options, to_options, spread)
        elif (there := place.holds(_of_backend(to_options))) == "archive":
            reading = {k: v for k, v in to_options.items() if k != "quota_bytes"}
            open_archive(place.text, **reading).close()  # so that none begins here
            archive = stack.enter_context(open_archive(place.text, "a", **to_options))
            done = _add(plan, archive, options, to_options, spread)
        elif place.folder is None:
            if there == "partial" and not resume:
                raise InvalidArgument(
                    f"{place.text}: has the rest of a migration that did not end; go on with "
                    "resume=True, or remove it"
                )
            done = _build(plan, place, to_options, options, spread)
        else:
            done = _build_beside(plan, place, to_options, options, spread)
    done.seconds = time.perf_counter() - started
    return done


class _Nothing(Exception):
    """A migration ended, by the exception that caused this one, before anything was stored."""


def _of_backend(options: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in options.items() if name not in _NOT_OF_BACKENDS}
    if "backend" in found:
        found["kind"] = found.pop("backend")
    return found


class _Spreading:
    """What it takes to let a cluster do the work, once it is known where it goes."""

    def __init__(
        self,
        scheduler: str,
        src: object,
        dst: object,
        src_options: Mapping[str, Any] | None,
        stack: ExitStack,
    ) -> None:
        from .spreading import Cluster

        for end in (src, dst):
            if isinstance(end, Archive) or str(end).startswith(MEMORY_PREFIX):
                raise InvalidArgument(
                    f"dask={scheduler!r}: give paths or addresses that workers can open, not {end}"
                )
        self._source = Place.of(os.fspath(cast(str, src))).absolute
        self._options = dict(src_options or {})
        self._cluster = Cluster(scheduler)
        stack.callback(self._cluster.close)

    @contextmanager
    def to(
        self, target: Target, text: str, to_options: dict[str, Any], *, is_there: bool, verify: bool
    ) -> Iterator[Elsewhere]:
        """Yield who does the work, until it is done."""
        from .ends import Ends
        from .spreading import Spread

        ends = Ends(
            self._source,
            Place.of(text).absolute,
            self._options,
            _of_backend(to_options),
            to_options if is_there else None,
            to_options["lock_timeout"],
            secrets.token_hex(8),
        )
        elsewhere = Spread(self._cluster, ends, verify, target.moved)
        try:
            yield elsewhere
        finally:
            elsewhere.end()


def _workers(
    spread: _Spreading | None,
    target: Target,
    text: str,
    to_options: dict[str, Any],
    options: dict[str, Any],
    *,
    is_there: bool,
) -> AbstractContextManager[Elsewhere | None]:
    """Return a context of who does the work elsewhere; of None if nobody does."""
    if spread is None:
        return nullcontext()
    return spread.to(target, text, to_options, is_there=is_there, verify=bool(options["verify"]))


def _add(
    plan: Plan,
    archive: Archive,
    options: dict[str, Any],
    to_options: dict[str, Any],
    spread: _Spreading | None,
) -> Migrated:
    if archive.mode == "r":
        raise InvalidArgument(f"{archive.path}: opened with mode='r'; use mode='a' to write")
    target = Target(archive._backend, archive._catalog, archive._room, archive._timeout)
    workers = _workers(spread, target, archive.path, to_options, options, is_there=True)
    with workers as elsewhere:
        return Adding(plan, target, elsewhere=elsewhere, **options).run()


def _build(
    plan: Plan,
    place: Place,
    to_options: dict[str, Any],
    options: dict[str, Any],
    spread: _Spreading | None,
) -> Migrated:
    """Build an archive at a place that has none."""
    backend = open_backend(place.text, "a", **_of_backend(to_options))
    try:
        target = Target(backend, Catalog(backend.path), None, to_options["lock_timeout"])
        workers = _workers(spread, target, place.text, to_options, options, is_there=False)
        with workers as elsewhere:
            building = Building(plan, target, elsewhere=elsewhere, **options)
            try:
                done = building.run()
            except BaseException as error:
                if not (building.n_bytes or options["resume"]):
                    raise _Nothing from error
                raise
    finally:
        backend.close()
    if options["resume"] or "quota_bytes" in to_options:
        with open_archive(place.text, "a", **to_options) as archive:
            archive.gc()  # of an earlier try with other sessions
    return done


def _build_beside(
    plan: Plan,
    place: Place,
    to_options: dict[str, Any],
    options: dict[str, Any],
    spread: _Spreading | None,
) -> Migrated:
    """Build an archive under another name, and rename it."""
    partial = place.partial
    if place.folder is None or partial.folder is None:
        raise NotFound(f"{place.text}: not in the file system")
    with partial_folder(partial.folder, resume=options["resume"]):
        try:
            done = _build(plan, partial, to_options, options, spread)
        except _Nothing as nothing:
            shutil.rmtree(partial.folder, ignore_errors=True)
            raise nothing.__cause__ or nothing from None
        except KvError as error:
            advice = "go on with resume=True, or remove it"
            error.args = (f"{error}; {partial.folder} keeps what was moved: {advice}",)
            raise
        move_into_place(partial.folder, place.folder)
    return done
