"""The frames of one layer on their way into an attention.

They are read and checked some at a time. Rows of a `ggml` scheme go to the kernel as they lie in
the archive; others are decoded one window after the other, into memory that is used again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from kvcodecs.attention import Attention, Operand, Rows
from kvcodecs.ggml.codec import CODEC as GGML_CODEC
from kvcodecs.ggml.codec import GGMLParams
from kvcodecs.plan import Plan
from kvcodecs.rope import Rope
from kvcodecs.spec import F32, KINDS, Kind, KState

from .backend import Snapshot
from .passing import Passing
from .pieces import Piece, pieces
from .reader import Reader, Request, Tables, Work
from .records import located
from .session_record import SessionRecord

# Tokens that are decoded together, at least: small frames are seen some at a time.
_WINDOW_TOKENS: Final = 256
# Tokens whose frames are announced and checked together, where a window is not more.
_CHECKED_TOKENS: Final = 2048
_NO_OUTPUT: Final[npt.NDArray[Any]] = np.empty(0, np.float32)


class _Part(NamedTuple):
    """Successive tokens of K or V: floats, or rows as they are stored."""

    start: int
    stop: int
    values: F32
    rows: memoryview = memoryview(b"")
    params: GGMLParams | None = None

    def cut(self, start: int, stop: int) -> Operand:
        """Return some of the tokens as the kernel takes them."""
        lo, hi = start - self.start, stop - self.start
        if self.params is None:
            return self.values[:, lo:hi]
        n_bytes = self.params.row_bytes
        return Rows(self.rows[lo * n_bytes : hi * n_bytes], self.params.scheme)


class Walk:
    """Takes the frames of one layer, one after the other, to an attention.

    Parameters
    ----------
    rope
        Rotate K for its positions; None: K as it was before RoPE.
    """

    def __init__(
        self,
        reader: Reader,
        snapshot: Snapshot,
        record: SessionRecord,
        layer: int,
        rope: Rope | None,
        n_threads: int,
    ) -> None:
        self._reader, self._snapshot, self._record = reader, snapshot, record
        self._layer, self._rope, self._n_threads = layer, rope, n_threads
        self._k_state: KState = "pre" if rope is None else "post"
        self._scratch: dict[Kind, F32] = {}
        self._scratch_tokens = 0
        states = [record.streams[layer, kind] for kind in KINDS]
        self._base = states[0].start
        block = max(state.block_tokens for state in states)
        self._window = block * -(-_WINDOW_TOKENS // block)

    def run(self, attention: Attention, start: int, stop: int) -> None:
        """Attend to tokens ``[start, stop)``, each frame checked before it is seen.

        Raises
        ------
        Truncated, Corrupt, Unsupported
            Names the block.
        """
        passing = Passing(self._snapshot)
        self._scratch_tokens = min(self._window, stop - start)
        for lo, hi in self._cuts(start, stop, max(1, _CHECKED_TOKENS // self._window)):
            works = self._checked(lo, hi)
            k, v = ([work for work in works if work.request.kind == kind] for kind in KINDS)
            self._see(attention, lo, hi, self._parts("k", lo, hi, k), self._parts("v", lo, hi, v))
            for work in works:
                passing.add(work.payload)
        passing.release()

    def _cuts(self, start: int, stop: int, n_windows: int) -> Iterator[tuple[int, int]]:
        """Yield successive ranges that end where blocks do."""
        at, step = start, n_windows * self._window
        while at < stop:
            end = min(self._base + ((at - self._base) // step + 1) * step, stop)
            yield at, end
            at = end

    def _checked(self, start: int, stop: int) -> list[Work]:
        todo = [
            (request, piece)
            for request in (Request(self._layer, k, start, stop, _NO_OUTPUT) for k in KINDS)
            for piece in pieces(self._record, self._layer, request.kind, start, stop)
        ]
        opened = self._reader.open_all(self._snapshot, todo, self._k_state, self._n_threads)
        works = [work for some in opened for work in some]
        self._reader.note_read(len(works))
        return works

    def _see(
        self, attention: Attention, start: int, stop: int, ks: Iterator[_Part], vs: Iterator[_Part]
    ) -> None:
        """Attend to tokens ``[start, stop)``, which K and V may be cut differently of."""
        at, k, v = start, next(ks), next(vs)
        while at < stop:
            k = k if at < k.stop else next(ks)
            v = v if at < v.stop else next(vs)
            end = min(k.stop, v.stop)
            attention.add(
                k.cut(at, end),
                v.cut(at, end),
                at,
                rope=None if k.params is None else self._rope,
                n_threads=self._n_threads,
            )
            at = end

    def _parts(self, kind: Kind, start: int, stop: int, works: list[Work]) -> Iterator[_Part]:
        """Yield successive tokens; the floats of one part are those of the next."""
        if all(work.coding.codec is GGML_CODEC for work in works):
            yield from map(_rows, works)
            return
        if kind not in self._scratch:
            spec = self._reader.model.stream(self._layer, kind)
            shape = (spec.heads, self._scratch_tokens, spec.head_dim)
            self._scratch[kind] = np.empty(shape, np.float32)
        for lo, hi in self._cuts(start, stop, 1):
            out = self._scratch[kind][:, : hi - lo]
            request = Request(self._layer, kind, lo, hi, out)
            plan, tables = Plan(), Tables()
            for work in works:
                first, last = max(lo, work.piece.start), min(hi, work.piece.stop)
                if first < last:
                    piece = work.piece._replace(start=first, stop=last)
                    work = work._replace(request=request, piece=piece)
                    self._reader.schedule(plan, work, tables, 0)
            plan.run(self._n_threads)
            yield _Part(lo, hi, out)


def _rows(work: Work) -> _Part:
    """Return the rows of a frame that are asked for, as they lie in it."""
    piece: Piece = work.piece
    params: GGMLParams = work.coding.params
    row_bytes = params.row_bytes
    with located(work.where):
        params.check_size(work.payload.nbytes, work.n_tokens)
    lo, hi = piece.start - piece.first_token, piece.stop - piece.first_token
    rows = work.payload[lo * row_bytes : hi * row_bytes]
    return _Part(piece.start, piece.stop, _NO_OUTPUT, rows, params)
