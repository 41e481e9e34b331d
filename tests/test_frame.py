"""Frames and records: what was sealed comes back, and any damage is an error of the right kind."""

import math
import mmap
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, Truncated, Unsupported
from kvcodecs.frame import (
    HEADER_BYTES,
    RECORD_HEAD_BYTES,
    ErrorStats,
    FrameHeader,
    crc32c,
    header_tag,
    open_frame,
    open_frames,
    open_record,
    pack_frame,
    seal_record,
)

FORMAT = Path(__file__).parents[1] / "codecs" / "FORMAT.md"
FIELDS = {
    "codec": 1,
    "kind": "v",
    "owner": 0x1122334455667788,
    "layer": 29,
    "first_token": 4096,
    "n_tokens": 128,
    "header_tag": 0xFEDCBA9876543210,
    "error": ErrorStats(0.125, 3.5, 24576),
}
PAYLOAD = bytes(range(11))

stats = st.one_of(
    st.just(ErrorStats.unknown()),
    st.just(ErrorStats.none()),
    st.builds(
        ErrorStats,
        st.floats(0, 1e30),
        st.floats(0, 1e300),
        st.integers(1, 2**64 - 1),
    ),
)


def dumps():
    """Return the hex dumps of FORMAT.md that give every byte, in order."""
    blocks = re.findall(r"```\n((?: *\d+  [0-9a-f]{2}[^`]*\n)+)```", FORMAT.read_text())
    lines = [[re.split(r" {2,}", line.strip()) for line in block.splitlines()] for block in blocks]
    lines = [x for x in lines if all(re.fullmatch(r"[0-9a-f ]+", line[1]) for line in x)]
    for block in lines:
        at = 0
        for line in block:
            assert int(line[0]) == at
            at += len(bytes.fromhex(line[1]))
    return [b"".join(bytes.fromhex(line[1]) for line in block) for block in lines]


def same_stats(a, b):
    if not a.is_known:
        return not b.is_known and b.n_values == 0
    return a == b


@settings(deadline=None)
@given(
    codec=st.integers(0, 255),
    kind=st.sampled_from(["k", "v"]),
    owner=st.integers(0, 2**64 - 1),
    layer=st.integers(0, 2**32 - 1),
    first_token=st.integers(0, 2**63 - 2**32),
    n_tokens=st.integers(1, 2**32 - 1),
    tag=st.integers(0, 2**64 - 1),
    error=stats,
    payload=st.binary(max_size=300),
)
def test_round_trip(codec, kind, owner, layer, first_token, n_tokens, tag, error, payload):
    data = pack_frame(
        codec=codec,
        kind=kind,
        owner=owner,
        layer=layer,
        first_token=first_token,
        n_tokens=n_tokens,
        header_tag=tag,
        error=error,
        payload=payload,
    )
    assert len(data) == HEADER_BYTES + len(payload)
    header, body = open_frame(data)
    assert body == payload
    assert (header.codec, header.kind, header.owner, header.layer) == (codec, kind, owner, layer)
    assert (header.first_token, header.n_tokens) == (first_token, n_tokens)
    assert header.stop_token == first_token + n_tokens
    assert (header.header_tag, header.payload_bytes) == (tag, len(payload))
    assert same_stats(error, header.error)
    # NaN makes unknown statistics unequal to themselves, so compare what is left by packing it.
    again = FrameHeader.unpack(data[:HEADER_BYTES])
    assert (again.owner, again.n_tokens, again.payload_bytes) == (owner, n_tokens, len(payload))


def test_layout_pinned():
    data = pack_frame(payload=PAYLOAD, **FIELDS)
    assert data[:4] == b"KVF1"
    assert struct.unpack("<4B3Q2IQ2dQI", data[4:76]) == (
        1, 1, 1, 0, 0x1122334455667788, 4096, 11, 29, 128, 0xFEDCBA9876543210, 0.125, 3.5, 24576,
        crc32c(data[:72], PAYLOAD),
    )  # fmt: skip
    assert crc32c(b"1234", b"", b"56789") == 0xE3069283  # the check value of CRC-32C


@pytest.mark.parametrize("n_threads", [1, 3])
def test_many_frames_open_like_each(n_threads):
    frames = [
        pack_frame(**{**FIELDS, "layer": i}, payload=bytes([i]) * (i * i * 400)) for i in range(40)
    ]
    wheres = [f"block {i}" for i in range(40)]
    for header, payload in open_frames(frames, wheres, n_threads):
        alone, body = open_frame(frames[header.layer])
        assert (header, payload) == (alone, body)
    assert open_frames([], [], n_threads) == []


@pytest.mark.parametrize("n_threads", [1, 3])
def test_of_many_frames_the_first_damaged_one_is_named(n_threads):
    good = pack_frame(**FIELDS, payload=PAYLOAD)
    newer = bytearray(good)
    newer[4] = 2
    flipped = bytearray(good)
    flipped[80] ^= 1
    impossible = bytearray(good)
    impossible[6] = 2
    impossible[72:76] = crc32c(impossible[:72], impossible[76:]).to_bytes(4, "little")
    bad = [good[:75], good[:80], good + b"0", b"", b"x" * 100, newer, flipped, impossible]
    for i, first in enumerate(bad):
        with pytest.raises(KvError) as alone:
            open_frame(first, "block 1")
        rest = bad[i:] + bad[:i]
        with pytest.raises(type(alone.value), match=f"^{re.escape(str(alone.value))}$"):
            open_frames([good, *rest], [f"block {n}" for n in range(len(bad) + 1)], n_threads)


def test_unknown_error_is_the_default():
    header, _ = open_frame(pack_frame(**{**FIELDS, "error": None}, payload=b""))
    assert not header.error.is_known
    assert header.error.n_values == 0
    assert math.isnan(header.error.rms)


@pytest.mark.parametrize("size", [0, 11])
def test_every_truncation_of_a_frame_is_truncated(size):
    data = pack_frame(payload=PAYLOAD[:size], **FIELDS)
    for n in range(len(data)):
        with pytest.raises(Truncated):
            open_frame(data[:n])
    for n in range(HEADER_BYTES):
        with pytest.raises(Truncated):
            FrameHeader.unpack(data[:n])


def test_every_flip_of_a_frame_is_an_error():
    data = pack_frame(payload=PAYLOAD, **FIELDS)
    for at in range(len(data)):
        for mask in [1 << bit for bit in range(8)] + [0xFF]:
            bad = bytearray(data)
            bad[at] ^= mask
            # A flipped version may read as a newer one, a flipped length as a longer frame.
            kinds = Unsupported if at == 4 else (Corrupt, Truncated) if 24 <= at < 32 else Corrupt
            if at == 4 and bad[4] == 0:
                kinds = Corrupt
            with pytest.raises(kinds, match="layer 3 k block 9"):
                open_frame(bad, "layer 3 k block 9")


def test_bytes_after_a_frame_are_corrupt():
    with pytest.raises(Corrupt, match="88 bytes where its header says 87"):
        open_frame(pack_frame(payload=PAYLOAD, **FIELDS) + b"\0")


def reseal(data, at, new):
    """Change header bytes and make the checksum right again."""
    bad = bytearray(data)
    bad[at : at + len(new)] = new
    bad[72:76] = crc32c(bad[:72], bad[76:]).to_bytes(4, "little")
    return bytes(bad)


@pytest.mark.parametrize(
    ("at", "new", "kind"),
    [
        (0, b"KVF2", Corrupt),
        (4, b"\x02", Unsupported),
        (4, b"\x00", Corrupt),
        (6, b"\x02", Corrupt),
        (7, b"\x01", Corrupt),  # unplaced, with an owner
        (7, b"\x02", Unsupported),
        (7, b"\x80", Unsupported),
        (36, bytes(4), Corrupt),
        (16, b"\xff" * 8, Corrupt),
        (48, struct.pack("<d", math.nan), Corrupt),
        (48, struct.pack("<d", -1.0), Corrupt),
        (56, struct.pack("<d", math.inf), Corrupt),
        (48, struct.pack("<2d", math.nan, math.nan), Corrupt),
    ],
)
def test_fields_are_checked_behind_a_right_checksum(at, new, kind):
    data = reseal(pack_frame(payload=PAYLOAD, **FIELDS), at, new)
    with pytest.raises(kind):
        open_frame(data)
    with pytest.raises(kind):
        FrameHeader.unpack(data)


def test_an_unplaced_frame_says_so_in_bit_0_of_its_flags():
    place = {"owner": 0, "layer": 0, "first_token": 0}
    data = pack_frame(payload=PAYLOAD, **FIELDS | place, unplaced=True)
    assert data[7] == 1
    header, payload = open_frame(data)
    assert header.unplaced
    assert payload == PAYLOAD
    placed = pack_frame(payload=PAYLOAD, **FIELDS | place)
    assert (placed[:7], placed[8:72]) == (data[:7], data[8:72])
    assert not open_frame(placed)[0].unplaced


@pytest.mark.parametrize(
    "change",
    [
        {"codec": 256},
        {"kind": "q"},
        {"owner": -1},
        {"owner": 2**64},
        {"layer": 2**32},
        {"first_token": 2**63},
        {"first_token": 2**63 - 1, "n_tokens": 2},
        {"n_tokens": 0},
        {"n_tokens": 2**32},
        {"header_tag": 2**64},
        {"error": ErrorStats(math.nan, 0.0, 0)},
        {"error": ErrorStats(0.0, 0.0, -1)},
        {"error": ErrorStats(-0.5, 0.0, 1)},
        {"unplaced": True},
        {"unplaced": True, "owner": 0, "layer": 0},
        {"unplaced": True, "owner": 0, "first_token": 0},
    ],
)
def test_fields_that_do_not_fit_are_refused(change):
    with pytest.raises(InvalidArgument):
        pack_frame(**{**FIELDS, **change}, payload=b"")


def test_any_buffer_is_read_in_place():
    data = pack_frame(payload=PAYLOAD, **FIELDS)
    with mmap.mmap(-1, len(data) + 3) as mapped:
        mapped[3:] = data
        view = memoryview(mapped)[3:]  # any address
        _, payload = open_frame(view)
        assert payload == PAYLOAD
        assert payload.obj is mapped
        payload.release()
        view.release()
    assert open_frame(np.frombuffer(data, np.uint8))[1] == PAYLOAD
    assert open_frame(bytearray(data))[1] == PAYLOAD
    for body in (bytearray(PAYLOAD), memoryview(PAYLOAD), np.frombuffer(PAYLOAD, np.uint8)):
        assert pack_frame(payload=body, **FIELDS) == data
    assert pack_frame(payload=np.empty(0, np.uint8), **FIELDS) == pack_frame(payload=b"", **FIELDS)


def test_error_stats_merge():
    a, b = ErrorStats(0.5, 4.0, 3), ErrorStats(0.25, 5.0, 6)
    assert a.merge(b) == b.merge(a) == ErrorStats(0.5, 9.0, 9)
    assert a.merge(b).rms == 1.0
    assert a.merge(ErrorStats.none()) == a
    assert ErrorStats.none().rms == 0.0
    assert not a.merge(ErrorStats.unknown()).is_known
    assert not ErrorStats.unknown().merge(ErrorStats.none()).is_known


def test_header_tag_depends_on_every_byte_and_is_never_none():
    assert header_tag(b"") != 0
    assert len({header_tag(bytes([i, j])) for i in range(16) for j in range(16)}) == 256
    assert header_tag(b"abc") == header_tag(memoryview(b"abc")) == header_tag(bytearray(b"abc"))


@given(payload=st.binary(max_size=200))
def test_record_round_trip(payload):
    data = seal_record(b"TEST", payload)
    assert len(data) == RECORD_HEAD_BYTES + len(payload)
    assert open_record(b"TEST", data) == payload


def test_every_truncation_of_a_record_is_truncated():
    data = seal_record(b"TEST", PAYLOAD)
    for n in range(len(data)):
        with pytest.raises(Truncated):
            open_record(b"TEST", data[:n])


def test_every_flip_of_a_record_is_an_error():
    data = seal_record(b"TEST", PAYLOAD)
    for at in range(len(data)):
        for mask in [1 << bit for bit in range(8)] + [0xFF]:
            bad = bytearray(data)
            bad[at] ^= mask
            with pytest.raises(KvError, match="session 'a'"):
                open_record(b"TEST", bad, "session 'a'")


def test_records_of_another_kind_or_time_are_refused():
    data = seal_record(b"TEST", PAYLOAD)
    with pytest.raises(Corrupt, match="TEST"):
        open_record(b"REST", data)
    with pytest.raises(Corrupt):
        open_record(b"TEST", data + b"\0")
    newer = bytearray(data)
    newer[4] = 2
    with pytest.raises(Unsupported):
        open_record(b"TEST", newer)
    newer = bytearray(data)
    newer[5] = 1
    newer[16:20] = crc32c(newer[:16], newer[20:]).to_bytes(4, "little")
    with pytest.raises(Unsupported):
        open_record(b"TEST", newer)
    with pytest.raises(InvalidArgument):
        seal_record(b"TOOLONG", b"")


def test_worked_example_of_the_format_document():
    frame, stream_header, *_ = dumps()
    header, payload = open_frame(frame)
    assert payload == b"\0"
    assert (header.codec, header.kind, header.layer) == (1, "k", 5)
    assert (header.first_token, header.n_tokens) == (0, 1)
    assert header.error == ErrorStats(0.0, 0.0, 2)
    assert header.header_tag == header_tag(stream_header)
