"""Keys of an archive: packed so that byte order is logical order. FORMAT.md section 2."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from kvcodecs.errors import Corrupt, InvalidArgument
from kvcodecs.shared import SHARED_BYTES
from kvcodecs.spec import Kind

from . import prefix_keys

ARCHIVE: Final = b"A"
IDENTITY: Final = b"I"
SESSION: Final = b"S"
HEADER: Final = b"H"
FRAME: Final = b"F"
TAIL: Final = b"T"
HEAD: Final = b"R"
TOKENS: Final = b"K"
USER: Final = b"U"
RECEIPT: Final = b"Q"
SHARED: Final = b"B"
PREFIX: Final = prefix_keys.PREFIX

DIGEST_BYTES: Final = 16
MAX_NAME_BYTES: Final = 255

_KINDS: Final[tuple[Kind, Kind]] = ("k", "v")
_STREAM: Final = struct.Struct(">cQIB")
_BLOCK: Final = struct.Struct(">cQIBQ")
_CHUNK: Final = struct.Struct(">cQQ")
_OWNER: Final = struct.Struct(">cQ")
_USER: Final = struct.Struct(">cQQQ")
#: Stands for "as far as it goes" in the key of a user: the session that appends to the owner.
FOR_EVER: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Key:
    """A parsed key; fields that its prefix does not have are None."""

    prefix: bytes
    name: str | None = None
    digest: bytes | None = None
    owner: int | None = None
    layer: int | None = None
    kind: Kind | None = None
    index: int | None = None
    until: int | None = None
    session: int | None = None


def check_name(name: str) -> str:
    """Return a session name that may be stored.

    Raises
    ------
    InvalidArgument
        Empty, longer than 255 bytes of UTF-8, or with control characters or lone surrogates.
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"session name {name!r}: expected a non-empty string")
    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name):
        raise InvalidArgument(f"session name {name!r}: control characters are not allowed")
    try:
        n_bytes = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidArgument(f"session name {name!r}: not valid Unicode") from None
    if n_bytes > MAX_NAME_BYTES:
        raise InvalidArgument(
            f"session name of {n_bytes} bytes: at most {MAX_NAME_BYTES} bytes of UTF-8"
        )
    return name


def session_key(name: str) -> bytes:
    """Key of a session record."""
    return SESSION + check_name(name).encode("utf-8")


def identity_key(digest: bytes) -> bytes:
    """Key of a model identity."""
    return IDENTITY + digest


def shared_key(digest: bytes) -> bytes:
    """Key of an object that stream headers share."""
    return SHARED + digest


def stream_key(prefix: bytes, owner: int, layer: int, kind: Kind) -> bytes:
    """Key of a stream header, tail or head; prefix of the stream's frames with `FRAME`."""
    return _STREAM.pack(prefix, owner, layer, _KINDS.index(kind))


def frame_key(owner: int, layer: int, kind: Kind, block: int) -> bytes:
    """Key of a sealed frame."""
    return _BLOCK.pack(FRAME, owner, layer, _KINDS.index(kind), block)


def unpack_frame_key(key: bytes) -> tuple[int, int, Kind, int]:
    """Return owner, layer, kind and block of the key of a frame; raises `Corrupt`."""
    try:
        _, owner, layer, kind, block = _BLOCK.unpack(key)
        return owner, layer, _KINDS[kind], block
    except (struct.error, IndexError) as error:
        raise Corrupt(f"key {key!r}: {error}") from error


def tokens_key(owner: int, chunk: int) -> bytes:
    """Key of a chunk of token ids."""
    return _CHUNK.pack(TOKENS, owner, chunk)


def receipts_prefix(session: int) -> bytes:
    """What the keys of all receipts of a session start with."""
    return _OWNER.pack(RECEIPT, session)


def receipt_key(session: int, number: int) -> bytes:
    """Key of a receipt; the numbers of a session rise."""
    return _CHUNK.pack(RECEIPT, session, number)


def owner_prefix(prefix: bytes, owner: int) -> bytes:
    """What all keys of `prefix` and `owner` start with."""
    return _OWNER.pack(prefix, owner)


def user_key(owner: int, until: int, session: int) -> bytes:
    """Key that says which session uses the frames of an owner.

    `until` is up to which token a prefix can be taken from that session: `FOR_EVER` for the one
    that appends to the owner, 0 for one that no prefix can be taken from.
    """
    return _USER.pack(USER, owner, until, session)


#: Prefixes of the keys that belong to an owner, in the order they are written.
OWNED: Final = (HEADER, FRAME, TAIL, HEAD, TOKENS)


def name_of(key: bytes) -> str:
    """Return the name in the key of a session record; raises `Corrupt` if there is none."""
    try:
        name = key[1:].decode("utf-8")
        # Quick for the many: a name that is printable, as nearly all are, has no control character.
        return name if name.isprintable() and 1 < len(key) <= MAX_NAME_BYTES else check_name(name)
    except (UnicodeDecodeError, InvalidArgument) as error:
        raise Corrupt(f"key {key!r}: {error}") from error


def parse(key: bytes) -> Key:
    """Return what a stored key says.

    Raises
    ------
    Corrupt
        Not a key of this format.
    """
    prefix = key[:1]
    try:
        if prefix == ARCHIVE and len(key) == 1:
            return Key(prefix)
        if prefix == IDENTITY and len(key) == 1 + DIGEST_BYTES:
            return Key(prefix, digest=key[1:])
        if prefix == SHARED and len(key) == 1 + SHARED_BYTES:
            return Key(prefix, digest=key[1:])
        if prefix == SESSION:
            return Key(prefix, name=name_of(key))
        if prefix == FRAME:
            _, owner, layer, kind, index = _BLOCK.unpack(key)
            return Key(prefix, owner=owner, layer=layer, kind=_KINDS[kind], index=index)
        if prefix in (HEADER, TAIL, HEAD):
            _, owner, layer, kind = _STREAM.unpack(key)
            return Key(prefix, owner=owner, layer=layer, kind=_KINDS[kind])
        if prefix == TOKENS:
            _, owner, index = _CHUNK.unpack(key)
            return Key(prefix, owner=owner, index=index)
        if prefix == RECEIPT:
            _, session, index = _CHUNK.unpack(key)
            return Key(prefix, session=session, index=index)
        if prefix == PREFIX:
            _, _, owner = prefix_keys.parse_entry(key)
            return Key(prefix, owner=owner)
        if prefix == USER:
            _, owner, until, session = _USER.unpack(key)
            return Key(prefix, owner=owner, until=until, session=session)
    except (struct.error, IndexError, UnicodeDecodeError, InvalidArgument) as error:
        raise Corrupt(f"key {key!r}: {error}") from error
    raise Corrupt(f"key {key!r}: unknown prefix or length")
