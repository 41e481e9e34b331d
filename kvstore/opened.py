"""An archive as its sessions see it: backend, catalog and room, leases, and what is open."""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Final

from kvcodecs.errors import InvalidArgument, Locked

from . import keys
from .backend import (
    Backend,
    Lease,
    Mode,
    Snapshot,
    Transaction,
    check_seconds,
)
from .catalog import UNKNOWN_ID, Catalog, begin
from .codings import Codings
from .forklock import ForkLock
from .identity import Model
from .lineage import check_unfinished
from .matching import Promise
from .mismatch import check_identity
from .prefix_upkeep import add_entries
from .room import Room
from .session import Session
from .session_record import SessionRecord
from .token_ids import Ids
from .upgrading import BeforeUpgrade, Upgraded, bring_up_to_date
from .versions import FORMAT_VERSION
from .writer import SessionWriter

_PATIENCE_SECONDS: Final = 0.5
_POLL_SECONDS: Final = 0.01


class OpenArchive:
    """What `Archive` is made of; `kvstore`'s own modules work with this."""

    def __init__(
        self,
        backend: Backend,
        mode: Mode,
        *,
        lock_timeout: float = 10.0,
        lease_seconds: float | None = None,
        before_upgrade: BeforeUpgrade | None = None,
    ) -> None:
        self._backend, self._mode, self._timeout = backend, mode, lock_timeout
        self._lease_seconds = (
            None if lease_seconds is None else check_seconds("lease_seconds", lease_seconds)
        )
        self._catalog = Catalog(backend.path)
        self._codings = Codings()
        self._room = Room(backend, self._catalog, lock_timeout)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._lock, self._renaming = ForkLock(), ForkLock()
        self._upgraded: Upgraded | None = None
        try:
            self._about = begin(backend, mode, lock_timeout)
            if mode == "a" and int(self._about["format"]) < FORMAT_VERSION:
                self._upgraded = bring_up_to_date(self, before_upgrade)
                self._about = begin(backend, mode, lock_timeout)
        except BaseException:
            backend.close()
            raise

    @property
    def path(self) -> str:
        return self._backend.path

    @property
    def mode(self) -> Mode:
        return self._mode

    def session(self, name: str, expect: Model | None = None) -> Session:
        """Return a stored session.

        Parameters
        ----------
        name
            Its name.
        expect
            The model it must belong to.

        Raises
        ------
        NotFound
            No session of this name.
        IdentityMismatch
            Stored for another model; names the first field that differs.
        """
        with self._read() as snapshot:
            record = self._catalog.record(snapshot, name)
            model = self._catalog.model(snapshot, record.model)
        if expect is not None:
            check_identity(model, expect, f"{self.path}: session {name!r}")
        return self._make_session(name, model, record.id)

    def __contains__(self, name: str) -> bool:
        with self._read() as snapshot:
            return snapshot.get(keys.session_key(name)) is not None

    def close(self) -> None:
        """Close all sessions and the archive; what was not committed is lost."""
        for session in self._open_sessions():
            session.close()
        self._backend.close()

    def new_owner(self) -> int:
        """Return a random id for the streams of a new session; never 0."""
        return secrets.randbelow((1 << 64) - 1) + 1

    def _read(self) -> AbstractContextManager[Snapshot]:
        return self._backend.read()

    def _make_session(
        self, name: str, model: Model, session: int, promise: Promise | None = None
    ) -> Session:
        made = Session(self, name, model, session, promise)
        with self._lock:
            self._sessions.add(made)
        return made

    def _open_sessions(self) -> list[Session]:
        with self._lock:
            return list(self._sessions)

    def take_lease(self, session: int, name: str) -> Lease:
        """Become the appender of a session, or raise `Locked`.

        Waits a little: who collects garbage or evicts holds leases for a moment.
        """
        deadline = time.monotonic() + min(self._timeout, _PATIENCE_SECONDS)
        while True:
            try:
                return self._backend.lease(
                    session, name, expires=self._lease_seconds, timeout=self._timeout
                )
            except Locked:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_POLL_SECONDS)

    def _appender(self, session: Session) -> SessionWriter:
        """Take a session's lease and return its appender."""
        if self._mode == "r":
            raise InvalidArgument(f"{self.path}: opened with mode='r'; use mode='a' to append")
        lease = self.take_lease(session._id, session.name)
        try:
            return self._writer(session, lease)
        except BaseException:
            lease.release()
            raise

    def _writer(self, session: Session, lease: Lease) -> SessionWriter:
        """Return an appender that goes on from what is committed."""
        with self._read() as snapshot:
            record = session._record(snapshot)
            check_unfinished(record, session._where)
            return SessionWriter(
                self._room, self._catalog, session.name, record, session._reader, snapshot, lease
            )

    @contextmanager
    def _taken(self, name: str) -> Iterator[int]:
        """Hold the lease of a session that goes; then closes the sessions of this object."""
        with self._read() as snapshot:
            session = self._catalog.id(snapshot, name)
        own = [s for s in self._open_sessions() if s.name == name]
        if session != UNKNOWN_ID:
            own = [s for s in own if s._id == session]
        with ExitStack() as stack:
            # Until the end: a commit must not come in between. Always in the same order.
            for opened in sorted(own, key=id):
                stack.enter_context(opened._lock)
            # Nobody can hold the lease of a session whose id is not known: none is in the record.
            if session != UNKNOWN_ID and all(opened._writer is None for opened in own):
                stack.callback(self.take_lease(session, name).release)
            yield session
            for opened in own:
                opened.close()

    @contextmanager
    def _replaced(self, name: str, replace: bool) -> Iterator[int | None]:
        """Hold the lease of the session that a new one replaces; yields its id, or None."""
        if replace and name in self:
            with self._taken(name) as session:
                yield session
        else:
            yield None

    def _publish(
        self,
        name: str,
        record: SessionRecord,
        model: Model,
        values: Mapping[bytes, bytes],
        token_ids: Ids | None = None,
        *,
        replace: bool = False,
    ) -> None:
        """Store a new session; `token_ids` are those of all its tokens."""

        def work(transaction: Transaction) -> None:
            self._catalog.publish(transaction, name, record, model, values, replaces)
            if token_ids is not None:
                add_entries(transaction, record, model, token_ids)

        with self._replaced(name, replace) as replaces:
            self._room.write(work)
