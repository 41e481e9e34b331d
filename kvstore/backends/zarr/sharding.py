"""Many blocks to an object: a finished session's frames become the inner chunks of shards.

The shards lie beside the chunks, under other keys of the same arrays; the commit switches to
them, and its documents then say so to zarr. FORMAT.md section 9.6.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from kvcodecs.errors import Corrupt
from kvcodecs.frame import crc32c

from ... import keys
from ...session_record import StreamName
from .objects import Objects
from .places import (
    IN_ARRAY,
    IN_SHARD,
    Home,
    Lookup,
    Reference,
    chunk_of,
    doomed_key,
    home_key,
    home_of,
    locations,
    owners_in,
    pack_json,
    shard_of,
)
from .sessions import Stored, n_sealed, shared_blocks
from .tails import tail_frame

_ENTRY: Final = struct.Struct("<QQ")
_CRC: Final = struct.Struct("<I")
_ABSENT: Final = (1 << 64) - 1
_MOST_BLOCKS: Final = 1 << 16


class _Block(NamedTuple):
    """A frame to lay into a shard: where it is, or, of the last tokens, the frame itself."""

    key: bytes
    reference: Reference | None
    frame: bytes | None = None


def shard(
    objects: Objects,
    lookup: Lookup,
    stored: Stored,
    shard_bytes: int,
    still_mine: Callable[[], None],
    due_ns: int,
) -> dict[bytes, bytes | None]:
    """Put the shards of a session, and return what the commit that switches to them changes.

    Killed before that commit, the shards are leftovers.

    Parameters
    ----------
    shard_bytes
        About how many bytes a shard has.
    still_mine, due_ns
        As for `Objects.put_frames` and `placing.place`.

    Returns
    -------
    dict
        Empty if the session has shards already, or no whole block.

    Raises
    ------
    Corrupt
        A frame is missing.
    """
    # It is finished, once the commit is there.
    stored = stored._replace(record=replace(stored.record, finished=True))
    home = home_of(lookup, stored.record.owner)
    streams = _blocks(objects, lookup, stored)
    if home is None or home.shard_blocks or not any(streams.values()):
        return {}
    n_blocks = _blocks_of(streams, shard_bytes)
    puts: dict[bytes, bytes | None] = {}
    doomed = []
    owners = owners_in(lookup, home.group)
    for owner in owners:
        puts[home_key(owner)] = Home(home.group, n_blocks).pack()
    for (layer, kind), frames in streams.items():
        for first in range(0, len(frames), n_blocks):
            number, part = first // n_blocks, frames[first : first + n_blocks]
            data, offsets = _pack_shard(objects, lookup, stored, (layer, kind), part, n_blocks)
            objects.put_frames([(shard_of(home.group, layer, kind, number), data)], still_mine)
            for number, (block, offset) in enumerate(zip(part, offsets, strict=True), first):
                if block.reference is None and block.frame is None:
                    continue
                doomed.append(chunk_of(home.group, layer, kind, number))
                if block.reference is None:
                    continue
                if keys.parse(block.key).owner in owners and block.reference.home == IN_ARRAY:
                    n_bytes = block.reference.n_bytes
                    puts[block.key] = Reference(IN_SHARD, n_bytes, offset).pack()
    if doomed:
        puts[doomed_key(due_ns, 1 << 31)] = pack_json({"objects": doomed})
    return puts


def _blocks_of(streams: Mapping[StreamName, list[_Block]], shard_bytes: int) -> int:
    """Return how many blocks of a session make a shard of about so many bytes."""
    sizes = [
        block.reference.n_bytes
        for blocks in streams.values()
        for block in blocks
        if block.reference is not None
    ]
    return min(max(shard_bytes * len(sizes) // max(sum(sizes), 1), 1), _MOST_BLOCKS)


def _blocks(objects: Objects, lookup: Lookup, stored: Stored) -> dict[StreamName, list[_Block]]:
    """Return each whole block, without a reference if it was trimmed, and then the last tokens."""
    record = stored.record
    shared = shared_blocks(record)
    found: dict[StreamName, list[_Block]] = {}
    for stream, state in record.streams.items():
        trimmed = max(record.first - state.start, 0) // state.block_tokens
        blocks = found[stream] = []
        for block in range(n_sealed(record, stream)):
            owner, there = shared.get((stream, block), (record.owner, block))
            key = keys.frame_key(owner, *stream, there)
            reference = lookup.raw(key) if block >= trimmed else None
            if reference is None and block >= trimmed:
                layer, kind = stream
                raise Corrupt(
                    f"session {stored.name!r} layer {layer} {kind} block {block}: missing; verify "
                    "the archive"
                )
            found_at = None if reference is None else Reference.unpack(reference)
            blocks.append(_Block(key, found_at))
        frame = tail_frame(objects, lookup, stored, stream)
        if frame is not None:
            blocks.append(_Block(b"", None, frame))
    return found


def _pack_shard(
    objects: Objects,
    lookup: Lookup,
    stored: Stored,
    stream: StreamName,
    part: list[_Block],
    n_blocks: int,
) -> tuple[bytes, list[int]]:
    """Return a shard of zarr's format, and where in it each frame begins."""
    requests = [
        locations(lookup, block.key, block.reference.pack())[0]
        for block in part
        if block.reference is not None
    ]
    found = iter(objects.get_many(requests))
    data, index, offsets = bytearray(), bytearray(), []
    for key, reference, frame in part:
        offsets.append(len(data))
        if reference is not None:
            frame = next(found)
            if frame is None or len(frame) != reference.n_bytes:
                raise Corrupt(
                    f"{objects.where}: session {stored.name!r} layer {stream[0]} {stream[1]}: the "
                    f"frame of {key!r} is missing or cut; verify the archive"
                )
        if frame is None:
            index += _ENTRY.pack(_ABSENT, _ABSENT)
            continue
        index += _ENTRY.pack(len(data), len(frame))
        data += frame
    for _ in range(n_blocks - len(part)):
        index += _ENTRY.pack(_ABSENT, _ABSENT)
    index += _CRC.pack(crc32c(index))
    return bytes(data + index), offsets
