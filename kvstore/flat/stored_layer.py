"""What a flat layer has stored, and every way to read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, NotFound
from kvcodecs.ggml.schemes import Scheme
from kvcodecs.plan import check_threads
from kvcodecs.spec import KINDS, Kind, KState, StreamSpec
from kvcodecs.tensor import as_array

from ..forklock import ForkLock
from ..identity import Model
from .checksums import block_checksums
from .coding import RowCoder, Tensor
from .file import Bytes, LayerFile
from .layout import MAX_POSITION, Header, State, check_whole
from .pages import Advice
from .segments import Segments
from .state import Commits

_T = TypeVar("_T")

#: Rows that `pieces` and `verify` check at a time.
_PIECE_ROWS: Final = 4096


class StoredLayer:
    """The rows of an open file; positions are those of tokens.

    Safe to use from many threads, one after the other. In a forked child, a layer that its parent
    appends to reads what is committed.
    """

    def __init__(
        self, file: LayerFile, header: Header, commits: Commits, *, writable: bool
    ) -> None:
        self._file, self.header, self._commits = file, header, commits
        self._writable, self._lock = writable, ForkLock()
        self._segments, self._coder = Segments(header, file), RowCoder(header)
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
        with self._lock:
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
        k_state: KState | None = None,
        dtype: str | np.dtype[Any] | type = "float32",
        n_threads: int | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return K and V of positions ``[start, stop)``, ``(heads, n, head_dim)`` each.

        The checksum blocks that the range touches are checked first, whole. One that is not
        asked for, or that the layer does not have, is None. `k_state` None gives K as the file
        keeps it; ``"pre"`` and ``"post"``, as it was before RoPE or is after it.

        Raises
        ------
        NotFound
            Rows that were dropped, also while they were read.
        InvalidArgument
            A range beyond the last row, or a value that overflows `dtype`.
        Truncated, Corrupt
            The file was cut, or a block is damaged.
        """

        n_threads = check_threads(n_threads)
        for kind in kinds:
            if kind not in KINDS:
                raise InvalidArgument(f"{self._file.where}: kind {kind!r}, expected 'k' or 'v'")

        def read(state: State, lo: int, hi: int) -> tuple[Tensor | None, Tensor | None]:
            found: dict[Kind, Tensor] = {}
            for kind in self.header.kinds:
                if kind in kinds:
                    parts, first = self._checked(kind, state, lo, hi, n_threads), state.origin + lo
                    found[kind] = self._coder.decode(
                        kind, parts, first, k_state, dtype, n_threads, self._file.where
                    )
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
        k_state: KState | None = None,
        dtype: str | np.dtype[Any] | type = "float32",
    ) -> tuple[Tensor, Tensor | None]:
        """Return single rows, in the order asked for, ``(heads, n, head_dim)`` each.

        Only the pages of these rows are touched, so they are *not* checked against a checksum.
        `k_state` as in `read_rows`.

        Raises
        ------
        NotFound, InvalidArgument, Truncated
            As `read_rows`, for any of the positions.
        """
        given = as_array(positions, f"{self._file.where}: positions")
        if given.size and not np.issubdtype(given.dtype, np.integer):
            raise InvalidArgument(f"{self._file.where}: positions of dtype {given.dtype}")
        places = given.astype(np.int64).reshape(-1)

        def read(state: State, lo: int, hi: int) -> tuple[Tensor, Tensor | None]:
            found: dict[Kind, Tensor] = {}
            for kind in self.header.kinds:
                rows = self._segments.pick(kind, places - state.origin)
                found[kind] = self._coder.decode(
                    kind, [rows], places, k_state, dtype, 1, self._file.where
                )
            return found["k"], found.get("v")

        if not places.size:
            start = self._now().start
            return self._consistent(start, start, read)
        return self._consistent(int(places.min()), int(places.max()) + 1, read)

    def pieces(
        self, start: int, stop: int, n_threads: int = 1
    ) -> Iterator[tuple[int, int, Bytes, Bytes]]:
        """Yield ``(start, stop, k_rows, v_rows)`` of successive rows, checked, as stored.

        Rows are views of the map, good until the next ones are asked for.

        Raises
        ------
        NotFound
            Rows that were dropped or taken back, also while the caller had them: what was made of
            them is worth nothing.
        InvalidArgument, Truncated, Corrupt
            As `read_rows`.
        """
        self.header.spec("v")

        def read(state: State, lo: int, hi: int) -> tuple[State, Bytes, Bytes]:
            run = next(self._segments.runs(lo, hi))
            hi = lo + run.n_rows
            k, v = (self._checked(kind, state, lo, hi, n_threads)[0] for kind in KINDS)
            return state, k, v

        while start < stop:
            end = min(stop, self._piece_stop(self._now(), start))
            state, k, v = self._consistent(start, end, read)
            yield start, start + len(k), k, v
            if not self._still_there(state, start):
                raise NotFound(
                    f"{self._file.where}: rows [{start}, {start + len(k)}) were dropped or taken "
                    "back while they were read; read again"
                )
            start += len(k)

    def stored_rows(self, kind: Kind, start: int, stop: int) -> Bytes:
        """Return rows of positions ``[start, stop)`` as stored, ``(n, row_bytes)``, checked.

        Raises
        ------
        NotFound, InvalidArgument, Truncated, Corrupt
            As `read_rows`.
        """
        none = np.empty((0, self.header.row_bytes(kind)), np.uint8)

        def read(state: State, lo: int, hi: int) -> Bytes:
            return np.concatenate([none, *self._checked(kind, state, lo, hi)])

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
        """Let pages of rows go from memory; they are read again from the file when needed.

        Pages that are not on the disk yet stay, so `commit` first. Memory without a file goes to
        the swap, if there is any.
        """
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
        n_blocks, size = 0, self.header.block_rows

        def check(state: State, lo: int, hi: int) -> list[Corrupt]:
            return [d for kind in self.header.kinds for d in self._read(kind, state, lo, hi)[1]]

        with self._lock:
            at = self.start
            with _told(on_damage):
                self._commits.check_copies()
            with _told(on_damage):
                self._segments.check_whole()
                while at < (state := self._now()).end:
                    stop = min(self._piece_stop(state, at), state.end)
                    try:
                        damage = self._consistent(at, stop, check)
                    except NotFound:  # another process has dropped rows
                        at = self.start
                        continue
                    for each in damage:
                        with _told(on_damage):
                            raise each
                    lo, hi = at - state.origin, stop - state.origin
                    n_blocks += (-(-hi // size) - lo // size) * len(self.header.kinds)
                    at = stop
        return n_blocks

    def close(self) -> None:
        """Close; what is not committed is lost. Views that `raw_rows` gave stay."""
        with self._lock:
            self._file.close()
            self._segments.close()

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
        if state.end - self._block_start(state) > self._segments.n_rows or (
            self.header.max_rows is None and state.end - state.origin > self._segments.n_rows
        ):
            raise Corrupt(f"{self._file.where}: impossible commit record {state}")
        self._state = state

    def _now(self) -> State:
        """Return what there is: as appended here, or as committed by another."""
        with self._lock:
            self._file.fd  # noqa: B018  raises `Closed`
            if not self._writable or self._file.is_inherited:
                self._settle(self._commits.load())
            return self._state

    def _block_start(self, state: State) -> int:
        """Position of the first row of the first block that is still there."""
        return self._floor(state, state.start)

    def _floor(self, state: State, position: int) -> int:
        """Position of the first row of the block of a row."""
        return position - (position - state.origin) % self.header.block_rows

    def _piece_stop(self, state: State, start: int) -> int:
        """One past the last row that is checked together with `start`: whole blocks."""
        size = self.header.block_rows
        return self._floor(state, start) + max(_PIECE_ROWS // size, 1) * size

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
                if self._still_there(state, start):
                    if damage is not None:
                        raise damage
                    return found
                # What was read may have been written over meanwhile.

    def _still_there(self, before: State, start: int) -> bool:
        """Whether rows from position `start` on are what they were."""
        now = self._now()
        if now.epoch != before.epoch or now.origin != before.origin:
            return False
        return self._block_start(now) <= max(self._block_start(before), start)

    def _checked(
        self, kind: Kind, state: State, lo: int, hi: int, n_threads: int | None = None
    ) -> list[Bytes]:
        """Return what `_read` does; raise the first damage."""
        parts, damage = self._read(kind, state, lo, hi, n_threads)
        if damage:
            raise damage[0]
        return parts

    def _read(
        self, kind: Kind, state: State, lo: int, hi: int, n_threads: int | None = None
    ) -> tuple[list[Bytes], list[Corrupt]]:
        """Return the rows with indices ``[lo, hi)``, one array for each run of them, and damage.

        The blocks that they touch are checked whole.
        """
        if lo == hi:
            return [], []
        size, end = self.header.block_rows, state.end - state.origin
        first, last = lo // size * size, min(-(-hi // size) * size, end)
        parts = [self._segments.rows(kind, run) for run in self._segments.runs(first, last)]
        found = block_checksums(parts, size, n_threads)
        stored = self._segments.checksums(kind, first // size, last // size)
        if last % size:
            stored = np.append(stored, np.uint32(state.crc(kind)))
        damage = []
        for block in np.flatnonzero(found != stored).tolist():
            at = state.origin + first + block * size
            stop = min(at + size, state.origin + last)
            damage.append(
                Corrupt(
                    f"{self._file.where}: {kind} rows [{at}, {stop}): wrong checksum; restore a "
                    "copy"
                )
            )
        parts[0] = parts[0][lo - first :]
        parts[-1] = parts[-1][: len(parts[-1]) - (last - hi)]
        return parts, damage

    def _advise(self, start: int, stop: int, what: Advice) -> None:
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
