"""Every way to read what a flat layer has stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, NotFound
from kvcodecs.plan import check_threads
from kvcodecs.spec import KINDS, Kind, KState
from kvcodecs.tensor import as_array

from .asking import check_whole
from .coding import Tensor
from .commit_record import State
from .file import Bytes
from .header import MAX_POSITION
from .mapped_layer import MappedLayer

_T = TypeVar("_T")


class StoredLayer(MappedLayer):
    """An open layer, and every way to read it; positions are those of tokens."""

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
        wanted = self._positions(start, stop)
        return self._decoded(lambda _: wanted, kinds, k_state, dtype, n_threads)

    def read_window(
        self,
        n_rows: int,
        *,
        kinds: Sequence[Kind] = KINDS,
        k_state: KState | None = None,
        dtype: str | np.dtype[Any] | type = "float32",
        n_threads: int | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the last `n_rows`, or all there are if they are fewer; see `read_rows`."""
        n = check_whole(n_rows, f"{self._file.where}: window", 0, MAX_POSITION)

        def last(state: State) -> tuple[int, int]:
            return max(state.start, state.end - n), state.end

        return self._decoded(last, kinds, k_state, dtype, n_threads)

    def read_all(
        self,
        *,
        kinds: Sequence[Kind] = KINDS,
        k_state: KState | None = None,
        dtype: str | np.dtype[Any] | type = "float32",
        n_threads: int | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return all rows; see `read_rows`."""
        return self._decoded(lambda at: (at.start, at.end), kinds, k_state, dtype, n_threads)

    def _decoded(
        self,
        wanted: Callable[[State], tuple[int, int]],
        kinds: Iterable[Kind],
        k_state: KState | None,
        dtype: str | np.dtype[Any] | type,
        n_threads: int | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        n_threads = check_threads(n_threads)
        chosen = self._kinds(kinds)

        def read(state: State, lo: int, hi: int) -> tuple[Tensor | None, Tensor | None]:
            found: dict[Kind, Tensor] = {}
            for kind in chosen:
                parts, first = self._checked(kind, state, lo, hi, n_threads), state.origin + lo
                found[kind] = self._coder.decode(
                    kind, parts, first, k_state, dtype, n_threads, self._file.where
                )
            return found.get("k"), found.get("v")

        return self._consistent_of(wanted, read)

    def _kinds(self, kinds: Iterable[Kind]) -> list[Kind]:
        """Return which of those that the layer has are asked for."""
        if not isinstance(kinds, Iterable):
            raise InvalidArgument(f"{self._file.where}: kinds {kinds!r}, expected some of 'k', 'v'")
        asked = list(kinds)
        for kind in asked:
            if not isinstance(kind, str) or kind not in KINDS:
                raise InvalidArgument(f"{self._file.where}: kind {kind!r}, expected 'k' or 'v'")
        return [kind for kind in self.header.kinds if kind in asked]

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

        Rows are views of the map, good until the next ones are asked for. K that is kept before
        RoPE is in coded channel order.

        Raises
        ------
        NotFound
            Rows that were dropped or taken back, also while the caller had them: what was made of
            them is worth nothing.
        InvalidArgument, Truncated, Corrupt
            As `read_rows`.
        """
        self.header.spec("v")
        (start, stop), threads = self._positions(start, stop), check_threads(n_threads)

        def read(state: State, lo: int, hi: int) -> tuple[State, Bytes, Bytes]:
            run = next(self._segments.runs(lo, hi))
            hi = lo + run.n_rows
            k, v = (self._checked(kind, state, lo, hi, threads)[0] for kind in KINDS)
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

        K that is kept before RoPE is in coded channel order: `FlatLayer` shows how to undo that.

        Raises
        ------
        NotFound, InvalidArgument, Truncated, Corrupt
            As `read_rows`.
        """
        none = np.empty((0, self.header.row_bytes(kind)), np.uint8)

        def read(state: State, lo: int, hi: int) -> Bytes:
            return np.concatenate([none, *self._checked(kind, state, lo, hi)])

        return self._consistent(start, stop, read)

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
        at = 0

        def following(state: State) -> tuple[int, int]:
            start = min(max(at, state.start), state.end)
            return start, min(self._piece_stop(state, start), state.end)

        def check(state: State, lo: int, hi: int) -> tuple[State, int, int, list[Corrupt]]:
            each = (self._read(kind, state, lo, hi)[1] for kind in self.header.kinds)
            return state, lo, hi, [damage for some in each for damage in some]

        with self._lock:
            with _told(on_damage):
                self._commits.check_copies()
            with _told(on_damage):
                self._segments.check_whole()
                while True:
                    state, lo, hi, found = self._consistent_of(following, check)
                    if lo == hi:
                        break
                    for each in found:
                        with _told(on_damage):
                            raise each
                    n_blocks += (-(-hi // size) - lo // size) * len(self.header.kinds)
                    at = state.origin + hi
        return n_blocks


@contextmanager
def _told(on_damage: Callable[[KvError], object] | None) -> Iterator[None]:
    try:
        yield
    except KvError as error:
        if on_damage is None:
            raise
        on_damage(error)
