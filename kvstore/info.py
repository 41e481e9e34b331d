"""What an archive says about its sessions: sizes, rates and measured errors, without decoding.

Every byte is counted: frames with their headers, stream headers, records, token ids, and keys.
The identity record is shared by the sessions of a model and counted in the archive alone; objects
that stream headers share count for each session that reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcodecs.codec import codec_by_name
from kvcodecs.errors import Corrupt
from kvcodecs.frame import HEADER_BYTES, ErrorStats, FrameHeader
from kvcodecs.spec import Kind

from . import keys
from .backend import ReaderInfo, Snapshot
from .identity import Model
from .passing import Passing
from .pieces import all_pieces
from .prefix_keys import index_bytes
from .prefix_upkeep import owned_ids
from .reader import Reader
from .records import located
from .session_record import SessionRecord
from .sharing import user_keys
from .spans import head_of, header_of, id_spans
from .stored_frame import announced, first_value
from .token_ids import CHUNK_TOKENS
from .users import is_prefix

_FP16_BITS = 16


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """One stream: geometry, layout, sizes in bytes, error in the coded domain.

    Attributes
    ----------
    start_token
        First position that the stream has.
    n_head_tokens
        Tokens that are read from the raw head.
    codec
        What the stream is coded with: ``"kvr1"``, ``"ggml.q8_0"``.
    step
        The quantiser's step, half of which no error exceeds. None while there is no stream header,
        and for codecs that state no bound: those that are lossless, and ggml's schemes, of which
        `error` says what was measured.
    lossless
        Whether values are kept as they are.
    frame_bytes, payload_bytes
        Frames with and without their headers.
    shared_bytes
        The part of `frame_bytes` that other sessions' appenders stored: of forks and ranges.
    header_bytes
        The stream header.
    n_vectors, n_raw_vectors
        Of a codec that keeps some vectors as they are, one head of one token each: how many its
        frames have, and how many of these are raw. Else 0.
    objects
        Bytes of each object that the header needs, such as a codebook, and of its key, by digest.
        Streams of a session, and sessions, share them: not in `total_bytes`.
    error
        Measured when the values were coded; NaN when unknown. Of tokens in a raw head, whose
        values are exact, the error that their blocks would have is counted.
    """

    layer: int
    kind: Kind
    heads: int
    head_dim: int
    codec: str
    step: float | None
    lossless: bool
    start_token: int
    n_tokens: int
    n_head_tokens: int
    block_tokens: int
    n_frames: int
    frame_bytes: int
    shared_bytes: int
    payload_bytes: int
    header_bytes: int
    key_bytes: int
    error: ErrorStats
    objects: Mapping[bytes, int] = field(default_factory=dict)
    n_vectors: int = 0
    n_raw_vectors: int = 0

    @property
    def n_values(self) -> int:
        return max(self.n_tokens - self.start_token, 0) * self.heads * self.head_dim

    @property
    def total_bytes(self) -> int:
        return self.frame_bytes + self.header_bytes + self.key_bytes

    @property
    def bits_per_value(self) -> float:
        """NaN for a stream without tokens."""
        return 8 * self.total_bytes / self.n_values if self.n_values > 0 else math.nan


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One session.

    Attributes
    ----------
    codecs
        Configuration of each kind, as JSON.
    first_token
        Tokens before it were trimmed.
    pinned
        Whether eviction leaves it alone.
    finished
        Whether nothing is appended any more; see `Archive.seal`.
    zarr_group
        Path of the group that zarr sees it as; None in archives that are not zarr's.
    created, updated
        Unix time of creation and of the last commit, seconds.
    k_state
        ``"post"`` if any K was given after RoPE.
    n_recoded
        How often `kvstore.migrate` has coded it anew: the errors of its streams are not measured
        then but bounds, of all codings together.
    record_bytes
        Session record, token ids, and entries of the prefix index, with their keys.
    """

    name: str
    model: Model
    n_tokens: int
    first_token: int
    pinned: bool
    finished: bool
    zarr_group: str | None
    has_token_ids: bool
    k_state: str
    codecs: Mapping[Kind, Mapping[str, object]]
    created: int
    updated: int
    metadata: Mapping[str, Any]
    record_bytes: int
    streams: tuple[StreamInfo, ...]
    n_recoded: int = 0

    @property
    def n_values(self) -> int:
        return sum(stream.n_values for stream in self.streams)

    @property
    def n_frames(self) -> int:
        return sum(stream.n_frames for stream in self.streams)

    @property
    def frame_bytes(self) -> int:
        return sum(stream.frame_bytes for stream in self.streams)

    @property
    def shared_bytes(self) -> int:
        """Frames that other sessions may need as well; among `frame_bytes`."""
        return sum(stream.shared_bytes for stream in self.streams)

    @property
    def payload_bytes(self) -> int:
        return sum(stream.payload_bytes for stream in self.streams)

    @property
    def header_bytes(self) -> int:
        return sum(stream.header_bytes for stream in self.streams)

    @property
    def objects(self) -> dict[bytes, int]:
        """Bytes of the objects that its stream headers need, and of their keys, by digest."""
        return {digest: n for stream in self.streams for digest, n in stream.objects.items()}

    @property
    def object_bytes(self) -> int:
        """All of `objects`."""
        return sum(self.objects.values())

    @property
    def total_bytes(self) -> int:
        """Everything that this session reads.

        Forks count the frames they share as well, and so do all sessions the objects of an archive
        that they need.
        """
        n_bytes = sum(stream.total_bytes for stream in self.streams)
        return self.record_bytes + self.object_bytes + n_bytes

    @property
    def bits_per_value(self) -> float:
        """Of all stored bytes; NaN without tokens."""
        return 8 * self.total_bytes / self.n_values if self.n_values else math.nan

    @property
    def ratio_fp16(self) -> float:
        """How many times smaller than float16; NaN without tokens."""
        return _FP16_BITS / self.bits_per_value

    @property
    def error(self) -> ErrorStats:
        """Measured error of all streams, coded domain."""
        merged = ErrorStats.none()
        for stream in self.streams:
            merged = merged.merge(stream.error)
        return merged


@dataclass(frozen=True, slots=True)
class ArchiveInfo:
    """A whole archive.

    Attributes
    ----------
    format
        Version of the archive format; see `kvstore.versions`.
    file_bytes, free_bytes
        The data file, and the part of it that will be used again before it grows.
    used_bytes
        What is in use, LMDB's own pages included.
    frame_bytes
        All frames; those that sessions share count once.
    index_bytes
        The prefix index and the lists of users, with their keys.
    quota_bytes
        None without a quota.
    readers
        Snapshots that are open, the oldest first: they keep freed space from being used again.
    n_damaged
        Sessions that `Archive.damaged` names; they are among `n_sessions`.
    object_bytes
        Objects that stream headers share, such as codebooks, with their keys.
    """

    path: str
    backend: str
    format: int
    writer: str
    created: int
    file_bytes: int
    free_bytes: int
    used_bytes: int
    frame_bytes: int
    index_bytes: int
    n_sessions: int
    n_pinned: int
    quota_bytes: int | None
    readers: tuple[ReaderInfo, ...]
    n_damaged: int = 0
    object_bytes: int = 0

    @property
    def overhead(self) -> float:
        """File bytes over frame bytes; NaN without frames."""
        return self.file_bytes / self.frame_bytes if self.frame_bytes else math.nan


def session_info(
    snapshot: Snapshot, name: str, record: SessionRecord, reader: Reader
) -> SessionInfo:
    """Describe a session from its record, stream headers and frame headers.

    Raises
    ------
    Truncated, Corrupt, Unsupported
        A header or frame header is missing or damaged; payloads are not looked at.
    """
    passing = Passing(snapshot)
    streams = tuple(
        _stream_info(snapshot, passing, record, reader, layer, kind)
        for layer, kind in record.streams
    )
    passing.release()
    n_bytes = _stored(snapshot, keys.session_key(name))
    n_bytes += sum(len(key) + len(name.encode()) for key in user_keys(record, reader.model))
    if is_prefix(record, reader.model):
        n_bytes += index_bytes(*owned_ids(record))
    for owner, first, stop in id_spans(record, CHUNK_TOKENS):
        for chunk in range(max(first, record.first // CHUNK_TOKENS), stop):
            size = _stored(snapshot, keys.tokens_key(owner, chunk))
            if not size:
                raise Corrupt(f"{reader.where} token ids chunk {chunk}: missing")
            n_bytes += size
    return SessionInfo(
        name=name,
        model=reader.model,
        n_tokens=record.n_tokens,
        first_token=record.first,
        pinned=record.pinned,
        finished=record.finished,
        zarr_group=snapshot.zarr_group(record.owner),
        has_token_ids=record.has_ids,
        k_state="post" if record.post else "pre",
        codecs={kind: config.to_json() for kind, config in record.codecs.items()},
        created=record.created,
        updated=record.updated,
        metadata=record.metadata,
        record_bytes=n_bytes,
        streams=streams,
        n_recoded=record.n_recoded,
    )


def _stream_info(
    snapshot: Snapshot,
    passing: Passing,
    record: SessionRecord,
    reader: Reader,
    layer: int,
    kind: Kind,
) -> StreamInfo:
    spec = reader.model.stream(layer, kind)
    state = record.streams[layer, kind]
    codec, step, header_bytes, key_bytes = record.codecs[kind].codec, None, 0, 0
    lossless = codec_by_name(codec).lossless
    objects: dict[bytes, int] = {}
    count_raw = params = None
    raw_head = head_of(record, (layer, kind))
    owner = header_of(record, (layer, kind))
    if owner is not None:
        coding = reader.coding(snapshot, owner, layer, kind)
        codec, step = coding.codec.name_of(coding.params), coding.codec.step(coding.params)
        lossless = coding.codec.lossless
        count_raw, params = getattr(coding.codec, "count_raw", None), coding.params
        key = keys.stream_key(keys.HEADER, owner, layer, kind)
        key_bytes += len(key)
        header_bytes = _stored(snapshot, key) - len(key)
        header = reader.header(snapshot, owner, layer, kind)[1]
        for digest in coding.codec.needs(header):
            objects[digest] = _stored(snapshot, keys.shared_key(digest))
    n_frames = frame_bytes = shared_bytes = n_vectors = n_raw = 0
    error = ErrorStats.none()
    for piece in announced(snapshot, all_pieces(record, layer, kind)):
        where = f"{reader.where} {piece.name}"
        value = first_value(snapshot, piece, where)
        head = FrameHeader.unpack(value if value is not None else b"", where)
        if value is not None:
            passing.add(value)
        if not (piece.raw and owner is not None):  # blocks hold the head's tokens as well
            error = error.merge(head.error.share(piece.n_tokens, head.n_tokens))
        if value is not None and not piece.raw and count_raw is not None:
            with located(where):
                n_raw += count_raw(params, value[HEADER_BYTES:], head.n_tokens)
            n_vectors += spec.heads * head.n_tokens
        n_frames += 1
        key_bytes += len(piece.keys[0])
        frame_bytes += HEADER_BYTES + head.payload_bytes
        if piece.owner != record.owner:
            shared_bytes += HEADER_BYTES + head.payload_bytes
    return StreamInfo(
        layer=layer,
        kind=kind,
        heads=spec.heads,
        head_dim=spec.head_dim,
        codec=codec,
        step=step,
        lossless=lossless,
        start_token=max(state.start, record.first),
        n_tokens=record.n_tokens,
        n_head_tokens=0 if raw_head is None else raw_head.n_tokens,
        block_tokens=state.block_tokens,
        n_frames=n_frames,
        frame_bytes=frame_bytes,
        shared_bytes=shared_bytes,
        payload_bytes=frame_bytes - n_frames * HEADER_BYTES,
        header_bytes=header_bytes,
        key_bytes=key_bytes,
        error=error,
        objects=objects,
        n_vectors=n_vectors,
        n_raw_vectors=n_raw,
    )


def _stored(snapshot: Snapshot, key: bytes) -> int:
    value = snapshot.get(key)
    return 0 if value is None else len(key) + value.nbytes


def stored_bytes(snapshot: Snapshot, *prefixes: bytes, with_keys: bool) -> int:
    """Return the bytes of all values under some prefixes, and of their keys."""
    n_bytes = 0
    for prefix in prefixes:
        for key, size in snapshot.sizes(prefix):
            n_bytes += size + (len(key) if with_keys else 0)
    return n_bytes
