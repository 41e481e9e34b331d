"""The session record: the commit record of a session and what it says about its frames.

Bookkeeping is counted with every byte of an archive, so the record stays small: what is equal
for all streams is stored once. FORMAT.md sections 3.3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, TypeAlias

from kvcodecs.codec import CodecConfig, config_from_json
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, Truncated, Unsupported
from kvcodecs.frame import seal_record
from kvcodecs.spec import KINDS, Kind

from .identity import Model
from .metadata import canonical_json
from .records import load_json, located, read_count

StreamName: TypeAlias = tuple[int, Kind]

SESSION_MAGIC: Final = b"KVS1"
MAX_TOKENS: Final = 1 << 40
#: Parts of one session: each costs a few bytes of a record that every commit rewrites.
MAX_PARTS: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class StreamState:
    """How one stream is laid out. FORMAT.md section 4.

    Attributes
    ----------
    block_tokens
        Tokens per block.
    start
        Position of the first token that the stream has.
    n_head
        Tokens that the session's own raw head has, ``[start, start + n_head)``.
    has_header
        Whether the session's own stream header is fixed.
    """

    block_tokens: int
    start: int = 0
    n_head: int = 0
    has_header: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A span of a session that the frames of another owner serve. FORMAT.md section 4.3.

    It begins where the part before ends, or with the stream.

    Attributes
    ----------
    owner
        Whose frames.
    stops
        Position where it ends, per stream. Ends of the last part may lie inside a block; where
        the session goes on from there it codes that block anew, and the part ends before it.
    offset
        Positions here minus positions there; 0 unless the span was taken from another place.
    heads
        Tokens of the owner's raw head that belong to it, per stream.
    starts
        First token of the owner's streams, as positions there.
    """

    owner: int
    stops: Mapping[StreamName, int]
    offset: int
    heads: Mapping[StreamName, int]
    starts: Mapping[StreamName, int]


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The commit record of a session: what it says exists, and nothing else does.

    Attributes
    ----------
    id
        Random, for the session's life: lease, last use and claims go by it.
    owner
        Id under which its own frames are stored.
    model
        Digest of the identity record.
    n_tokens
        Committed tokens.
    codecs
        Configuration of each kind.
    fit_tokens
        Fewest tokens that a header is fitted to.
    streams
        Layout of every stream.
    parts
        Spans before its own tokens that other owners serve.
    id_parts
        (owner, position where they end) of token ids that other owners store; those of `parts`
        unless some were appended from elsewhere.
    first
        Tokens before this position were trimmed.
    n_faithful
        Tokens whose KV is that of the session's own token sequence, the first that hold a range
        appended from elsewhere end it; None for all.
    n_rollbacks
        How often tokens were taken back.
    n_recoded
        How often a migration has coded all of it anew: recorded errors are bounds then.
    has_ids
        Whether token ids are stored.
    post
        Whether any K was given after RoPE.
    pinned
        Whether eviction leaves it alone.
    finished
        Whether nothing is appended to it any more, nor taken back.
    receipts
        First token that receipts are about; None where commits leave none.
    created, updated
        Unix time of creation and of the last commit, seconds.
    metadata
        The user's JSON object.
    """

    id: int
    owner: int
    model: bytes
    n_tokens: int
    codecs: Mapping[Kind, CodecConfig]
    fit_tokens: int
    streams: Mapping[StreamName, StreamState]
    parts: tuple[Part, ...] = ()
    id_parts: tuple[tuple[int, int], ...] = ()
    first: int = 0
    n_faithful: int | None = None
    n_rollbacks: int = 0
    n_recoded: int = 0
    has_ids: bool = False
    post: bool = False
    pinned: bool = False
    finished: bool = False
    receipts: int | None = None
    created: int = 0
    updated: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    #: Kept by `spans`: who serves which streams.
    served: dict[object, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def n_faithful_tokens(self) -> int:
        """Tokens whose KV is that of the session's token sequence."""
        return self.n_tokens if self.n_faithful is None else min(self.n_faithful, self.n_tokens)

    @property
    def is_cut(self) -> bool:
        """Whether nothing is stored of its own yet: all its tokens are those of parts."""
        return bool(self.parts) and max(self.parts[-1].stops.values()) == self.n_tokens

    def pack(self, name: str) -> bytes:
        """Return the stored value of the session `name`."""
        configs = {kind: config.to_json() for kind, config in self.codecs.items()}
        codec: object = configs
        if configs["k"] == configs["v"]:
            codec = configs["k"]
        streams = self.streams
        data: dict[str, object] = {
            "name": name,
            "owner": f"{self.owner:016x}",
            "model": self.model.hex(),
            "n_tokens": self.n_tokens,
            "codec": codec,
            "fit_tokens": self.fit_tokens,
            "block_tokens": _fold(streams, [s.block_tokens for s in streams.values()]),
            "start": _fold(streams, [s.start for s in streams.values()]),
            "n_head": _fold(streams, [s.n_head for s in streams.values()]),
            "header": _fold(streams, [int(s.has_header) for s in streams.values()]),
            "parts": [_pack_part(part, streams) for part in self.parts],
            "first": self.first,
            "rollbacks": self.n_rollbacks,
            "recoded": self.n_recoded,
            "ids": int(self.has_ids),
            "post": int(self.post),
            "pinned": int(self.pinned),
            "finished": int(self.finished),
            "created": self.created,
            "updated": self.updated,
            "metadata": dict(self.metadata),
        }
        if self.id_parts != _owners_and_stops(self.parts):
            data["id_parts"] = [[f"{owner:016x}", stop] for owner, stop in self.id_parts]
        if self.id != self.owner:
            data["id"] = f"{self.id:016x}"
        data = _without_defaults(data, "n_tokens", "id_parts")
        if self.n_faithful is not None:
            data["faithful"] = self.n_faithful
        if self.receipts is not None:
            data["receipts"] = self.receipts
        return seal_record(SESSION_MAGIC, canonical_json(data))


def unpack_session(data: dict[str, Any], names: Iterable[StreamName], where: str) -> SessionRecord:
    """Return the record whose JSON is `data`.

    Parameters
    ----------
    names
        The streams of the session's model.
    where
        Prefix of error messages.

    Raises
    ------
    Corrupt, Unsupported
        Not a session record that this release can read.
    """
    with located(where):
        return _session(data, list(names), where)


def load_session(value: memoryview | bytes, name: str, where: str) -> dict[str, Any]:
    """Return the JSON of the record of session `name`, before its model is known.

    `model_of` says which that is.
    """
    data = load_json(SESSION_MAGIC, value, where)
    if data.get("name") != name:
        raise Corrupt(f"{where}: the record of session {data.get('name')!r} is stored here")
    return data


def id_of(data: Mapping[str, Any], where: str) -> int:
    """Return the id in the JSON of a session record."""
    try:
        return _owner(data.get("id", data["owner"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"{where}: session record: id {error!r}") from error


def model_of(data: Mapping[str, Any], where: str) -> bytes:
    """Return the digest of the model in the JSON of a session record."""
    try:
        return bytes.fromhex(data["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"{where}: session record: model {error!r}") from error


def check_record(record: SessionRecord, name: str, model: Model, where: str) -> bytes:
    """Return the stored value of a record that is about to be published, once it reads back.

    Raises
    ------
    InvalidArgument
        No reader could make sense of it.
    """
    value = record.pack(name)
    try:
        again = unpack_session(load_session(value, name, where), model.streams(), where)
    except (Corrupt, Truncated, Unsupported) as error:
        raise InvalidArgument(f"{where}: the record would not read back: {error}") from error
    if again.pack(name) != value:
        raise InvalidArgument(f"{where}: the record would read back as another one")
    return value


def _session(data: dict[str, Any], names: list[StreamName], where: str) -> SessionRecord:
    try:
        codec = data["codec"]
        configs: dict[Kind, CodecConfig] = {}
        for kind in KINDS:
            configs[kind] = config_from_json(codec if "codec" in codec else codec[kind])
        fields = ("block_tokens", "start", "n_head", "header")
        columns = [_unfold(names, data.get(name, 0)) for name in fields]
        # Most streams are alike: one object for them, since many records are kept.
        rows = list(zip(*columns, strict=True))
        states = {
            (block, start, n_head, header): StreamState(block, start, n_head, bool(header))
            for block, start, n_head, header in set(rows)
        }
        streams = {name: states[row] for name, row in zip(names, rows, strict=True)}
        if any(header > 1 for header in columns[3]):
            raise ValueError(f"header {columns[3]}")
        faithful, receipts = data.get("faithful"), data.get("receipts")
        parts = _parts(data.get("parts", []), names)
        id_parts = _owners_and_stops(parts)
        if "id_parts" in data:
            id_parts = tuple((_owner(owner), _tokens(stop)) for owner, stop in data["id_parts"])
        record = SessionRecord(
            id=id_of(data, where),
            owner=_owner(data["owner"]),
            model=model_of(data, where),
            n_tokens=_tokens(data["n_tokens"]),
            codecs=configs,
            fit_tokens=_tokens(data["fit_tokens"]),
            streams=streams,
            parts=parts,
            id_parts=id_parts,
            first=_tokens(data.get("first", 0)),
            n_faithful=None if faithful is None else _tokens(faithful),
            n_rollbacks=read_count(data.get("rollbacks", 0)),
            n_recoded=read_count(data.get("recoded", 0)),
            has_ids=bool(data.get("ids", 0)),
            post=bool(data.get("post", 0)),
            pinned=bool(data.get("pinned", 0)),
            finished=bool(data.get("finished", 0)),
            receipts=None if receipts is None else _tokens(receipts),
            created=read_count(data.get("created", 0)),
            updated=read_count(data.get("updated", 0)),
            metadata=_object(data.get("metadata", {})),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, KvError):
            raise
        raise Corrupt(f"{where}: session record: {error!r}") from error
    _check(record, where)
    return record


def _check(record: SessionRecord, where: str) -> None:
    """Raise `Corrupt` for a record whose numbers cannot be true together."""
    n = record.n_tokens
    stops = [0, *(stop for _, stop in record.id_parts)]
    if not _rises(stops, n) or record.first > n or (record.receipts or 0) > n:
        raise Corrupt(f"{where}: session record: {n} tokens, ids {stops}, first {record.first}")
    for stream, state in record.streams.items():
        ends = [0, *(part.stops[stream] for part in record.parts)]
        n_all = max(n - state.start, 0)
        n_own = n - max(ends[-1], state.start)
        # Own tokens without a header are all in the own head, and those before them too.
        bad_head = state.n_head > n_all or (
            n_own > 0 and not state.has_header and state.n_head < n_all
        )
        if state.block_tokens < 1 or bad_head or not _rises(ends, n):
            raise Corrupt(f"{where}: session record: layer {stream[0]} {stream[1]}: {state} {ends}")
        for part, begin in zip(record.parts, ends, strict=False):
            # Blocks of the owner must lie on blocks of this session.
            there = part.offset + part.starts[stream]
            used = part.stops[stream] > begin
            early = used and max(begin, record.first, state.start) < there
            if (state.start - there) % state.block_tokens or early:
                raise Corrupt(f"{where}: session record: layer {stream[0]} {stream[1]}: {part}")


def _rises(numbers: list[int], last: int) -> bool:
    return numbers[-1] <= last and all(a <= b for a, b in pairwise(numbers))


def _pack_part(part: Part, streams: Mapping[StreamName, StreamState]) -> dict[str, object]:
    data: dict[str, object] = {
        "owner": f"{part.owner:016x}",
        "stop": _fold(streams, [part.stops[name] for name in streams]),
        "offset": part.offset,
        "n_head": _fold(streams, [part.heads[name] for name in streams]),
        "start": _fold(streams, [part.starts[name] for name in streams]),
    }
    return _without_defaults(data)


def _parts(items: object, names: list[StreamName]) -> tuple[Part, ...]:
    if not isinstance(items, list) or len(items) > MAX_PARTS:
        raise ValueError("parts are not a list")
    return tuple(
        Part(
            owner=_owner(item["owner"]),
            stops=dict(zip(names, _unfold(names, item.get("stop", 0)), strict=True)),
            offset=_offset(item.get("offset", 0)),
            heads=dict(zip(names, _unfold(names, item.get("n_head", 0)), strict=True)),
            starts=dict(zip(names, _unfold(names, item.get("start", 0)), strict=True)),
        )
        for item in items
    )


def _owners_and_stops(parts: tuple[Part, ...]) -> tuple[tuple[int, int], ...]:
    """Return what `id_parts` are when they say nothing else than the parts."""
    return tuple((part.owner, max(part.stops.values())) for part in parts)


def _without_defaults(data: dict[str, object], *kept: str) -> dict[str, object]:
    """Leave out what a reader takes for a missing field: zero, and what is empty."""
    return {name: value for name, value in data.items() if value not in (0, [], {}) or name in kept}


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"metadata {value!r} is not an object")
    return value


def _owner(value: str) -> int:
    if len(bytes.fromhex(value)) != 8:
        raise ValueError(f"{value!r} is not an owner")
    return int(value, 16)


def _tokens(value: object) -> int:
    n = read_count(value)
    if n > MAX_TOKENS:
        raise ValueError(f"{n} is not a count of tokens")
    return n


def _offset(value: object) -> int:
    return -_tokens(-value) if isinstance(value, int) and value < 0 else _tokens(value)


def _fold(names: Iterable[StreamName], values: list[int]) -> object:
    """Return one number when all are equal, a pair when they are per kind, else the list."""
    if len(set(values)) <= 1:
        return values[0] if values else 0
    by_kind: dict[Kind, set[int]] = {"k": set(), "v": set()}
    for (_, kind), value in zip(names, values, strict=True):
        by_kind[kind].add(value)
    if all(len(kinds) == 1 for kinds in by_kind.values()):
        return {kind: by_kind[kind].pop() for kind in KINDS}
    return values


def _unfold(names: list[StreamName], value: object) -> list[int]:
    if isinstance(value, dict):
        return [_tokens(value[kind]) for _, kind in names]
    if isinstance(value, list):
        if len(value) != len(names):
            raise ValueError(f"{len(value)} values for {len(names)} streams")
        return [_tokens(item) for item in value]
    return [_tokens(value)] * len(names)
