"""This project's codecs for a table of codecs for KV caches, made by a harness outside of it.

Such a harness times single-threaded codecs of any library on the same float16 K and V
``[layers][heads][tokens][head_dim]``, with one absolute error bound for each layer and kind, and
reads blocks of `UNIT_TOKENS` tokens of all layers as the random-access unit. `make` returns what it
calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.codec import codec_by_name
from kvcodecs.frame import open_frame
from kvcodecs.kvr1 import KVR1
from kvcodecs.plan import Plan
from kvcodecs.spec import KINDS, StreamSpec
from kvcodecs.tkv1 import TKV1

from kvstore.layout import auto_block_tokens
from kvtools.bench.codec import Source, encode_stream

F16 = npt.NDArray[np.float16]

UNIT_TOKENS = 128
#: Where a frame begins: frames are found by an index, as those of the other codecs are.
INDEX_BYTES = 4


class Frames:
    """Frames in memory, as an archive stores them.

    Encoding starts at float16: its conversion is timed too, as are statistics, checks and
    checksums. Decoding checks every checksum and writes float16 into the given arrays. Sizes count
    every byte: frames with their headers and checksums, stream headers, and the index.

    Parameters
    ----------
    config
        Class of the codec's configuration.
    block_tokens
        Tokens of a frame; None is what archives choose.
    """

    lossy = True

    def __init__(self, config: type[KVR1] | type[TKV1], block_tokens: int | None) -> None:
        self._config, self._block_tokens = config, block_tokens
        blocks = "archive blocks" if block_tokens is None else f"{block_tokens}-token blocks"
        self._codec = codec_by_name(config.codec)
        self.name = f"{config.codec}, {blocks}"

    def encode(
        self,
        k: F16,
        v: F16,
        k_bounds: Sequence[float],
        v_bounds: Sequence[float],
        layers: Sequence[int],
    ) -> dict[str, Any]:
        """Code K and V; the absolute error of a layer is at most its bound."""
        rows, n_bytes = [], 0
        for kind, x, bounds in zip(KINDS, (k, v), (k_bounds, v_bounds), strict=True):
            spec = StreamSpec(kind, x.shape[1], x.shape[3])
            block = self._block_tokens or auto_block_tokens(spec)
            streams = [
                encode_stream(
                    self._config(step=2 * float(bound)), Source(layer, spec, values), block
                )
                for layer, values, bound in zip(layers, x, bounds, strict=True)
            ]
            rows.append([(stream, stream.frames) for stream in streams])
            n_bytes += sum(s.n_bytes + INDEX_BYTES * len(s.frames) for s in streams)
        # Of "B" the harness takes the sizes of K and V apart.
        return {"B": rows, "n": n_bytes}

    def nbytes(self, coded: dict[str, Any]) -> int:
        """Every byte that a file of these streams would have."""
        return int(coded["n"])

    def decode(self, coded: dict[str, Any], out: tuple[F16, F16]) -> tuple[F16, F16]:
        """Decode everything into the arrays of `out`."""
        self._decode(coded, 0, out)
        return out

    def decode_block(
        self, coded: dict[str, Any], index: int, out: tuple[F16, F16]
    ) -> tuple[F16, F16]:
        """Decode `UNIT_TOKENS` tokens of all layers, of the frames that hold them."""
        self._decode(coded, index * UNIT_TOKENS, out)
        return out

    def _decode(self, coded: dict[str, Any], start: int, out: tuple[F16, F16]) -> None:
        """Decode as many tokens as `out` has, from `start` on."""
        plan = Plan()
        for rows, arrays in zip(coded["B"], out, strict=True):
            for (stream, frames), values in zip(rows, arrays, strict=True):
                block = self._block_tokens or auto_block_tokens(stream.source.spec)
                stop = start + values.shape[1]
                for frame in frames[start // block : -(-stop // block)]:
                    header, payload = open_frame(frame)
                    here = max(start, header.first_token)
                    until = min(stop, header.stop_token)
                    plan.add(
                        self._codec, stream.params, payload,
                        first_token=header.first_token, n_tokens=header.n_tokens,
                        start=here, stop=until, out=values[:, here - start : until - start],
                    )  # fmt: skip
        plan.run(1)


def make() -> list[Frames]:
    """Return what the table shows of this project."""
    return [Frames(KVR1, None), Frames(KVR1, UNIT_TOKENS), Frames(TKV1, None)]
