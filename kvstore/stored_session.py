"""What is stored of a session: any token range of any layer, sizes and errors."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from kvcodecs.errors import InvalidArgument
from kvcodecs.plan import check_threads
from kvcodecs.rope import check_k_state
from kvcodecs.spec import KINDS, Kind, KState, float_dtype

from .backend import Snapshot
from .destination import destination
from .identity import Model
from .info import SessionInfo, session_info
from .matching import Promise
from .outputs import check_out, outs_of_layers
from .reader import Reader, Request
from .receipts import SessionReceipt, stored_receipts
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

    def receipts(self) -> list[SessionReceipt]:
        """Return what is stored of receipts, one for each commit that added tokens, in their order.

        Empty for a session that was created without ``receipts=True``.

        Raises
        ------
        Truncated, Corrupt, Unsupported
            A receipt is damaged, or of a newer release.
        NotFound
            The session has been deleted.
        """
        with self._archive._read() as snapshot:
            record = self._record(snapshot)
            return [found for _, found in stored_receipts(snapshot, record.id, self._where)]

    def decode_receipt(self, k: Any, v: Any = None, *, start: int | None = None) -> SessionReceipt:
        """Return a decode receipt of values that were read: their digests, and those of the frames.

        Nothing is stored.

        Parameters
        ----------
        k, v : (layers, heads, n, head_dim)
            What `read_all` returned, on the host: arrays, or lists of an array per layer with None
            where there is none. Layers that were not read may be None.
        start
            Position of the first token, as `read_all` was asked; None for the first of each stream.

        Raises
        ------
        InvalidArgument
            Arrays of another geometry, or of tokens that are not there.
        Truncated, Corrupt, Unsupported, NotFound
            As `read`: frames are read again for their digests.
        """
        from .receipt_making import hashed, receipt_of_read

        values = hashed(self.model, k, v, self._where)
        with self._archive._read() as snapshot:
            record = self._record(snapshot)
        firsts = {
            (layer, kind): check_range(record, layer, kind, start, None, self._where, None)[0]
            for layer, kind in values
        }
        return receipt_of_read(self, values, firsts)

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
        stream: Any = None,
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
            `kvgpu.Paged`: written in the order of `stream`, so what other streams still do with
            it must be done.
        position_offset
            K after RoPE is rotated for positions so much later (earlier where negative): to use
            the tokens at another place of a context. V and K before RoPE stay the same.
        n_threads
            None: one per CPU this process may use. The result does not depend on it.
        device
            ``"cpu"``, or ``"cuda"``: decode on CuPy's current device, see `kvgpu.decode`. None:
            where `out` lies, and without it on the host. The bits are the same.
        stream
            Of the GPU, see `kvgpu.decode`; None: CuPy's current one.

        Returns
        -------
        x : (heads, stop - start, head_dim)
            A NumPy or a CuPy array, or `out`. Its values are written when this returns, on a GPU
            too. Within half a step of the input in the coded domain, plus half an ulp of `dtype`.

        Raises
        ------
        InvalidArgument
            No such stream or range, one that was trimmed, a shifted position below 0, or a value
            that overflows float16. A `stream` where the values go to the host.
        Truncated, Corrupt, Unsupported
            Stored bytes are not what was written; names the block. `Unsupported` also where
            there is no GPU to decode on.
        NotFound
            The session has been deleted.
        """
        with self._archive._read() as snapshot:
            record = self._record(snapshot)
            self.model.stream(layer, kind)  # says which there are
            start, stop = check_range(
                record, layer, kind, start, stop, self._where, self._n_appended()
            )
            check_k_state(k_state)
            n_threads = check_threads(n_threads)
            shape = self._shape(layer, kind, start, stop)
            where = f"{self._where} layer {layer} {kind}"
            offset = check_offset(position_offset)
            out_dtype = self._dtype(dtype) if out is None else check_out(out, shape, dtype, where)
            into = destination(device, (out,), stream)
            if math.prod(shape) * out_dtype.itemsize >= _LARGE_BYTES:
                self._reader.check_end(snapshot, record, layer, kind, stop)
            if out is None:
                out = into.empty(shape, out_dtype)
            request = Request(layer, kind, start, stop, into.view(out))
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
        out: tuple[Any, Any] | None = None,
        position_offset: int = 0,
        n_threads: int | None = None,
        device: str | None = None,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """Return committed tokens ``[start, stop)`` of K and V of all layers, or of `layers`.

        The other parameters are those of `read`. All blocks of all layers are decoded together,
        on a GPU by as few launches as memory allows: prefer it to reads of one layer each.

        Parameters
        ----------
        out : (k, v), optional
            Written instead of new arrays: for K and for V a list of what `read` takes, one for
            each of the layers, with None where V is absent; or one array ``(layers, heads, n,
            head_dim)``; or None where no layer has V. `kvgpu.Paged` may be among them, to fill a
            paged cache.

        Returns
        -------
        k, v
            ``(layers, heads, n, head_dim)`` each where the layers are alike, else a list of
            ``(heads, n, head_dim)`` per layer, with None where V is absent. With `start` None each
            layer from its first token: those with a window may have fewer. With ``device="cuda"``
            CuPy arrays; with `out`, what it holds.

        Raises
        ------
        InvalidArgument, Truncated, Corrupt, Unsupported, NotFound
            As `read`.
        """
        chosen = range(self.model.n_layers) if layers is None else _layers(layers)
        check_k_state(k_state)
        n_threads = check_threads(n_threads)
        offset = check_offset(position_offset)
        outs = None if out is None else outs_of_layers(out, len(chosen))
        requests: list[Request] = []
        results: list[Any] = []
        with self._archive._read() as snapshot:
            record = self._record(snapshot)
            out_dtype = self._dtype(dtype)
            ranges = {
                (layer, kind): check_range(
                    record, layer, kind, start, stop, self._where, self._n_appended()
                )
                for kind in KINDS
                for layer in chosen
                if self.model.has_stream(layer, kind)
            }
            if outs is not None:
                self._check_outs(outs, chosen, ranges, dtype)
            given = () if outs is None else outs[0] + outs[1]
            into = destination(device, given, stream)
            n_tensors = len(KINDS) * len(chosen)
            for at, kind in enumerate(KINDS):
                spans = {ranges.get((layer, kind)) for layer in chosen}
                alike = self.model.is_uniform(chosen, kind) and len(spans) == 1
                parts: list[Any] = []
                stacked: Any = None
                for i, layer in enumerate(chosen):
                    if (layer, kind) not in ranges:
                        parts.append(None)
                        continue
                    lo, hi = ranges[layer, kind]
                    shape = self._shape(layer, kind, lo, hi)
                    if n_tensors * math.prod(shape) * out_dtype.itemsize >= _LARGE_BYTES:
                        self._reader.check_end(snapshot, record, layer, kind, hi)
                    if outs is not None:
                        part = outs[at][i]
                    else:
                        if stacked is None and alike:
                            stacked = into.empty((len(chosen), *shape), out_dtype)
                        part = into.empty(shape, out_dtype) if stacked is None else stacked[i]
                    parts.append(part)
                    requests.append(Request(layer, kind, lo, hi, into.view(part)))
                results.append(parts if stacked is None else stacked)
            self._reader.read(snapshot, record, requests, k_state, n_threads, offset, into)
        self._archive._room.note_use(self._id)
        k, v = results if out is None else out
        return k, v

    def _check_outs(
        self,
        outs: list[list[Any]],
        chosen: Sequence[int],
        ranges: Mapping[tuple[int, Kind], tuple[int, int]],
        dtype: str | np.dtype[Any] | type | None,
    ) -> None:
        for kind, arrays in zip(KINDS, outs, strict=True):
            for layer, array in zip(chosen, arrays, strict=True):
                where = f"{self._where} layer {layer} {kind}"
                if (layer, kind) in ranges:
                    shape = self._shape(layer, kind, *ranges[layer, kind])
                    check_out(array, shape, dtype, where)
                elif array is not None:
                    raise InvalidArgument(f"{where}: there is none; give None in its place")

    def _shape(self, layer: int, kind: Kind, start: int, stop: int) -> tuple[int, int, int]:
        spec = self.model.stream(layer, kind)
        return spec.heads, stop - start, spec.head_dim

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


def check_offset(position_offset: object) -> int:
    """Return a shift of positions; `InvalidArgument` unless it is an integer."""
    if isinstance(position_offset, bool) or not isinstance(position_offset, int | np.integer):
        raise InvalidArgument(f"position_offset {position_offset!r}: expected an integer")
    return int(position_offset)
