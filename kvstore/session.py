"""A session: append and commit, read any token range back."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Closed, InvalidArgument
from kvcodecs.spec import KINDS, Kind, KState, float_dtype

from .backend import Snapshot
from .forklock import ForkLock
from .identity import Model, check_metadata
from .info import SessionInfo, session_info
from .layout import check_threads
from .matching import Promise
from .reader import Reader, Request, check_range
from .session_record import SessionRecord
from .token_ids import Ids, read_ids
from .writer import SessionWriter, Tensors

if TYPE_CHECKING:
    from .archive import Archive
    from .relocation import AppendedRange

Tensor = npt.NDArray[Any]


class Session:
    """The KV of one token sequence; made by `Archive.create_session` and `Archive.session`.

    Safe to use from many threads: reads run side by side, appends and commits one at a time.
    What was appended and not committed is lost when the session or archive is closed.
    """

    def __init__(
        self,
        archive: Archive,
        name: str,
        model: Model,
        session: int,
        promise: Promise | None = None,
    ) -> None:
        self._archive, self._name, self._id = archive, name, session
        self._promise = promise
        self._reader = Reader(model, self._where)
        self._lock = ForkLock()
        self._writer: SessionWriter | None = None
        self._closed = False
        self._process = os.getpid()

    @property
    def name(self) -> str:
        return self._name

    @property
    def model(self) -> Model:
        return self._reader.model

    @property
    def metadata(self) -> dict[str, Any]:
        """The JSON object that is stored with the session; a copy, see `set_metadata`."""
        with self._archive._read() as snapshot:
            return copy.deepcopy(dict(self._record(snapshot).metadata))

    @property
    def pinned(self) -> bool:
        """Whether eviction leaves the session alone; see `pin`."""
        with self._archive._read() as snapshot:
            return self._record(snapshot).pinned

    @property
    def first_token(self) -> int:
        """First position that was not trimmed; see `trim_front`."""
        with self._archive._read() as snapshot:
            return self._record(snapshot).first

    @property
    def n_committed(self) -> int:
        """Tokens that are durable and readable, as of now; another process may append."""
        with self._archive._read() as snapshot:
            return self._record(snapshot).n_tokens

    @property
    def n_tokens(self) -> int:
        """Tokens appended, committed or not: where the next append goes."""
        with self._lock:
            if self._writer is not None and not self._closed:
                return self._writer.n_tokens
        return self.n_committed

    @property
    def n_frames_read(self) -> int:
        """Stored frames that reads of this object have decoded so far: a range costs its own."""
        return self._reader.n_frames_read

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

    def read(
        self,
        layer: int,
        kind: Kind,
        start: int = 0,
        stop: int | None = None,
        k_state: KState = "pre",
        dtype: str | np.dtype[Any] | type | None = None,
        *,
        out: Tensor | None = None,
        position_offset: int = 0,
        n_threads: int | None = None,
    ) -> Tensor:
        """Return committed tokens ``[start, stop)`` of one stream.

        Parameters
        ----------
        layer, kind
            Which stream.
        start, stop
            Absolute positions; `stop` None means all that is committed.
        k_state
            K before or after RoPE; V and layers without RoPE are the same either way.
        dtype
            float32, float16 or bfloat16; None means the model's, or float32 if it has none.
        out : (heads, stop - start, head_dim), optional
            Written instead of a new array; last axis contiguous. Untouched if a stored byte
            proves wrong.
        position_offset
            K after RoPE is rotated for positions so much later (earlier where negative): to use
            the tokens at another place of a context. V and K before RoPE stay the same.
        n_threads
            None: one per CPU this process may use. The result does not depend on it.

        Returns
        -------
        x : (heads, stop - start, head_dim)
            Within half a step of the input in the coded domain, plus half an ulp of `dtype`.

        Raises
        ------
        InvalidArgument
            No such stream or range, one that was trimmed, a shifted position below 0, or a value
            that overflows float16.
        Truncated, Corrupt, Unsupported
            Stored bytes are not what was written; names the block.
        NotFound
            The session has been deleted.
        """
        with self._archive._read() as snapshot:
            record = self._record(snapshot)
            spec = self.model.stream(layer, kind)
            start, stop = check_range(
                record, layer, kind, start, stop, self._where, self._n_appended()
            )
            _check_k_state(k_state)
            n_threads = check_threads(n_threads)
            self._reader.check_end(snapshot, record, layer, kind, stop)
            shape = (spec.heads, stop - start, spec.head_dim)
            if out is None:
                out = np.empty(shape, self._dtype(dtype))
            elif out.shape != shape or (dtype is not None and out.dtype != float_dtype(dtype)):
                raise InvalidArgument(
                    f"{self._where} layer {layer} {kind}: out is {out.dtype} {out.shape}, "
                    f"expected {dtype or 'a float type'} {shape}"
                )
            request = Request(layer, kind, start, stop, out)
            offset = check_offset(position_offset)
            self._reader.read(snapshot, record, [request], k_state, n_threads, offset)
        self._archive._note_use(self._id)
        return out

    def read_all(
        self,
        start: int = 0,
        stop: int | None = None,
        layers: Sequence[int] | None = None,
        k_state: KState = "pre",
        dtype: str | np.dtype[Any] | type | None = None,
        *,
        position_offset: int = 0,
        n_threads: int | None = None,
    ) -> tuple[Tensor | list[Tensor | None], Tensor | list[Tensor | None]]:
        """Return committed tokens ``[start, stop)`` of K and V of all layers, or of `layers`.

        The parameters are those of `read`.

        Returns
        -------
        k, v
            ``(layers, heads, n, head_dim)`` each where the layers are alike, else a list of
            ``(heads, n, head_dim)`` per layer, with None where V is absent.

        Raises
        ------
        InvalidArgument, Truncated, Corrupt, Unsupported, NotFound
            As `read`.
        """
        chosen = range(self.model.n_layers) if layers is None else list(layers)
        _check_k_state(k_state)
        n_threads = check_threads(n_threads)
        requests: list[Request] = []
        results: list[Tensor | list[Tensor | None]] = []
        with self._archive._read() as snapshot:
            record = self._record(snapshot)
            out_dtype = self._dtype(dtype)
            for kind in KINDS:
                parts: list[Tensor | None] = []
                stacked: Tensor | None = None
                for i, layer in enumerate(chosen):
                    if not self.model.has_stream(layer, kind):
                        parts.append(None)
                        continue
                    spec = self.model.stream(layer, kind)
                    lo, hi = check_range(
                        record, layer, kind, start, stop, self._where, self._n_appended()
                    )
                    self._reader.check_end(snapshot, record, layer, kind, hi)
                    shape = (spec.heads, hi - lo, spec.head_dim)
                    if stacked is None and self.model.is_uniform(chosen, kind):
                        stacked = np.empty((len(chosen), *shape), out_dtype)
                    part = np.empty(shape, out_dtype) if stacked is None else stacked[i]
                    parts.append(part)
                    requests.append(Request(layer, kind, lo, hi, part))
                results.append(parts if stacked is None else stacked)
            offset = check_offset(position_offset)
            self._reader.read(snapshot, record, requests, k_state, n_threads, offset)
        self._archive._note_use(self._id)
        return results[0], results[1]

    def token_ids(self, start: int = 0, stop: int | None = None) -> Ids | None:
        """Return the committed token ids ``[start, stop)`` as int64; None if none are stored."""
        with self._archive._read() as snapshot:
            record = self._record(snapshot)
            if not record.has_ids:
                return None
            stop = record.n_tokens if stop is None else stop
            if not record.first <= start <= stop <= record.n_tokens:
                raise InvalidArgument(
                    f"{self._where}: token ids [{start}, {stop}) of [{record.first}, "
                    f"{record.n_tokens})"
                )
            return read_ids(snapshot, record, start, stop, self._where)

    def start_token(self, layer: int, kind: Kind = "k") -> int:
        """Return the first position of a layer that can be read.

        0, or more for a layer with a window or after `trim_front`.
        """
        self.model.stream(layer, kind)
        with self._archive._read() as snapshot:
            record = self._record(snapshot)
            return max(record.streams[layer, kind].start, record.first)

    def info(self) -> SessionInfo:
        """Return sizes, rates and measured errors; decodes nothing."""
        with self._archive._read() as snapshot:
            record = self._record(snapshot)
            return session_info(snapshot, self._name, record, self._reader)

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
            Committed tokens to share; None for all. A block that is cut is coded again when the
            fork first commits tokens of its own.
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
        return self._archive._fork(self._name, self._id, name, at, metadata, replace)

    def truncate(self, n_tokens: int) -> None:
        """Take back the tokens from `n_tokens` on, durably; the next append goes there.

        For an answer that is generated anew, or a speculation that is rejected. Appended tokens
        that stay and are not committed yet are committed.

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
            if not 0 <= n_tokens <= writer.n_tokens:
                raise InvalidArgument(
                    f"{self._where}: truncate to {n_tokens}: it has {writer.n_tokens} tokens"
                )
            if n_tokens > writer.record.n_tokens:
                writer.commit()
            if n_tokens < writer.n_tokens:
                self._writer = self._archive._truncated(self._name, writer, self._reader, n_tokens)

    def trim_front(self, n_tokens: int) -> None:
        """Drop the first `n_tokens` committed tokens, for sliding windows; durable at once.

        Positions stay what they are; reads before `n_tokens` raise. Blocks that lie wholly before
        it are deleted. A session that was trimmed matches no prompt any more.

        Raises
        ------
        InvalidArgument
            More tokens than are committed.
        Locked, Full
            See `commit`.
        """
        self._check_open()
        self._archive._trim(self._name, self._id, n_tokens)

    def append_range(self, source: Session, start: int, stop: int) -> AppendedRange:
        """Append the committed tokens ``[start, stop)`` of another session, and commit.

        Where both sessions' blocks lie alike, whole blocks are shared: nothing is coded again.
        The others are decoded and coded with this session's step. See `relocation.append_range`
        for what is required and returned.
        """
        from .relocation import append_range

        return append_range(self, source, start, stop)

    def rename(self, name: str, *, replace: bool = False) -> None:
        """Give the session another name; with `replace` also one that is taken.

        Raises
        ------
        InvalidArgument
            The name is taken or not a name.
        Locked
            Another session object is appending, or see `commit`.
        """
        with self._lock:
            self._check_open()
            self._archive._rename(self, name, replace)

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the JSON object that is stored with the session; durable at once."""
        self._check_open()
        self._archive._change(self._name, self._id, metadata=check_metadata(metadata))

    def pin(self, pinned: bool = True) -> None:
        """Keep eviction from the session, or with False allow it again; durable at once."""
        self._check_open()
        self._archive._change(self._name, self._id, pinned=bool(pinned))

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
            self._writer = self._archive._appender(self._name, self._id, self._reader)
        return self._writer

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._where}: closed; open the session again to append")
        if self._process != os.getpid():
            raise Closed(f"{self._where}: opened before a fork; open it again in this process")

    @property
    def _where(self) -> str:
        return f"{self._archive.path}: session {self._name!r}"

    def _record(self, snapshot: Snapshot) -> SessionRecord:
        """Return the session's record; what a prompt matched must still be there."""
        record = self._archive._catalog.record(snapshot, self._name, self._id)
        if self._promise is not None:
            self._promise.check(snapshot, record, self._where)
        return record

    def _n_appended(self) -> int | None:
        writer = self._writer
        return None if writer is None else writer.n_tokens

    def _dtype(self, dtype: str | np.dtype[Any] | type | None) -> np.dtype[Any]:
        return float_dtype(dtype if dtype is not None else self.model.dtype or "float32")


def _check_k_state(k_state: str) -> None:
    if k_state not in ("pre", "post"):
        raise InvalidArgument(f"k_state {k_state!r}, expected 'pre' or 'post'")


def check_offset(position_offset: object) -> int:
    """Return a shift of positions; `InvalidArgument` unless it is an integer."""
    if isinstance(position_offset, bool) or not isinstance(position_offset, int | np.integer):
        raise InvalidArgument(f"position_offset {position_offset!r}: expected an integer")
    return int(position_offset)


def source_of(stats_from: object) -> tuple[str, int | None]:
    """Return name and, of a session object, id of the session that headers come from."""
    if isinstance(stats_from, str):
        return stats_from, None
    if not isinstance(stats_from, Session):
        raise InvalidArgument(f"stats_from {stats_from!r}: expected a session or its name")
    return stats_from.name, stats_from._id
