"""FibQuant frames of a plan as work for the device: pieces of their rows, and books."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from kvcodecs import _core
from kvcodecs.plan import Plan

from . import structs
from .image import ALL, Image, aligned
from .launches import WARP, Launch, Limits, vector_grid

# kernels/arguments.hpp kPieceRows, kernels/rotations.hpp kTogether.
_PIECE_ROWS: Final = 16
_TOGETHER: Final = 4
_MARK_VECTORS: Final = 32
_MOST_CTAS: Final = 1 << 16


class VectorWork:
    """What two kernels need: one looks through payloads, one decodes pieces of their rows.

    Attributes
    ----------
    blocks
        As `kvcodecs.vectors.Vectors.arrays` returns them.
    n_pieces
        Of all blocks; each has a status.
    scratch_bytes
        That the kernels use, what the first one finds for the second among them.
    """

    def __init__(self, plan: Plan, limits: Limits) -> None:
        self._books, self.blocks, self._streams, self._order, self._channels = plan.vectors.arrays()
        streams = self._streams[self.blocks["stream"]]
        heads = streams["heads"].astype(np.uint64)
        wanted = (self.blocks["stop"] - self.blocks["skip"]).astype(np.uint64)
        self._pieces, self.n_pieces = _begins(heads * _divided(wanted, _PIECE_ROWS))
        marks = _divided(heads * self.blocks["n_tokens"], _MARK_VECTORS)
        self._marks, n_marks = _begins(marks)
        # Codewords, and the vectors that they become.
        words = 2 * _TOGETHER * int(streams["head_dim"].max())
        self._grid = vector_grid(self.n_pieces, words, limits)
        contents = aligned(len(self.blocks) * structs.CONTENTS_BYTES)
        self._offsets = (contents, contents + aligned(n_marks * structs.MARK_BYTES))
        self.scratch_bytes = self._offsets[1] + self._grid.scratch_bytes

    def check(
        self,
        n_bytes: npt.NDArray[np.uint64],
        output_shapes: npt.NDArray[np.uint64],
        rope_shapes: npt.NDArray[np.uint64],
    ) -> None:
        """Raise `InvalidArgument` where tables refer to what there is not."""
        tables = (self._books, self.blocks, self._streams, self._order, self._channels)
        _core.check_fib_blocks(*tables, n_bytes, output_shapes, rope_shapes)

    def add(self, image: Image, shared: dict[str, int], scratch: int, status: int) -> list[Launch]:
        """Add tables and books; return the kernels to run, in this order.

        Parameters
        ----------
        shared
            Offsets of the tables that all kernels share.
        scratch, status
            Offsets of memory for `scratch_bytes`, and for a byte a piece.
        """
        grid, n = self._grid, len(self.blocks)
        if self.n_pieces == 0:
            return []
        spans = np.empty(n, structs.SPAN)
        spans["first_piece"], spans["first_mark"] = self._pieces, self._marks
        pointers = shared | {
            "blocks": image.add(self.blocks),
            "streams": image.add(self._streams),
            "books": self._add_books(image),
            "order": image.add(self._order),
            "channels": image.add(self._channels),
            "spans": image.add(spans),
            "contents": scratch,
            "marks": scratch + self._offsets[0],
            "scratch": scratch + self._offsets[1],
            "status": status,
        }
        numbers = {
            "n_blocks": n,
            "n_pieces": self.n_pieces,
            "shared_words": grid.shared_words,
            "scratch_words": grid.scratch_words,
            "n_warps": grid.n,
        }
        arguments = image.add_struct(structs.VECTOR_ARGUMENTS, pointers, numbers)
        warps = grid.block_threads // WARP
        shared_bytes = 4 * grid.shared_words * warps
        n_ctas = min(-(-n // WARP), _MOST_CTAS)
        return [
            Launch("kv_look_through_payloads", arguments, n_ctas, WARP),
            Launch(
                "kv_decode_vectors", arguments, -(-grid.n // warps), grid.block_threads,
                shared_bytes,
            ),
        ]  # fmt: skip

    def of_blocks(self, status: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return the statuses of blocks, given those of pieces: the worst of each."""
        # Damage has a higher number than an overflow, which the CPU reports after it, too.
        worst = np.zeros(len(self.blocks), np.uint8)
        failed = np.flatnonzero(status)
        blocks = np.searchsorted(self._pieces, failed.astype(np.uint64), "right") - 1
        np.maximum.at(worst, blocks, status[failed])
        return worst

    def _add_books(self, image: Image) -> int:
        table = np.zeros(len(self._books), structs.BOOK)
        for row, book in zip(table, self._books, strict=True):
            row["rotation_kind"] = book.rotation
            for name in ("d", "k", "n_codewords", "index_bits", "index_bytes"):
                row[name] = getattr(book, name)
            power = 1 << (book.d.bit_length() - 1)
            row["power"], row["factor"] = power, np.float32(1 / np.sqrt(power))
        table["rotation"] = [image.add(book.rotation_data) for book in self._books]
        table["codewords"] = [image.add(book.codewords) for book in self._books]
        return image.add(table, rotation=ALL, codewords=ALL)


def _divided(n: npt.NDArray[np.uint64], by: int) -> npt.NDArray[np.uint64]:
    parts: npt.NDArray[np.uint64] = (n + np.uint64(by - 1)) // np.uint64(by)
    return parts


def _begins(n: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], int]:
    """Return where so many of each block begin among those of all, and how many all are."""
    ends = np.cumsum(n, dtype=np.uint64)
    begins: npt.NDArray[np.uint64] = ends - n
    return begins, int(ends[-1])
