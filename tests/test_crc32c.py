"""CRC-32C: the published vectors, and the same as another implementation for any bytes."""

from itertools import pairwise

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcodecs import _core
from kvcodecs.errors import InvalidArgument
from kvcodecs.frame import crc32c

HEAD, PAYLOAD = 72, 76
MANY = np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8)

portable = pytest.mark.parametrize("portable", [False, True])


def frame_checksum(frame):
    frame = bytes(frame)
    return google_crc32c.extend(google_crc32c.value(frame[:HEAD]), frame[PAYLOAD:])


@portable
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        # RFC 3720 B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (
            bytes.fromhex(
                "01c00000 00000000 00000000 00000000 14000000 00000400"
                "00000014 00000018 28000000 00000000 02000000 00000000"
            ),
            0xD9963A56,
        ),
    ],
)
def test_published_vectors(data, expected, portable):
    assert _core.crc32c(0, data, portable) == expected
    assert crc32c(data) == expected


@portable
@given(data=st.binary(max_size=2000), crc=st.integers(0, 2**32 - 1), at=st.integers(0, 9))
def test_like_another_implementation(data, crc, at, portable):
    expected = google_crc32c.extend(crc, data[at:])
    assert _core.crc32c(crc, memoryview(data)[at:], portable) == expected


@portable
@given(at=st.integers(0, 70), n=st.integers(0, 20_000), cut=st.integers(0, 20_000))
def test_long_runs_at_any_place(at, n, cut, portable):
    whole = MANY[at : at + n]
    first = _core.crc32c(0, whole[:cut], portable)
    assert _core.crc32c(first, whole[cut:], portable) == google_crc32c.value(whole.tobytes())


@portable
def test_every_length(portable):
    """Up to several rounds of each of the interleaved loops."""
    data = MANY[3:].tobytes()
    for n in (*range(1200), *range(6100, 7000), 2 << 20):
        assert _core.crc32c(0, data[:n], portable) == google_crc32c.value(data[:n])


@portable
@given(
    spans=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 9000)), max_size=8),
    n_threads=st.integers(0, 3),
)
def test_checksums_of_frames(spans, n_threads, portable):
    """Of any lengths, none and overlapping ones among them."""
    frames = [MANY[start : start + n] for start, n in spans]
    found = _core.frame_checksums(frames, HEAD, PAYLOAD, n_threads, portable)
    assert found.dtype == np.uint32
    assert found.tolist() == [frame_checksum(frame) for frame in frames]


@portable
@pytest.mark.parametrize("n_threads", [0, 1, 2, 5, 4096])
def test_checksums_on_threads(n_threads, portable):
    bounds = [0, 10, 86, 162, 300, 1 << 20, (1 << 20) + 75, 2 << 20, 3 << 20]
    frames = [memoryview(MANY)[a:b] for a, b in pairwise(bounds)]
    frames += [b"", bytearray(b"x" * 76), memoryview(MANY)]
    found = _core.frame_checksums(frames, HEAD, PAYLOAD, n_threads, portable)
    assert found.tolist() == [frame_checksum(frame) for frame in frames]


def test_what_is_no_frame_is_refused():
    with pytest.raises(TypeError):
        _core.frame_checksums([b"", 5], HEAD, PAYLOAD, 1)
    with pytest.raises((BufferError, ValueError)):
        _core.crc32c(0, MANY[::2])
    with pytest.raises(InvalidArgument, match="payload begins inside"):
        _core.frame_checksums([], PAYLOAD, HEAD, 1)
    with pytest.raises(TypeError):
        _core.crc32c(-1, b"")
    with pytest.raises(TypeError):
        _core.crc32c(2**32, b"")
