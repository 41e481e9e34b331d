"""Objects that the stream headers of an archive share: stored once, under their digest.

A header and what it needs are stored in one transaction, so whoever has the header has all.
FORMAT.md section 3.6.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvcodecs.codec import codec_by_number
from kvcodecs.errors import Corrupt
from kvcodecs.frame import BytesLike, open_record
from kvcodecs.shared import Shared, pack_shared, shared_digest, short, unpack_shared

from . import keys
from .backend import Snapshot, Transaction, Value
from .records import HEADER_MAGIC

_ADVICE = "restore a copy of the archive; nothing that was coded with it can be read without"


def objects_of(snapshot: Snapshot, digests: Iterable[bytes], where: str) -> dict[bytes, memoryview]:
    """Return the records of objects as they are stored, checked, by key; errors of `check_object`.

    They are views, valid as long as the snapshot.
    """
    found = {}
    for digest in digests:
        check_object(snapshot, digest, where)
        key = keys.shared_key(digest)
        value = snapshot.get(key)
        if value is not None:
            found[key] = value
    return found


def objects_in(snapshot: Snapshot, where: str) -> Shared:
    """Return what finds the objects of an archive; `where` is the stream that needs them.

    They are views, valid as long as the snapshot.
    """

    def find(digest: bytes) -> BytesLike:
        value = snapshot.get(keys.shared_key(digest))
        spot = f"{where}: shared object {short(digest)}"
        if value is None:
            raise Corrupt(f"{spot}: missing; {_ADVICE}")
        return unpack_shared(value, spot)

    return find


def object_puts(objects: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Yield what to store of objects, packed, by digest."""
    for digest, data in objects:
        yield keys.shared_key(digest), pack_shared(data)


def put_all(transaction: Transaction, puts: Iterable[tuple[bytes, Value | None]]) -> None:
    """Store values, and delete those that are None; an object that is there stays as it is."""
    for key, value in puts:
        if value is None:
            transaction.delete(key)
        elif key[:1] != keys.SHARED or not _is_there(transaction, key, value):
            transaction.put(key, value)


def _is_there(transaction: Transaction, key: bytes, value: Value) -> bool:
    found = transaction.get(key)
    return found is not None and bytes(found) == bytes(value)


def needs_of(value: BytesLike, where: str) -> tuple[bytes, ...]:
    """Return the digests of what a stored stream header needs.

    Raises
    ------
    Truncated, Corrupt, Unsupported
        The header cannot be read.
    """
    body = bytes(open_record(HEADER_MAGIC, value, where))
    if not body:
        raise Corrupt(f"{where}: empty")
    return codec_by_number(body[0]).needs(body[1:])


def check_object(snapshot: Snapshot, digest: bytes, where: str) -> None:
    """Check an object: its record, and that it is the one of its digest.

    Raises
    ------
    Truncated, Corrupt
        It is not, or is missing.
    """
    data = objects_in(snapshot, where)(digest)
    if shared_digest(data) != digest:
        spot = f"{where}: shared object {short(digest)}"
        raise Corrupt(f"{spot}: another one is stored in its place; {_ADVICE}")
