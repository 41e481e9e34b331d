"""Digests of the values of a stream, computed while they pass by. FORMAT.md section 3.7."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from kvcodecs.digests import bytes_digest
from kvcodecs.errors import InvalidArgument
from kvcodecs.tensor import as_array, as_float32, is_float

_HEAD_DOMAIN: Final = b"kvstore_values_of_head_v1\0"
_DOMAIN: Final = "kvstore_values_v1"
#: Tokens that are converted to float32 at a time.
_TOKENS: Final = 1024


class SourceHasher:
    """Hashes successive tokens of one stream; how they are cut into chunks makes no difference."""

    def __init__(self, heads: int, head_dim: int) -> None:
        self._shape = heads, head_dim
        self._heads = [blake3(_HEAD_DOMAIN) for _ in range(heads)]
        self.n_tokens = 0

    def update(self, x: npt.NDArray[Any]) -> None:
        """Add tokens ``(heads, n, head_dim)`` of any float dtype."""
        for at in range(0, x.shape[1], _TOKENS):
            part = as_float32(x[:, at : at + _TOKENS]).astype("<f4", copy=False)
            for hasher, values in zip(self._heads, part, strict=True):
                hasher.update(values.view(np.uint8).reshape(-1))
        self.n_tokens += x.shape[1]

    def digest(self) -> str:
        """Return the digest of all tokens so far."""
        heads, head_dim = self._shape
        numbers = b"".join(n.to_bytes(8, "little") for n in (heads, self.n_tokens, head_dim))
        return bytes_digest(_DOMAIN, numbers, *(hasher.digest() for hasher in self._heads))


def source_digest(x: Any) -> str:
    """Return the digest of a stream's values that receipts call `source_digest`.

    Parameters
    ----------
    x : (heads, n, head_dim) float16, bfloat16, float32 or float64
        Values as they were given to `Session.append`, K before or after RoPE alike: of all
        appends that one commit made durable, one after the other. Of values that were read, what
        receipts call `decoded_digest`.

    Returns
    -------
    str
        ``"blake3:"`` and 64 hexadecimal digits. Of the values as float32: arrays of different
        dtypes that hold the same values have the same digest.

    Raises
    ------
    InvalidArgument
        Not such an array.
    """
    values = as_array(x, "source_digest")
    if values.ndim != 3 or not is_float(values.dtype):
        raise InvalidArgument(
            f"source_digest: {values.dtype} of shape {values.shape}, expected floats (heads, n, "
            "head_dim)"
        )
    hasher = SourceHasher(values.shape[0], values.shape[2])
    hasher.update(values)
    return hasher.digest()
