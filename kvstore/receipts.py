"""Receipts of a session: what each commit made of the tokens that it got. FORMAT.md section 3.7.

A receipt is stored in the transaction of its commit and never changes; what a rollback takes back
of its tokens stands beside it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, get_args

from kvcodecs.digests import canonical_json, document_digest
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, Unsupported
from kvcodecs.frame import open_record, seal_record
from kvcodecs.receipts import Receipt
from kvcodecs.spec import KINDS, Kind

from . import keys
from .backend import Snapshot, Transaction
from .records import MAX_COUNT, located, read_count
from .session_record import SessionRecord, StreamName

SCHEMA: Final = "kvstore_session_receipt_v1"
_FAMILY: Final = "kvstore_session_receipt_v"
RECEIPT_MAGIC: Final = b"KVSR"
#: Of the JSON of one receipt: sessions of thousands of streams have some tens of MB.
_MAX_BYTES: Final = 1 << 30

#: How the tokens came to be: appended; taken over with the frames of another session; coded anew
#: by a migration; or read.
Origin: TypeAlias = Literal["append", "range", "recode", "read"]


@dataclass(frozen=True, slots=True)
class StreamReceipt:
    """Receipt for one stream.

    Attributes
    ----------
    layer, kind
        Which stream.
    pages
        Which frames the pages of `receipt` are, in their order: numbers of blocks, None for the
        raw head.
    receipt
        Its `source_digest` and `decoded_digest` are those of `kvstore.source_digest`.
    """

    layer: int
    kind: Kind
    pages: tuple[int | None, ...]
    receipt: Receipt

    def to_json(self) -> dict[str, object]:
        """Return a JSON object, fields in their order."""
        return {
            "layer": self.layer,
            "kind": self.kind,
            "pages": list(self.pages),
            "receipt": self.receipt.to_json(),
        }


@dataclass(frozen=True, slots=True)
class SessionReceipt:
    """Receipt for the tokens ``[first_token, stop_token)`` of a session.

    Attributes
    ----------
    session
        Name that the session had.
    model
        Digest of the model's identity, hexadecimal.
    origin
        ``"append"``: a commit of appended tokens. ``"range"``: frames taken over from another
        session; nothing was coded, so there are no `streams`. ``"recode"``: coded anew by a
        migration, from what was stored before: that is the source, and errors are bounds on the
        error against the originals. ``"read"``: a decode receipt.
    streams
        One for each stream. A frame holds whole blocks: the first page of a commit may begin with
        tokens of commits before.
    software
        That wrote it.
    recorded_unix_seconds
        When.
    kept
        Where those of its tokens end that no rollback has taken back; no part of the document.
    """

    session: str
    model: str
    origin: Origin
    first_token: int
    stop_token: int
    streams: tuple[StreamReceipt, ...]
    software: str
    recorded_unix_seconds: int
    kept: int

    @property
    def operation(self) -> str:
        """``"compress"`` or ``"decode"``."""
        return "decode" if self.origin == "read" else "compress"

    def digest(self) -> str:
        """Return the digest of the receipt as it was made."""
        return document_digest(SCHEMA, self.to_json())

    def to_json(self) -> dict[str, object]:
        """Return the document, fields in their order."""
        return {
            "schema_version": SCHEMA,
            "operation_kind": self.operation,
            "origin": self.origin,
            "session": self.session,
            "model": self.model,
            "first_token": self.first_token,
            "stop_token": self.stop_token,
            "streams": [stream.to_json() for stream in self.streams],
            "software": self.software,
            "recorded_unix_seconds": self.recorded_unix_seconds,
        }

    @classmethod
    def from_json(cls, data: object, kept: int | None = None) -> SessionReceipt:
        """Return the receipt that `to_json` described.

        Raises
        ------
        Corrupt
            A field is missing, too many, or not what it should be.
        Unsupported
            A newer version.
        """
        if not isinstance(data, Mapping):
            raise Corrupt(f"session receipt: {type(data).__name__} instead of a JSON object")
        version = data.get("schema_version")
        if version != SCHEMA:
            newer = isinstance(version, str) and version.startswith(_FAMILY)
            kind = Unsupported if newer else Corrupt
            raise kind(f"session receipt: schema_version {version!r}, this release reads {SCHEMA}")
        try:
            receipt = cls(
                session=_text(data["session"]),
                model=_text(data["model"]),
                origin=_origin(data["origin"]),
                first_token=read_count(data["first_token"]),
                stop_token=read_count(data["stop_token"]),
                streams=tuple(_stream(item) for item in data["streams"]),
                software=_text(data["software"]),
                recorded_unix_seconds=read_count(data["recorded_unix_seconds"]),
                kept=read_count(data["stop_token"] if kept is None else kept),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"session receipt: {error!r}") from error
        _check(receipt, data)
        return receipt


def pack_receipt(receipt: SessionReceipt) -> bytes:
    """Return the stored value of a receipt."""
    data = canonical_json({"kept": receipt.kept, "receipt": receipt.to_json()})
    return seal_record(RECEIPT_MAGIC, zlib.compress(data, 6))


def unpack_receipt(value: memoryview | bytes, where: str) -> SessionReceipt:
    """Return a stored receipt.

    Raises
    ------
    Truncated, Corrupt, Unsupported
        Damaged, or of a newer release.
    """
    body = open_record(RECEIPT_MAGIC, value, where)
    with located(where):
        try:
            inflate = zlib.decompressobj()
            data = inflate.decompress(body, _MAX_BYTES)
            if not inflate.eof or inflate.unused_data:
                raise Corrupt("session receipt: not one zlib stream")
            envelope = json.loads(data)
            is_canonical = canonical_json(envelope) == data
        except (zlib.error, ValueError, RecursionError, InvalidArgument) as error:
            raise Corrupt(f"session receipt: {error}") from error
        if not is_canonical:  # what it says would have another digest than what is stored
            raise Corrupt("session receipt: not canonical JSON")
        if not isinstance(envelope, dict) or set(envelope) != {"kept", "receipt"}:
            raise Corrupt("session receipt: not a receipt with its state")
        try:
            kept = read_count(envelope["kept"])
        except ValueError as error:
            raise Corrupt(f"session receipt: kept: {error}") from error
        return SessionReceipt.from_json(envelope["receipt"], kept)


def stored_receipts(
    snapshot: Snapshot, session: int, where: str
) -> Iterator[tuple[int, SessionReceipt]]:
    """Yield number and receipt of the receipts of a session, in the order of its commits."""
    for key, value in snapshot.scan(keys.receipts_prefix(session)):
        number = keys.parse(key).index or 0
        yield number, unpack_receipt(bytes(value), f"{where} receipt {number}")


def checked_receipts(snapshot: Snapshot, record: SessionRecord, where: str) -> dict[bytes, bytes]:
    """Return the receipts of a session as they are stored, once each of them reads."""
    found = {}
    for key, value in snapshot.scan(keys.receipts_prefix(record.id)):
        found[key] = bytes(value)
        unpack_receipt(found[key], f"{where} receipt {keys.parse(key).index}")
    return found


def add_receipt(transaction: Transaction, session: int, value: bytes) -> None:
    """Store a packed receipt as the newest of a session."""
    last = transaction.before(keys.receipt_key(session, keys.FOR_EVER))
    number = 0
    if last is not None and last.startswith(keys.receipts_prefix(session)):
        number = (keys.parse(last).index or 0) + 1
    transaction.put(keys.receipt_key(session, number), value)


def delete_receipts(transaction: Transaction, session: int) -> None:
    """Delete all receipts of a session."""
    for key in [key for key, _ in transaction.sizes(keys.receipts_prefix(session))]:
        transaction.delete(key)


def cut_receipts(transaction: Transaction, record: SessionRecord, n_tokens: int) -> None:
    """Note that the tokens from `n_tokens` on were taken back from the session of `record`.

    Receipts of frames that still serve tokens before stay, with fewer tokens or none: the frames
    are what they were. Damaged ones stay for `verify` to tell.
    """
    for key, receipt in _readable(transaction, record):
        begins = [_page_span(record, s, page)[0] for s in receipt.streams for page in s.pages]
        if min(receipt.first_token, *begins, MAX_COUNT) >= n_tokens:
            transaction.delete(key)
        elif receipt.kept > n_tokens:
            cut = replace(receipt, kept=n_tokens)
            transaction.put(key, pack_receipt(cut))


def trim_receipts(transaction: Transaction, record: SessionRecord) -> None:
    """Delete the first receipts of which `record` has no frame and no token, after a trim.

    Up to one that has: so what is left is a chain.
    """
    for key, receipt in _readable(transaction, record):
        ends = [_page_span(record, s, page)[1] for s in receipt.streams for page in s.pages]
        if max(receipt.kept, *ends, 0) > record.first:
            return
        transaction.delete(key)


def _readable(
    transaction: Transaction, record: SessionRecord
) -> Iterator[tuple[bytes, SessionReceipt]]:
    for key, _ in list(transaction.sizes(keys.receipts_prefix(record.id))):
        value = transaction.get(key)
        try:
            found = None if value is None else unpack_receipt(bytes(value), "")
        except KvError:
            continue
        if found is not None:
            yield key, found


def _page_span(record: SessionRecord, stream: StreamReceipt, page: int | None) -> tuple[int, int]:
    """Return the first token of a frame and the last one it may have, as positions."""
    state = record.streams.get((stream.layer, stream.kind))
    if state is None or page is None:
        return 0 if state is None else state.start, 0
    first = state.start + page * state.block_tokens
    return first, first + state.block_tokens


def stream_names(receipt: SessionReceipt) -> list[StreamName]:
    """Return the streams of a receipt, in their order."""
    return [(stream.layer, stream.kind) for stream in receipt.streams]


def _stream(item: Any) -> StreamReceipt:
    if not isinstance(item, Mapping) or set(item) != {"layer", "kind", "pages", "receipt"}:
        raise ValueError("a stream without its fields")
    kind, pages = item["kind"], item["pages"]
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}")
    if not isinstance(pages, list | tuple):
        raise ValueError(f"pages {pages!r}")
    receipt = Receipt.from_json(item["receipt"])
    numbers = tuple(None if page is None else read_count(page) for page in pages)
    if len(numbers) != receipt.n_pages or len(set(numbers)) != len(numbers):
        raise ValueError(f"{len(numbers)} pages, {receipt.n_pages} digests")
    return StreamReceipt(read_count(item["layer"]), kind, numbers, receipt)


def _check(receipt: SessionReceipt, data: Mapping[str, Any]) -> None:
    first, stop, kept = receipt.first_token, receipt.stop_token, receipt.kept
    names = stream_names(receipt)
    operations = {stream.receipt.operation for stream in receipt.streams}
    if first > stop or kept > stop:
        raise Corrupt(f"session receipt: tokens {first}:{stop}, kept until {kept}")
    if len(set(names)) != len(names) or (receipt.origin == "range" and names):
        raise Corrupt(f"session receipt: {len(names)} streams of origin {receipt.origin!r}")
    if operations - {receipt.operation}:
        raise Corrupt(f"session receipt: {receipt.operation} of streams that {operations}")
    if dict(data) != receipt.to_json():
        raise Corrupt("session receipt: fields that do not belong together, or unknown ones")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _origin(value: object) -> Origin:
    for origin in get_args(Origin):
        if value == origin:
            known: Origin = origin
            return known
    raise ValueError(f"origin {value!r}")
