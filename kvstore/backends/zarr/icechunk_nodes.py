"""Where the objects of an archive are in an Icechunk repository, which keeps nodes and chunks only.

A document is that of a node, a chunk inside its array's grid is that chunk. All other objects
are chunks of arrays of ours, under numbers that say what their key says:

* ``_kvstore/commits``: chunk (number)
* ``_kvstore/segments``: chunk (number, upper and lower 16 bits of the nonce)
* ``_kvstore/frames``: chunk (16 bits of the owner, four times from the top; 0 for k, 1 for v;
  layer; block)
* ``_kvstore/ahead/GROUP/ARRAY``: the chunks that lie outside of the grid of ``GROUP/ARRAY``,
  under their own numbers

An object that stream headers share is the one chunk of ``_kvstore/books/DIGEST``.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple

from kvcodecs.errors import Corrupt, InvalidArgument

from .documents import FILE_NAME, group_document
from .places import BOOKS, ROOT

AHEAD: Final = ROOT + "ahead/"
#: A node, so that what is below it can be listed.
AHEAD_NODE: Final = AHEAD.rstrip("/")

_COMMITS: Final = ROOT + "commits"
_SEGMENTS: Final = ROOT + "segments"
_FRAMES: Final = ROOT + "frames"
_OWN: Final = (_COMMITS, _SEGMENTS, _FRAMES)
_COMMIT: Final = re.compile(r"_kvstore/commits/([0-9a-f]{16})")
_SEGMENT: Final = re.compile(r"_kvstore/segments/([0-9a-f]{16})-([0-9a-f]{4})([0-9a-f]{4})")
_FRAME: Final = re.compile(
    r"_kvstore/frames/([0-9a-f]{4})([0-9a-f]{4})([0-9a-f]{4})([0-9a-f]{4})/([kv])_(\d+)/(\d+)"
)
_CHUNK: Final = re.compile(r"(.+)/c/(\d+(?:/\d+)*)")
#: Numbers of chunks are below this: Icechunk keeps them in 32 bits.
_MOST: Final = (1 << 31) - 1
_WORD: Final = 1 << 16


class Place(NamedTuple):
    """Where an object is.

    Attributes
    ----------
    node
        Path of the array.
    numbers
        Of the chunk; none for the document of the node.
    """

    node: str
    numbers: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """What zarr calls it."""
        if not self.numbers:
            return document_of(self.node)
        return f"{self.node}/c/{'/'.join(map(str, self.numbers))}"

    @property
    def is_own(self) -> bool:
        """Whether it is in an array that only Icechunk needs."""
        return self.node in _OWN or f"{self.node}/".startswith((AHEAD, BOOKS))

    @property
    def ahead(self) -> Place:
        """Where it is as long as it is outside of its array's grid."""
        return Place(AHEAD + self.node, self.numbers)


def document_of(node: str) -> str:
    """Return the key of a node's document."""
    return f"{node}/{FILE_NAME}" if node else FILE_NAME


def place_of(key: str, where: str) -> Place:
    """Return the place of an object.

    Raises
    ------
    InvalidArgument
        There is none for it.
    """
    if key == FILE_NAME or key.endswith(f"/{FILE_NAME}"):
        return Place(key[: -len(FILE_NAME)].rstrip("/"))
    match = _COMMIT.fullmatch(key)
    if match:
        return _checked(Place(_COMMITS, (int(match[1], 16),)), key, where)
    match = _SEGMENT.fullmatch(key)
    if match:
        numbers = tuple(int(digits, 16) for digits in match.groups())
        return _checked(Place(_SEGMENTS, numbers), key, where)
    match = _FRAME.fullmatch(key)
    if match:
        owner = (int(digits, 16) for digits in match.groups()[:4])
        kind = int(match[5] == "v")
        numbers = (*owner, kind, int(match[6]), int(match[7]))
        return _checked(Place(_FRAMES, numbers), key, where)
    is_own = key.startswith(ROOT) and not key.startswith(BOOKS)
    match = None if is_own else _CHUNK.fullmatch(key)
    if match:
        return _checked(Place(match[1], tuple(map(int, match[2].split("/")))), key, where)
    raise InvalidArgument(
        f"{where}: object {key!r}: an Icechunk repository has no place for it; shards belong into "
        "directories and buckets"
    )


def key_of(stored: str) -> str | None:
    """Return the key of the object that Icechunk has under a key; None for its own documents."""
    if stored.endswith(FILE_NAME):
        place = Place(stored[: -len(FILE_NAME)].rstrip("/"))
        return None if place.is_own else stored
    match = _CHUNK.fullmatch(stored)
    if match is None:
        return None
    node, numbers = match[1], [int(number) for number in match[2].split("/")]
    if node == _COMMITS and len(numbers) == 1:
        return f"{_COMMITS}/{numbers[0]:016x}"
    if node == _SEGMENTS and len(numbers) == 3:
        return f"{_SEGMENTS}/{numbers[0]:016x}-{numbers[1]:04x}{numbers[2]:04x}"
    if node == _FRAMES and len(numbers) == 7:
        owner = "".join(f"{number:04x}" for number in numbers[:4])
        return f"{_FRAMES}/{owner}/{'kv'[numbers[4]]}_{numbers[5]:03d}/{numbers[6]}"
    return stored.removeprefix(AHEAD)


def node_of(prefix: str) -> tuple[str, ...]:
    """Return the nodes below which all objects are whose key begins with `prefix`."""
    path = prefix.rstrip("/")
    if path + "/" == ROOT:
        return (path, *_OWN)  # of an array Icechunk lists no chunks of nodes below it
    if not path or path.startswith(ROOT):
        return (path,)
    return path, AHEAD_NODE


def own_document(place: Place) -> bytes:
    """Return the document of the array that only Icechunk needs."""
    n = len(place.numbers)
    if place.node == AHEAD_NODE:
        return group_document({})
    if place.node == _SEGMENTS:
        shape = [_MOST, _WORD, _WORD]
    elif place.node == _FRAMES:
        shape = [_WORD] * 4 + [2, _WORD, _MOST]
    else:
        shape = [_MOST] * n
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1] * n}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [{"name": "bytes"}],
            "attributes": {"kvstore": "objects of the archive engine; not for zarr"},
        }
    ).encode()


def grid_of(document: bytes | None, where: str) -> tuple[int, ...] | None:
    """Return how many chunks an array has along each axis; None for a group, or no node."""
    if document is None:
        return None
    try:
        fields: dict[str, Any] = json.loads(document)
        if fields["node_type"] != "array":
            return None
        chunk = fields["chunk_grid"]["configuration"]["chunk_shape"]
        return tuple(-(-n // c) for n, c in zip(fields["shape"], chunk, strict=True))
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise Corrupt(f"{where}: document of an array: {error!r}") from error


def is_inside(place: Place, grid: tuple[int, ...] | None) -> bool:
    """Whether a chunk is in a grid."""
    if grid is None or len(grid) != len(place.numbers):
        return False
    return all(number < n for number, n in zip(place.numbers, grid, strict=True))


def _checked(place: Place, key: str, where: str) -> Place:
    if max(place.numbers) >= _MOST:
        raise InvalidArgument(f"{where}: object {key!r}: its number is too large for Icechunk")
    return place
