"""An archive: open or create it, and create, find, list and delete its sessions."""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace as replace_fields
from typing import TYPE_CHECKING, Any

from kvcodecs.codec import CodecConfig
from kvcodecs.errors import InvalidArgument, KvError, Unsupported
from kvcodecs.kvr1 import KVR1
from kvcodecs.spec import Kind, KState

from . import keys
from .backend import Backend, Lease, Mode, Snapshot, Transaction, check_timeout, open_backend
from .catalog import REPLACE_ADVICE, UNKNOWN_ID, Catalog, begin
from .forklock import ForkLock
from .garbage import collect_garbage, rebuild_index
from .identity import Model, check_identity, check_metadata, check_model
from .info import ArchiveInfo, SessionInfo
from .layout import check_configs, check_fit_tokens, new_layout
from .lineage import fork, roll_back, trim_front
from .matching import Match, Promise, find_prefix, n_sealed
from .prefix_upkeep import add_entries
from .reader import Reader
from .records import FORMAT_VERSION
from .room import Room
from .session import Session, source_of
from .session_record import SessionRecord
from .sharing import put_record
from .survey import Survey, session_names, survey
from .token_ids import Ids, check_ids
from .writer import SessionWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from .ingest import Source
    from .verify import Report


def open(
    path: str | os.PathLike[str],
    mode: Mode = "r",
    *,
    lock_timeout: float = 10.0,
    map_size: int | None = None,
    backend: str | None = None,
) -> Archive:
    """Open an archive.

    Parameters
    ----------
    path
        A directory (LMDB), or ``"memory:NAME"`` for one that lives in this process.
    mode
        ``"r"`` to read, ``"a"`` to append or create.
    lock_timeout
        Seconds that a write waits for other writers before it raises `Locked`; may be infinite.
    map_size
        Upper limit of the archive in bytes; None for 1 TiB or what the process can map.
    backend
        ``"lmdb"``, ``"memory"`` or None to go by `path`.

    Raises
    ------
    NotFound
        Mode "r" and no archive there.
    Truncated, Corrupt, Unsupported
        Damaged, not an archive, or written by a newer release.
    InvalidArgument
        A mode, backend or place that cannot be used.
    """
    seconds = check_timeout(lock_timeout)
    return Archive(
        open_backend(path, mode, kind=backend, map_size=map_size), mode, lock_timeout=seconds
    )


class Archive:
    """Many sessions in one container; made by `kvstore.open`. Safe to use from many threads."""

    def __init__(self, backend: Backend, mode: Mode, *, lock_timeout: float = 10.0) -> None:
        self._backend, self._mode, self._timeout = backend, mode, lock_timeout
        self._catalog = Catalog(backend.path)
        self._room = Room(backend, lock_timeout)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._lock = ForkLock()
        try:
            self._about = begin(backend, mode, lock_timeout)
            if mode == "a" and int(self._about["format"]) < FORMAT_VERSION:
                rebuild_index(self)
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

    def create_session(
        self,
        name: str,
        *,
        model: Model,
        codec: CodecConfig | Mapping[Kind, CodecConfig] | None = None,
        block_tokens: int | str = "auto",
        fit_tokens: int = 128,
        stats_from: str | Session | None = None,
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> Session:
        """Create a session without tokens, durable at once, and become its appender.

        Parameters
        ----------
        name
            1 to 255 bytes of UTF-8 without control characters; slashes mean nothing.
        model
            Identity and geometry of the KV.
        codec
            A configuration for both kinds or ``{"k": ..., "v": ...}``; None for ``KVR1()``, or
            with `stats_from` for that session's.
        block_tokens
            Tokens per block, for all streams; ``"auto"`` chooses 128 to 1024 for each stream so
            that frames reach about 32 KB.
        fit_tokens
            Fewest tokens that a stream's statistics are fitted to; until then commits are kept
            raw.
        stats_from
            Take the stream headers, and with them the codec, from this session of the same
            model in this archive; for short sessions.
        metadata
            A JSON object to keep with the session.
        replace
            Replace a session that has the name, in the same transaction.

        Raises
        ------
        InvalidArgument
            The name is taken or not a name, or an argument cannot be used.
        IdentityMismatch
            `stats_from` belongs to another model.
        Locked, Full
            See `Session.commit`.
        """
        keys.check_name(name)
        check_fit_tokens(fit_tokens)
        metadata = check_metadata(metadata)
        check_model(model)
        headers: dict[bytes, bytes] = {}
        owner = self.new_owner()
        if stats_from is not None:
            other, other_id = source_of(stats_from)
            with self._read() as snapshot:
                codec, headers = self._catalog.headers(
                    snapshot, other, model, codec, owner, other_id
                )
        record = SessionRecord(
            id=owner,
            owner=owner,
            model=model.digest,
            n_tokens=0,
            codecs=check_configs(codec if codec is not None else KVR1()),
            fit_tokens=fit_tokens,
            streams=new_layout(model, block_tokens, stats_from is not None),
            created=int(time.time()),
            metadata=metadata,
        )
        lease = self._backend.lease(owner, name)
        try:
            self._publish(name, record, model, headers, replace=replace)
            session = self._make_session(name, model, owner)
            session._writer = self._writer(name, owner, session._reader, lease)
        except BaseException:
            lease.release()
            raise
        return session

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

    def names(self) -> list[str]:
        """Return the names of all sessions, in byte order."""
        with self._read() as snapshot:
            return session_names(snapshot)

    def sessions(self) -> list[SessionInfo]:
        """Return what `Session.info` says of every session; costs a look at every frame.

        Sessions for which that fails are left out: `damaged` says which and why.
        """
        return self.survey().sessions

    def damaged(self) -> dict[str, KvError]:
        """Return why `Session.info` fails, by name, of the sessions that `sessions` leaves out.

        Looks at records and headers of frames; `verify` looks at everything.
        """
        return self.survey().damaged

    def survey(self) -> Survey:
        """Return `sessions` and `damaged` of one walk over the archive."""
        with self._read() as snapshot:
            return survey(self, snapshot)

    def match_prefix(self, token_ids: object, model: Model, salt: str | None = None) -> Match:
        """Find the session that shares most with a prompt from its first token on.

        Parameters
        ----------
        token_ids : (n,) integers
            The prompt.
        model
            Whose KV it must be: every field has to be equal, an empty one matches only an empty
            one.
        salt
            Of the tenant; None means that of `model`. Sessions under another salt never match.

        Returns
        -------
        match : Match
            False if no session shares a token. Sessions without token ids, and trimmed ones,
            never match; of those that hold ranges taken from elsewhere, only what comes before.

        Raises
        ------
        InvalidArgument
            Not ids or not a model.

        Notes
        -----
        Costs a hash per 64 tokens of the prompt and a few look-ups, however large the archive. The
        stored token ids have the last word: a collision of hashes is a miss.
        """
        check_model(model)
        ids = check_ids(token_ids)
        if salt is not None:
            model = replace_fields(model, salt=salt)
        if int(self._about["format"]) < FORMAT_VERSION:
            raise Unsupported(
                f"{self.path}: written before there was an index; open it with "
                "mode='a' once, or run kvstore reindex"
            )
        with self._read() as snapshot:
            found = find_prefix(snapshot, self._catalog, ids, model)
        if found is None:
            return Match(None, 0, 0)
        promise = Promise(ids[: found.n_tokens].copy(), found.record)
        session = self._make_session(found.name, model, found.record.id, promise)
        self._note_use(found.record.id)
        return Match(session, found.n_tokens, n_sealed(found.record, found.n_tokens))

    def delete_session(self, name: str) -> None:
        """Delete a session and what it alone needs; forks of it stay whole.

        Of a session whose record is damaged only the record is removed where nothing else says
        what it owned: `gc` removes its frames once all other records can be read.

        Raises
        ------
        NotFound
            No session of this name.
        Locked
            It has an appender other than sessions of this archive object, or see
            `Session.commit`. Nothing has changed then: sessions of this object are closed only
            once it is deleted.
        """
        with self._taken(name) as session:
            self._room.write(lambda transaction: self._catalog.delete(transaction, name, session))

    def rename_session(self, name: str, new_name: str, *, replace: bool = False) -> None:
        """Give a session another name. See `Session.rename`."""
        self.session(name).rename(new_name, replace=replace)

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
                stack.callback(self._backend.lease(session, name).release)
            yield session
            for opened in own:
                opened.close()

    def ingest(
        self,
        name: str,
        source: Source,
        *,
        model: Model,
        codec: CodecConfig | Mapping[Kind, CodecConfig] | None = None,
        block_tokens: int | str = "auto",
        fit_tokens: int = 128,
        k_state: KState = "pre",
        token_ids: object = None,
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Session:
        """Store a whole session stream by stream, in constant memory.

        `source` is a `kvstore.ingest.Source`; see `kvstore.ingest.ingest` for `progress` and
        errors, `create_session` and `Session.append` for the rest. With `replace`, a session of
        this name is replaced in the transaction that publishes the new one: a reader sees the one
        or the other.
        """
        from .ingest import ingest

        return ingest(
            self,
            name,
            source,
            model=model,
            codecs=check_configs(codec if codec is not None else KVR1()),
            block_tokens=block_tokens,
            fit_tokens=fit_tokens,
            k_state=k_state,
            token_ids=token_ids,
            metadata=metadata,
            replace_existing=replace,
            progress=progress,
        )

    def gc(self) -> int:
        """Remove what killed writers left behind, and return how many bytes that were.

        Frames of sessions that were never published, and frames after the last commit of
        sessions that nobody is appending to. Such leftovers are harmless and never read.

        While the record of any session cannot be read, whatever has no readable record stays, and
        so do models: it might be that session's. Delete that session first.

        Raises
        ------
        Locked, Full
            See `Session.commit`.
        """
        return collect_garbage(self)

    def reindex(self) -> tuple[int, list[KvError]]:
        """Make the prefix index and the lists of users anew, in one transaction.

        Needed only where `verify` says so.

        Returns
        -------
        n_entries
            Entries of the index.
        errors
            What cannot be indexed, since its token ids are damaged.

        Raises
        ------
        Locked, Full
            See `Session.commit`.
        """
        return rebuild_index(self)

    def verify(
        self, *, decode: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> Report:
        """Read and check everything. See `kvstore.verify.verify`."""
        from .verify import verify

        return verify(self, decode=decode, progress=progress)

    def info(self) -> ArchiveInfo:
        """Return the sizes of the whole archive."""
        found = self.survey()
        backend = self._backend.info()
        return ArchiveInfo(
            path=self.path,
            backend=backend.kind,
            writer=str(self._about.get("writer", "")),
            created=int(self._about.get("created", 0)),
            file_bytes=backend.file_bytes,
            free_bytes=backend.free_bytes,
            frame_bytes=sum(session.frame_bytes for session in found.sessions),
            n_sessions=len(found.sessions) + len(found.damaged),
            n_damaged=len(found.damaged),
        )

    def close(self) -> None:
        """Close all sessions and the archive; what was not committed is lost."""
        for session in self._open_sessions():
            session.close()
        self._backend.close()

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Archive {self.path!r} mode={self._mode!r}>"

    def new_owner(self) -> int:
        """Return a random id for the streams of a new session; never 0."""
        return secrets.randbelow((1 << 64) - 1) + 1

    def _read(self) -> AbstractContextManager[Snapshot]:
        return self._backend.read()

    def _note_use(self, session: int) -> None:
        """Note that a session was used, for eviction: advisory, never fails."""

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

    def _appender(self, name: str, session: int, reader: Reader) -> SessionWriter:
        """Take a session's lease and return its appender."""
        if self._mode == "r":
            raise InvalidArgument(f"{self.path}: opened with mode='r'; use mode='a' to append")
        lease = self._backend.lease(session, name)
        try:
            return self._writer(name, session, reader, lease)
        except BaseException:
            lease.release()
            raise

    def _writer(self, name: str, session: int, reader: Reader, lease: Lease) -> SessionWriter:
        with self._read() as snapshot:
            record = self._catalog.record(snapshot, name, session)
            return SessionWriter(self._room, self._catalog, name, record, reader, snapshot, lease)

    def _truncated(
        self, name: str, writer: SessionWriter, reader: Reader, n_tokens: int
    ) -> SessionWriter:
        """Roll a session back and return an appender that goes on from there."""
        owner, where = self.new_owner(), reader.where

        def work(transaction: Transaction) -> None:
            record = writer.stored(transaction)
            if n_tokens < record.n_tokens:
                roll_back(transaction, self._catalog, name, record, n_tokens, owner, where)

        self._room.write(work)
        return self._writer(name, writer.record.id, reader, writer.lease)

    def _fork(
        self,
        parent: str,
        parent_id: int,
        name: str,
        at: int | None,
        metadata: Mapping[str, Any] | None,
        replace: bool,
    ) -> Session:
        keys.check_name(name)
        checked = None if metadata is None else check_metadata(metadata)
        session = self.new_owner()
        where = f"{self.path}: session {parent!r}"

        def work(transaction: Transaction) -> None:
            record = self._catalog.record(transaction, parent, parent_id)
            fork(
                transaction,
                self._catalog,
                record,
                name,
                at,
                session,
                record.metadata if checked is None else checked,
                replaces,
                where,
            )

        with self._replaced(name, replace) as replaces:
            self._room.write(work)
        return self.session(name)

    def _trim(self, name: str, session: int, first: int) -> None:
        where = f"{self.path}: session {name!r}"

        def work(transaction: Transaction) -> None:
            record = self._catalog.record(transaction, name, session)
            trim_front(transaction, self._catalog, name, record, first, where)

        self._room.write(work)

    def _rename(self, session: Session, new_name: str, replace: bool) -> None:
        keys.check_name(new_name)
        old_name = session.name
        if new_name == old_name:
            return

        def work(transaction: Transaction) -> None:
            record = self._catalog.record(transaction, old_name, session._id)
            if replaces is not None:
                self._catalog.delete(transaction, new_name, replaces)
            elif transaction.get(keys.session_key(new_name)) is not None:
                raise InvalidArgument(
                    f"{self.path}: session {new_name!r} exists already; {REPLACE_ADVICE}"
                )
            put_record(transaction, self._catalog, new_name, record, record, old_name=old_name)

        own = [s for s in self._open_sessions() if s._id == session._id]
        with ExitStack() as stack:
            for opened in sorted(own, key=id):
                stack.enter_context(opened._lock)
            if all(opened._writer is None for opened in own):
                stack.callback(self._backend.lease(session._id, old_name).release)
            replaces = stack.enter_context(self._replaced(new_name, replace))
            self._room.write(work)
            for opened in own:
                opened._renamed(new_name)

    def _change(self, name: str, session: int, **changes: Any) -> None:
        """Change fields of a session's record that nothing else depends on."""

        def work(transaction: Transaction) -> None:
            record = self._catalog.record(transaction, name, session)
            put_record(transaction, self._catalog, name, record, replace_fields(record, **changes))

        self._room.write(work)

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
