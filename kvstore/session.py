"""A session: append and commit; fork, roll back, trim. Reading is next door."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
from kvcodecs.errors import Closed, InvalidArgument
from kvcodecs.spec import KState

from .changes import (
    change_session,
    fork_session,
    rename_session,
    trim_session,
    truncate_session,
)
from .forklock import ForkLock
from .given import Tensors
from .identity import Model
from .lineage import check_position
from .matching import Promise
from .metadata import check_metadata
from .stored_session import StoredSession
from .writer import SessionWriter

if TYPE_CHECKING:
    from .opened import OpenArchive
    from .relocation import AppendedRange

Tensor = npt.NDArray[Any]


class Session(StoredSession):
    """The KV of one token sequence; made by `Archive.create_session` and `Archive.session`.

    Safe to use from many threads: reads run side by side, appends and commits one at a time.
    What was appended and not committed is lost when the session or archive is closed.
    """

    def __init__(
        self,
        archive: OpenArchive,
        name: str,
        model: Model,
        session: int,
        promise: Promise | None = None,
    ) -> None:
        super().__init__(archive, name, model, session, promise)
        self._lock = ForkLock()
        self._writer: SessionWriter | None = None
        self._closed = False
        self._process = os.getpid()

    @property
    def n_tokens(self) -> int:
        """Tokens appended, committed or not: where the next append goes."""
        with self._lock:
            if self._writer is not None and not self._closed:
                return self._writer.n_tokens
        return self.n_committed

    def append(
        self,
        k: Tensors,
        v: Tensors = None,
        *,
        k_state: KState = "pre",
        token_ids: object = None,
        start: int | None = None,
        n_threads: int | None = None,
    ) -> None:
        """Append tokens to all layers, or to none if anything is wrong with any value.

        Parameters
        ----------
        k, v : (layers, heads, n, head_dim) float16, bfloat16, float32 or float64
            An array, or a sequence of one ``(heads, n, head_dim)`` array per layer, with None
            where V is absent. On the first append, layers with a window may bring only the
            last of the tokens. Copied.
        k_state
            Whether K was taken before or after RoPE.
        token_ids : (n,) integers, optional
            For all tokens of a session or for none.
        start
            Where the tokens should go: guards against appending twice after a crash.
        n_threads
            None: one per CPU this process may use. The stored bytes do not depend on it.

        Raises
        ------
        InvalidArgument
            Wrong shape, dtype or count, `start` is not `n_tokens`, or a value that cannot be
            coded; names layer, kind, head, token and channel.
        Locked
            Another session object, here or in another process, is appending to this session.

        Notes
        -----
        Loss is the codec's: `KVR1` and `TKV1` keep every value within half a step. Readable after
        `commit`, which rewrites the last, unfinished block of every stream: commit every so many
        tokens rather than each where that much durability is not needed.
        """
        with self._lock:
            self._appender().append(k, v, k_state, token_ids, start, n_threads)

    def commit(self) -> None:
        """Make everything appended so far durable: all layers in one atomic step, or nothing.

        Raises
        ------
        Full
            No space. What was committed before is unharmed, what was appended is kept, and
            the commit can be tried again.
        Locked
            Another writer held the archive's lock for `lock_timeout` seconds; as above.
        InvalidArgument
            The first tokens cannot be coded as the session's codec asks (an absolute step or
            bound that is far too small for them).
        """
        with self._lock:
            self._check_open()
            if self._writer is not None:
                self._writer.commit()

    def fork(
        self,
        name: str,
        at: int | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> Session:
        """Create a session that begins with the first `at` tokens of this one, durable at once.

        Shares the frames: costs a record and the token ids, whatever the length. Appending to
        either leaves the other as it is, and either may be deleted.

        Parameters
        ----------
        name
            Of the new session.
        at
            Committed tokens to share; None for all. A block that is cut is coded again with the
            fork's first append; its values stay what they are.
        metadata
            A JSON object for the fork; None copies this session's.
        replace
            Replace a session that has the name.

        Raises
        ------
        InvalidArgument
            The name is taken or not a name; `at` is beyond `n_committed`, or before the first
            token that every layer has.
        Locked, Full
            See `commit`.
        """
        return fork_session(self, name, at, metadata, replace)

    def truncate(self, n_tokens: int) -> None:
        """Take back the tokens from `n_tokens` on, durably; the next append goes there.

        For an answer that is generated anew, or a speculation that is rejected. Costs about as
        much as a commit or two. Appended tokens that stay and are not committed yet are committed.

        Raises
        ------
        InvalidArgument
            More than there are, or fewer than were trimmed or than a windowed layer begins with.
        Locked
            Another session object is appending, or see `commit`.
        Full
            See `commit`.
        """
        with self._lock:
            writer = self._appender()
            n_tokens = check_position(n_tokens, f"{self._where}: truncate")
            if n_tokens > writer.n_tokens:
                raise InvalidArgument(
                    f"{self._where}: truncate to {n_tokens}: it has {writer.n_tokens} tokens"
                )
            if 0 < n_tokens < writer.start:
                raise InvalidArgument(
                    f"{self._where}: truncate to {n_tokens}: layers begin at token {writer.start}"
                )
            if n_tokens > writer.record.n_tokens:
                writer.commit()
            if n_tokens < writer.n_tokens:
                self._writer = truncate_session(self, writer, n_tokens)

    def trim_front(self, n_tokens: int) -> None:
        """Drop the first `n_tokens` committed tokens, for sliding windows; durable at once.

        Positions stay what they are; reads before `n_tokens` raise. Space comes back in whole
        blocks, those that lie before it: for a short window choose `block_tokens` small when the
        session is created. A session that was trimmed matches no prompt any more.

        Raises
        ------
        InvalidArgument
            More tokens than are committed.
        Locked, Full
            See `commit`.
        """
        trim_session(self, n_tokens)

    def append_range(self, source: Session, start: int, stop: int) -> AppendedRange:
        """Append the committed tokens ``[start, stop)`` of another session, and commit.

        Where both sessions' blocks lie alike, whole blocks are shared: nothing is coded again. The
        other tokens are decoded and coded with this session's step, or copied if both have the same
        `ggml` scheme. See `relocation.append_range` for what is required and returned.
        """
        from .relocation import append_range

        if not isinstance(source, Session):
            raise InvalidArgument(f"{self._where}: source {source!r}: expected a session")
        return append_range(self, source, start, stop)

    def rename(self, name: str, *, replace: bool = False) -> None:
        """Give the session another name; with `replace` also one that is taken.

        Session objects of this archive object follow; elsewhere the old name is not found.

        Raises
        ------
        InvalidArgument
            The name is taken or not a name.
        Locked
            Somebody else than session objects of this archive object is appending, or see `commit`.
        """
        rename_session(self, name, replace)

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the JSON object that is stored with the session; durable at once."""
        change_session(self, metadata=check_metadata(metadata))

    def pin(self, pinned: bool = True) -> None:
        """Keep eviction from the session, or with False allow it again; durable at once."""
        if not isinstance(pinned, bool):
            raise InvalidArgument(f"{self._where}: pin {pinned!r}: expected True or False")
        change_session(self, pinned=pinned)

    def close(self) -> None:
        """Drop what was not committed and let another appender in; reading goes on working.

        Never waits in a forked child, where the session belongs to the parent.
        """
        with self._lock:
            self._closed = True
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session {self._name!r} of {self._archive.path!r}>"

    def _renamed(self, name: str) -> None:
        self._name = name
        self._reader.where = self._where
        if self._writer is not None:
            self._writer.name = name

    def _appender(self) -> SessionWriter:
        self._check_open()
        if self._writer is None:
            self._writer = self._archive._appender(self)
        return self._writer

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._where}: closed, or deleted; open the session again to append")
        if self._process != os.getpid():
            raise Closed(f"{self._where}: opened before a fork; open it again in this process")

    def _n_appended(self) -> int | None:
        writer = self._writer
        return None if writer is None else writer.n_tokens


def source_of(stats_from: object) -> tuple[str, int | None]:
    """Return name and, of a session object, id of the session that headers come from."""
    if isinstance(stats_from, str):
        return stats_from, None
    if not isinstance(stats_from, Session):
        raise InvalidArgument(f"stats_from {stats_from!r}: expected a session or its name")
    return stats_from.name, stats_from._id
