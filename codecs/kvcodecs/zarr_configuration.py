"""The configuration of our codec in `zarr.json`, of an archive's arrays.

Nothing here imports zarr, so that archives can write their metadata without it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from .codec import codec_by_name
from .errors import Corrupt, InvalidArgument, Unsupported
from .frame import header_tag
from .rope import Rope, RopeStyle
from .shared import SHARED_BYTES
from .spec import KINDS, Kind, StreamSpec

#: Name of the codec in `zarr.json`.
NAME: Final = "kvstore.frame"
#: Stream headers up to here are kept in the configuration, larger ones in an array of their own.
MOST_HEADER_BYTES: Final = 1 << 16

_ARCHIVE_KEYS: Final = {"codec", "kind", "layer", "header_tag", "archive"}
_MORE_ARCHIVE_KEYS: Final = {
    "header",
    "header_array",
    "more_headers",
    "rope",
    "shared",
    "tail",
    "tokens",
}
_DIGEST: Final = re.compile(f"[0-9a-f]{{{2 * SHARED_BYTES}}}")


@dataclass(frozen=True, slots=True)
class ChannelOrder:
    """Which channels of K a RoPE pairs: the order of coded channels depends on it, nothing else."""

    n_pairs: int
    style: RopeStyle

    def rope(self) -> Rope:
        """Return a RoPE of this order, of no frequencies that mean anything."""
        return Rope(np.ones(self.n_pairs, np.float32), style=self.style)


class MoreHeader(NamedTuple):
    """The stream header of blocks that a session took from elsewhere."""

    codec: str
    header_tag: int
    header: bytes


@dataclass(frozen=True, slots=True)
class ArchiveArray:
    """How the chunks of an archive's array are coded.

    Attributes
    ----------
    codec, kind, layer
        What every frame of the array must say.
    header_tag
        Of the stream header, as in the frames.
    header
        The stream header; None when `header_array` has it.
    header_array
        Name of an array in the same group: one dimension of uint8, one chunk that is the header as
        it is.
    order
        The RoPE's channel order, if it is not that of the tensor.
    tokens
        Length of the array; None leaves it open. zarr validates a new shape before it changes or
        deletes anything, so with it an array cannot be resized behind its archive's back.
    more_headers
        Other stream headers that frames of the array may have: of tokens that were taken from
        other sessions.
    tail
        Tokens of the last chunk, if it is not full: of a finished session. Its frame has at least
        so many.
    shared
        Digests of the objects that the stream headers need, and the packed objects themselves
        where the archive's are out of reach.
    """

    codec: str
    kind: Kind
    layer: int
    header_tag: int
    header: bytes | None = field(default=None, repr=False)  # kilobytes
    header_array: str | None = None
    order: ChannelOrder | None = None
    tokens: int | None = None
    more_headers: tuple[MoreHeader, ...] = field(default=(), repr=False)
    tail: int = 0
    shared: tuple[tuple[bytes, bytes | None], ...] = field(default=(), repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the configuration of the codec in `zarr.json`."""
        data: dict[str, Any] = {"archive": True, "codec": self.codec, "kind": self.kind}
        data["layer"] = self.layer
        data["header_tag"] = f"{self.header_tag:016x}"
        if self.header is not None:
            data["header"] = base64.b64encode(self.header).decode("ascii")
        if self.header_array is not None:
            data["header_array"] = self.header_array
        if self.order is not None:
            data["rope"] = {"n_pairs": self.order.n_pairs, "style": self.order.style}
        if self.tokens is not None:
            data["tokens"] = self.tokens
        if self.tail:
            data["tail"] = self.tail
        if self.more_headers:
            data["more_headers"] = [
                [more.codec, f"{more.header_tag:016x}", base64.b64encode(more.header).decode()]
                for more in self.more_headers
            ]
        if self.shared:
            data["shared"] = {
                digest.hex(): None if packed is None else base64.b64encode(packed).decode("ascii")
                for digest, packed in self.shared
            }
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ArchiveArray:
        """Return what `to_json` described.

        Raises
        ------
        Corrupt
            A key is missing or malformed, or the stream header is not the one that is meant.
        Unsupported
            A codec or key that this release does not know.
        """
        unknown = sorted(set(data) - _ARCHIVE_KEYS - _MORE_ARCHIVE_KEYS)
        if unknown:
            raise Unsupported(f"{NAME}: configuration with {', '.join(unknown)}; upgrade")
        for key, kind in (("codec", str), ("kind", str), ("layer", int), ("header_tag", str)):
            if type(data.get(key)) is not kind:
                raise Corrupt(f"{NAME}: {key} {data.get(key)!r} in the configuration")
        if data.get("archive") is not True or data["kind"] not in KINDS or data["layer"] < 0:
            found = {key: data.get(key) for key in ("archive", "kind", "layer")}
            raise Corrupt(f"{NAME}: {found} in the configuration")
        codec_by_name(data["codec"])
        tag = _tag(data["header_tag"])
        tokens, tail = data.get("tokens"), data.get("tail", 0)
        for key, count in (("tokens", tokens), ("tail", tail)):
            if not (count is None or (type(count) is int and count >= 0)):
                raise Corrupt(f"{NAME}: {key} {count!r} in the configuration")
        header, name = data.get("header"), data.get("header_array")
        if (header is None) == (name is None):
            raise Corrupt(f"{NAME}: the configuration needs one of header and header_array")
        return cls(
            data["codec"],
            "k" if data["kind"] == "k" else "v",
            data["layer"],
            tag,
            None if header is None else check_header(from_base64(header, "header"), tag, "header"),
            None if name is None else _name(name),
            _order(data.get("rope")),
            tokens,
            _more_headers(data.get("more_headers", [])),
            tail or 0,
            _shared(data.get("shared", {})),
        )

    def spec(self, heads: int, head_dim: int) -> StreamSpec:
        """Return the stream; `Corrupt` if these sizes cannot be its."""
        rope = None if self.order is None else self.order.rope()
        try:
            return StreamSpec(self.kind, heads, head_dim, rope)
        except InvalidArgument as error:
            raise Corrupt(f"{NAME}: {error}") from error


def archive_configuration(
    spec: StreamSpec,
    codec: str,
    layer: int,
    header: bytes,
    *,
    tokens: int | None,
    header_array: str | None = None,
    more_headers: Sequence[tuple[str, bytes]] = (),
    tail_tokens: int = 0,
    shared: Mapping[bytes, bytes | None] | None = None,
) -> dict[str, Any]:
    """Return the configuration of `NAME` for an archive's array.

    Parameters
    ----------
    spec
        The stream.
    codec
        Name of its codec.
    layer
        Layer index.
    header
        The stream header as the codec packed it.
    tokens
        Length of the array, which must not differ from its shape; None within shards, where zarr
        validates a codec with the shape of a chunk.
    header_array
        Name of the array in the same group that holds `header`. Needed beyond `MOST_HEADER_BYTES`;
        not within shards, where a codec cannot read other objects.
    more_headers
        (codec, stream header) of blocks that were taken from elsewhere.
    tail_tokens
        Tokens of the last chunk, if it is not full.
    shared
        Digests of the objects that the headers need; packed within shards, else None.
    """
    order = None
    if spec.rope is not None and not spec.rope.keeps_order(spec.head_dim):
        order = ChannelOrder(spec.rope.n_pairs, spec.rope.style)
    inline = None if header_array is not None else header
    more = tuple(MoreHeader(name, header_tag(data), data) for name, data in more_headers)
    array = ArchiveArray(
        codec,
        spec.kind,
        layer,
        header_tag(header),
        inline,
        header_array,
        order,
        tokens,
        more,
        tail_tokens,
        tuple((shared or {}).items()),
    )
    return array.to_json()


def check_header(header: bytes, tag: int, where: str) -> bytes:
    """Return a stream header; `Corrupt` if it is not the one with this tag."""
    if header_tag(header) != tag:
        raise Corrupt(
            f"{NAME}: {where}: the stream header has tag {header_tag(header):016x}, the "
            f"configuration says {tag:016x}"
        )
    return header


def _tag(text: str) -> int:
    if len(text) == 16 and set(text) <= set("0123456789abcdef"):
        return int(text, 16)
    raise Corrupt(f"{NAME}: header_tag {text!r}, expected 16 hex digits")


def from_base64(text: object, what: str) -> bytes:
    """Return the bytes of a field of the configuration; `Corrupt` if it has none."""
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Corrupt(f"{NAME}: {what}: {error}") from error
    raise Corrupt(f"{NAME}: {what} {text!r} is not base64")


def _name(name: object) -> str:
    if isinstance(name, str) and name not in ("", ".", "..") and "/" not in name:
        return name
    raise Corrupt(f"{NAME}: header_array {name!r} is no name of an array in the same group")


def _more_headers(data: object) -> tuple[MoreHeader, ...]:
    found = []
    for item in data if isinstance(data, list) else [None]:
        if not isinstance(item, list) or len(item) != 3 or not all(type(x) is str for x in item):
            raise Corrupt(f"{NAME}: more_headers {data!r} in the configuration")
        codec, tag = codec_by_name(item[0]).name, _tag(item[1])
        found.append(
            MoreHeader(
                codec, tag, check_header(from_base64(item[2], "more_headers"), tag, "more_headers")
            )
        )
    return tuple(found)


def _shared(data: object) -> tuple[tuple[bytes, bytes | None], ...]:
    found: list[tuple[bytes, bytes | None]] = []
    for text, packed in data.items() if isinstance(data, Mapping) else [(None, None)]:
        if not isinstance(text, str) or _DIGEST.fullmatch(text) is None:
            raise Corrupt(f"{NAME}: shared objects {data!r} in the configuration")
        found.append(
            (bytes.fromhex(text), None if packed is None else from_base64(packed, "shared"))
        )
    return tuple(found)


def _order(data: object) -> ChannelOrder | None:
    if data is None:
        return None
    if isinstance(data, Mapping) and set(data) == {"n_pairs", "style"}:
        n_pairs, style = data["n_pairs"], data["style"]
        if type(n_pairs) is int and 1 <= n_pairs <= 1 << 15 and style in ("half", "interleaved"):
            return ChannelOrder(n_pairs, style)
    raise Corrupt(f"{NAME}: rope {data!r} in the configuration")
