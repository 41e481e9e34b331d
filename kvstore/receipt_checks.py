"""Checking the receipts of a session against what is stored of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcodecs.codec import config_of_layer
from kvcodecs.digests import canonical_json
from kvcodecs.errors import Corrupt, KvError

from . import keys
from .backend import Snapshot
from .codings import Coding
from .pieces import Piece, all_pieces
from .reader import Reader
from .receipt_making import Page, shape_digest, stored_pages, stream_receipt
from .receipts import SessionReceipt, StreamReceipt, stream_names, unpack_receipt
from .session_record import SessionRecord, StreamName

#: Takes what is wrong, and with which receipt or frame.
OnError = Callable[[str, KvError], None]
#: Fields of a stream's receipt that its frames say, where all of them are there.
_OF_FRAMES = (
    "profile_digest",
    "codebook_digest",
    "rotation_digest",
    "compressed_blocks",
    "raw_fallback_blocks",
    "fallback_reasons",
    "max_error",
    "rms",
)


@dataclass(slots=True)
class Checked:
    """Receipts of a session that can be read, by number."""

    receipts: dict[int, SessionReceipt] = field(default_factory=dict)
    n_bad: int = 0


def read_receipts(snapshot: Snapshot, record: SessionRecord, on_error: OnError) -> Checked:
    """Return the receipts of a session; those that are damaged go to `on_error`."""
    found = Checked()
    for key, value in snapshot.scan(keys.receipts_prefix(record.id)):
        number = keys.parse(key).index or 0
        try:
            found.receipts[number] = unpack_receipt(bytes(value), f"receipt {number}")
        except KvError as error:
            found.n_bad += 1
            on_error(f"receipt {number}", error)
    return found


def check_receipts(
    snapshot: Snapshot,
    reader: Reader,
    record: SessionRecord,
    found: Checked,
    on_error: OnError,
) -> None:
    """Check receipts against each other, the session's record and its frames.

    Frames that other receipts speak of by now are not there any more, nor those of tokens that
    were taken back or trimmed: of these a receipt is taken at its word.
    """
    if not found.n_bad:
        _check_chain(record, found.receipts, on_error)
    for number, receipt in found.receipts.items():
        try:
            _check_record(record, reader, receipt)
        except Corrupt as error:
            on_error(f"receipt {number}", error)
    for stream in record.streams:
        _check_stream(snapshot, reader, record, stream, found, on_error)


def _check_chain(
    record: SessionRecord, receipts: dict[int, SessionReceipt], on_error: OnError
) -> None:
    """Check that there is a receipt for each token that there should be one for."""
    if record.receipts is None and not receipts:
        return
    least = max(record.receipts or 0, record.first)
    held = [(n, receipt) for n, receipt in receipts.items() if receipt.kept > receipt.first_token]
    at = min(held[0][1].first_token, least) if held else least
    for number, receipt in held:
        if receipt.first_token != at:
            message = f"begins at token {receipt.first_token}, expected {at}: a receipt is missing"
            on_error(f"receipt {number}", Corrupt(message))
        at = receipt.kept
    if at != record.n_tokens:
        message = f"receipts end at token {at}, the session at {record.n_tokens}"
        on_error("receipts", Corrupt(message))


def _check_record(record: SessionRecord, reader: Reader, receipt: SessionReceipt) -> None:
    """Check what a receipt says of the session."""
    if receipt.model != record.model.hex():
        raise Corrupt(f"of model {receipt.model}, the session is of {record.model.hex()}")
    if receipt.origin == "range":
        return
    if receipt.origin == "read":
        raise Corrupt("a decode receipt, which belongs to no session")
    if stream_names(receipt) != list(record.streams):
        raise Corrupt("of other streams than the session has")
    for part in receipt.streams:
        stream = part.layer, part.kind
        start = max(receipt.first_token, record.streams[stream].start)
        shape = shape_digest(reader.model.stream(*stream), max(receipt.stop_token - start, 0))
        if part.receipt.shape_digest != shape:
            raise Corrupt(f"layer {part.layer} {part.kind}: another shape than the session's")
        config = config_of_layer(record.codecs[part.kind], part.layer).to_json()
        if canonical_json(part.receipt.codec) != canonical_json(config):
            raise Corrupt(f"layer {part.layer} {part.kind}: another codec than the session's")


def _check_stream(
    snapshot: Snapshot,
    reader: Reader,
    record: SessionRecord,
    stream: StreamName,
    found: Checked,
    on_error: OnError,
) -> None:
    """Check the frames of a stream against the newest receipts that speak of them."""
    parts: dict[int, StreamReceipt] = {}
    newest: dict[int | None, tuple[int, str]] = {}
    state = record.streams[stream]
    for number, receipt in found.receipts.items():
        if receipt.origin == "range":
            # Blocks from there on are another owner's, whatever they were before a rollback.
            first = max(receipt.first_token - state.start, 0) // state.block_tokens
            newest = {b: said for b, said in newest.items() if b is None or b < first}
        for part in receipt.streams:
            if (part.layer, part.kind) == stream:
                parts[number] = part
                for block, digest in zip(part.pages, part.receipt.page_digests, strict=True):
                    newest[block] = number, digest
    pages: dict[int, dict[int | None, Page]] = {}
    codings: dict[int, Coding | None] = {}
    for piece in all_pieces(record, *stream):
        if piece.block not in newest:
            if not found.n_bad and _should_be_said(piece, found.receipts):
                on_error("receipts", Corrupt(f"{piece.name}: no receipt speaks of it"))
            continue
        number, digest = newest[piece.block]
        try:
            (page,), coding = stored_pages(snapshot, reader, [piece])
        except KvError:
            continue  # reported where frames are checked
        if page.digest != digest:
            message = f"{piece.name}: is {page.digest}, the receipt has {digest}"
            on_error(f"receipt {number}", Corrupt(message))
            continue
        pages.setdefault(number, {})[piece.block] = page
        codings[number] = coding or codings.get(number)
    for number, of_receipt in pages.items():
        if set(of_receipt) == set(parts[number].pages):
            listed = [of_receipt[block] for block in parts[number].pages]
            try:
                _check_sums(reader, record, parts[number], listed, codings[number])
            except Corrupt as error:
                on_error(f"receipt {number}", error)


def _should_be_said(piece: Piece, receipts: dict[int, SessionReceipt]) -> bool:
    """Whether a receipt was made of tokens in a frame."""
    return any(
        receipt.streams and receipt.first_token < piece.stop and receipt.kept > piece.first_token
        for receipt in receipts.values()
    )


def _check_sums(
    reader: Reader,
    record: SessionRecord,
    part: StreamReceipt,
    pages: list[Page],
    coding: Coding | None,
) -> None:
    """Check what a receipt says of all its frames together, which are there."""
    stream, config = (part.layer, part.kind), record.codecs[part.kind]
    spec, digest = reader.model.stream(*stream), part.receipt.values_digest
    made = stream_receipt(stream, spec, config, coding, pages, digest, 0, 0)
    for name in _OF_FRAMES:
        found, expected = getattr(part.receipt, name), getattr(made.receipt, name)
        if found != expected:
            raise Corrupt(
                f"layer {part.layer} {part.kind}: {name} is {found!r}, what is stored says "
                f"{expected!r}"
            )
