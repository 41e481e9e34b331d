"""A session: append and commit, read any token range back."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Closed, InvalidArgument
from kvcodecs.spec import KINDS, Kind, KState, float_dtype

from .forklock import ForkLock
from .identity import Model
from .info import SessionInfo, session_info
from .layout import check_threads
from .reader import Reader, Request, check_range
from .token_ids import Ids, read_ids
from .writer import SessionWriter, Tensors

if TYPE_CHECKING:
    from .archive import Archive

Tensor = npt.NDArray[Any]


class Session:
    """The KV of one token sequence; made by `Archive.create_session` and `Archive.session`.

    Safe to use from many threads: reads run side by side, appends and commits one at a time.
    What was appended and not committed is lost when the session or archive is closed.
    """

    def __init__(self, archive: Archive, name: str, model: Model, owner: int) -> None:
        self._archive, self._name = archive, name
        self._where = f"{archive.path}: session {name!r}"
        self._reader = Reader(model, owner, self._where)
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
        """The JSON object that was stored with the session; a copy."""
        with self._archive._read() as snapshot:
            record = self._archive._catalog.record(snapshot, self._name, self._reader.owner)
            return copy.deepcopy(dict(record.metadata))

    @property
    def n_committed(self) -> int:
        """Tokens that are durable and readable, as of now; another process may append."""
        with self._archive._read() as snapshot:
            return self._archive._catalog.record(snapshot, self._name, self._reader.owner).n_tokens

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
        n_threads
            None: one per CPU this process may use. The result does not depend on it.

        Returns
        -------
        x : (heads, stop - start, head_dim)
            Within half a step of the input in the coded domain, plus half an ulp of `dtype`.

        Raises
        ------
        InvalidArgument
            No such stream or range, or a value that overflows float16.
        Truncated, Corrupt, Unsupported
            Stored bytes are not what was written; names the block.
        NotFound
            The session has been deleted.
        """
        with self._archive._read() as snapshot:
            record = self._archive._catalog.record(snapshot, self._name, self._reader.owner)
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
            self._reader.read(snapshot, record, [request], k_state, n_threads)
        return out

    def read_all(
        self,
        start: int = 0,
        stop: int | None = None,
        layers: Sequence[int] | None = None,
        k_state: KState = "pre",
        dtype: str | np.dtype[Any] | type | None = None,
        *,
        n_threads: int | None = None,
    ) -> tuple[Tensor | list[Tensor | None], Tensor | list[Tensor | None]]:
        """Return committed tokens ``[start, stop)`` of K and V of all layers, or of `layers`.

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
            record = self._archive._catalog.record(snapshot, self._name, self._reader.owner)
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
            self._reader.read(snapshot, record, requests, k_state, n_threads)
        return results[0], results[1]

    def token_ids(self, start: int = 0, stop: int | None = None) -> Ids | None:
        """Return the committed token ids ``[start, stop)`` as int64; None if none are stored."""
        with self._archive._read() as snapshot:
            record = self._archive._catalog.record(snapshot, self._name, self._reader.owner)
            if not record.has_ids:
                return None
            stop = record.n_tokens if stop is None else stop
            if not 0 <= start <= stop <= record.n_tokens:
                raise InvalidArgument(
                    f"{self._where}: token ids [{start}, {stop}) of {record.n_tokens}"
                )
            return read_ids(snapshot, record, start, stop, self._where)

    def start_token(self, layer: int, kind: Kind = "k") -> int:
        """Return the first position that a layer has: 0, or more for a layer with a window."""
        self.model.stream(layer, kind)
        with self._archive._read() as snapshot:
            record = self._archive._catalog.record(snapshot, self._name, self._reader.owner)
            return record.streams[layer, kind].start

    def info(self) -> SessionInfo:
        """Return sizes, rates and measured errors; decodes nothing."""
        with self._archive._read() as snapshot:
            record = self._archive._catalog.record(snapshot, self._name, self._reader.owner)
            return session_info(snapshot, self._name, record, self._reader)

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

    def _appender(self) -> SessionWriter:
        self._check_open()
        if self._writer is None:
            self._writer = self._archive._appender(self._name, self._reader)
        return self._writer

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._where}: closed; open the session again to append")
        if self._process != os.getpid():
            raise Closed(f"{self._where}: opened before a fork; open it again in this process")

    def _n_appended(self) -> int | None:
        writer = self._writer
        return None if writer is None else writer.n_tokens

    def _dtype(self, dtype: str | np.dtype[Any] | type | None) -> np.dtype[Any]:
        return float_dtype(dtype if dtype is not None else self.model.dtype or "float32")


def _check_k_state(k_state: str) -> None:
    if k_state not in ("pre", "post"):
        raise InvalidArgument(f"k_state {k_state!r}, expected 'pre' or 'post'")


def source_of(stats_from: object) -> tuple[str, int | None]:
    """Return name and, of a session object, owner of the session that headers come from."""
    if isinstance(stats_from, str):
        return stats_from, None
    if not isinstance(stats_from, Session):
        raise InvalidArgument(f"stats_from {stats_from!r}: expected a session or its name")
    return stats_from.name, stats_from._reader.owner
