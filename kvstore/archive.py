"""An archive: create, find, match, list and delete its sessions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace as replace_fields
from typing import TYPE_CHECKING, Any

from kvcodecs.errors import KvError, Unsupported
from kvcodecs.kvr1 import KVR1
from kvcodecs.spec import KState

from . import keys
from .backend import BackendInfo
from .garbage import collect_garbage, rebuild_index
from .identity import Model, check_model
from .info import ArchiveInfo, stored_bytes
from .layout import Codecs, check_configs, check_fit_tokens, first_receipt, new_layout
from .matching import Match, Promise, find_prefix, n_sealed
from .metadata import check_metadata
from .opened import OpenArchive
from .session import Session, source_of
from .session_record import SessionRecord
from .survey import (
    SessionEntry,
    Survey,
    list_sessions,
    session_filter,
    session_names,
    survey,
)
from .token_ids import check_ids
from .versions import FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .ingest import Source
    from .verify import Report


class Archive(OpenArchive):
    """Many sessions in one container; made by `kvstore.open`. Safe to use from many threads."""

    def create_session(
        self,
        name: str,
        *,
        model: Model,
        codec: Codecs | None = None,
        block_tokens: int | str = "auto",
        fit_tokens: int = 128,
        stats_from: str | Session | None = None,
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
        receipts: bool = False,
    ) -> Session:
        """Create a session without tokens, durable at once, and become its appender.

        Parameters
        ----------
        name
            1 to 255 bytes of UTF-8 without control characters; slashes mean nothing.
        model
            Identity and geometry of the KV.
        codec
            A configuration for both kinds or ``{"k": ..., "v": ...}``, or the name of a codec
            without options, ``"ggml.q8_0"`` for example; None for ``KVR1()``, or with `stats_from`
            for that session's.
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
        receipts
            Leave a receipt with each commit, see `Session.receipts`; hashing costs a little time.

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
        configs = check_configs(codec if codec is not None else KVR1())
        where = f"{self.path}: session {name!r}"
        record = SessionRecord(
            id=owner,
            owner=owner,
            model=model.digest,
            n_tokens=0,
            codecs=configs,
            fit_tokens=fit_tokens,
            streams=new_layout(model, configs, block_tokens, stats_from is not None, where),
            receipts=first_receipt(receipts),
            created=int(time.time()),
            metadata=metadata,
        )
        lease = self.take_lease(owner, name)
        try:
            self._publish(name, record, model, headers, replace=replace)
            session = self._make_session(name, model, owner)
            session._writer = self._writer(session, lease)
        except BaseException:
            lease.release()
            raise
        return session

    def names(self) -> list[str]:
        """Return the names of all sessions, in byte order."""
        with self._read() as snapshot:
            return session_names(snapshot)

    def sessions(
        self,
        prefix: str = "",
        *,
        model: Model | None = None,
        metadata: Mapping[str, Any] | None = None,
        pinned: bool | None = None,
        min_tokens: int = 0,
    ) -> list[SessionEntry]:
        """Return the sessions that meet all conditions, by name; reads their records alone.

        Parameters
        ----------
        prefix
            What the name begins with.
        model
            The model, every field of it.
        metadata
            Keys and values that the session's metadata has, among others.
        pinned
            Whether it is pinned; None for either.
        min_tokens
            Fewest committed tokens.

        Notes
        -----
        Sessions whose record cannot be read are left out: `damaged` says which and why. `survey`
        looks at the frames as well.
        """
        keep = session_filter(prefix, model, metadata, pinned, min_tokens)
        with self._read() as snapshot:
            return list_sessions(self, snapshot, keep)

    def damaged(self) -> dict[str, KvError]:
        """Return why `Session.info` fails, by name, of the sessions where it does.

        Looks at records and headers of frames; `verify` looks at everything.
        """
        return self.survey().damaged

    def survey(self) -> Survey:
        """Return what `Session.info` says of every session, and `damaged`; looks at every frame."""
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
                "mode='a' once, or run kvstore upgrade"
            )
        with self._read() as snapshot:
            found = find_prefix(snapshot, self._catalog, ids, model)
        if found is None:
            return Match(None, 0, 0)
        promise = Promise(ids[: found.n_tokens].copy(), found.record)
        session = self._make_session(found.name, model, found.record.id, promise)
        self._room.note_use(found.record.id)
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
            self._room.write(
                lambda transaction: self._catalog.delete(transaction, name, session), frees=True
            )

    def rename_session(self, name: str, new_name: str, *, replace: bool = False) -> None:
        """Give a session another name. See `Session.rename`."""
        self.session(name).rename(new_name, replace=replace)

    @property
    def quota_bytes(self) -> int | None:
        """The archive's quota in bytes, or None; see `set_quota`."""
        return self._room.quota()

    def set_quota(self, quota_bytes: int | None) -> None:
        """Bound the archive's data file, for all who write to it, until it is set anew.

        A write that would not fit makes room: the sessions that were not used for longest are
        deleted, save pinned ones and those that somebody is appending to. Reads in progress end
        as if nothing had happened. 1/32 of the quota (up to 1/8 of small ones) stays free for
        LMDB's own work.

        Parameters
        ----------
        quota_bytes
            At least 1 MiB; None takes the quota away. Below what is used now, sessions are
            evicted at once; the file itself gets no smaller until `kvstore.compact`.

        Raises
        ------
        InvalidArgument
            Not such a number.
        Full
            What may not be evicted needs more. The quota holds nevertheless.
        Locked
            See `Session.commit`; also while reads of this process go on.
        """
        self._room.set_quota(quota_bytes)

    def ingest(
        self,
        name: str,
        source: Source,
        *,
        model: Model,
        codec: Codecs | None = None,
        block_tokens: int | str = "auto",
        fit_tokens: int = 128,
        k_state: KState = "pre",
        token_ids: object = None,
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
        receipts: bool = False,
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
            receipts=receipts,
            progress=progress,
        )

    def seal(
        self,
        names: Iterable[str] | None = None,
        *,
        shard_bytes: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> list[str]:
        """Finish sessions: from now on nothing is appended to them, nor taken from them.

        They can be read, forked, renamed, pinned and deleted as before.

        Parameters
        ----------
        names
            Of the sessions; None for all.
        shard_bytes
            In a zarr archive, also lay their blocks together in shards of about so many bytes, so
            that a million blocks are not a million objects; single blocks are read as before.
        progress
            Called with sessions done and sessions in all.

        Returns
        -------
        list of str
            Names of the sessions that this has changed.

        Raises
        ------
        NotFound
            No session of that name; those before it are finished.
        InvalidArgument
            `shard_bytes` in an archive whose backend has no objects to lay together.
        Locked, Full
            See `Session.commit`; `Locked` also where a session has an appender.
        """
        from .finishing import seal

        chosen = self.names() if names is None else names
        return seal(self, chosen, shard_bytes=shard_bytes, progress=progress)

    def gc(self) -> int:
        """Remove what killed writers left behind, and return how many bytes that were.

        Frames of sessions that were never published, and frames after the last commit of
        sessions that nobody is appending to. Such leftovers are harmless and never read.

        While the record of any session cannot be read, whatever has no readable record stays, and
        so do models: it might be that session's. Delete that session first.

        In a zarr archive this also removes what was deleted longer ago than the grace period, and
        objects of writers that were killed in a transaction.

        Objects that stream headers share, such as codebooks, stay when a session is deleted, and go
        here once no stream header needs them; as long as one cannot be read all stay.

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
        self,
        *,
        decode: bool = False,
        receipts: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Report:
        """Read and check everything. See `kvstore.verify.verify`."""
        from .verify import verify

        return verify(self, decode=decode, receipts=receipts, progress=progress)

    def sizes(self) -> BackendInfo:
        """Return what the file has, uses and has free, without a look at any session."""
        return self._backend.info()

    def info(self) -> ArchiveInfo:
        """Return the sizes of the whole archive, and who is reading it."""
        with self._read() as snapshot:
            found = survey(self, snapshot)
            frame_bytes = stored_bytes(snapshot, keys.FRAME, keys.TAIL, keys.HEAD, with_keys=False)
            index_bytes = stored_bytes(snapshot, keys.PREFIX, keys.USER, with_keys=True)
            object_bytes = stored_bytes(snapshot, keys.SHARED, with_keys=True)
        backend = self._backend.info()
        return ArchiveInfo(
            path=self.path,
            backend=backend.kind,
            format=int(self._about["format"]),
            writer=str(self._about.get("writer", "")),
            created=int(self._about.get("created", 0)),
            file_bytes=backend.file_bytes,
            free_bytes=backend.free_bytes,
            used_bytes=backend.used_bytes,
            frame_bytes=frame_bytes,
            index_bytes=index_bytes,
            n_sessions=len(found.sessions) + len(found.damaged),
            n_pinned=sum(session.pinned for session in found.sessions),
            quota_bytes=self._room.quota(),
            readers=tuple(self._backend.readers()),
            n_damaged=len(found.damaged),
            object_bytes=object_bytes,
        )

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Archive {self.path!r} mode={self._mode!r}>"
