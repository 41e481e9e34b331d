"""Objects that many stream headers share: kept once under their digest, never in a header.

FORMAT.md section 2.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from .digests import raw_digest
from .errors import NotFound
from .frame import BytesLike, open_record, seal_record

#: Returns the packed object of a digest; raises `NotFound` or `Corrupt`.
Shared: TypeAlias = Callable[[bytes], BytesLike]

SHARED_MAGIC: Final = b"KVSO"
#: Of a digest of an object.
SHARED_BYTES: Final = 32
#: Objects of every kind so far: books of FibQuant.
_DOMAIN: Final = "kvstore_fibquant_book_v1"


def nothing_shared(digest: bytes) -> BytesLike:
    """Raise `NotFound`: a `Shared` for where there are no objects."""
    raise NotFound(f"shared object {short(digest)} is needed to decode, and is not here")


def shared_digest(data: BytesLike) -> bytes:
    """Return the digest that a packed object is kept under."""
    return raw_digest(_DOMAIN, data)


def pack_shared(data: BytesLike) -> bytes:
    """Return the record of a packed object."""
    return seal_record(SHARED_MAGIC, data)


def unpack_shared(value: BytesLike, where: str) -> memoryview:
    """Return the packed object in a record; `Truncated` or `Corrupt`.

    Whether it is the one that was asked for the codec checks, by its digest.
    """
    return open_record(SHARED_MAGIC, value, where)


def short(digest: bytes) -> str:
    """Return the first digits of a digest, as messages and reports show it."""
    return digest.hex()[:12]


class NothingShared:
    """The part of a `BlockCodec` whose headers say everything."""

    def needs(self, header: BytesLike) -> tuple[bytes, ...]:
        """See `BlockCodec.needs`."""
        return ()

    def shared(self, params: Any) -> dict[bytes, bytes]:
        """See `BlockCodec.shared`."""
        return {}
