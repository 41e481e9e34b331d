"""The core's FibQuant: a plain model of the arithmetic, every instruction set, damaged payloads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from kvcodecs import _core
from kvcodecs.errors import InvalidArgument
from kvcodecs.rows import BLOCK_DTYPE
from kvcodecs.varints import varint

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]

HAAR, HADAMARD = 0, 1
LEVELS = [level for level in range(3) if _core.level_supported(level)]
every_level = pytest.mark.parametrize("level", LEVELS)
STREAM_DTYPE = np.dtype(
    [
        ("order", "u8"),
        ("channels", "u8"),
        ("book", "u4"),
        ("heads", "u4"),
        ("head_dim", "u4"),
        ("n_pairs", "u4"),
    ]
)
OK, OVERFLOW, BAD_BLOCK = 0, 3, 4
NO_CHANNELS = 2**64 - 1

#: d, k, N: every block_dim with code of its own and others, d and N that are no powers of two.
SHAPES = [
    (64, 4, 256),
    (64, 2, 16),
    (6, 3, 5),
    (80, 5, 100),
    (96, 6, 300),
    (56, 7, 70),
    (96, 8, 33),
    (4, 2, 2),
    (48, 12, 9),
    (15, 5, 6),
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_rotation = pytest.mark.parametrize("rotation", [HAAR, HADAMARD], ids=["haar", "hadamard"])


@dataclass(frozen=True)
class Model:
    """A book, and the arithmetic of FORMAT.md in NumPy: float32, every operation rounded."""

    rotation: int
    data: F32
    codewords: F32

    @property
    def core(self) -> _core.FibBook:
        return _core.FibBook(self.rotation, self.data, self.codewords)

    @property
    def d(self) -> int:
        return self.data.shape[1]

    @property
    def k(self) -> int:
        return self.codewords.shape[1]

    @property
    def width(self) -> int:
        return (len(self.codewords) - 1).bit_length()

    def butterflies(self, x: F32, at: int) -> None:
        m = 1 << (self.d.bit_length() - 1)
        h = 1
        while h < m:
            pairs = x[:, at : at + m].reshape(len(x), m // h // 2, 2, h)
            a, b = pairs[:, :, 0].copy(), pairs[:, :, 1].copy()
            x[:, at : at + m] = np.stack([a + b, a - b], axis=2).reshape(len(x), m)
            h *= 2
        x[:, at : at + m] *= np.float32(1 / np.sqrt(float(m)))

    def rotate(self, u: F32) -> F32:
        if self.rotation == HAAR:
            y = np.zeros_like(u)
            for j in range(self.d):
                y = y + self.data[:, j][None] * u[:, j, None]
            return y
        x, m = u.copy(), 1 << (self.d.bit_length() - 1)
        for signs in self.data:
            x *= signs
            self.butterflies(x, 0)
            if m < self.d:
                self.butterflies(x, self.d - m)
        return x

    def rotate_back(self, g: F32) -> F32:
        if self.rotation == HAAR:
            parts = []
            for b in range(0, self.d, self.k):
                part = self.data[b][None] * g[:, b, None]
                for i in range(b + 1, b + self.k):
                    part = part + self.data[i][None] * g[:, i, None]
                parts.append(part)
            v: F32 = parts[0]
            for part in parts[1:]:
                v = v + part
            return v
        x, m = g.copy(), 1 << (self.d.bit_length() - 1)
        for signs in self.data[::-1]:
            if m < self.d:
                self.butterflies(x, self.d - m)
            self.butterflies(x, 0)
            x *= signs
        return x

    def nearest(self, t: F32) -> U32:
        """Return the first codeword of the largest score for each point of `t` (n, k)."""
        squared = np.cumsum(self.codewords.astype(np.float64) ** 2, axis=1)[:, -1]
        score = np.tile((-squared / 2).astype(np.float32), (len(t), 1))
        for i in range(self.k):
            score = score + t[:, i, None] * self.codewords[:, i]
        return score.argmax(axis=1).astype(np.uint32)

    def encode(self, u: F32) -> tuple[U16, U8]:
        """Return norms and packed indices of vectors (n, d) whose norms fit."""
        squared = np.cumsum(u.astype(np.float64) ** 2, axis=1)[:, -1]
        norms = np.sqrt(squared).astype(np.float32).astype(np.float16)
        t = self.rotate(u) * (np.float32(1) / norms.astype(np.float32))[:, None]
        index = self.nearest(t.reshape(-1, self.k)).reshape(len(u), -1)
        return norms.view(np.uint16), pack(index, self.width)

    def decode(self, norms: U16, indices: U8) -> F32:
        index = unpack(indices, self.width, self.d // self.k)
        v = self.rotate_back(self.codewords[index].reshape(len(index), self.d))
        return v * norms.view(np.float16).astype(np.float32)[:, None]


def pack(index: U32, width: int) -> U8:
    bits = (index[:, :, None] >> np.arange(width, dtype=np.uint32)) & 1
    return np.packbits(
        bits.astype(np.uint8).reshape(len(index), index.shape[1] * width), axis=1, bitorder="little"
    )


def unpack(indices: U8, width: int, blocks: int) -> U32:
    bits = np.unpackbits(indices, axis=1, bitorder="little")[:, : blocks * width]
    places = np.uint32(1) << np.arange(width, dtype=np.uint32)
    return (bits.reshape(-1, blocks, width) * places).sum(axis=2, dtype=np.uint32)


def model(rotation: int, d: int, k: int, n: int, seed: int = 8) -> Model:
    rng = np.random.default_rng([seed, d, k, n])
    codewords = (rng.standard_normal((n, k)) / np.sqrt(d)).astype(np.float32)
    if rotation == HAAR:
        data = np.linalg.qr(rng.standard_normal((d, d)))[0].astype(np.float32, order="C")
    else:
        data = rng.choice(np.float32([-1, 1]), (2, d))
    return Model(rotation, data, codewords)


def vectors(heads: int, n: int, d: int, seed: int = 3) -> F32:
    rng = np.random.default_rng([seed, heads, n, d])
    return (rng.standard_normal((heads, n, d)) * rng.uniform(0.01, 40, (heads, n, 1))).astype("f4")


def none_kept(x: F32) -> U8:
    return np.zeros(x.shape[:2], np.uint8)


@every_level
@every_rotation
@every_shape
def test_encoding_is_that_of_the_model(
    shape: tuple[int, int, int], rotation: int, level: int
) -> None:
    m = model(rotation, *shape)
    x = vectors(2, 37, m.d)
    state, norms, indices, most, squares = _core.fib_encode(
        m.core, x, None, None, none_kept(x), 2, level
    )
    flat = x.reshape(-1, m.d)
    expected_norms, expected_indices = m.encode(flat)
    assert not state.any()
    assert np.array_equal(norms.reshape(-1), expected_norms)
    assert np.array_equal(indices.reshape(len(flat), -1), expected_indices)
    errors = m.decode(expected_norms, expected_indices).astype(np.float64) - flat
    assert most == np.abs(errors).max()
    assert squares == pytest.approx(np.square(errors).sum(), rel=1e-12)


@every_level
@every_rotation
@every_shape
def test_decoding_is_that_of_the_model(
    shape: tuple[int, int, int], rotation: int, level: int
) -> None:
    m = model(rotation, *shape)
    rng = np.random.default_rng(5)
    index = rng.integers(0, len(m.codewords), (45, m.d // m.k), dtype=np.uint32)
    norms = rng.integers(1, 0x7C00, 45, dtype=np.uint16)  # subnormal ones too
    indices = pack(index, m.width)
    expected = m.decode(norms, indices)
    for n_threads in (1, 3):
        values, bad = _core.fib_decode(m.core, norms, indices, n_threads, level)
        assert bad == -1
        assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))


@every_level
def test_statistics_of_channels_come_off_and_on(level: int) -> None:
    m = model(HADAMARD, 80, 5, 100)
    x = vectors(3, 20, m.d)
    mean = x.mean(axis=1).astype(np.float16).astype("f4").reshape(-1)
    scale = x.std(axis=1).astype(np.float16).astype("f4").reshape(-1)
    _, norms, indices, most, _ = _core.fib_encode(m.core, x, mean, scale, none_kept(x), 1, level)
    u = (x - mean.reshape(3, 1, -1)) * (np.float32(1) / scale).reshape(3, 1, -1)
    expected_norms, expected_indices = m.encode(u.reshape(-1, m.d))
    assert np.array_equal(norms.reshape(-1), expected_norms)
    assert np.array_equal(indices.reshape(60, -1), expected_indices)
    v = m.decode(expected_norms, expected_indices).reshape(x.shape)
    decoded = v * scale.reshape(3, 1, -1) + mean.reshape(3, 1, -1)
    assert most == np.abs(decoded.astype(np.float64) - x).max()


def test_errors_do_not_depend_on_threads() -> None:
    m = model(HADAMARD, 64, 4, 64)
    x = vectors(3, 1000, 64)
    results = [_core.fib_encode(m.core, x, None, None, none_kept(x), n) for n in (1, 2, 5)]
    for result in results[1:]:
        assert result[3:] == results[0][3:]
        assert all(np.array_equal(a, b) for a, b in zip(result[:3], results[0][:3], strict=True))


@every_level
def test_what_cannot_be_coded_says_why(level: int) -> None:
    m = model(HADAMARD, 16, 4, 16)
    x = vectors(1, 40, 16)
    keep = none_kept(x)
    keep[0, [0, 7]] = 1, 5
    x[0, 0] = np.nan
    x[0, 3] = 0
    x[0, 4] = 65520 / 4  # the least norm that rounds to infinity
    x[0, 5] = 65519 / 4
    x[0, 6] = 2.0**-25 / 4  # half of the least float16 rounds to zero
    x[0, 8] = 2.0**-24 / 4
    state, norms, indices, *errors = _core.fib_encode(m.core, x, None, None, keep, 1, level)
    expected = np.zeros(40, np.uint8)
    expected[[0, 3, 4, 6, 7]] = 1, 3, 4, 4, 5
    assert np.array_equal(state[0], expected)
    assert not norms[0, expected != 0].any()
    assert not indices[0, expected != 0].any()
    coded = expected == 0
    alone = _core.fib_encode(m.core, x[:, coded], None, None, keep[:, coded], 1, level)
    assert np.array_equal(alone[1], norms[:, coded])
    assert np.array_equal(alone[2], indices[:, coded])
    assert list(alone[3:]) == errors
    assert norms[0, 5] == 0x7BFF
    assert norms[0, 8] == 1


@every_level
@pytest.mark.parametrize(
    ("k", "n"),
    [(2, 5000), (3, 5001), (4, 20000), (5, 5000), (8, 8192), (2, 256), (4, 512), (4, 513)],
)
def test_the_nearest_codeword_is_the_first_of_the_best_score(level: int, k: int, n: int) -> None:
    m = model(HADAMARD, 8 * k, k, n)
    rng = np.random.default_rng([k, n])
    codewords = m.codewords.copy()
    codewords[n // 2 : n // 2 + 50] = codewords[:50]  # equal scores
    codewords[1::97] = np.round(codewords[1::97] * 8) / 8
    m = Model(m.rotation, m.data, codewords)
    points = np.concatenate(
        [
            codewords[rng.integers(0, n, 60)],
            np.round(rng.standard_normal((60, k)) * 4).astype("f4") / 16,
            (rng.standard_normal((60, k)) * 0.3).astype("f4"),
            (rng.standard_normal((60, k)) * 1e4).astype("f4"),
            (rng.standard_normal((57, k)) * 1e-30).astype("f4"),
        ]
    )
    assert np.array_equal(_core.fib_nearest(m.core, points, level), m.nearest(points))


def test_points_far_from_numbers_have_a_nearest_codeword_at_every_level() -> None:
    for n in (300, 5000):
        core = model(HADAMARD, 8, 4, n).core
        points = np.full((40, 4), np.nan, "f4")
        points[:20] = np.float32([1e38, -3e38, np.inf, 1])
        expected = _core.fib_nearest(core, points, 0)
        assert expected.max() < n
        for level in LEVELS:
            assert np.array_equal(_core.fib_nearest(core, points, level), expected)


@pytest.mark.parametrize(
    ("rotation", "data", "codewords"),
    [
        (2, np.ones((2, 8), "f4"), np.ones((4, 2), "f4")),
        (HADAMARD, np.ones((8, 8), "f4"), np.ones((4, 2), "f4")),
        (HAAR, np.ones((2, 8), "f4"), np.ones((4, 2), "f4")),
        (HADAMARD, np.full((2, 8), 0.5, "f4"), np.ones((4, 2), "f4")),
        (HADAMARD, np.ones((2, 8), "f4"), np.ones((4, 3), "f4")),
        (HADAMARD, np.ones((2, 8), "f4"), np.ones((4, 0), "f4")),
        (HADAMARD, np.ones((2, 8), "f4"), np.ones((1, 2), "f4")),
        (HADAMARD, np.ones((2, 8), "f4"), np.full((4, 2), np.inf, "f4")),
        (HAAR, np.full((8, 8), np.nan, "f4"), np.ones((4, 2), "f4")),
        (HAAR, np.ones((4098, 4098), "f4"), np.ones((4, 2), "f4")),
    ],
)
def test_a_book_that_is_none_is_refused(rotation: int, data: F32, codewords: F32) -> None:
    with pytest.raises(InvalidArgument, match="book"):
        _core.FibBook(rotation, data, codewords)


def test_a_bad_vector_is_named() -> None:
    m = model(HADAMARD, 6, 3, 5)  # two indices of three bits: two bits of padding
    norms = np.full(40, 0x3C00, np.uint16)
    good = np.zeros((40, 1), np.uint8)
    assert _core.fib_decode(m.core, norms, good)[1] == -1
    for bad in (0b101, 0b111000, 0b1000000, 0b10000000):
        damaged = good.copy()
        damaged[[33, 21]] = bad
        for n_threads in (1, 3):
            assert _core.fib_decode(m.core, norms, damaged, n_threads)[1] == 21
    for norm in (0, 0x7C00, 0x7E00, 0x8001, 0xBC00):
        damaged_norms = norms.copy()
        damaged_norms[17] = norm
        assert _core.fib_decode(m.core, damaged_norms, good)[1] == 17


# Frames


@dataclass(frozen=True)
class Frame:
    """A frame of random vectors, its payload and what it decodes to."""

    model: Model
    reasons: U8  # (heads, n_tokens)
    raw_type: int
    payload: bytes
    values: F32  # (heads, n_tokens, d)

    @property
    def n_vectors(self) -> int:
        return self.reasons.size

    def check(self, payload: bytes) -> int:
        core = self.model.core
        return _core.fib_check_payload(payload, self.n_vectors, core.index_bytes, core.d)


def frame(m: Model, reasons: U8, raw_type: int = 0, channels: F32 | None = None) -> Frame:
    heads, n = reasons.shape
    rng = np.random.default_rng([7, heads, n])
    flat = reasons.reshape(-1)
    coded = np.flatnonzero(flat == 0)
    norms = rng.uniform(0.5, 30, len(coded)).astype(np.float16).view(np.uint16)
    index = rng.integers(0, len(m.codewords), (len(coded), m.d // m.k), dtype=np.uint32)
    indices = pack(index, m.width)
    raw = rng.standard_normal((len(flat) - len(coded), m.d)).astype("f4")
    if raw_type == 0:
        raw_bytes = raw.tobytes()
    elif raw_type == 1:
        raw_bytes = raw.astype(np.float16).tobytes()
        raw = raw.astype(np.float16).astype("f4")
    else:
        raw_bytes = (raw.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        raw = (raw.view(np.uint32) & 0xFFFF0000).view("f4")
    values = np.zeros((len(flat), m.d), "f4")
    values[coded] = m.decode(norms, indices)
    if channels is not None:
        mean, scale = channels.reshape(2, heads, 1, m.d)
        spread = values.reshape(heads, n, m.d) * scale + mean
        values[coded] = spread.reshape(-1, m.d)[coded]
    values[flat != 0] = raw
    head = bytearray()
    if not flat.any():
        head.append(0)
    elif flat.all() and len(set(flat.tolist())) == 1:
        head += bytes([1, flat[0]])
    else:
        head.append(2)
        runs, last = bytearray(), 0
        changes = np.flatnonzero(np.diff(flat)) + 1
        starts, ends = [0, *changes.tolist()], [*changes.tolist(), len(flat)]
        raw_runs = [(a, b) for a, b in zip(starts, ends, strict=True) if flat[a]]
        for a, b in raw_runs:
            runs += varint(a - last)
            runs += varint(b - a)
            runs.append(flat[a])
            last = b
        head += varint(len(raw_runs))
        head += runs
    if flat.any():
        head.append(raw_type)
    payload = bytes(head) + norms.tobytes() + indices.tobytes() + raw_bytes
    return Frame(m, reasons, raw_type, payload, values.reshape(heads, n, m.d))


def run(
    f: Frame,
    out: npt.NDArray[np.generic],
    kind: int,
    *,
    skip: int = 0,
    stop: int | None = None,
    row: int = 0,
    rope: tuple[F32, F32] | None = None,
    order: U32 | None = None,
    channels: F32 | None = None,
    payload: bytes | None = None,
    n_threads: int = 1,
    level: int = -1,
) -> int:
    heads, n = f.reasons.shape
    d = f.model.d
    block = np.array(
        [(0, 0, 0, n, n if stop is None else stop, skip, row, 0, -1 if rope is None else 0, 0)],
        BLOCK_DTYPE,
    )
    pairs = 0 if rope is None else rope[0].shape[1]
    first = NO_CHANNELS if channels is None else 0
    stream = np.array([(0, first, 0, heads, d, pairs)], STREAM_DTYPE)
    status = _core.run_fib_blocks(
        [f.model.core],
        block,
        stream,
        np.arange(d, dtype=np.uint32) if order is None else order,
        np.zeros(0, "f4") if channels is None else channels,
        [f.payload if payload is None else payload],
        [out],
        [kind],
        [] if rope is None else [rope],
        n_threads,
        level,
    )
    return int(status[0])


def mixed(heads: int = 3, n: int = 41) -> U8:
    reasons = np.zeros((heads, n), np.uint8)
    reasons[:, :4] = 1
    reasons[1] = 2
    reasons[2, [9, 10, 30]] = 3, 4, 5
    return reasons


ALL_RAW = np.full((2, 5), 2, np.uint8)
FORMS = [np.zeros((2, 33), np.uint8), ALL_RAW, mixed()]


def test_the_structs_have_the_sizes_of_the_core() -> None:
    assert STREAM_DTYPE.itemsize == _core.FIB_STREAM_BYTES
    assert BLOCK_DTYPE.itemsize == _core.ROW_BLOCK_BYTES


@every_level
@pytest.mark.parametrize("raw_type", [0, 1, 2])
@pytest.mark.parametrize("reasons", FORMS, ids=["coded", "raw", "mixed"])
def test_a_frame_decodes_to_any_output(reasons: U8, raw_type: int, level: int) -> None:
    f = frame(model(HADAMARD, 80, 5, 100), reasons, raw_type)
    heads, n, d = f.values.shape
    assert f.check(f.payload) == 0
    plain = np.zeros((heads, n, d), "f4")
    assert run(f, plain, 0, level=level, n_threads=2) == OK
    assert np.array_equal(plain.view(np.uint32), f.values.view(np.uint32))
    half = np.zeros((n + 5, heads + 1, d), np.float16).transpose(1, 0, 2)
    assert run(f, half, 1, skip=2, stop=n - 1, row=3, level=level) == OK
    assert np.array_equal(half[:heads, 3:n], f.values[:, 2 : n - 1].astype(np.float16))
    assert not half[heads].any()
    assert not half[:, :3].any()
    assert not half[:, n:].any()
    order = np.random.default_rng(2).permutation(d).astype(np.uint32)
    brain = np.zeros((heads, n, d), np.uint16)
    assert run(f, brain, 2, order=order, level=level) == OK
    bits = f.values.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    assert np.array_equal(brain[:, :, order], rounded)


@every_level
def test_a_frame_rotates_as_it_is_written(level: int) -> None:
    f = frame(model(HAAR, 16, 4, 30), mixed())
    heads, n, d = f.values.shape
    angle = np.arange(n, dtype="f4")[:, None] * np.float32([1, 0.3, 0.1])
    cos, sin = np.cos(angle), np.sin(angle)
    out = np.zeros((heads, n, d), "f4")
    assert run(f, out, 0, rope=(cos, sin), level=level) == OK
    a, b = f.values[:, :, :3], f.values[:, :, 8:11]
    expected = f.values.copy()
    expected[:, :, :3] = a * cos - b * sin
    expected[:, :, 8:11] = b * cos + a * sin
    assert np.array_equal(out, expected)


@every_level
def test_a_frame_has_statistics_of_its_stream(level: int) -> None:
    rng = np.random.default_rng(1)
    m = model(HADAMARD, 16, 4, 30)
    mean, scale = rng.standard_normal(48), rng.uniform(0.1, 3, 48)
    channels = np.concatenate([mean, scale]).astype("f4")
    f = frame(m, mixed(), 1, channels)
    out = np.zeros(f.values.shape, "f4")
    assert run(f, out, 0, channels=channels, level=level) == OK
    assert np.array_equal(out, f.values)


@every_level
def test_any_single_vector_can_be_had(level: int) -> None:
    f = frame(model(HADAMARD, 24, 3, 17), mixed())
    for token in range(f.values.shape[1]):
        out = np.zeros((3, 1, 24), "f4")
        assert run(f, out, 0, skip=token, stop=token + 1, level=level) == OK
        assert np.array_equal(out[:, 0], f.values[:, token])


def test_values_beyond_the_output_are_told() -> None:
    m = model(HADAMARD, 16, 4, 30)
    f = frame(Model(m.rotation, m.data, m.codewords * 64), np.zeros((1, 20), np.uint8))
    payload = bytearray(f.payload)
    payload[1 + 2 * 9 : 3 + 2 * 9] = b"\xff\x7b"
    out = np.zeros((1, 20, 16), np.float16)
    assert run(f, out, 1, payload=bytes(payload)) == OVERFLOW
    wide = np.zeros((1, 20, 16), "f4")
    assert run(f, wide, 0, payload=bytes(payload)) == OK
    channels = np.full(32, 3e38, "f4")
    assert run(f, wide, 0, channels=channels, payload=bytes(payload)) == BAD_BLOCK


@pytest.mark.parametrize("reasons", FORMS, ids=["coded", "raw", "mixed"])
def test_no_payload_is_read_beyond_its_end(reasons: U8) -> None:
    f = frame(model(HADAMARD, 12, 3, 5), reasons, 1)
    out = np.zeros(f.values.shape, "f4")
    for size in range(len(f.payload)):
        assert f.check(f.payload[:size]) == 1
        assert run(f, out, 0, payload=f.payload[:size]) == BAD_BLOCK
    assert f.check(f.payload + b"\0") == 2
    assert run(f, out, 0, payload=f.payload + b"\0") == BAD_BLOCK


@every_level
@pytest.mark.parametrize("reasons", FORMS, ids=["coded", "raw", "mixed"])
def test_flipped_bytes_never_crash(reasons: U8, level: int) -> None:
    f = frame(model(HADAMARD, 12, 3, 5), reasons, 1)
    out = np.zeros(f.values.shape, "f4")
    rng = np.random.default_rng(9)
    places = np.concatenate([np.arange(40), rng.integers(0, len(f.payload), 300)])
    for at in places[places < len(f.payload)]:
        payload = bytearray(f.payload)
        payload[at] ^= 1 << rng.integers(8)
        status = run(f, out, 0, payload=bytes(payload), level=level)
        assert status in (OK, BAD_BLOCK)
        assert np.isfinite(out).all()
        if f.check(bytes(payload)) != 0:
            assert status == BAD_BLOCK


def damaged(head: bytes, vectors: int = 8, index_bytes: int = 2, head_dim: int = 4) -> int:
    return _core.fib_check_payload(head + bytes(200), vectors, index_bytes, head_dim)


@pytest.mark.parametrize(
    ("head", "fault"),
    [
        (b"\x03", 3),  # form
        (b"\x01\x00", 3),  # reasons
        (b"\x01\x06", 3),
        (b"\x01\x01\x03", 3),  # dtype
        (b"\x02\x00", 2),  # no runs
        (b"\x02\x09", 2),  # more runs than vectors
        (b"\x02\x01\x00\x00\x01", 2),  # an empty run
        (b"\x02\x01\x09\x01\x01", 2),  # beyond the last vector
        (b"\x02\x01\x00\x09\x01", 2),
        (b"\x02\x02\x00\x08\x01\x00\x01\x01", 2),
        (b"\x02\x01\x00\x01\x00", 3),
        (b"\x02" + b"\xff" * 10, 2),  # varints of more than 64 bits
        (b"\x02\x01" + b"\xff" * 9 + b"\x02", 2),
        (b"\x02\x01" + b"\xff" * 9 + b"\x01" + b"\xff" * 9 + b"\x01\x01", 2),
    ],
)
def test_damaged_heads_of_payloads_are_told(head: bytes, fault: int) -> None:
    assert damaged(head) == fault


def test_a_raw_value_that_is_no_number_is_bad() -> None:
    for raw_type, bits in ((0, b"\0\0\x80\x7f"), (1, b"\0\x7c"), (2, b"\x80\x7f")):
        f = frame(model(HADAMARD, 12, 3, 5), mixed(), raw_type)
        payload = f.payload[: -len(bits)] + bits
        out = np.zeros(f.values.shape, "f4")
        assert f.check(payload) == 0
        assert run(f, out, 0, payload=payload) == BAD_BLOCK


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("book", 1),
        ("heads", 0),
        ("heads", 4),
        ("heads", 2**20),
        ("head_dim", 6),
        ("order", 1),
        ("order", 2**63),
        ("channels", 0),
        ("stream", 1),
        ("payload", 1),
        ("output", 1),
        ("stop", 42),
        ("skip", 42),
        ("row", 1),
        ("n_tokens", 0),
        ("rope", 0),
    ],
)
def test_no_plan_leaves_its_tables(field: str, value: int) -> None:
    f = frame(model(HADAMARD, 12, 3, 5), mixed())
    block = np.array([(0, 0, 0, 41, 41, 0, 0, 0, -1, 0)], BLOCK_DTYPE)
    stream = np.array([(0, NO_CHANNELS, 0, 3, 12, 0)], STREAM_DTYPE)
    (block if field in BLOCK_DTYPE.names else stream)[field] = value  # type: ignore[operator]
    out = np.zeros(f.values.shape, "f4")
    order = np.arange(12, dtype=np.uint32)
    tables = (order, np.zeros(71, "f4"), [f.payload], [out], [0], [], 1, -1)
    with pytest.raises(InvalidArgument, match="plan: block 0"):
        _core.run_fib_blocks([f.model.core], block, stream, *tables)
