"""Everything stored that is not a frame: archive, identity and session records.

Each value is JSON inside the checked envelope of `kvcodecs.frame`.
Bookkeeping is counted with every byte of an archive, so records stay small: what is equal for
all streams is stored once. FORMAT.md section 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from kvcodecs.codec import CodecConfig, config_from_json
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, Truncated, Unsupported
from kvcodecs.frame import open_record, seal_record
from kvcodecs.spec import KINDS, Kind

from .identity import Model, canonical_json

StreamName: TypeAlias = tuple[int, Kind]

FORMAT_VERSION: Final = 1
ARCHIVE_MAGIC: Final = b"KVA1"
IDENTITY_MAGIC: Final = b"KVI1"
SESSION_MAGIC: Final = b"KVS1"
HEADER_MAGIC: Final = b"KVH1"

MAX_TOKENS: Final = 1 << 40


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
        Tokens that are read from the raw head, ``[start, start + n_head)``.
    has_header
        Whether the stream header is fixed: the tokens after the head are then in blocks.
    """

    block_tokens: int
    start: int = 0
    n_head: int = 0
    has_header: bool = False


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The commit record of a session: what it says exists, and nothing else does.

    Attributes
    ----------
    owner
        Id under which the frames are stored.
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
    has_ids
        Whether token ids are stored.
    post
        Whether any K was given after RoPE.
    created
        Unix time of creation, seconds.
    metadata
        The user's JSON object.
    """

    owner: int
    model: bytes
    n_tokens: int
    codecs: Mapping[Kind, CodecConfig]
    fit_tokens: int
    streams: Mapping[StreamName, StreamState]
    has_ids: bool = False
    post: bool = False
    created: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)

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
            "created": self.created,
        }
        if self.has_ids:
            data["ids"] = 1
        if self.post:
            data["post"] = 1
        if self.metadata:
            data["metadata"] = dict(self.metadata)
        # Zero is what a missing field means.
        data = {name: value for name, value in data.items() if value != 0 or name == "n_tokens"}
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
    data = _load(SESSION_MAGIC, value, where)
    if data.get("name") != name:
        raise Corrupt(f"{where}: the record of session {data.get('name')!r} is stored here")
    return data


def owner_of(data: Mapping[str, Any], where: str) -> int:
    """Return the owner in the JSON of a session record."""
    try:
        return _owner(data["owner"])
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"{where}: session record: owner {error!r}") from error


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


def model_of(data: Mapping[str, Any], where: str) -> bytes:
    """Return the digest of the model in the JSON of a session record."""
    try:
        return bytes.fromhex(data["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"{where}: session record: model {error!r}") from error


def _session(data: dict[str, Any], names: list[StreamName], where: str) -> SessionRecord:
    try:
        codec = data["codec"]
        configs: dict[Kind, CodecConfig] = {}
        for kind in KINDS:
            configs[kind] = config_from_json(codec if "codec" in codec else codec[kind])
        fields = ("block_tokens", "start", "n_head", "header")
        columns = [_unfold(names, data.get(name, 0)) for name in fields]
        n_tokens = _number(data["n_tokens"])
        streams: dict[StreamName, StreamState] = {}
        for name, block, start, n_head, header in zip(names, *columns, strict=True):
            state = StreamState(block, start, n_head, bool(header))
            n_own = n_tokens - start
            # Without a header every token is in the head.
            bad_head = n_head > max(n_own, 0) or (not header and n_head < n_own)
            if block < 1 or header > 1 or bad_head:
                raise Corrupt(f"{where}: session record: layer {name[0]} {name[1]}: {state}")
            streams[name] = state
        return SessionRecord(
            owner=owner_of(data, where),
            model=model_of(data, where),
            n_tokens=n_tokens,
            codecs=configs,
            fit_tokens=_number(data["fit_tokens"]),
            streams=streams,
            has_ids=bool(data.get("ids", 0)),
            post=bool(data.get("post", 0)),
            created=_number(data.get("created", 0)),
            metadata=_object(data.get("metadata", {})),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, KvError):
            raise
        raise Corrupt(f"{where}: session record: {error!r}") from error


def pack_archive(writer: str, created: int) -> bytes:
    """Return the archive record."""
    data = {"format": FORMAT_VERSION, "writer": writer, "created": created}
    return seal_record(ARCHIVE_MAGIC, canonical_json(data))


def check_archive(value: memoryview | bytes, where: str) -> dict[str, Any]:
    """Return the archive record's JSON if this release can read the archive.

    Raises
    ------
    Unsupported
        Written by a newer release.
    Truncated, Corrupt
        Damaged.
    """
    data = _load(ARCHIVE_MAGIC, value, where)
    version = data.get("format")
    if type(version) is not int or version < 1:
        raise Corrupt(f"{where}: archive record: format {version!r}")
    if version > FORMAT_VERSION:
        raise Unsupported(
            f"{where}: archive format {version}, this release reads up to {FORMAT_VERSION}; upgrade"
        )
    try:
        _number(data.get("created", 0))
    except ValueError as error:
        raise Corrupt(f"{where}: archive record: created: {error}") from error
    return data


def pack_identity(model: Model) -> bytes:
    """Return the identity record of a model."""
    return seal_record(IDENTITY_MAGIC, canonical_json(model.to_json()))


def unpack_identity(value: memoryview | bytes, digest: bytes, where: str) -> Model:
    """Return the model of an identity record stored under `digest`."""
    model = Model.from_json(_load(IDENTITY_MAGIC, value, where))
    if model.digest != digest:
        raise Corrupt(f"{where}: identity record is stored under another model's digest")
    return model


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put `where` in front of an error that does not say it yet."""
    try:
        yield
    except (Corrupt, InvalidArgument, Truncated, Unsupported) as error:
        if where in str(error):
            raise
        raise type(error)(f"{where}: {error}") from error


def _load(magic: bytes, value: memoryview | bytes, where: str) -> dict[str, Any]:
    body = open_record(magic, value, where)
    try:
        data = json.loads(bytes(body), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where}: record is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise Corrupt(f"{where}: record is not a JSON object")
    return data


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"metadata {value!r} is not an object")
    return value


def _owner(value: str) -> int:
    if len(bytes.fromhex(value)) != 8:
        raise ValueError(f"{value!r} is not an owner")
    return int(value, 16)


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{value!r} is not a count")
    return value


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
        return [_number(value[kind]) for _, kind in names]
    if isinstance(value, list):
        if len(value) != len(names):
            raise ValueError(f"{len(value)} values for {len(names)} streams")
        return [_number(item) for item in value]
    return [_number(value)] * len(names)
