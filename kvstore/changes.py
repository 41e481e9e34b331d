"""Changes to sessions that are not appends; each is one transaction. See `Session` for each."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace as replace_fields
from typing import TYPE_CHECKING, Any

from kvcodecs.errors import InvalidArgument

from . import keys
from .backend import Transaction
from .catalog import REPLACE_ADVICE
from .lineage import fork, roll_back, trim_front
from .metadata import check_metadata
from .sharing import put_record

if TYPE_CHECKING:
    from .session import Session
    from .writer import SessionWriter


def fork_session(
    parent: Session,
    name: str,
    at: int | None,
    metadata: Mapping[str, Any] | None,
    replace: bool,
) -> Session:
    """Publish a fork and return it. See `Session.fork`."""
    archive, catalog = parent._archive, parent._archive._catalog
    keys.check_name(name)
    if name == parent.name:
        raise InvalidArgument(
            f"{parent._where}: a fork needs another name; to go on in this session, truncate it"
        )
    given = None if metadata is None else check_metadata(metadata)
    session = archive.new_owner()

    def work(transaction: Transaction) -> None:
        record = parent._record(transaction)
        about = record.metadata if given is None else given
        fork(transaction, catalog, record, name, at, session, about, replaces, parent._where)

    with archive._replaced(name, replace) as replaces:
        archive._room.write(work, keep=(parent._id,))
    archive._room.note_use(parent._id)
    archive._room.note_use(session)
    return archive.session(name)


def truncate_session(session: Session, writer: SessionWriter, n_tokens: int) -> SessionWriter:
    """Take back committed tokens; return an appender that goes on from there."""
    archive = session._archive
    owner = archive.new_owner()

    def work(transaction: Transaction) -> None:
        record = writer.stored(transaction)
        if n_tokens < record.n_tokens:
            name, where = session.name, session._where
            roll_back(transaction, archive._catalog, name, record, n_tokens, owner, where)

    archive._room.write(work, frees=True)
    session._promise = None  # what a prompt matched was taken back on purpose
    return archive._writer(session, writer.lease)


def trim_session(session: Session, first: int) -> None:
    """Drop tokens at the front. See `Session.trim_front`."""
    archive = session._archive

    def work(transaction: Transaction) -> None:
        record = session._record(transaction)
        trim_front(transaction, archive._catalog, session.name, record, first, session._where)

    archive._room.write(work, frees=True)
    session._promise = None


def rename_session(session: Session, name: str, replace: bool) -> None:
    """Give a session and its open objects another name. See `Session.rename`."""
    archive, old_name = session._archive, session.name
    keys.check_name(name)
    if name == old_name:
        return

    def work(transaction: Transaction) -> None:
        record = session._record(transaction)
        if replaces is not None:
            archive._catalog.delete(transaction, name, replaces)
        elif transaction.get(keys.session_key(name)) is not None:
            raise InvalidArgument(
                f"{archive.path}: session {name!r} exists already; {REPLACE_ADVICE}"
            )
        put_record(transaction, archive._catalog, name, record, record, old_name=old_name)

    with ExitStack() as stack:
        # Two names' sessions are locked here: one rename at a time, or two might wait for each
        # other.
        stack.enter_context(archive._renaming)
        own = [opened for opened in archive._open_sessions() if opened._id == session._id]
        for opened in sorted(own, key=id):
            stack.enter_context(opened._lock)
        if all(opened._writer is None for opened in own):
            stack.callback(archive.take_lease(session._id, old_name).release)
        replaces = stack.enter_context(archive._replaced(name, replace))
        archive._room.write(work, frees=True)
        for opened in own:
            opened._renamed(name)


def change_session(session: Session, **changes: Any) -> None:
    """Change fields of a session's record that nothing else depends on."""
    archive = session._archive

    def work(transaction: Transaction) -> None:
        record = session._record(transaction)
        new = replace_fields(record, **changes)
        put_record(transaction, archive._catalog, session.name, record, new)

    # Small, and perhaps what makes room: never refused for the quota.
    archive._room.write(work, frees=True)
