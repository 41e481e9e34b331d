"""The newest tokens of a stream, held back until it is known whether others follow."""

from __future__ import annotations

import numpy as np
from kvcodecs.spec import F32


class Newest:
    """Holds back the last tokens of what is pushed.

    Parameters
    ----------
    most
        How many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: list[F32] = []

    @property
    def n_tokens(self) -> int:
        return sum(chunk.shape[1] for chunk in self._held)

    def push(self, chunk: F32) -> F32:
        """Add tokens, ``[heads][n][head_dim]``; return those that are not among the last any more.

        What is held is a copy.
        """
        if not self._most:
            return chunk
        n = self.n_tokens + chunk.shape[1] - self._most
        if n <= 0:
            self._held.append(np.array(chunk))
            return chunk[:, :0]
        tokens = np.concatenate([*self._held, chunk], axis=1)
        self._held = [tokens[:, n:].copy()]
        return tokens[:, :n]

    def take(self) -> list[F32]:
        """Return what is held, in order, and hold nothing."""
        held, self._held = self._held, []
        return held
