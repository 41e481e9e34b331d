"""What one transaction changes in an Icechunk repository, before its commit.

Icechunk takes a chunk only inside its array's grid, and drops those outside of it when an array
shrinks. The engine puts frames before the document that makes room for them, and some without
one ever. So chunks outside wait in memory for the document; what still waits at the end of the
transaction, or is too much, is stored ahead: see `icechunk_nodes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from .documents import FILE_NAME
from .icechunk_nodes import (
    AHEAD,
    AHEAD_NODE,
    Place,
    document_of,
    grid_of,
    is_inside,
    key_of,
    node_of,
    own_document,
    place_of,
)
from .icechunk_store import Store
from .objects import Found, Request
from .places import ROOT

#: More bytes than this do not wait in memory.
MOST_WAITING: Final = 64 << 20
# So many objects are put, or moved, at the same time.
_AT_ONCE: Final = 64


def get(store: Store, place: Place, start: int | None, stop: int | None) -> bytes | None:
    """Return what is stored at a place, or bytes ``[start, stop)`` of it."""
    data = store.get(place.key, start, stop)
    if data is None and place.numbers and not place.is_own:
        data = store.get(place.ahead.key, start, stop)
    return data


def keys_below(store: Store, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (key, what Icechunk calls it) of the objects whose key begins with `prefix`."""
    for node in node_of(prefix):
        stored = store.names(node)
        if not stored and node and not node.startswith(ROOT):
            stored = store.names("")  # no node, and yet there may be some below it
        for name in stored:
            key = key_of(name)
            if key is not None and key.startswith(prefix):
                yield key, name


class Changes:
    """A transaction. Used by one thread.

    Parameters
    ----------
    store
        Of a session that can be written.
    where
        The archive, for messages.
    """

    def __init__(self, store: Store, where: str) -> None:
        self._store, self._where = store, where
        self._grids: dict[str, tuple[int, ...] | None] = {}
        self._waiting: dict[Place, bytes] = {}
        self._n_waiting = 0
        self._ahead: set[str] = set()  # arrays of chunks ahead that have lost some
        #: Number of the archive's commit, and the groups whose documents change.
        self.number: int | None = None
        self.groups: dict[str, None] = {}

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes | None:
        """See `Objects.get`."""
        place = place_of(key, self._where)
        data = self._waiting.get(place)
        return get(self._store, place, start, stop) if data is None else data[start:stop]

    def get_many(self, requests: Sequence[Request]) -> list[bytes | None]:
        """See `Objects.get_many`."""
        return [self.get(*request) for request in requests]

    def exists(self, key: str) -> bool:
        """See `Objects.exists`."""
        place = place_of(key, self._where)
        if place in self._waiting or self._store.exists(place.key):
            return True
        outside = bool(place.numbers) and not place.is_own
        return outside and self._store.exists(place.ahead.key)

    def listed(self, prefix: str) -> Sequence[Found]:
        """Return what `Objects.list` yields."""
        found = list(keys_below(self._store, prefix))
        lengths = self._store.sizes([name for _, name in found])
        # Icechunk also lists chunks that it dropped when an array shrank, with no bytes.
        sizes = {key: n for (key, _), n in zip(found, lengths, strict=True) if n}
        sizes.update(
            (place.key, len(data))
            for place, data in self._waiting.items()
            if place.key.startswith(prefix)
        )
        return [Found(key, sizes[key]) for key in sorted(sizes)]

    def put(self, key: str, data: bytes) -> None:
        """See `Objects.put`."""
        self.put_all([(key, data)])

    def put_all(self, items: Iterable[tuple[str, bytes]]) -> None:
        """See `Objects.put_all`."""
        ready: list[tuple[str, bytes]] = []
        for key, data in items:
            place = place_of(key, self._where)
            if not place.numbers:
                self._put_document(place.node, data)
            elif self._is_ready(place):
                ready.append((place.key, data))
            else:
                self._wait(place, data)
            if key.startswith(f"{ROOT}commits/"):
                self.number = place.numbers[0]
        self._set(ready)
        if self._n_waiting > MOST_WAITING:
            self._store_ahead()

    def delete(self, keys: Sequence[str]) -> None:
        """See `Objects.delete`; the document of a group stays as long as anything is below it."""
        places = [place_of(key, self._where) for key in keys]
        for place in places:
            if place.numbers:
                self._delete_chunk(place)
        documents = {place.node for place in places if not place.numbers}
        for node in sorted(documents, key=len, reverse=True):
            old = self._store.get(document_of(node))
            if old is None:
                continue
            if grid_of(old, self._where) is None:
                if self._store.names(node) != [document_of(node)]:
                    continue
            else:
                self._rescue(node, None)
            self._store.delete(document_of(node))
            self._grids[node] = None

    def finish(self) -> None:
        """Store what still waits; the session can be committed then."""
        self._store_ahead()
        for node in self._ahead:
            if self._store.names(node) == [document_of(node)]:
                self._store.delete(document_of(node))
        self._ahead.clear()

    def _is_ready(self, place: Place) -> bool:
        """Whether a chunk can be put where it belongs; makes an array of ours for it."""
        if place.is_own and self._grid(place.node) is None:
            if place.node.startswith(AHEAD) and not self._store.exists(document_of(AHEAD_NODE)):
                self._make(Place(AHEAD_NODE))
            self._make(place)
        return is_inside(place, self._grid(place.node))

    def _make(self, place: Place) -> None:
        """Make an array of ours."""
        document = own_document(place)
        self._store.set(document_of(place.node), document)
        self._grids[place.node] = grid_of(document, self._where)

    def _grid(self, node: str) -> tuple[int, ...] | None:
        if node not in self._grids:
            self._grids[node] = grid_of(self._store.get(document_of(node)), self._where)
        return self._grids[node]

    def _wait(self, place: Place, data: bytes) -> None:
        self._n_waiting += len(data) - len(self._waiting.get(place, b""))
        self._waiting[place] = data

    def _unwait(self, place: Place) -> bytes:
        data = self._waiting.pop(place, b"")
        self._n_waiting -= len(data)
        return data

    def _put_document(self, node: str, data: bytes) -> None:
        old = self._store.get(document_of(node))
        grid = grid_of(data, self._where)
        if old != data:
            if old is not None and grid is not None and grid_of(old, self._where) is None:
                # A session's group that was closed. Icechunk makes no array of a group, and
                # keeps what was below it with the commits before.
                self._store.delete_below(node)
                self._grids = {n: g for n, g in self._grids.items() if not n.startswith(node)}
            elif old is not None:
                self._rescue(node, grid)
            self._store.set(document_of(node), data)
            self._grids[node] = grid
            self.groups[node.partition("/")[0]] = None
        if grid is not None:
            self._settle(node, grid)

    def _settle(self, node: str, grid: tuple[int, ...]) -> None:
        """Put the chunks into an array that have waited for its grid."""
        ready = {p for p in self._waiting if p.node == node and is_inside(p, grid)}
        self._set([(place.key, self._unwait(place)) for place in ready])
        if node.startswith(ROOT) or self._grid(AHEAD + node) is None:
            return
        for place in self._chunks(AHEAD + node):
            here = Place(node, place.numbers)
            if not is_inside(here, grid):
                continue
            data = None if here in ready else self._store.get(place.key)
            if data is not None:
                self._store.set(here.key, data)
            self._store.delete(place.key)
            self._ahead.add(place.node)

    def _rescue(self, node: str, grid: tuple[int, ...] | None) -> None:
        """Move the chunks ahead that are outside of the grid that an array gets."""
        old = self._grid(node)
        if old is None or node.startswith(ROOT):
            return
        if grid is not None and len(grid) == len(old) and all(map(int.__ge__, grid, old)):
            return
        for place in self._chunks(node):
            data = None if is_inside(place, grid) else self._store.get(place.key)
            if data is not None and self._is_ready(place.ahead):
                self._store.set(place.ahead.key, data)
                self._store.delete(place.key)  # or it comes back when the array grows again

    def _store_ahead(self) -> None:
        waiting, self._waiting, self._n_waiting = self._waiting, {}, 0
        self._set([(p.ahead.key, data) for p, data in waiting.items() if self._is_ready(p.ahead)])

    def _chunks(self, node: str) -> Sequence[Place]:
        """Return the chunks of an array."""
        found = []
        for name in self._store.names(node):
            head, _, numbers = name.rpartition("/c/")
            if head == node and not name.endswith(FILE_NAME):
                found.append(Place(node, tuple(map(int, numbers.split("/")))))
        return found

    def _delete_chunk(self, place: Place) -> None:
        self._unwait(place)
        for at in (place,) if place.is_own else (place, place.ahead):
            if is_inside(at, self._grid(at.node)):
                self._store.delete(at.key)
                if at.node.startswith(AHEAD):
                    self._ahead.add(at.node)

    def _set(self, items: Sequence[tuple[str, bytes]]) -> None:
        for first in range(0, len(items), _AT_ONCE):
            self._store.set_many(items[first : first + _AT_ONCE])
