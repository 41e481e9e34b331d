"""The header of a layer's file: what never changes about it. FORMAT.md section 11.2."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from kvcodecs.errors import Corrupt, InvalidArgument, Unsupported
from kvcodecs.frame import RECORD_HEAD_BYTES, seal_record
from kvcodecs.ggml.schemes import Scheme, scheme_by_name
from kvcodecs.rope import Rope
from kvcodecs.spec import Kind, KState, StreamSpec

from ..metadata import canonical_json
from ..records import load_json, located, read_count

HEADER_MAGIC: Final = b"KVF1"
HEADER_BYTES: Final = 8192
FORMAT: Final = 1
#: Past this many bytes of rows, segments do not get larger.
MAX_SEGMENT_BYTES: Final = 1 << 30
MAX_POSITION: Final = 1 << 48
MAX_BLOCK_ROWS: Final = 1 << 16
_MAX_FILE_BYTES: Final = 1 << 62
_BLOCK_BYTES: Final = 16384


@dataclass(frozen=True)
class Header:
    """What never changes about a layer's file.

    Attributes
    ----------
    k, v
        Geometry; `v` is None where V is absent. `k` has the RoPE, whatever `k_state` is.
    k_scheme, v_scheme
        How rows are coded.
    k_state
        Whether the stored K is before RoPE, in coded channel order, or after it, as it was given.
    capacity
        Rows of the first segment; a multiple of `block_rows`.
    block_rows
        Rows under one checksum.
    max_rows
        The most rows that a ring holds; None for a layer that grows.
    session, layer
        The session that the file belongs to, 0 for none, and which layer of it.
    """

    k: StreamSpec
    v: StreamSpec | None
    k_scheme: Scheme
    v_scheme: Scheme | None
    k_state: KState
    capacity: int
    block_rows: int
    max_rows: int | None = None
    session: int = 0
    layer: int = 0

    def __post_init__(self) -> None:
        if self.capacity * self.bytes_per_row > _MAX_FILE_BYTES:
            raise InvalidArgument(
                f"{self.capacity} rows of {self.bytes_per_row} bytes: no file is so large; give a "
                "smaller capacity or max_rows"
            )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return ("k",) if self.v is None else ("k", "v")

    def spec(self, kind: Kind) -> StreamSpec:
        """Return the geometry of K or V."""
        if kind not in ("k", "v"):
            raise InvalidArgument(f"kind {kind!r}, expected 'k' or 'v'")
        spec = self.k if kind == "k" else self.v
        if spec is None:
            raise InvalidArgument("the layer has no V")
        return spec

    def scheme(self, kind: Kind) -> Scheme:
        """Return the scheme of K or V."""
        self.spec(kind)
        scheme = self.k_scheme if kind == "k" else self.v_scheme
        if scheme is None:
            raise InvalidArgument("the layer has no V")
        return scheme

    def row_bytes(self, kind: Kind) -> int:
        """Return the bytes of one row of K or V."""
        return self.scheme(kind).row_bytes(self.spec(kind).channels)

    @cached_property
    def bytes_per_row(self) -> int:
        """Of K and V together."""
        return sum(self.row_bytes(kind) for kind in self.kinds)

    def segment_rows(self, index: int) -> int:
        """Return the rows of a segment: each new one doubles the file, up to a limit."""
        if index == 0 or self.max_rows is not None:
            return self.capacity
        most = MAX_SEGMENT_BYTES // self.bytes_per_row // self.block_rows * self.block_rows
        return min(self.capacity << min(index - 1, 48), max(self.capacity, most))

    def pack(self) -> bytes:
        """Return the header's bytes, under a checksum to the last one.

        Raises
        ------
        InvalidArgument
            A RoPE of too many pairs.
        """
        data: dict[str, Any] = {
            "format": FORMAT,
            "heads": self.k.heads,
            "head_dim_k": self.k.head_dim,
            "head_dim_v": None if self.v is None else self.v.head_dim,
            "rope": None if self.k.rope is None else self.k.rope.to_json(),
            "k_scheme": self.k_scheme.name,
            "v_scheme": None if self.v_scheme is None else self.v_scheme.name,
            "k_state": self.k_state,
            "capacity": self.capacity,
            "block_rows": self.block_rows,
            "max_rows": self.max_rows,
            "session": self.session,
            "layer": self.layer,
        }
        body = canonical_json(data)
        room = HEADER_BYTES - RECORD_HEAD_BYTES
        if len(body) > room:
            raise InvalidArgument(
                f"a header of {len(body)} bytes, {room} fit: a RoPE of so many pairs cannot be "
                "kept; leave it out, and store K as it is"
            )
        return seal_record(HEADER_MAGIC, body.ljust(room))

    @classmethod
    def unpack(cls, data: bytes, where: str) -> Header:
        """Return what `pack` packed.

        Raises
        ------
        Truncated, Corrupt, Unsupported
            Damaged, no layer's file, or written by a newer release.
        """
        fields = load_json(HEADER_MAGIC, data, where)
        version = fields.get("format")
        if type(version) is not int or version < 1:
            raise Corrupt(f"{where}: header: format {version!r}")
        if version > FORMAT:
            raise Unsupported(
                f"{where}: format {version}, this release reads up to {FORMAT}; install a newer "
                "kvstore to read it"
            )
        with located(f"{where}: header"):
            try:
                return cls._of(fields)
            except (KeyError, TypeError, ValueError) as error:
                raise Corrupt(f"{where}: header: {error!r}") from error

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> Header:
        rope = None if fields["rope"] is None else Rope.from_json(fields["rope"])
        heads, head_dim_v, v_scheme = fields["heads"], fields["head_dim_v"], fields["v_scheme"]
        max_rows = fields["max_rows"]
        header = cls(
            StreamSpec("k", heads, fields["head_dim_k"], rope),
            None if head_dim_v is None else StreamSpec("v", heads, head_dim_v),
            scheme_by_name(fields["k_scheme"]),
            None if v_scheme is None else scheme_by_name(v_scheme),
            fields["k_state"],
            read_count(fields["capacity"]),
            read_count(fields["block_rows"]),
            None if max_rows is None else read_count(max_rows),
            read_count(fields["session"]),
            read_count(fields["layer"]),
        )
        if header.k_state not in ("pre", "post") or (header.v is None) != (v_scheme is None):
            raise ValueError("k_state or v_scheme")
        if not 1 <= header.block_rows <= MAX_BLOCK_ROWS or header.capacity < header.block_rows:
            raise ValueError("block_rows or capacity")
        if header.capacity % header.block_rows or header.capacity > MAX_POSITION:
            raise ValueError("capacity")
        most = header.max_rows
        if most is not None and (not most or ring_rows(most, header.block_rows) != header.capacity):
            raise ValueError("max_rows")
        for kind in header.kinds:
            header.row_bytes(kind)
        return header


def auto_block_rows(row_bytes: int) -> int:
    """Return the least power of two from 16 to 1024 whose rows reach about 16 KB."""
    rows = 16
    while rows < 1024 and rows * row_bytes < _BLOCK_BYTES:
        rows *= 2
    return rows


def ring_rows(max_rows: int, block_rows: int) -> int:
    """Return the slots of a ring: blocks are freed whole, so it needs one more than it holds."""
    return (-(-max_rows // block_rows) + 1) * block_rows
