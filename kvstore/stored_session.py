"""What is stored of a session: any token range of any layer, sizes and errors."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from kvcodecs.errors import InvalidArgument
from kvcodecs.plan import check_threads
from kvcodecs.spec import KINDS, Kind, KState, float_dtype

from .backend import Snapshot
from .destination import destination, dtype_of
from .identity import Model
from .info import SessionInfo, session_info
from .matching import Promise
from .reader import Reader, Request
from .session_record import SessionRecord
from .token_ids import Ids, read_ids
from .token_range import check_range, check_token

if TYPE_CHECKING:
    from .opened import OpenArchive

# Before an output of so much is allocated, the record's promise of tokens is looked at. Smaller
# ones are allocated right away: the read finds a missing frame before it writes.
_LARGE_BYTES: Final = 64 << 20


class StoredSession:
    """What is stored of a session, to read. Safe to use from many threads."""

    def __init__(
        self,
        archive: OpenArchive,
        name: str,
        model: Model,
        session: int,
        promise: Promise | None = None,
    ) -> None:
        self._archive, self._name, self._id = archive, name, session
        self._promise = promise
        self._reader = Reader(model, self._where, archive._codings)

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
    def finished(self) -> bool:
        """Whether nothing is appended to the session any more; see `Archive.seal`."""
        with self._archive._read() as snapshot:
            return self._record(snapshot).finished

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
    def n_frames_read(self) -> int:
        """Stored frames that reads of this object have decoded so far: a range costs its own."""
        return self._reader.n_frames_read

    def read(
        self,
        layer: int,
        kind: Kind,
        start: int | None = None,
        stop: int | None = None,
        k_state: KState = "pre",
        dtype: str | np.dtype[Any] | type | None = None,
        *,
        out: Any = None,
        position_offset: int = 0,
        n_threads: int | None = None,
        device: str | None = None,
    ) -> Any:
        """Return committed tokens ``[start, stop)`` of one stream.

        Parameters
        ----------
        layer, kind
            Which stream.
        start, stop
            Absolute positions; None means the first that the stream has, and all that is
            committed.
        k_state
            K before or after RoPE; V and layers without RoPE are the same either way.
        dtype
            float32, float16 or bfloat16; None means the model's, or float32 if it has none.
        out : (heads, stop - start, head_dim), optional
            Written instead of a new array; last axis contiguous. Untouched if a stored byte
            proves wrong. May be an array of a GPU, a PyTorch tensor among them, or
            `kvgpu.Paged`: written in the order of CuPy's current stream, so what other streams
            still do with it must be done.
        position_offset
            K after RoPE is rotated for positions so much later (earlier where negative): to use
            the tokens at another place of a context. V and K before RoPE stay the same.
        n_threads
            None: one per CPU this process may use. The result does not depend on it.
        device
            ``"cpu"``, or ``"cuda"``: decode on CuPy's current device, see `kvgpu.decode`. None:
            where `out` lies, and without it on the host. The bits are the same.

        Returns
        -------
        x : (heads, stop - start, head_dim)
            A NumPy or a CuPy array, or `out`. Within half a step of the input in the coded domain,
            plus half an ulp of `dtype`.

        Raises
        ------
        InvalidArgument
            No such stream or range, one that was trimmed, a shifted position below 0, or a value
            that overflows float16.
        Truncated, Corrupt, Unsupported
            Stored bytes are not what was written; names the block. `Unsupported` also where
            there is no GPU to decode on.
        NotFound
            The session has been deleted.
        """
        into = destination(device, out)
        with self._archive._read() as snapshot:
            record = self._record(snapshot)
            spec = self.model.stream(layer, kind)
            start, stop = check_range(
                record, layer, kind, start, stop, self._where, self._n_appended()
            )
            _check_k_state(k_state)
            n_threads = check_threads(n_threads)
            shape = (spec.heads, stop - start, spec.head_dim)
            where = f"{self._where} layer {layer} {kind}"
            out_dtype = self._dtype(dtype) if out is None else dtype_of(out, where)
            if math.prod(shape) * out_dtype.itemsize >= _LARGE_BYTES:
                self._reader.check_end(snapshot, record, layer, kind, stop)
            if out is None:
                out = into.empty(shape, out_dtype)
            elif tuple(out.shape) != shape or (
                dtype is not None and out_dtype != float_dtype(dtype)
            ):
                raise InvalidArgument(
                    f"{where}: out is {out.dtype} {tuple(out.shape)}, "
                    f"expected {dtype or 'a float type'} {shape}"
                )
            request = Request(layer, kind, start, stop, into.view(out))
            offset = check_offset(position_offset)
            self._reader.read(snapshot, record, [request], k_state, n_threads, offset, into)
        self._archive._room.note_use(self._id)
        return out

    def read_all(
        self,
        start: int | None = None,
        stop: int | None = None,
        layers: Sequence[int] | None = None,
        k_state: KState = "pre",
        dtype: str | np.dtype[Any] | type | None = None,
        *,
        position_offset: int = 0,
        n_threads: int | None = None,
        device: str | None = None,
    ) -> tuple[Any, Any]:
        """Return committed tokens ``[start, stop)`` of K and V of all layers, or of `layers`.

        The parameters are those of `read`.

        Returns
        -------
        k, v
            ``(layers, heads, n, head_dim)`` each where the layers are alike, else a list of
            ``(heads, n, head_dim)`` per layer, with None where V is absent. With `start` None each
            layer from its first token: those with a window may have fewer. With ``device="cuda"``
            CuPy arrays.

        Raises
        ------
        InvalidArgument, Truncated, Corrupt, Unsupported, NotFound
            As `read`.
        """
        chosen = range(self.model.n_layers) if layers is None else _layers(layers)
        _check_k_state(k_state)
        n_threads = check_threads(n_threads)
        into = destination(device)
        requests: list[Request] = []
        results: list[Any] = []
        with self._archive._read() as snapshot:
            record = self._record(snapshot)
            out_dtype = self._dtype(dtype)
            n_tensors = len(KINDS) * len(chosen)
            for kind in KINDS:
                ranges = [
                    check_range(record, layer, kind, start, stop, self._where, self._n_appended())
                    for layer in chosen
                    if self.model.has_stream(layer, kind)
                ]
                alike = self.model.is_uniform(chosen, kind) and len(set(ranges)) == 1
                left = iter(ranges)
                parts: list[Any] = []
                stacked: Any = None
                for i, layer in enumerate(chosen):
                    if not self.model.has_stream(layer, kind):
                        parts.append(None)
                        continue
                    spec = self.model.stream(layer, kind)
                    lo, hi = next(left)
                    shape = (spec.heads, hi - lo, spec.head_dim)
                    if n_tensors * math.prod(shape) * out_dtype.itemsize >= _LARGE_BYTES:
                        self._reader.check_end(snapshot, record, layer, kind, hi)
                    if stacked is None and alike:
                        stacked = into.empty((len(chosen), *shape), out_dtype)
                    part = into.empty(shape, out_dtype) if stacked is None else stacked[i]
                    parts.append(part)
                    requests.append(Request(layer, kind, lo, hi, into.view(part)))
                results.append(parts if stacked is None else stacked)
            offset = check_offset(position_offset)
            self._reader.read(snapshot, record, requests, k_state, n_threads, offset, into)
        self._archive._room.note_use(self._id)
        return results[0], results[1]

    def token_ids(self, start: int | None = None, stop: int | None = None) -> Ids | None:
        """Return the committed token ids ``[start, stop)`` as int64; None if none are stored.

        `start` and `stop` None mean the first that was not trimmed, and all.
        """
        with self._archive._read() as snapshot:
            record = self._record(snapshot)
            if not record.has_ids:
                return None
            what = f"{self._where}: token ids [{start}, {stop})"
            stop = record.n_tokens if stop is None else check_token(stop, what)
            start = min(record.first, stop) if start is None else check_token(start, what)
            if not 0 <= start <= stop <= record.n_tokens:
                raise InvalidArgument(f"{what}: {record.n_tokens} tokens are committed")
            if start < min(record.first, stop):
                raise InvalidArgument(
                    f"{what}: trimmed; the session starts at token {record.first}"
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

    @property
    def _where(self) -> str:
        return f"{self._archive.path}: session {self._name!r}"

    def _record(self, snapshot: Snapshot) -> SessionRecord:
        """Return the session's record; what a prompt matched must still be there."""
        record = self._archive._catalog.record(snapshot, self._name, self._id)
        if self._promise is not None:
            self._promise.check(snapshot, record, self._where)
        return record

    def _dtype(self, dtype: str | np.dtype[Any] | type | None) -> np.dtype[Any]:
        return float_dtype(dtype if dtype is not None else self.model.dtype or "float32")

    def _n_appended(self) -> int | None:
        """Return how many tokens there will be with the next commit, if somebody here appends."""
        return None


def _layers(layers: object) -> list[int]:
    if not isinstance(layers, Sequence | range | np.ndarray) or isinstance(layers, str):
        raise InvalidArgument(f"layers {layers!r}: expected a sequence of numbers")
    return list(layers)


def _check_k_state(k_state: str) -> None:
    if k_state not in ("pre", "post"):
        raise InvalidArgument(f"k_state {k_state!r}, expected 'pre' or 'post'")


def check_offset(position_offset: object) -> int:
    """Return a shift of positions; `InvalidArgument` unless it is an integer."""
    if isinstance(position_offset, bool) or not isinstance(position_offset, int | np.integer):
        raise InvalidArgument(f"position_offset {position_offset!r}: expected an integer")
    return int(position_offset)
