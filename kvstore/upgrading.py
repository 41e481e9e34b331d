"""Upgrades: an archive of an old format becomes one of the newest, in one transaction.

Opening for writing does it by itself. `upgrade` keeps a copy of the old archive as well, and sees
to it that no older release has the archive open meanwhile. FORMAT.md section 8.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from kvcodecs.errors import Corrupt, InvalidArgument, KvError

from . import keys
from .backend import Backend, Snapshot, Transaction, check_timeout
from .catalog import begin
from .garbage import living
from .place import open_backend
from .records import check_archive, pack_archive
from .versions import FORMAT_VERSION, VERSIONS

if TYPE_CHECKING:
    from .opened import OpenArchive
    from .session_record import SessionRecord

#: Called with the old format inside the transaction that upgrades, before it changes anything.
BeforeUpgrade: TypeAlias = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Upgraded:
    """Outcome of an upgrade.

    Attributes
    ----------
    before, after
        Versions of the format; equal if there was nothing to do.
    n_sessions
        Sessions that can be read, before and after.
    problems
        What could not be made new, since it is damaged; the rest is.
    backup
        The archive as it was; None without one.
    """

    before: int
    after: int
    n_sessions: int = 0
    problems: list[KvError] = field(default_factory=list)
    backup: str | None = None


@runtime_checkable
class _CanBackUp(Protocol):
    def back_up(self, place: str, progress: Callable[[int, int], object] | None = None) -> None: ...


def bring_up_to_date(archive: OpenArchive, before: BeforeUpgrade | None = None) -> Upgraded:
    """Upgrade an open archive to the newest format, in one transaction.

    Raises
    ------
    Corrupt
        A session would no longer be what it was. Nothing has changed then.
    Locked, Full
        See `Session.commit`. Likewise.
    """

    def work(transaction: Transaction) -> Upgraded:
        value = transaction.get(keys.ARCHIVE)
        about = check_archive(b"" if value is None else value, archive.path)
        found, problems = int(about["format"]), []
        if found == FORMAT_VERSION:
            return Upgraded(found, found)  # somebody else was faster
        if before is not None:
            before(found)
        records = _records(archive, transaction)
        for version in VERSIONS:
            if version.number > found and version.step is not None:
                problems += version.step(archive, transaction)
        transaction.put(keys.ARCHIVE, pack_archive(about))
        if _records(archive, transaction) != records:
            raise Corrupt(f"{archive.path}: sessions would be lost; the archive is as it was")
        return Upgraded(found, FORMAT_VERSION, len(records), problems)

    return archive._room.write(work, frees=True)


def upgrade(
    path: str | os.PathLike[str],
    *,
    backup: str | os.PathLike[str] | bool = True,
    lock_timeout: float = 10.0,
    progress: Callable[[int, int], object] | None = None,
) -> Upgraded:
    """Upgrade an archive to the newest format in place, and keep a copy of the old one.

    Copy and upgrade see the same moment. Killed at any point, the archive is the old one or the
    new one, and the copy is whole or does not have its name yet.

    Parameters
    ----------
    path
        As for `open`.
    backup
        Where the copy goes, a directory that does not exist yet; True for
        ``PATH.backup-formatN``, with a number behind it if that is taken; False for none.
    lock_timeout
        Seconds to wait for other writers.
    progress
        Called now and then with the bytes copied and those that there will be.

    Returns
    -------
    upgraded : Upgraded
        With equal formats, and no copy, if the archive has the newest one already.

    Raises
    ------
    Locked
        Somebody has it open, in this process or another: a release that does not know the new
        format would go on writing the old one.
    Full
        No space for the copy or for the upgrade; the archive is as it was.
    InvalidArgument
        The copy cannot be made there, or the archive cannot be written.
    NotFound, Unsupported, Truncated, Corrupt
        No archive, one of a newer release, or a damaged one.
    """
    from .archive import Archive

    timeout = check_timeout(lock_timeout)
    found, kind, text = _look(path)
    if found == FORMAT_VERSION:
        return Upgraded(found, found)
    made: list[str] = []

    def keep(number: int) -> None:
        if backup is False or made:  # a transaction may run again, the copy is made once
            return
        place = _free_place(text, number) if backup is True else os.fspath(backup)
        if not isinstance(backend, _CanBackUp):
            raise InvalidArgument(
                f"{backend.path}: a backup can only be made of a directory; use backup=False"
            )
        backend.back_up(place, progress)
        made.append(place)

    with ExitStack() as stack:
        if kind == "lmdb":
            from .backends._backup import keep_to_oneself

            stack.enter_context(keep_to_oneself(text))
        backend: Backend = open_backend(path, "a")
        archive = Archive(backend, "a", lock_timeout=timeout, before_upgrade=keep)
        stack.callback(archive.close)
        done = archive._upgraded or Upgraded(FORMAT_VERSION, FORMAT_VERSION)
    return Upgraded(
        done.before, done.after, done.n_sessions, done.problems, made[0] if made else None
    )


def _records(archive: OpenArchive, snapshot: Snapshot) -> dict[str, SessionRecord]:
    return {name: record for name, record, _ in living(archive, snapshot).records}


def _look(path: str | os.PathLike[str]) -> tuple[int, str, str]:
    """Return format, kind of backend and path of an archive; errors of `open`."""
    backend = open_backend(path, "r")
    try:
        return int(begin(backend, "r", 0.0)["format"]), backend.info().kind, backend.path
    finally:
        backend.close()


def _free_place(path: str, number: int) -> str:
    """Return the name of a backup that is not taken."""
    name = place = f"{os.path.abspath(path)}.backup-format{number}"
    n = 1
    while os.path.lexists(place):
        n += 1
        place = f"{name}-{n}"
    return place
