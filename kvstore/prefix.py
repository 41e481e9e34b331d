"""The prefix index: which stored token ids begin like a prompt. FORMAT.md section 2.1.

Ids are hashed in blocks of 64, each hash over the one before, so that equal hashes at a boundary
mean equal ids from the first one on, of one identity. An owner has a key at every boundary before
its end: the hash, then the ids that follow. What the index says is a claim: the stored ids have
the last word.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Final

import numpy as np
from kvcodecs.errors import Corrupt

from .backend import Snapshot
from .identity import Model
from .metadata import canonical_json
from .prefix_keys import (
    HASH_BYTES,
    HASH_TOKENS,
    HEAD_BYTES,
    PREFIX,
    code_ids,
    entry_keys,
    parse_entry,
)
from .token_ids import Ids

__all__ = [
    "HASH_TOKENS",
    "Chain",
    "candidates",
    "changes",
    "common_tokens",
    "entry_keys",
    "longest",
    "parse_entry",
]

#: Entries looked at on either side of the prompt, per boundary. The first of each side settle
#: what is longest; more matter only where those owners cannot be used after all.
NEIGHBOURS: Final = 17

_MODEL: Final = b"kvs prefix model"
_BLOCK: Final = b"kvs prefix block"
_BLOCK_BYTES: Final = HASH_TOKENS * 8


def _digest(person: bytes, data: bytes) -> bytes:
    return blake2b(data, digest_size=32, person=person).digest()


class Chain:
    """Hashes of a growing sequence of token ids, at every 64th.

    Parameters
    ----------
    model
        Ids of another identity, salt included, have other hashes from boundary 0 on.

    Attributes
    ----------
    hashes
        What keys hold of the hashes, for boundaries 0 to ``n_tokens // 64``.
    n_tokens
        Ids taken so far.
    """

    def __init__(self, model: Model) -> None:
        self._state = _digest(_MODEL, canonical_json(model.to_json()))
        self._pending = b""
        self.hashes = [self._state[:HASH_BYTES]]
        self.n_tokens = 0

    @property
    def pending(self) -> Ids:
        """Ids since the last boundary, fewer than 64; older ones are not kept."""
        return np.frombuffer(self._pending, ">i8").astype(np.int64)

    def extend(self, ids: Ids) -> None:
        """Take further ids; how they are cut into calls changes nothing."""
        data = self._pending + ids.astype(">i8").tobytes()
        self.n_tokens += len(ids)
        state, end = self._state, len(data) - len(data) % _BLOCK_BYTES
        for at in range(0, end, _BLOCK_BYTES):
            state = _digest(_BLOCK, state + data[at : at + _BLOCK_BYTES])
            self.hashes.append(state[:HASH_BYTES])
        self._state, self._pending = state, data[end:]

    def copy(self) -> Chain:
        """Return one that grows apart from this one."""
        other = copy.copy(self)
        other.hashes = self.hashes.copy()
        return other


def changes(chain: Chain, ids: Ids, owner: int) -> tuple[list[bytes], list[bytes]]:
    """Extend a chain by an owner's next ids; return the keys to remove and those to add.

    An owner that ends between two boundaries has one key with fewer than 64 ids: the only one
    that further ids replace.
    """
    if not len(ids):
        return [], []
    before, pending = chain.n_tokens, chain.pending
    first, base = before // HASH_TOKENS, before - len(pending)
    removed = list(entry_keys(chain.hashes[first:], pending, base, before, owner, first))
    chain.extend(ids)
    known, after = np.concatenate([pending, ids]), chain.n_tokens
    return removed, list(entry_keys(chain.hashes[first:], known, before, after, owner, first))


def candidates(snapshot: Snapshot, hashes: Sequence[bytes], ids: Ids) -> Iterator[tuple[int, int]]:
    """Yield owners whose ids begin like a prompt's, and how many ids they claim to share.

    Claims never rise: once a length is found true that is not below the last claim, nothing that
    follows beats it. The first claim is the longest that is stored, unless hashes collide. An
    owner may come again, never with a higher claim. Owners that share no id do not come.

    Parameters
    ----------
    hashes, ids
        The prompt's, as `Chain` gives and takes them.

    Raises
    ------
    KvError
        What the snapshot raises. Damaged keys are passed over.
    """
    for boundary in range(_last_boundary(snapshot, hashes), -1, -1):
        head = PREFIX + hashes[boundary]
        n_before = boundary * HASH_TOKENS
        codes = code_ids(ids[n_before : n_before + HASH_TOKENS])
        query = head + b"".join(codes)
        # On either side the shared ids become fewer with the distance.
        sides = (
            _run(head, snapshot.at_or_after(query), lambda key: snapshot.at_or_after(key + b"\0")),
            _run(head, snapshot.before(query), snapshot.before),
        )
        claims = (_claims(islice(side, NEIGHBOURS), codes) for side in sides)
        for n_shared, owner in heapq.merge(*claims, reverse=True, key=lambda claim: claim[0]):
            if not n_before + n_shared:
                return
            yield owner, n_before + n_shared


def _last_boundary(snapshot: Snapshot, hashes: Sequence[bytes]) -> int:
    """Return a boundary that somebody has, after which nobody shares a hash; -1 if none.

    Who has a boundary has all before it, so that halving finds the last one. A collision may
    bring about a later one, never an earlier one.
    """
    low, high = -1, len(hashes)
    while high - low > 1:
        middle = (low + high) // 2
        head = PREFIX + hashes[middle]
        found = snapshot.at_or_after(head)
        if found is not None and found.startswith(head):
            low = middle
        else:
            high = middle
    return low


def _run(head: bytes, key: bytes | None, step: Callable[[bytes], bytes | None]) -> Iterator[bytes]:
    while key is not None and key.startswith(head):
        yield key
        key = step(key)


def _claims(entries: Iterator[bytes], codes: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    for key in entries:
        try:
            _, _, owner = parse_entry(key)
        except Corrupt:
            continue
        at, n_shared = HEAD_BYTES, 0
        for code in codes:
            if not key.startswith(code, at):
                break
            at += len(code)
            n_shared += 1
        yield n_shared, owner


def longest(
    snapshot: Snapshot,
    hashes: Sequence[bytes],
    ids: Ids,
    usable: Callable[[int, int], int],
) -> tuple[int, int] | None:
    """Return the owner that shares most with a prompt and how many ids, or None.

    Parameters
    ----------
    usable
        Called at most once per owner, with the owner and its claim: how many of the claimed ids
        the owner truly shares, as its stored ids say, and can serve; 0 for none.
    """
    best, n_best, tried = 0, 0, set[int]()
    for owner, claimed in candidates(snapshot, hashes, ids):
        if claimed <= n_best:
            break
        if owner in tried:
            continue
        tried.add(owner)
        n_usable = usable(owner, claimed)
        if n_usable > n_best:
            best, n_best = owner, n_usable
        if n_usable >= claimed:
            break
    return (best, n_best) if n_best else None


def common_tokens(a: Ids, b: Ids) -> int:
    """Return how many ids two sequences share from their first one on."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n
