"""An archive: open or create it, and create, find, list and delete its sessions."""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from kvcodecs.codec import CodecConfig
from kvcodecs.errors import InvalidArgument, KvError, NotFound
from kvcodecs.kvr1 import KVR1
from kvcodecs.spec import Kind, KState

from . import keys
from .backend import Backend, Lease, Mode, Snapshot, check_timeout, open_backend
from .catalog import UNKNOWN_OWNER, Catalog, begin, delete_owned
from .forklock import ForkLock
from .identity import Model, check_identity, check_metadata, check_model
from .info import ArchiveInfo, SessionInfo
from .layout import check_configs, check_fit_tokens, new_layout
from .reader import Reader
from .records import SessionRecord
from .session import Session, source_of
from .survey import Survey, collect_garbage, session_names, survey
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
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._lock = ForkLock()
        try:
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
            other, other_owner = source_of(stats_from)
            with self._read() as snapshot:
                codec, headers = self._catalog.headers(
                    snapshot, other, model, codec, owner, other_owner
                )
        record = SessionRecord(
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
            self._publish(name, record, model, headers)
            session = self._make_session(name, model, owner)
            session._writer = self._writer(name, session._reader, lease)
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
        return self._make_session(name, model, record.owner)

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

    def delete_session(self, name: str) -> None:
        """Delete a session and all that belongs to it; its space is used again.

        Of a session whose record is damaged only the record is removed, since nothing else says
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
        with self._taken(name) as owner, self._backend.write(self._timeout) as transaction:
            if self._catalog.owner(transaction, name) != owner:
                raise NotFound(f"{self.path}: session {name!r} was replaced meanwhile")
            transaction.delete(keys.session_key(name))
            delete_owned(transaction, owner)
        self._catalog.forget(name)

    @contextmanager
    def _taken(self, name: str) -> Iterator[int]:
        """Hold the lease of a session that goes; then closes the sessions of this object."""
        with self._read() as snapshot:
            owner = self._catalog.owner(snapshot, name)
        own = [s for s in self._open_sessions() if s.name == name]
        if owner != UNKNOWN_OWNER:
            own = [s for s in own if s._reader.owner == owner]
        with ExitStack() as stack:
            # Until the end: a commit must not come in between. Always in the same order.
            for session in sorted(own, key=id):
                stack.enter_context(session._lock)
            # Nobody can hold the lease of an owner that is not known: none is in the record.
            if owner != UNKNOWN_OWNER and all(session._writer is None for session in own):
                stack.callback(self._backend.lease(owner, name).release)
            yield owner
            for session in own:
                session.close()

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

    def _make_session(self, name: str, model: Model, owner: int) -> Session:
        session = Session(self, name, model, owner)
        with self._lock:
            self._sessions.add(session)
        return session

    def _open_sessions(self) -> list[Session]:
        with self._lock:
            return list(self._sessions)

    def _appender(self, name: str, reader: Reader) -> SessionWriter:
        """Take a session's lease and return its appender."""
        if self._mode == "r":
            raise InvalidArgument(f"{self.path}: opened with mode='r'; use mode='a' to append")
        lease = self._backend.lease(reader.owner, name)
        try:
            return self._writer(name, reader, lease)
        except BaseException:
            lease.release()
            raise

    def _writer(self, name: str, reader: Reader, lease: Lease) -> SessionWriter:
        with self._read() as snapshot:
            record = self._catalog.record(snapshot, name, reader.owner)
            return SessionWriter(
                self._backend, name, record, reader, snapshot, lease, self._timeout
            )

    def _publish(
        self,
        name: str,
        record: SessionRecord,
        model: Model,
        values: Mapping[bytes, bytes],
        replaces: int | None = None,
    ) -> None:
        with self._backend.write(self._timeout) as transaction:
            self._catalog.publish(transaction, name, record, model, values, replaces)
