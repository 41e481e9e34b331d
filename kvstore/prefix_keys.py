"""Keys of the prefix index: a hash, the token ids after it, an owner. FORMAT.md section 2.1.

Ids are coded such that no code begins another one, and none begins with the byte that ends the
ids. So keys with the same hash are in the order of their ids, and those that share most ids with
a given sequence are next to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Corrupt, InvalidArgument

PREFIX: Final = b"P"
#: Token ids per hash.
HASH_TOKENS: Final = 64
#: Bytes of a hash that a key holds.
HASH_BYTES: Final = 16
#: Bytes before the ids.
HEAD_BYTES: Final = 1 + HASH_BYTES

_OWNER_BYTES: Final = 8
# An id from 0 to here is 4 bytes big-endian. Any other one is 0xFF and a hash: 64 ids of 9 bytes
# each would not fit a key, and the stored ids have the last word anyway.
_PLAIN_IDS: Final = 0xFE000000
_END: Final = 0xFE
_HASHED: Final = 0xFF
_HASHED_BYTES: Final = 7
_TOKEN: Final = b"kvs prefix token"


def _digest(person: bytes, data: bytes) -> bytes:
    return blake2b(data, digest_size=_HASHED_BYTES - 1, person=person).digest()


def code_ids(ids: npt.NDArray[np.int64]) -> list[bytes]:
    """Return the ids as keys hold them."""
    return [
        token.to_bytes(4, "big")
        if 0 <= token < _PLAIN_IDS
        else b"\xff" + _digest(_TOKEN, token.to_bytes(8, "big", signed=True))
        for token in ids.tolist()
    ]


def entry_keys(
    hashes: Sequence[bytes],
    ids: npt.NDArray[np.int64],
    start: int,
    stop: int,
    owner: int,
    first_boundary: int = 0,
) -> Iterator[bytes]:
    """Yield the keys that speak of tokens ``[start, stop)``, of an owner that has `stop` tokens.

    Parameters
    ----------
    hashes
        Those of boundaries `first_boundary` and on.
    ids
        Those of tokens ``[64 * first_boundary, stop)``.

    Raises
    ------
    InvalidArgument
        Hashes or ids do not reach from `start` to `stop`.
    """
    if start >= stop:
        return
    base = first_boundary * HASH_TOKENS
    boundaries = range(start // HASH_TOKENS, -(-stop // HASH_TOKENS))
    n_known = min(base + len(ids), base + len(hashes) * HASH_TOKENS)
    if boundaries.start < first_boundary or n_known < stop:
        raise InvalidArgument(
            f"prefix index: tokens [{start}, {stop}) of hashes and ids of [{base}, {n_known})"
        )
    tail = bytes([_END]) + owner.to_bytes(_OWNER_BYTES, "big")
    ids = ids[: stop - base]
    plain = ids.astype(">u4").tobytes()
    unusual = np.flatnonzero((ids < 0) | (ids >= _PLAIN_IDS)) // HASH_TOKENS
    slow = set(unusual.tolist())
    for boundary in boundaries:
        j = boundary - first_boundary
        first, last = j * HASH_TOKENS, (j + 1) * HASH_TOKENS
        codes = b"".join(code_ids(ids[first:last])) if j in slow else plain[4 * first : 4 * last]
        yield PREFIX + hashes[j] + codes + tail


def index_bytes(start: int, stop: int) -> int:
    """Return the bytes of the entries of tokens ``[start, stop)``, for ids of 4 bytes each."""
    if start >= stop:
        return 0
    first = start // HASH_TOKENS
    n_entries = -(-stop // HASH_TOKENS) - first
    return n_entries * (HEAD_BYTES + 1 + _OWNER_BYTES) + 4 * (stop - first * HASH_TOKENS)


def parse_entry(key: bytes) -> tuple[bytes, int, int]:
    """Return the hash, the number of ids and the owner that a key of the index holds.

    Raises
    ------
    Corrupt
        Not a key of the index.
    """
    end = len(key) - _OWNER_BYTES - 1
    codes = key[HEAD_BYTES : max(end, 0)]
    n_ids = _count(codes) if codes and key[:1] == PREFIX and key[end] == _END else 0
    if not 1 <= n_ids <= HASH_TOKENS:
        raise Corrupt(f"key {key!r}: not an entry of the prefix index")
    return key[1:HEAD_BYTES], n_ids, int.from_bytes(key[end + 1 :], "big")


def _count(codes: bytes) -> int:
    """Return how many ids the codes are of, 0 if they are malformed."""
    if len(codes) % 4 == 0 and codes[::4].isascii():  # ids below 2**31: nearly all there are
        return len(codes) // 4
    at = n_ids = 0
    while at < len(codes) and codes[at] != _END:
        at += _HASHED_BYTES if codes[at] == _HASHED else 4
        n_ids += 1
    return n_ids if at == len(codes) else 0
