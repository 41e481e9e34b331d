"""Tokens of one stream as they are stored, for another stream that codes alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvcodecs.codec import CodedRows

from .backend import Snapshot
from .pieces import Piece
from .reader import Reader


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Tokens whose codec is one with `rows_stand_alone`.

    Attributes
    ----------
    codec, tag
        Number of the codec, and the tag of the stream's header.
    n_tokens
        How many tokens.
    chunks
        Called for each pass: successive rows that decode, with the errors that their frames say.
    """

    codec: int
    tag: int
    n_tokens: int
    chunks: Callable[[], Iterable[CodedRows]]

    def kept(self) -> StoredRows:
        """Return the same, copied into memory."""
        chunks = [rows._replace(data=memoryview(bytes(rows.data))) for rows in self.chunks()]
        return StoredRows(self.codec, self.tag, self.n_tokens, lambda: chunks)


def stored_rows(
    reader: Reader,
    snapshot: Snapshot,
    pieces: Callable[[], Iterable[Piece]],
    done: Callable[[memoryview], None] = lambda payload: None,
) -> StoredRows | None:
    """Return the tokens of pieces of one stream; None unless all are coded alike, in rows.

    Parameters
    ----------
    pieces
        Called for each pass.
    done
        Called with each payload that is not needed any more in this pass.
    """
    streams, n_tokens = set(), 0
    for piece in pieces():
        if piece.raw:
            return None
        coding = reader.coding(snapshot, piece.owner, piece.layer, piece.kind)
        if not coding.codec.rows_stand_alone:
            return None
        streams.add((coding.codec.number, coding.tag))
        n_tokens += piece.stop - piece.start
    if len(streams) != 1:
        return None

    def chunks() -> Iterator[CodedRows]:
        for piece in pieces():
            # What a read refuses is not copied: its checksum may be right.
            reader.decode(snapshot, piece, piece.layer, piece.kind)
            _, header, payload = reader.open(snapshot, piece, piece.layer, piece.kind)
            rows = CodedRows(payload, header.n_tokens, header.error)
            yield rows.cut(piece.start - piece.first_token, piece.stop - piece.first_token)
            done(payload)

    ((codec, tag),) = streams
    return StoredRows(codec, tag, n_tokens, chunks)
