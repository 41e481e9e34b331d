"""The structs of ``kernels/arguments.hpp``, field by field. Addresses are of device memory."""

from __future__ import annotations

from typing import Final

import numpy as np

SOURCE: Final = np.dtype([("bytes", "u8"), ("n_bytes", "u8")])
TARGET: Final = np.dtype(
    [
        ("data", "u8"),
        ("pages", "u8"),
        ("head_stride", "i8"),
        ("row_stride", "i8"),
        ("page_stride", "i8"),
        ("first_row", "u8"),
        ("page_rows", "u4"),
        ("type", "u4"),
    ]
)
ROTATION: Final = np.dtype([("cos", "u8"), ("sin", "u8"), ("pairs", "u8")])
LANE_ARGUMENTS: Final = np.dtype(
    [
        ("lanes", "u8"),
        ("n_lanes", "u8"),
        ("channels", "u8"),
        ("classes", "u8"),
        ("prior", "u8"),
        ("sources", "u8"),
        ("targets", "u8"),
        ("rotations", "u8"),
        ("status", "u8"),
        ("scratch", "u8"),
        ("scratch_words", "u8"),
        ("n_threads", "u8"),
    ]
)
#: Rho in bits 0 to 7 of ``rho_class``, the class in 8 to 15.
COMPONENT: Final = np.dtype([("mean", "i4"), ("rho_class", "u4")])
BLOCK_ARGUMENTS: Final = np.dtype(
    [
        ("blocks", "u8"),
        ("n_blocks", "u8"),
        ("streams", "u8"),
        ("components", "u8"),
        ("order", "u8"),
        ("slots", "u8"),
        ("compact", "u8"),
        ("sources", "u8"),
        ("targets", "u8"),
        ("rotations", "u8"),
        ("status", "u8"),
        ("shared_words", "u8"),
        ("scratch", "u8"),
        ("scratch_words", "u8"),
        ("n_warps", "u8"),
    ]
)
BOOK: Final = np.dtype(
    [
        ("rotation", "u8"),
        ("codewords", "u8"),
        ("rotation_kind", "u4"),
        ("d", "u4"),
        ("k", "u4"),
        ("n_codewords", "u4"),
        ("index_bits", "u4"),
        ("index_bytes", "u4"),
        ("power", "u4"),
        ("factor", "f4"),
    ]
)
SPAN: Final = np.dtype([("first_piece", "u8"), ("first_mark", "u8")])
#: Of what kernels alone write and read: ``Contents`` of a block, ``RawVectors`` of 32 vectors.
CONTENTS_BYTES: Final = 72
MARK_BYTES: Final = 8
VECTOR_ARGUMENTS: Final = np.dtype(
    [
        ("blocks", "u8"),
        ("n_blocks", "u8"),
        ("streams", "u8"),
        ("books", "u8"),
        ("order", "u8"),
        ("channels", "u8"),
        ("sources", "u8"),
        ("targets", "u8"),
        ("rotations", "u8"),
        ("spans", "u8"),
        ("contents", "u8"),
        ("marks", "u8"),
        ("status", "u8"),
        ("n_pieces", "u8"),
        ("shared_words", "u8"),
        ("scratch", "u8"),
        ("scratch_words", "u8"),
        ("n_warps", "u8"),
    ]
)
#: Values at hand: ``[heads][rows][channels]`` of the target's type, without gaps.
COPY: Final = np.dtype(
    [
        ("values", "u8"),
        ("first_row", "u8"),
        ("target", "u4"),
        ("heads", "u4"),
        ("rows", "u4"),
        ("channels", "u4"),
    ]
)
COPY_ARGUMENTS: Final = np.dtype(
    [("copies", "u8"), ("n_copies", "u8"), ("n_rows", "u8"), ("targets", "u8")]
)
