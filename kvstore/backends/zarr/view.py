"""What zarr's own tools see: written after the commit, from its records alone. FORMAT.md 9.5.

So the arrays never show what is not committed, and never have a shape whose chunks are not
there. A writer that dies before it is done leaves them behind the commit; the next one, which
finds in the commit what was to be done, does it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcodecs.codec import codec_by_number
from kvcodecs.errors import Corrupt, InvalidArgument, KvError
from kvcodecs.frame import open_record
from kvcodecs.shared import short, unpack_shared
from kvcodecs.spec import Kind

from ... import keys
from ...records import HEADER_MAGIC
from ...session_record import SessionRecord
from ...spans import header_of, spans_of
from .documents import (
    FILE_NAME,
    bytes_document,
    dimension_names,
    group_document,
    headers_array,
    needs_array,
    stream_document,
    stub_document,
)
from .objects import Objects
from .places import ROOT, Lookup, array_of, chunk_of, home_of
from .placing import Sync
from .sessions import Stored, n_sealed, stored_session
from .tails import tail_frame, tail_tokens

_ABOUT_ROOT = "KV archive; each group is a session, each array a layer's K or V"
_ABOUT_INTERNAL = "what the archive engine keeps here is not for zarr"
_ABOUT_EMPTY = "no whole block is committed any more"
_ABOUT_CLOSED = "a session that was deleted; its objects wait for the end of the grace period"


def begin(objects: Objects) -> None:
    """Put the documents of a new archive; it is known by the second one."""
    objects.put(FILE_NAME, group_document({"kvstore": {"about": _ABOUT_ROOT}}))
    objects.put(ROOT + FILE_NAME, stub_document(_ABOUT_INTERNAL))


def sync(objects: Objects, lookup: Lookup, what: Sync, still_mine: Callable[[], None]) -> Sync:
    """Bring the documents of some sessions to what is committed; again does no harm.

    Parameters
    ----------
    lookup
        What is stored as of the commit.
    still_mine
        As for `Objects.put_frames`.

    Returns
    -------
    Sync
        What was refused: a session whose documents cannot be put does not keep back others.
    """
    left = Sync()
    stub = stub_document(_ABOUT_CLOSED)
    objects.put_all(((f"{group}/{FILE_NAME}", stub) for group in what.closed), still_mine)
    shown: set[str] = set()
    for name in what.sessions:
        stored = stored_session(lookup, name, lookup.raw(keys.session_key(name)))
        if stored is not None:
            try:
                shown.update(_show(objects, lookup, stored, still_mine))
            except InvalidArgument:
                left.sessions.append(name)
    closed = set(what.closed)
    hidden = {f"{path}/{FILE_NAME}": path.partition("/")[0] in closed for path in what.hidden}
    still_mine()
    objects.delete([key for key, is_closed in hidden.items() if is_closed and key not in shown])
    # Leftover chunks may be below: tools would call them no part of the hierarchy.
    stub = stub_document(_ABOUT_EMPTY)
    objects.put_all(
        [(key, stub) for key, is_closed in hidden.items() if not is_closed and key not in shown],
        still_mine,
    )
    return left


def _show(
    objects: Objects, lookup: Lookup, stored: Stored, still_mine: Callable[[], None]
) -> list[str]:
    """Put the documents of a session's group and arrays; return their keys."""
    record, model = stored.record, stored.model
    home = home_of(lookup, record.owner)
    if home is None:
        return []
    documents: dict[str, bytes] = {}
    shapes, tails = {}, {}
    for stream, state in record.streams.items():
        n_tokens = n_sealed(record, stream) * state.block_tokens
        frame = tail_frame(objects, lookup, stored, stream)
        if frame is not None:
            tails[stream] = tail_tokens(stored, stream)
            n_tokens += tails[stream]
            if not home.shard_blocks:
                documents[chunk_of(home.group, *stream, n_sealed(record, stream))] = frame
        if n_tokens:
            spec = model.stream(*stream)
            shapes[stream] = spec.heads, n_tokens, spec.head_dim
    names = dimension_names(record, shapes)
    for stream, (_, n_tokens, _) in shapes.items():
        try:
            headers = _headers(lookup, record, stream)
            shared = _shared(lookup, headers)
        except KvError:
            continue  # damage, which `verify` tells; the array stays as it is
        layer, kind = stream
        header = headers[-1][1]
        if needs_array(header, home.shard_blocks):
            path = f"{home.group}/{headers_array(kind, layer)}"
            documents[f"{path}/c/0"] = header
            documents[f"{path}/{FILE_NAME}"] = bytes_document(len(header), {})
        documents[f"{array_of(home.group, layer, kind)}/{FILE_NAME}"] = stream_document(
            stored,
            stream,
            n_tokens,
            headers,
            home.shard_blocks,
            names[stream],
            tails.get(stream, 0),
            shared,
        )
    about = {
        "session": stored.name,
        "id": f"{record.id:016x}",
        "first": record.first,
        "model": model.to_json(),
        "metadata": dict(record.metadata),
    }
    documents[f"{home.group}/{FILE_NAME}"] = group_document({"kvstore": about})
    objects.put_all(documents.items(), still_mine)
    return list(documents)


def _shared(lookup: Lookup, headers: Sequence[tuple[int, bytes]]) -> dict[bytes, bytes]:
    """Return the packed objects that stream headers need, by digest."""
    found = {}
    for number, header in headers:
        for digest in codec_by_number(number).needs(header):
            value = lookup.raw(keys.shared_key(digest))
            if value is None:
                raise Corrupt(f"shared object {short(digest)}: missing")
            found[digest] = bytes(unpack_shared(value, f"shared object {short(digest)}"))
    return found


def _headers(
    lookup: Lookup, record: SessionRecord, stream: tuple[int, Kind]
) -> list[tuple[int, bytes]]:
    """Return (codec number, stream header) of each owner of a stream's blocks, its own last."""
    owners = dict.fromkeys(span.owner for span in spans_of(record, stream))
    last = header_of(record, stream)
    if last is not None:
        owners.pop(last, None)
        owners[last] = None
    found: dict[tuple[int, bytes], None] = {}
    for owner in owners:
        value = lookup.raw(keys.stream_key(keys.HEADER, owner, *stream))
        if value is None:
            raise Corrupt(f"layer {stream[0]} {stream[1]}: no stream header")
        body = bytes(open_record(HEADER_MAGIC, value))
        header = body[:1][0], body[1:]
        found.pop(header, None)
        found[header] = None
    return list(found)
