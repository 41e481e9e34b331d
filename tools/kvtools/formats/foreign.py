"""Migration to and from formats that are no archives; see `registry`.

Sessions go to a folder each, which is whole once it has its ``session.json``; the folder of all is
built under another name. With another codec they pass through an archive beside the target.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from kvcodecs.codec import CodecConfig
from kvcodecs.errors import InvalidArgument
from kvcodecs.spec import Kind

import kvstore
from kvstore.backend import Snapshot
from kvstore.migration.destination import check_apart, move_into_place, partial_folder
from kvstore.migration.needed import Item
from kvstore.migration.plan import Plan, chosen_names
from kvstore.migration.work import Meter, Migrated
from kvstore.pieces import count_frames
from kvstore.place import PARTIAL_SUFFIX, Place
from kvtools.formats.importing import Incoming, target_archive, tidied
from kvtools.formats.passing import passing
from kvtools.formats.registry import Format
from kvtools.formats.session_folder import SESSION_FILE, ZARR2_FILE, folder_name


class Export(Protocol):
    """Writes a session to a folder; returns bytes, and whether it shared frames."""

    def __call__(
        self, snapshot: Snapshot, item: Item, folder: Path, *, verify: bool
    ) -> tuple[int, bool]: ...


class Found(Protocol):
    """A session that has been found in a folder."""

    name: str
    folder: Path

    def incoming(self, archive: kvstore.Archive) -> Incoming: ...
    def values(self) -> Iterator[tuple[bytes, bytes]]: ...


def export(
    source: str,
    target: str,
    format: Format,
    *,
    sessions: list[str] | None,
    codec: Mapping[Kind, CodecConfig] | None,
    resume: bool,
    verify: bool,
    workers: int | None,
    progress: Callable[[int, int], None],
) -> Migrated:
    """Write sessions of an archive to a folder.

    Parameters
    ----------
    target
        As given, with its prefix.
    """
    started = time.perf_counter()
    folder = free_folder(target, format)
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    check_apart(Place.of(source), Place.of(folder))
    with ExitStack() as stack:
        done = Migrated(verified=verify)
        if codec is not None:
            passed = stack.enter_context(passing(folder, source, resume=resume))
            through = kvstore.migrate(
                source,
                passed,
                sessions=sessions,
                codec=codec,
                workers=workers,
                resume=resume,
                verify=verify,
                with_ranges=True,
            )
            done.recoded = through.recoded + through.skipped
            done.flattened = through.flattened
            source, sessions = str(passed), through.names  # a killed try may have left more
        archive = stack.enter_context(kvstore.open(source, snapshot_seconds=math.inf))
        plan = Plan(archive, stack.enter_context(archive._read()), sessions, None)
        stack.enter_context(partial_folder(partial, resume=resume))
        with tidied(partial, lambda: not (done.n_bytes or done.skipped)):
            _export_all(plan, partial, format, done, Meter(progress, plan.n_frames))
        move_into_place(partial, folder)
    done.seconds = time.perf_counter() - started
    return done


def free_folder(target: str, format: Format) -> Path:
    """Return the folder that sessions are to go to; `InvalidArgument` if something is there."""
    place = Place.of(format.folder(target))
    if place.folder is None:
        raise InvalidArgument(f"{target}: not a folder")
    if place.holds({}) != "nothing":
        raise InvalidArgument(
            f"{target}: exists already, and sessions come into a new folder only; give another "
            "name, or remove it"
        )
    return place.folder


def _export_all(plan: Plan, partial: Path, format: Format, done: Migrated, meter: Meter) -> None:
    format.exporting.begin(partial)
    write: Export = format.exporting.write_session
    for name in plan.order:
        item = plan.load(name)
        folder = partial / folder_name(name)
        if any((folder / last).exists() for last in (SESSION_FILE, ZARR2_FILE)):
            done.skipped.append(name)
            done.recoded = [x for x in done.recoded if x != name]
            meter.add(count_frames(item.record), 0)
            continue
        shutil.rmtree(folder, ignore_errors=True)
        n_bytes, alone = write(plan.snapshot, item, folder, verify=done.verified)
        done.n_bytes += n_bytes
        if name not in done.recoded:
            done.moved.append(name)
        if alone:
            done.flattened.append(name)
        meter.add(count_frames(item.record), n_bytes)
    meter.finish()


def take_in(
    source: str,
    target: str,
    format: Format,
    *,
    sessions: list[str] | None,
    codec: Mapping[Kind, CodecConfig] | None,
    resume: bool,
    verify: bool,
    workers: int | None,
    progress: Callable[[int, int], None],
    say: Callable[[str], None],
) -> Migrated:
    """Store sessions of a folder in an archive.

    Parameters
    ----------
    say
        Called with what does not come along, and why.
    """
    started = time.perf_counter()
    found: list[Found] = format.importing.sessions(format.folder(source))
    by_name: dict[str, Found] = {}
    for session in found:
        other = by_name.setdefault(session.name, session)
        if other is not session:
            raise InvalidArgument(
                f"{source}: {other.folder.name!r} and {session.folder.name!r} are both session "
                f"{session.name!r}; migrate these folders one by one, to different archives"
            )
    names = chosen_names(sorted(by_name, key=str.encode), sessions, source)
    done = Migrated(verified=verify)
    with ExitStack() as stack:
        into = target
        if codec is not None:
            place = passing(Place.of(target).folder, source, resume=resume)
            into = str(stack.enter_context(place))
        with target_archive(into, resume=resume) as archive:
            for i, name in enumerate(names):
                incoming = by_name[name].incoming(archive)
                if incoming.only_anew and codec is None:
                    advice = "coded anew it fits: --codec kvr1, or another one"
                    raise InvalidArgument(f"{incoming.only_anew}; {advice}")
                for text in incoming.left_out:
                    say(text)
                if name in archive and resume and _is_there(archive, incoming):
                    done.skipped.append(name)
                else:
                    incoming.store(by_name[name].values(), verify=verify)
                    done.n_bytes += incoming.n_bytes
                    done.moved.append(name)
                progress(i + 1, len(names))
        if codec is not None:
            through = kvstore.migrate(
                into,
                target,
                sessions=names,
                codec=codec,
                resume=resume,
                verify=verify,
                workers=workers,
            )
            done = through
    done.seconds = time.perf_counter() - started
    return done


def _is_there(archive: kvstore.Archive, incoming: Incoming) -> bool:
    with archive._read() as snapshot:
        record = archive._catalog.record(snapshot, incoming.item.name)
    return record.pack(incoming.item.name) == incoming.item.value
