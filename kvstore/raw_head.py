"""The tokens of a stream that has no header yet: they wait for it, and a commit keeps them raw."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from kvcodecs.codec import BlockEncoder, Chunks, codec_by_number
from kvcodecs.raw import Raw
from kvcodecs.spec import F32, StreamSpec

RAW = codec_by_number(0)


class RawHead:
    """Tokens of the coded domain, from the stream's first.

    Attributes
    ----------
    chunks
        The tokens, ``(heads, n, head_dim)`` each.
    dtype
        Name of a dtype that holds every value exactly; None without tokens.
    post
        Whether any were taken after RoPE.
    """

    def __init__(self) -> None:
        self.chunks: list[F32] = []
        self.dtype: str | None = None
        self.post = False

    def add(self, chunks: Iterable[F32], dtype: str, *, post: bool) -> None:
        """Append tokens, which are copied."""
        self.chunks += [np.array(chunk) for chunk in chunks]
        # Two dtypes meet in float32, which holds every value of either.
        self.dtype = dtype if self.dtype in (None, dtype) else "float32"
        self.post = self.post or post

    def take(self) -> list[F32]:
        """Return the tokens, and forget them."""
        chunks, self.chunks = self.chunks, []
        return chunks

    def encoder(self, spec: StreamSpec, first_token: int) -> BlockEncoder:
        """Return one block of all tokens, as a commit keeps it."""
        self.chunks = [np.concatenate(self.chunks, axis=1)]
        params = RAW.fit(Raw(self.dtype), spec, lambda: self.chunks)
        encoder = RAW.encoder(params, first_token)
        encoder.push(self.chunks[0])
        return encoder


def check_raw(spec: StreamSpec, chunks: Chunks, first_token: int) -> None:
    """Raise `InvalidArgument` where tokens cannot wait: a value that is not finite."""
    as_is = RAW.fit(Raw(), spec, chunks)
    for chunk in chunks():
        RAW.check(as_is, chunk, first_token)
        first_token += chunk.shape[1]
