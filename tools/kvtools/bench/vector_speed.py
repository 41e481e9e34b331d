"""Group `vectors`: how fast FibQuant codes and decodes, against memcpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs import _core
from kvcodecs.blocks import LEVELS, SIMD_LEVELS
from kvcodecs.errors import Corrupt, InvalidArgument
from kvcodecs.fibquant import Book, FibQuant, book_for
from kvcodecs.fibquant.profile import Rotation
from kvcodecs.fibquant.reference import coding
from kvcodecs.spec import F32

from kvtools.bench.codec import (
    CodedStream,
    Floats,
    Source,
    block_tokens,
    check_bound,
    decode_all,
    empty_like,
    encode_all,
    sources_of,
)
from kvtools.bench.rows import Row, interleaved
from kvtools.bench.tables import show_by_name
from kvtools.sample import Sample

GROUP = "vectors"
CASES: tuple[tuple[int, int, Rotation], ...] = (
    (2, 16, "hadamard"),
    (4, 256, "hadamard"),
    (4, 256, "haar"),
    (8, 256, "hadamard"),
    (4, 4096, "hadamard"),
)
#: The first layer is repeated until it has so many tokens.
N_TOKENS = 1024
LEAST_SECONDS = 5e-3
#: NumPy takes a look at every codeword for each part of a vector.
_PLAIN_SCORES = 1 << 22
_UNITS = {
    "encode": "Mvalues/s",
    "decode to float32": "Mvalues/s",
    "decode to float16": "Mvalues/s",
    "decode to float16 / memcpy": "x",
}
_LEGEND = "CPU time of one thread: statistics, frames and their checksums included."


def measure_vectors(sample: Sample, reps: int) -> list[Row]:
    """Time the first layer's K and V with every codebook of `CASES` that divides its heads.

    Raises
    ------
    Corrupt
        The core's bits are not those of NumPy, or not the same with every instruction set.
    """
    sample = sample.tiled(N_TOKENS, 1)
    sources, block = sources_of(sample), block_tokens(sample)
    dims = {source.spec.head_dim for source in sources}
    rows = []
    for k, n, rotation in CASES:
        if any(d % k or d == k for d in dims):
            continue
        config = FibQuant(k, n, rotation=rotation)
        for source in sources:
            check_bits(book_for(config.profile(source.spec.head_dim)), source.x[0])
        rows += _timed(config, sources, block, reps)
    if not rows:
        raise InvalidArgument(f"{sample.label}: no codebook is for heads of {sorted(dims)}")
    return rows


def show_vectors(rows: Sequence[Row]) -> None:
    """Print one line per codebook and rotation, and what the columns are."""
    show_by_name("codebook", rows, _UNITS, _LEGEND)


def check_bits(book: Book, x: F32) -> None:
    """Raise `Corrupt` unless the core codes and decodes vectors ``(n, d)`` as NumPy does."""
    x = np.ascontiguousarray(x[: max(1, _PLAIN_SCORES // (book.n_codewords * book.d // book.k))])
    plain = coding.encode(book, x)
    values = coding.decode(book, plain.norms, plain.indices)
    wanted: list[npt.NDArray[Any]] = [
        plain.states,
        plain.norms,
        plain.indices,
        values.view(np.uint32),
    ]
    keep = np.zeros((1, len(x)), np.uint8)
    for simd in SIMD_LEVELS:
        level = LEVELS[simd]
        states, norms, indices, *_ = _core.fib_encode(
            book.core, x[None], None, None, keep, 1, level
        )
        decoded, bad = _core.fib_decode(book.core, plain.norms, plain.indices, 1, level)
        found: list[npt.NDArray[Any]] = [states[0], norms[0], indices[0], decoded.view(np.uint32)]
        if bad >= 0 or not all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True)):
            raise Corrupt(f"FibQuant {book.k}x{book.n_codewords}, {simd}: other bits than NumPy")


def _timed(config: FibQuant, sources: Sequence[Source], block: int, reps: int) -> list[Row]:
    streams = encode_all(config, sources, block)
    outputs = {t.__name__: empty_like(streams, t) for t in (np.float32, np.float16)}
    _check(config, streams, outputs["float32"], outputs["float16"])
    copies = [np.empty_like(x) for x in outputs["float16"]]
    actions: dict[str, Callable[[], object]] = {
        "encode": partial(encode_all, config, sources, block),
        **{
            f"decode to {name}": partial(decode_all, config, streams, out, 1)
            for name, out in outputs.items()
        },
        "memcpy": partial(_copy, copies, outputs["float16"]),
    }
    timings = interleaved(list(actions.values()), max(3, reps), least_seconds=LEAST_SECONDS)
    millions = sum(source.x.size for source in sources) / 1e6
    found = [millions / timings.seconds(i, "cpu") for i in range(3)] + [timings.ratio(3, 2, "cpu")]
    name = f"{config.scheme} {config.rotation}"
    return [
        Row(GROUP, f"{name}, {what}", value, unit)
        for (what, unit), value in zip(_UNITS.items(), found, strict=True)
    ]


def _copy(targets: Sequence[Floats], sources: Sequence[Floats]) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


def _check(
    config: FibQuant, streams: Sequence[CodedStream], out: Sequence[Floats], half: Sequence[Floats]
) -> None:
    """Raise `Corrupt` unless all ways to decode agree, within the error that frames state."""
    decode_all(config, streams, out, 1)
    for stream, x in zip(streams, out, strict=True):
        check_bound(stream, x, config)
    for simd in SIMD_LEVELS:
        again = [np.full_like(x, np.nan) for x in out]
        decode_all(config, streams, again, 1, simd)
        if not all(np.array_equal(a, b) for a, b in zip(again, out, strict=True)):
            raise Corrupt(f"FibQuant {config.scheme}: {simd} decodes other values")
    decode_all(config, streams, half, 1)
    if not all(np.array_equal(x.astype(np.float16), y) for x, y in zip(out, half, strict=True)):
        raise Corrupt(f"FibQuant {config.scheme}: float16 and float32 differ")
