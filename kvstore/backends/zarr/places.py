"""Where a frame lies: in the chunk of a session's array, aside, or in a shard.

Frames of an owner lie in the group of the session that appends to it. Those that have no place
there (any more) are aside, under their owner. FORMAT.md section 9.3.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

from kvcodecs.errors import Corrupt
from kvcodecs.spec import Kind

from ... import keys
from .objects import Request

ROOT: Final = "_kvstore/"
ASIDE: Final = ROOT + "frames/"
BOOKS: Final = ROOT + "books/"

#: Keys of the backend's own begin with this byte, which no key of the engine does.
INTERNAL: Final = b"\xff"
OWNER_HOME: Final = INTERNAL + b"D"
GROUP: Final = INTERNAL + b"G"
DOOMED: Final = INTERNAL + b"X"

IN_ARRAY: Final = 0
IS_ASIDE: Final = 1
IN_SHARD: Final = 2

_REFERENCE: Final = struct.Struct("<BxxxIQ")
REFERENCE_BYTES: Final = _REFERENCE.size
_DOOMED: Final = struct.Struct(">2sQI")
_SAFE: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
#: Longest name of a group: file systems take 255 bytes, and a number may be added.
_LONGEST_NAME: Final = 200
_NAME_HASH_BYTES: Final = 8
_MOST_BYTES: Final = 255


class Lookup(Protocol):
    """What is stored as of one commit, or inside a transaction."""

    def raw(self, key: bytes) -> bytes | None:
        """Return the value as it is stored: of a frame its reference."""
        ...

    def raw_scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and values as they are stored, in key order."""
        ...


class Reference(NamedTuple):
    """What is stored under the key of a frame.

    Attributes
    ----------
    home
        `IN_ARRAY`, `IS_ASIDE` or `IN_SHARD`.
    n_bytes
        Length of the frame.
    offset
        First byte inside the shard; else 0.
    """

    home: int
    n_bytes: int
    offset: int = 0

    def pack(self) -> bytes:
        return _REFERENCE.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Reference:
        if len(data) != _REFERENCE.size:
            raise Corrupt(f"reference of {len(data)} bytes to a frame; restore a copy")
        return cls(*_REFERENCE.unpack(data))


class Home(NamedTuple):
    """Where the frames of an owner lie that are not aside.

    Attributes
    ----------
    group
        Path of the session's group.
    shard_blocks
        Blocks of a shard; 0 where each block is a chunk object of its own.
    """

    group: str
    shard_blocks: int = 0

    def pack(self) -> bytes:
        fields: dict[str, object] = {"group": self.group}
        if self.shard_blocks:
            fields["shard_blocks"] = self.shard_blocks
        return pack_json(fields)


def pack_json(data: Mapping[str, object]) -> bytes:
    """Return canonical JSON."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def load_fields(data: bytes, what: str) -> dict[str, Any]:
    """Return a JSON object of the backend's own; raises `Corrupt`."""
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise Corrupt(f"{what}: {error}; restore a copy of the archive") from error
    if not isinstance(fields, dict):
        raise Corrupt(f"{what}: not a JSON object; restore a copy of the archive")
    return fields


def frame_bytes(reference: bytes) -> int:
    """Return the length of the frame that a reference stands for."""
    return Reference.unpack(reference).n_bytes


def home_key(owner: int) -> bytes:
    """Key of the `Home` of an owner."""
    return OWNER_HOME + owner.to_bytes(8, "big")


def group_key(group: str) -> bytes:
    """Key that says that the path of a group is taken: {"owners": [hex, ...]}."""
    return GROUP + group.encode()


def doomed_key(due_ns: int, number: int) -> bytes:
    """Key of objects that are to be deleted from a time on."""
    return _DOOMED.pack(DOOMED, max(due_ns, 0), number)


def due_of(key: bytes) -> int:
    """Return the time in a `doomed_key`."""
    if len(key) != _DOOMED.size:
        raise Corrupt(f"key {key!r}: not of objects to delete; restore a copy of the archive")
    return int(_DOOMED.unpack(key)[1])


def home_of(lookup: Lookup, owner: int) -> Home | None:
    """Return where an owner's frames lie, or None."""
    value = lookup.raw(home_key(owner))
    return None if value is None else _home(value)


@lru_cache(maxsize=4096)
def _home(value: bytes) -> Home:
    fields = load_fields(value, "place of an owner's frames")
    group, n = fields.get("group"), fields.get("shard_blocks", 0)
    if not isinstance(group, str) or not _is_group(group) or type(n) is not int or n < 0:
        raise Corrupt(f"place of an owner's frames: {fields}; restore a copy of the archive")
    return Home(group, n)


def group_of(name: str) -> str:
    """Return the path of a group for a session: its name, with all but plain characters escaped.

    Other bytes of its UTF-8 become ``=`` and two hex digits, and so does a character at the
    beginning that zarr gives a meaning. A long one is cut, and ends in a hash.
    """
    text = "".join(
        c if c in _SAFE and (i or c not in "._") else "".join(f"={b:02X}" for b in c.encode())
        for i, c in enumerate(name)
    )
    if len(text) <= _LONGEST_NAME:
        return text
    digest = hashlib.blake2b(name.encode(), digest_size=_NAME_HASH_BYTES).hexdigest()
    # Not inside an escape: "=2" would be none.
    return text[: _LONGEST_NAME - 2 * _NAME_HASH_BYTES - 3].rstrip("=") + "=_" + digest


def _is_group(group: str) -> bool:
    is_plain = all(c in _SAFE or c == "=" for c in group)
    return is_plain and 0 < len(group) <= _MOST_BYTES and group[0] not in "._"


def stream_of(layer: int, kind: Kind) -> str:
    """Return what a stream is called in paths, such as ``k_007``."""
    return f"{kind}_{layer:03d}"


def array_of(group: str, layer: int, kind: Kind) -> str:
    """Return the path of a stream's array."""
    return f"{group}/{stream_of(layer, kind)}"


def chunk_of(group: str, layer: int, kind: Kind, block: int) -> str:
    """Return the key of a block's chunk."""
    return f"{array_of(group, layer, kind)}/c/0/{block}/0"


def shard_of(group: str, layer: int, kind: Kind, number: int) -> str:
    """Return the key of a shard; spelled so that an array can have chunks and shards at a time."""
    return f"{array_of(group, layer, kind)}/c.0.{number}.0"


def aside_of(owner: int, layer: int, kind: Kind, block: int) -> str:
    """Return the key of a frame that is aside."""
    return f"{ASIDE}{owner:016x}/{stream_of(layer, kind)}/{block}"


def book_of(key: bytes) -> str:
    """Return where zarr finds an object that stream headers share, of its key."""
    return f"{BOOKS}{key[len(keys.SHARED) :].hex()}/c/0"


def owners_in(lookup: Lookup, group: str) -> list[int]:
    """Return the owners that a group belongs to, in time order; none once it is closed."""
    value = lookup.raw(group_key(group))
    if value is None:
        return []
    owners = load_fields(value, f"group {group!r}").get("owners")
    if not isinstance(owners, list):
        raise Corrupt(f"group {group!r}: no list of owners; restore a copy of the archive")
    try:
        return [int(owner, 16) for owner in owners]
    except (TypeError, ValueError) as error:
        raise Corrupt(f"group {group!r}: owners: {error}; restore a copy") from error


def locations(lookup: Lookup, key: bytes, reference: bytes) -> list[Request]:
    """Return where a frame may be, in the order to try.

    A frame moves aside when the session goes on without it, and another one may take the chunk:
    so whoever reads looks at the owner in the frame, and then aside.
    """
    owner, layer, kind, block = frame_of(key)
    home, n_bytes, offset = Reference.unpack(reference)
    aside: Request = (aside_of(owner, layer, kind, block), None, None)
    if home == IS_ASIDE:
        return [aside]
    place = home_of(lookup, owner)
    if place is None:
        return [aside]
    if home == IN_ARRAY:
        return [(chunk_of(place.group, layer, kind, block), None, None), aside]
    if home == IN_SHARD and place.shard_blocks:
        shard = shard_of(place.group, layer, kind, block // place.shard_blocks)
        return [(shard, offset, offset + n_bytes), aside]
    raise Corrupt(f"key {key!r}: frame in a place {home} that is unknown; restore a copy")


def frame_of(key: bytes) -> tuple[int, int, Kind, int]:
    """Return (owner, layer, kind, block) of the key of a frame; raises `Corrupt`."""
    parsed = keys.parse(key)
    owner, layer, kind, block = parsed.owner, parsed.layer, parsed.kind, parsed.index
    if owner is None or layer is None or kind is None or block is None:
        raise Corrupt(f"key {key!r}: not of a frame")
    return owner, layer, kind, block
