"""What a flat layer has stored, and every way to read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, NotFound
from kvcodecs.frame import crc32c_each, extend_crc32c
from kvcodecs.ggml.schemes import Scheme
from kvcodecs.spec import KINDS, Kind, KState, StreamSpec

from ..forklock import ForkLock
from ..identity import Model
from .coding import Tensor, decode_rows
from .file import Bytes, LayerFile
from .layout import MAX_POSITION, Header, State, check_whole
from .segments import Segments
from .state import Commits

_T = TypeVar("_T")

#: Rows that `pieces` checks and hands out at a time.
_PIECE_ROWS: Final = 4096


class StoredLayer:
    """The rows of an open file; positions are those of tokens."""

    def __init__(
        self, file: LayerFile, header: Header, commits: Commits, *, writable: bool
    ) -> None:
        self._file, self.header, self._commits = file, header, commits
        self._writable, self._lock = writable, ForkLock()
        self._segments = Segments(header, file)
        self._state = State()
        self._settle(commits.load())

    @property
    def start(self) -> int:
        """Position of the first row that was not dropped."""
        return self._now().start

    @property
    def stop(self) -> int:
        """One past the position of the last row; here also of what is not committed yet."""
        return self._now().end

    def __len__(self) -> int:
        state = self._now()
        return state.end - state.start

    @property
    def n_committed(self) -> int:
        """One past the position of the last committed row."""
        return self._commits.load().end

    @property
    def k_state(self) -> KState:
        """Whether K is stored before or after RoPE."""
        return self.header.k_state

    def spec(self, kind: Kind) -> StreamSpec:
        """Return the geometry of K or V."""
        return self.header.spec(kind)

    def scheme(self, kind: Kind) -> Scheme:
        """Return the scheme of K or V."""
        return self.header.scheme(kind)

    @property
    def bytes_per_row(self) -> int:
        """Of K and V together."""
        return self.header.bytes_per_row

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows there are."""
        return len(self) * self.bytes_per_row

    @property
    def capacity(self) -> int:
        """Rows that there is room for without growing."""
        with self._lock:
            return self._segments.n_rows

    def read_rows(
        self,
        start: int,
        stop: int,
        *,
        kinds: Sequence[Kind] = KINDS,
        k_state: KState = "pre",
        dtype: str | np.dtype[Any] | type = "float32",
        n_threads: int | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return K and V of positions ``[start, stop)``, ``(heads, n, head_dim)`` each.

        The checksum blocks that the range touches are checked first, whole. One that is not
        asked for, or that the layer does not have, is None.

        Raises
        ------
        NotFound
            Rows that were dropped, also while they were read.
        InvalidArgument
            A range beyond the last row, or a value that overflows `dtype`.
        Truncated, Corrupt
            The file was cut, or a block is damaged.
        """

        def read(state: State, lo: int, hi: int) -> tuple[Tensor | None, Tensor | None]:
            found: dict[Kind, Tensor] = {}
            for kind in self.header.kinds:
                if kind not in kinds:
                    continue
                self._check_blocks(kind, state, lo, hi)
                rows, first = self._segments.gather(kind, lo, hi), state.origin + lo
                found[kind] = decode_rows(self.header, kind, rows, first, k_state, dtype, n_threads)
            return found.get("k"), found.get("v")

        return self._consistent(start, stop, read)

    def read_window(self, n_rows: int, **options: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return the last `n_rows`, or all there are if they are fewer; see `read_rows`."""
        state = self._now()
        n = check_whole(n_rows, f"{self._file.where}: window", 0, MAX_POSITION)
        return self.read_rows(max(state.start, state.end - n), state.end, **options)

    def read_all(self, **options: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return all rows; see `read_rows`."""
        state = self._now()
        return self.read_rows(state.start, state.end, **options)

    def gather(
        self,
        positions: Sequence[int] | npt.NDArray[np.integer[Any]],
        *,
        k_state: KState = "pre",
        dtype: str | np.dtype[Any] | type = "float32",
    ) -> tuple[Tensor, Tensor | None]:
        """Return single rows, in the order asked for, ``(heads, n, head_dim)`` each.

        Only the pages of these rows are touched, so they are *not* checked against a checksum.
        """
        with self._lock:
            state = self._now()
            places = [check_whole(int(p), "position", 0, MAX_POSITION) for p in positions]
            for place in places:
                self._check_range(state, place, place + 1)
            found: dict[Kind, Tensor] = {}
            for kind in self.header.kinds:
                rows = np.empty((len(places), self.header.row_bytes(kind)), np.uint8)
                for i, place in enumerate(places):
                    at = place - state.origin
                    rows[i] = self._segments.gather(kind, at, at + 1)[0]
                found[kind] = decode_rows(self.header, kind, rows, places, k_state, dtype, 1)
            after = self._now()
            for place in places:
                self._check_range(after, place, place + 1)
        return found["k"], found.get("v")

    def pieces(
        self, start: int, stop: int, n_threads: int = 1
    ) -> Iterator[tuple[int, int, Bytes, Bytes]]:
        """Yield ``(start, stop, k_rows, v_rows)`` of successive rows, checked, as stored.

        Raises
        ------
        NotFound
            Rows that were dropped or taken back, also those yielded last, when going on.
        """
        self.header.spec("v")
        while start < stop:

            def read(state: State, lo: int, hi: int) -> tuple[State, int, Bytes, Bytes]:
                run = next(self._segments.runs(lo, hi))
                for kind in ("k", "v"):
                    self._check_blocks(kind, state, lo, lo + run.n_rows, n_threads)
                k, v = (self._segments.rows(kind, run) for kind in ("k", "v"))
                return state, run.n_rows, k, v

            size = self.header.block_rows
            end = min(stop, start + max(_PIECE_ROWS // size, 1) * size)
            state, n, k, v = self._consistent(start, end, read)
            yield start, start + n, k, v
            if not self._still_there(state, self._now(), start):
                raise NotFound(
                    f"{self._file.where}: rows [{start}, {start + n}) were dropped or taken back "
                    "while they were read; read again"
                )
            start += n

    def stored_rows(self, kind: Kind, start: int, stop: int) -> Bytes:
        """Return rows of positions ``[start, stop)`` as stored, ``(n, row_bytes)``, checked.

        Raises
        ------
        NotFound, InvalidArgument, Truncated, Corrupt
            As `read_rows`.
        """
        self.header.spec(kind)

        def read(state: State, lo: int, hi: int) -> Bytes:
            self._check_blocks(kind, state, lo, hi)
            return np.array(self._segments.gather(kind, lo, hi))

        return self._consistent(start, stop, read)

    def raw_rows(self, kind: Kind) -> list[Bytes]:
        """Return the stored rows of each segment, ``(n, row_bytes)``, as read-only views.

        Nothing is copied: for uploads to a GPU. Row 0 of the first view is the first row ever (of a
        ring, slot 0); rows before `start` were dropped and may be zeros. Views stay valid while
        anybody has them, also when the layer grows or is closed; the file must not be cut.
        """
        with self._lock:
            state = self._now()
            return self._segments.areas(kind, state.end - state.origin)

    def prefetch_rows(self, start: int, stop: int) -> None:
        """Ask the kernel to read rows ahead; returns at once."""
        self._advise(start, stop, "prefetch")

    def advise_random(self) -> None:
        """Tell the kernel that rows are read here and there: it stops reading ahead."""
        with self._lock:
            self._segments.advise_random()

    def release(self, start: int | None = None, stop: int | None = None) -> None:
        """Let pages of rows go from memory; they are read again from the file when needed."""
        state = self._now()
        lo = state.start if start is None else start
        self._advise(lo, state.end if stop is None else stop, "release")

    def verify(self, on_damage: Callable[[KvError], object] | None = None) -> int:
        """Check everything against its checksum; return the number of blocks.

        Parameters
        ----------
        on_damage
            Called with each damage; None raises the first one.

        Raises
        ------
        Corrupt, Truncated
            What is damaged, named.
        """
        with self._lock:
            state, n_blocks = self._now(), 0
            with _told(on_damage):
                self._commits.check_copies()
            with _told(on_damage):
                self._segments.check_whole()
                size = self.header.block_rows
                lo = self._block_start(state) - state.origin
                for block in range(lo, state.end - state.origin, size):
                    for kind in self.header.kinds:
                        with _told(on_damage):
                            self._check_blocks(
                                kind, state, block, min(block + size, state.end - state.origin)
                            )
                        n_blocks += 1
            return n_blocks

    def close(self) -> None:
        """Close; what is not committed is lost. Views that `raw_rows` gave stay."""
        with self._lock:
            self._file.close()

    def renamed(self, path: str) -> None:
        """Note that its file has another name now."""
        self._file.where = path

    def check_belongs(self, session: int, layer: int, model: Model) -> None:
        """Raise `Corrupt` unless this is the layer of that session of `model`."""
        header = self.header
        found = header.session, header.layer, header.k, header.v
        v = model.stream(layer, "v") if model.has_stream(layer, "v") else None
        if found != (session, layer, model.stream(layer, "k"), v):
            raise Corrupt(f"{self._file.where}: the file of another session or layer")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        schemes = ", ".join(f"{kind} {self.scheme(kind).name}" for kind in self.header.kinds)
        return f"<{type(self).__name__} {self._file.where!r}, {schemes}>"

    def _settle(self, state: State) -> None:
        self._segments.know(state.n_segments)
        self._state = state

    def _now(self) -> State:
        """Return what there is: as appended here, or as committed by another."""
        with self._lock:
            self._file.fd  # noqa: B018  raises `Closed`
            if not self._writable:
                self._settle(self._commits.load())
            return self._state

    def _block_start(self, state: State) -> int:
        """Position of the first row of the first block that is still there."""
        size = self.header.block_rows
        return state.origin + (state.start - state.origin) // size * size

    def _check_range(self, state: State, start: int, stop: int) -> None:
        what = f"{self._file.where}: rows [{start}, {stop})"
        if not 0 <= start <= stop:
            raise InvalidArgument(f"{what} are not a range")
        if stop > state.end:
            raise InvalidArgument(f"{what}: there are rows up to {state.end}")
        if start < min(state.start, stop):
            raise NotFound(f"{what}: dropped; rows begin at {state.start}")

    def _consistent(self, start: int, stop: int, read: Callable[[State, int, int], _T]) -> _T:
        """Read rows that nobody drops or takes back meanwhile."""
        start = check_whole(start, f"{self._file.where}: start", -MAX_POSITION, MAX_POSITION)
        stop = check_whole(stop, f"{self._file.where}: stop", -MAX_POSITION, MAX_POSITION)
        with self._lock:
            while True:
                state = self._now()
                self._check_range(state, start, stop)
                damage: Corrupt | None = None
                try:
                    found = read(state, start - state.origin, stop - state.origin)
                except Corrupt as error:
                    damage = error
                if self._still_there(state, self._now(), start):
                    if damage is not None:
                        raise damage
                    return found
                # What was read may have been written over meanwhile.

    def _still_there(self, before: State, after: State, start: int) -> bool:
        """Whether nobody may have written over rows from `start` on that there were before."""
        same = after.epoch == before.epoch and after.origin == before.origin
        return same and self._block_start(after) <= max(self._block_start(before), start)

    def _check_blocks(self, kind: Kind, state: State, lo: int, hi: int, n_threads: int = 1) -> None:
        """Check the blocks that the rows with indices ``[lo, hi)`` touch."""
        size, end = self.header.block_rows, state.end - state.origin
        first = lo // size * size
        # Segments are whole blocks: none is in two runs.
        for run in self._segments.runs(first, min(-(-hi // size) * size, end)):
            rows, n_whole = self._segments.rows(kind, run), run.n_rows // size
            blocks = rows[: n_whole * size].reshape(n_whole, size * rows.shape[1])
            found = crc32c_each(list(blocks), n_threads).tolist()
            stored = self._segments.checksums(kind, run)
            if n_whole * size < run.n_rows:
                found.append(extended(0, rows[n_whole * size :]))
                stored.append(state.crc(kind))
            for one, other in zip(found, stored, strict=True):
                stop = min(first + size, end)
                if one != other:
                    raise Corrupt(
                        f"{self._file.where}: {kind} rows [{state.origin + first}, "
                        f"{state.origin + stop}): wrong checksum; restore a copy"
                    )
                first = stop

    def _advise(self, start: int, stop: int, what: str) -> None:
        with self._lock:
            state = self._now()
            lo, hi = max(start, state.start), min(stop, state.end)
            if lo < hi:
                self._segments.advise(lo - state.origin, hi - state.origin, what)


@contextmanager
def _told(on_damage: Callable[[KvError], object] | None) -> Iterator[None]:
    try:
        yield
    except KvError as error:
        if on_damage is None:
            raise
        on_damage(error)


def extended(crc: int, data: Bytes) -> int:
    """Return the checksum of what `crc` is of, and `data` after it."""
    return extend_crc32c(crc, np.ascontiguousarray(data))
