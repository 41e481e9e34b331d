"""Making receipts: of commits while their frames are made, of what was read or coded anew after."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt
from kvcodecs.codec import BlockCodec, CodecConfig, codec_by_number, config_of_layer
from kvcodecs.digests import document_digest
from kvcodecs.errors import Corrupt, InvalidArgument
from kvcodecs.frame import BytesLike, ErrorStats, open_frame
from kvcodecs.receipts import (
    Operation,
    Receipt,
    frame_digest,
    known_error,
    raw_parts,
    stream_profile_digest,
)
from kvcodecs.spec import Kind, StreamSpec
from kvcodecs.tensor import as_array, check_tensor

from . import keys
from .backend import Snapshot
from .catalog import writer_name
from .codings import Coding
from .identity import Model
from .passing import Passing
from .pieces import Piece, pieces
from .reader import Reader
from .receipts import Origin, SessionReceipt, StreamReceipt, pack_receipt
from .session_record import SessionRecord, StreamName
from .source_digests import SourceHasher
from .stored_frame import announced, first_value
from .stream import StreamWriter

if TYPE_CHECKING:
    from .stored_session import StoredSession

_SHAPE_DOMAIN = "kvstore_stream_shape_v1"
#: Why a raw head is raw.
NO_HEADER = "no_stream_header"


class Page(NamedTuple):
    """A frame as a receipt sees it.

    Attributes
    ----------
    number
        Of the block; None for the raw head.
    digest
        Of its bytes.
    error
        That it says.
    is_coded, reasons
        Whether it has coded values, and why it has raw ones.
    """

    number: int | None
    digest: str
    error: ErrorStats
    is_coded: bool
    reasons: tuple[str, ...]


def page_of(number: int | None, frame: BytesLike, codec: BlockCodec, params: Any) -> Page:
    """Return what a receipt says of a frame; that of the raw head is told by `number` None."""
    header, payload = open_frame(frame, "frame")
    is_coded, reasons = _parts(number, codec, params, payload, header.n_tokens)
    return Page(number, frame_digest(frame), header.error, is_coded, reasons)


def _parts(
    number: int | None, codec: BlockCodec, params: Any, payload: BytesLike, n_tokens: int
) -> tuple[bool, tuple[str, ...]]:
    if number is None:
        return False, (NO_HEADER,)
    return raw_parts(codec, params, payload, n_tokens)


def shape_digest(spec: StreamSpec, n_tokens: int) -> str:
    """Return the digest of the shape of some tokens of a stream."""
    document = {
        "schema_version": _SHAPE_DOMAIN,
        "kind": spec.kind,
        "heads": spec.heads,
        "tokens": n_tokens,
        "head_dim": spec.head_dim,
    }
    return document_digest(_SHAPE_DOMAIN, document)


def profile_digest(coding: Coding | None) -> str:
    """Return the digest of a stream's codec and parameters; None where it is a raw head alone."""
    if coding is None:
        return stream_profile_digest(0, b"")
    return stream_profile_digest(coding.codec.number, coding.codec.pack(coding.params))


def stream_receipt(
    stream: StreamName,
    spec: StreamSpec,
    config: CodecConfig,
    coding: Coding | None,
    pages: Sequence[Page],
    values_digest: str,
    n_tokens: int,
    now: int,
    operation: Operation = "compress",
) -> StreamReceipt:
    """Return the receipt of `n_tokens` tokens of a stream that are in these frames.

    Parameters
    ----------
    config
        Of the session's codec for this kind.
    coding
        Of the blocks among the pages, None if there are none.
    """
    error = ErrorStats.none()
    for page in pages:
        error = error.merge(page.error)
    max_error, rms = known_error(error)
    book = None if coding is None else getattr(coding.params, "book", None)
    receipt = Receipt(
        operation=operation,
        values_digest=values_digest,
        profile_digest=profile_digest(coding),
        shape_digest=shape_digest(spec, n_tokens),
        page_digests=tuple(page.digest for page in pages),
        codec=config_of_layer(config, stream[0]).to_json(),
        compressed_blocks=sum(page.is_coded for page in pages),
        raw_fallback_blocks=sum(bool(page.reasons) for page in pages),
        codebook_digest=None if book is None else book.codebook_digest,
        rotation_digest=None if book is None else book.rotation_digest,
        fallback_reasons=tuple(dict.fromkeys(r for page in pages for r in page.reasons)),
        max_error=max_error,
        rms=rms,
        recorded_unix_seconds=now,
    )
    return StreamReceipt(*stream, tuple(page.number for page in pages), receipt)


def session_receipt(
    name: str,
    record: SessionRecord,
    first: int,
    stop: int,
    streams: Iterable[StreamReceipt],
    origin: Origin,
    now: int | None = None,
) -> SessionReceipt:
    """Return a receipt of a session."""
    return SessionReceipt(
        session=name,
        model=record.model.hex(),
        origin=origin,
        first_token=first,
        stop_token=stop,
        streams=tuple(streams),
        software=_software(),
        recorded_unix_seconds=int(time.time()) if now is None else now,
        kept=stop,
    )


@cache
def _software() -> str:
    return writer_name()


class StreamLedger:
    """What the next receipt says of a stream that is being written."""

    def __init__(self, stream: StreamWriter) -> None:
        self._stream = stream
        self._pages: list[Page] = []
        self._source = SourceHasher(stream.spec.heads, stream.spec.head_dim)
        stream.on_frame = self._sealed

    def add(self, x: npt.NDArray[Any]) -> None:
        """Note tokens ``(heads, n, head_dim)`` as they were given."""
        self._source.update(x)

    def receipt(
        self, values: Mapping[bytes, bytes | None], config: CodecConfig, now: int
    ) -> StreamReceipt:
        """Return the receipt of all that was noted; `values` has what a commit stores."""
        stream = self._stream
        name, coding = (stream.layer, stream.kind), stream.coding
        pages = list(self._pages)
        prefix = keys.HEAD if coding is None else keys.TAIL
        last = values.get(keys.stream_key(prefix, stream.owner, *name))
        if last is not None:
            number = None if coding is None else stream.block
            pages.append(self._page(number, last))
        n_tokens = self._source.n_tokens
        digest = self._source.digest()
        return stream_receipt(name, stream.spec, config, coding, pages, digest, n_tokens, now)

    def reset(self) -> None:
        """Begin the receipt after the one that was stored."""
        self._pages = []
        self._source = SourceHasher(self._stream.spec.heads, self._stream.spec.head_dim)

    def _sealed(self, block: int, frame: bytes) -> None:
        self._pages.append(self._page(block, frame))

    def _page(self, number: int | None, frame: bytes) -> Page:
        coding = self._stream.coding
        if coding is None:
            return page_of(number, frame, codec_by_number(0), None)
        return page_of(number, frame, coding.codec, coding.params)


class Ledgers:
    """What the next receipt of a session says that is being written."""

    def __init__(self, streams: Mapping[StreamName, StreamWriter]) -> None:
        self._streams = {name: StreamLedger(stream) for name, stream in streams.items()}

    def add(self, tensors: Mapping[StreamName, npt.NDArray[Any]]) -> None:
        """Note tokens of all streams as they were given."""
        for name, x in tensors.items():
            self._streams[name].add(x)

    def receipt(
        self, name: str, record: SessionRecord, stop: int, values: Mapping[bytes, bytes | None]
    ) -> bytes:
        """Return the packed receipt of a commit.

        Parameters
        ----------
        name
            Of the session.
        record
            Before the commit.
        stop
            Tokens after it.
        values
            What it stores.
        """
        now = int(time.time())
        streams = [
            ledger.receipt(values, record.codecs[kind], now)
            for (_, kind), ledger in self._streams.items()
        ]
        return pack_receipt(
            session_receipt(name, record, record.n_tokens, stop, streams, "append", now)
        )

    def reset(self) -> None:
        """Begin the receipt after the one that was stored."""
        for ledger in self._streams.values():
            ledger.reset()


def stored_pages(
    snapshot: Snapshot, reader: Reader, todo: Iterable[Piece]
) -> tuple[list[Page], Coding | None]:
    """Return stored frames as receipts see them, checked, and the coding of their last block."""
    found, last = [], None
    passing = Passing(snapshot)
    for piece in announced(snapshot, iter(todo)):
        coding, header, payload = reader.open(snapshot, piece, piece.layer, piece.kind)
        value = first_value(snapshot, piece, reader.where)
        if value is None:
            raise Corrupt(f"{reader.where} {piece.name}: missing")
        last = last if piece.raw else coding
        codec, params = coding.codec, coding.params
        is_coded, reasons = _parts(piece.block, codec, params, payload, header.n_tokens)
        found.append(Page(piece.block, frame_digest(value), header.error, is_coded, reasons))
        passing.add(value)
    passing.release()
    return found, last


def receipt_of_stored(
    snapshot: Snapshot,
    reader: Reader,
    record: SessionRecord,
    stream: StreamName,
    todo: Iterable[Piece],
    values_digest: str,
    n_tokens: int,
    now: int,
    operation: Operation,
) -> StreamReceipt:
    """Return the receipt of `n_tokens` stored tokens, which are in the frames `todo`."""
    found, coding = stored_pages(snapshot, reader, todo)
    spec, config = reader.model.stream(*stream), record.codecs[stream[1]]
    return stream_receipt(
        stream, spec, config, coding, found, values_digest, n_tokens, now, operation
    )


def hashed(model: Model, k: Any, v: Any, where: str) -> dict[StreamName, SourceHasher]:
    """Return hashers of the values of each stream that is given; K and V as `read_all` has them."""
    found: dict[StreamName, SourceHasher] = {}
    tensors: dict[Kind, Any] = {"k": k, "v": v}
    for kind, given in tensors.items():
        items = [None] * model.n_layers if given is None else given
        if not hasattr(items, "__len__") or len(items) != model.n_layers:
            raise InvalidArgument(f"{where}: {kind}: expected {model.n_layers} layers")
        for layer, item in enumerate(items):
            if item is None:
                continue
            spec = model.stream(layer, kind)
            x = as_array(item, f"{where} layer {layer} {kind}")
            check_tensor(x, spec, f"{where} layer {layer} {kind}")
            hasher = found[layer, kind] = SourceHasher(spec.heads, spec.head_dim)
            hasher.update(x)
    return found


def receipt_of_read(
    session: StoredSession,
    values: Mapping[StreamName, SourceHasher],
    firsts: Mapping[StreamName, int],
) -> SessionReceipt:
    """Return the receipt of values that were read, `firsts` the positions of their first tokens.

    Raises
    ------
    InvalidArgument
        More tokens than there are, or none of any stream.
    Truncated, Corrupt, Unsupported
        A frame is not what was written.
    """
    reader = session._reader
    if not values:
        raise InvalidArgument(f"{reader.where}: a receipt of no values")
    now, receipts = int(time.time()), []
    stops = {stream: firsts[stream] + hasher.n_tokens for stream, hasher in values.items()}
    with session._archive._read() as snapshot:
        record = session._record(snapshot)
        if max(stops.values()) > record.n_tokens:
            raise InvalidArgument(f"{reader.where}: has {record.n_tokens} tokens, fewer than given")
        for stream, hasher in values.items():
            todo = pieces(record, *stream, firsts[stream], stops[stream])
            digest, n_tokens = hasher.digest(), hasher.n_tokens
            receipts.append(
                receipt_of_stored(
                    snapshot, reader, record, stream, todo, digest, n_tokens, now, "decode"
                )
            )
    first, stop = min(firsts[stream] for stream in values), max(stops.values())
    return session_receipt(session.name, record, first, stop, receipts, "read", now)
