"""FibQuant on a device: the bits of the CPU, its errors, and nothing outside the outputs."""

from dataclasses import dataclass, replace

import kvgpu
import ml_dtypes
import numpy as np
import pytest
from kvcodecs import _core
from kvcodecs.errors import Corrupt, InvalidArgument, KvError
from kvcodecs.fibquant.payload import Vectors, build_payload
from kvcodecs.plan import Plan
from kvcodecs.rope import Rope, RopeTable
from kvcodecs.targets import Placement
from kvcodecs.vectors import VectorTables
from kvgpu.host_device import HostDevice
from kvgpu.launches import Limits

import kvstore

DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
HAAR, HADAMARD = 0, 1
every_rotation = pytest.mark.parametrize("rotation", [HAAR, HADAMARD], ids=["haar", "hadamard"])


def book(rotation, d, k, n_codewords, seed=0):
    rng = np.random.default_rng(seed)
    if rotation == HAAR:
        data = np.linalg.qr(rng.standard_normal((d, d)))[0]
    else:
        data = rng.choice([-1, 1], (2, d))
    codewords = rng.standard_normal((n_codewords, k)) / np.sqrt(d)
    return _core.FibBook(rotation, data.astype(np.float32), codewords.astype(np.float32))


#: Which vectors are raw; the shares of heads, tokens and single vectors.
FORMS = {"coded": (0, 0, 0), "raw": (1, 0, 0), "mixed": (0.3, 0.1, 0.2)}


@dataclass
class Stream:
    """Coded blocks of vectors, without a codec around them."""

    tables: VectorTables
    blocks: list[tuple[int, int, bytes]]
    rope: RopeTable | None

    @classmethod
    def made(
        cls, a_book, *, heads=2, n_tokens=70, block=32, form="mixed", channels=True, rope=None,
        scale=1.0, seed=0,
    ):  # fmt: skip
        rng, d = np.random.default_rng(seed), a_book.d
        statistics = None
        if channels:
            statistics = np.concatenate(
                [rng.normal(0, 3, heads * d), rng.uniform(0.1, 2, heads * d)]
            )
            statistics = (scale * statistics).astype(np.float32)
        tables = VectorTables(
            a_book,
            heads,
            d,
            statistics,
            (np.arange(d) if rope is None else rope.channel_order(d)).astype(np.uint32),
            0 if rope is None else rope.n_pairs,
        )
        blocks = []
        for first in range(0, n_tokens, block):
            n = min(block, n_tokens - first)
            x = rng.standard_normal((heads, n, d)).astype(np.float32)
            of_head, of_token, alone = FORMS[form]
            keep = np.zeros((heads, n), np.uint8)
            keep[rng.random(heads) < of_head] = 2
            keep[:, rng.random(n) < of_token] = 1
            keep[rng.random((heads, n)) < alone] = 5
            states, norms, indices, _, _ = _core.fib_encode(a_book, x, None, None, keep, 1)
            coded = states == 0
            # Raw values of each type in turn.
            raw = x[~coded].astype(DTYPES[(first // block + 1) % 3]).astype(np.float32)
            parts = Vectors(states.reshape(-1), norms[coded], indices[coded], raw)
            blocks.append((first, n, build_payload(parts)))
        return cls(tables, blocks, None if rope is None else rope.table(0, n_tokens))

    @property
    def shape(self):
        return self.tables.heads, sum(n for _, n, _ in self.blocks), self.tables.head_dim

    def add(self, plan, start, stop, out, *, rotated=False):
        for first, n, payload in self.blocks:
            lo, hi = max(start, first), min(stop, first + n)
            if lo < hi:
                rows = out[:, lo - start : hi - start]
                rope = self.rope if rotated else None
                placement = Placement(lo, hi, n, rows, rope, f"block at {first}: ")
                plan.decode_vectors(self.tables, payload, first, placement)
        return plan

    def decode(self, start, stop, dtype, *, rotated=False):
        out = np.zeros((self.shape[0], stop - start, self.shape[2]), dtype)
        self.add(Plan(), start, stop, out, rotated=rotated).run(1)
        return out


def assert_same(x, y):
    assert x.dtype == y.dtype
    assert x.tobytes() == y.tobytes()


def error_of(action, *args):
    """Return kind and text of the error that an action ends with, None without one."""
    try:
        action(*args)
    except KvError as error:
        return type(error), str(error)
    return None


#: d, k, N: rotations of one and of two transforms, of less than a warp and of many steps of one;
#: indices of 1 to 11 bits.
SHAPES = [
    (64, 4, 256),
    (128, 2, 16),
    (80, 5, 100),
    (96, 8, 33),
    (6, 3, 5),
    (4, 2, 2),
    (33, 3, 1030),
    (300, 4, 64),
    (256, 8, 600),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_rotation
def test_the_bits_of_the_cpu(gpu, rotation, shape):
    d = shape[0]
    a_book = book(rotation, *shape)
    half, partial = (Rope.from_theta(1e4, 2 * n) for n in (d // 2, max(d // 4, 1)))
    for at, (form, channels, rope) in enumerate(
        [
            ("mixed", True, half if d % 2 == 0 else None),
            ("coded", False, partial if d % 2 == 0 else None),
            ("raw", True, None),
        ]
    ):
        stream = Stream.made(a_book, form=form, channels=channels, rope=rope)
        for rotated in {False, rope is not None}:
            for start, stop in ((0, 70), (31, 33), (5, 66)):
                dtype = DTYPES[(at + start) % 3]
                want = stream.decode(start, stop, dtype, rotated=rotated)
                out = gpu.put(np.zeros_like(want))
                kvgpu.decode(stream.add(Plan(), start, stop, out, rotated=rotated))
                assert_same(gpu.get(out), want)


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_rotation
def test_rotated_values_of_every_type(gpu, rotation, dtype, style):
    rope = Rope.from_theta(1e4, 24, style=style, scaling=1.25)
    stream = Stream.made(book(rotation, 32, 4, 50), rope=rope, n_tokens=40)
    want = stream.decode(0, 40, dtype, rotated=True)
    out = gpu.put(np.zeros_like(want))
    kvgpu.decode(stream.add(Plan(), 0, 40, out, rotated=True))
    assert_same(gpu.get(out), want)


def test_streams_of_several_books_in_one_plan(gpu):
    shapes = [(64, 4, 256), (16, 2, 9), (96, 3, 17)]
    books = [book(rotation, *shape) for rotation in (HAAR, HADAMARD) for shape in shapes]
    streams = [Stream.made(b, heads=1 + i % 3, seed=i) for i, b in enumerate([*books, books[0]])]
    plan, outputs = Plan(), []
    for i, stream in enumerate(streams):
        heads, _, d = stream.shape
        outputs.append(gpu.put(np.zeros((heads, 50, d), DTYPES[i % 3])))
        stream.add(plan, 10, 60, outputs[-1])
    kvgpu.decode(plan)
    for i, (stream, out) in enumerate(zip(streams, outputs, strict=True)):
        assert_same(gpu.get(out), stream.decode(10, 60, DTYPES[i % 3]))


@pytest.mark.parametrize(
    "limits",
    [Limits(1, 0), Limits(1, 4 << 10), Limits(1, 163 << 10), Limits(200, 227 << 10)],
    ids=["in scratch", "large vectors in scratch", "few warps", "a warp for each piece"],
)
def test_any_grid_gives_the_same_bits(gpu, monkeypatch, limits):
    """Warps that decode one piece after the other, damaged ones among them."""
    if not isinstance(gpu.device, HostDevice):
        room = gpu.device.limits.shared_bytes
        limits = replace(limits, shared_bytes=min(limits.shared_bytes, room))
    monkeypatch.setattr(gpu.device, "limits", limits)
    streams = [
        Stream.made(book(rotation, d, 4, 60), heads=3, n_tokens=200, block=50)
        for rotation, d in ((HAAR, 132), (HADAMARD, 16))
    ]
    damaged = replace(streams[1], blocks=list(streams[1].blocks))
    first, n, payload = damaged.blocks[2]
    damaged.blocks[2] = first, n, payload[:-1] + b"\x7f"  # a raw value of no number
    for wanted in (streams, [streams[0], damaged]):
        plan, host = Plan(), Plan()
        outputs = [gpu.put(np.zeros(s.shape, np.float16)) for s in wanted]
        expected = [np.zeros(s.shape, np.float16) for s in wanted]
        for stream, out, want in zip(wanted, outputs, expected, strict=True):
            stream.add(plan, 0, 200, out)
            stream.add(host, 0, 200, want)
        error = error_of(host.run)
        assert (error is None) == (wanted is streams)
        assert error_of(kvgpu.decode, plan) == error
        if error is None:
            for out, want in zip(outputs, expected, strict=True):
                assert_same(gpu.get(out), want)


def flips(payload, rng):
    """Return the payload with one bit flipped: in each of its first bytes, and in some others."""
    places = [*range(min(12, len(payload))), *rng.integers(0, len(payload), 12)]
    for at in places:
        data = bytearray(payload)
        data[at] ^= 1 << int(rng.integers(8))
        yield bytes(data)


@pytest.mark.parametrize("form", FORMS)
@every_rotation
def test_damage_is_what_the_cpu_says(gpu, rotation, form):
    """Payloads with flipped bits, too short and too long: the same error, or the same bits."""
    stream = Stream.made(book(rotation, 14, 2, 11), n_tokens=20, form=form)
    payload = stream.blocks[0][2]
    rng = np.random.default_rng(3)
    cut = [payload[:n] for n in (0, 1, 2, 5, len(payload) // 2, len(payload) - 1)]
    errors = []
    for broken in (*flips(payload, rng), *cut, payload + b"\0"):
        bad = replace(stream, blocks=[(0, 20, broken)])
        want, out = np.zeros(stream.shape, np.float16), gpu.put(np.zeros(stream.shape, np.float16))
        errors.append(error_of(bad.add(Plan(), 3, 20, want[:, 3:]).run))
        assert error_of(kvgpu.decode, bad.add(Plan(), 3, 20, out[:, 3:])) == errors[-1]
        if errors[-1] is None:
            assert_same(gpu.get(out), want)
    assert 8 < sum(error is not None for error in errors) < len(errors)


def one_vector(values, norm=1.0, scale=1.0):
    """Return a stream of one head whose one vector has these values before its norm and scale."""
    d = len(values)
    # A book that no build makes: nothing is rotated, each half of the values is a codeword.
    codewords = np.array(values, np.float32).reshape(2, d // 2)
    a_book = _core.FibBook(HAAR, np.eye(d, dtype=np.float32), codewords)
    statistics = np.array([0] * d + [scale] * d, np.float32)
    order = np.arange(d, dtype=np.uint32)
    tables = VectorTables(a_book, 1, d, statistics, order, d // 2)
    payload = b"\0" + np.float16(norm).tobytes() + b"\2"
    return Stream(tables, [(0, 1, payload)], RopeTable(0, *np.full((2, 1, d // 2), 1, np.float32)))


@pytest.mark.parametrize("norm", [0, -1, np.inf, -np.inf, np.nan])
def test_norms_that_no_encoder_writes(gpu, norm):
    stream = one_vector([1, 2, 3, 4], norm=norm)
    error = error_of(stream.add(Plan(), 0, 1, np.zeros((1, 1, 4), np.float32)).run)
    assert error[0] is Corrupt
    out = gpu.put(np.zeros((1, 1, 4), np.float32))
    assert error_of(kvgpu.decode, stream.add(Plan(), 0, 1, out)) == error


def test_negative_zeros_stay(gpu):
    stream = one_vector([-0.0] * 4)
    stream.tables = replace(stream.tables, channels=None)
    want, out = np.ones((1, 1, 4), np.float32), gpu.put(np.ones((1, 1, 4), np.float32))
    stream.add(Plan(), 0, 1, want).run()
    assert np.signbit(want).all()
    kvgpu.decode(stream.add(Plan(), 0, 1, out))
    assert_same(gpu.get(out), want)


def test_overflow_is_what_the_cpu_says(gpu):
    fine, large = one_vector([1, 2, 3, 4]), one_vector([1, 2, 3, 4], norm=6e4)
    infinite = one_vector([1, 2, 3, 4], norm=6e4, scale=3e38)
    beyond = one_vector([1, 2, 3, 4], scale=8e37)
    for stream, dtype, rotated, kind in (
        (fine, np.float16, True, None),
        (large, np.float16, False, InvalidArgument),
        (large, np.float32, True, None),
        (beyond, DTYPES[2], False, None),
        (beyond, DTYPES[2], True, InvalidArgument),
        (beyond, np.float32, True, InvalidArgument),
        (infinite, np.float32, False, Corrupt),
    ):
        want, out = np.zeros((1, 1, 4), dtype), gpu.put(np.zeros((1, 1, 4), dtype))
        error = error_of(stream.add(Plan(), 0, 1, want, rotated=rotated).run)
        assert (None if error is None else error[0]) is kind
        assert error_of(kvgpu.decode, stream.add(Plan(), 0, 1, out, rotated=rotated)) == error
        if error is None:
            assert_same(gpu.get(out), want)


def test_damage_comes_before_an_overflow_of_another_piece(gpu):
    """Pieces of one block have statuses of their own; the block has the worst."""
    a_book = book(HADAMARD, 8, 2, 4)
    x = np.full((1, 64, 8), 1e5, np.float32)
    keep = np.ones((1, 64), np.uint8)
    for at, error in ((None, InvalidArgument), (2, Corrupt), (40, Corrupt)):
        if at is not None:
            x[0, at, 3] = np.nan
        parts = Vectors(keep[0], np.zeros(0, np.uint16), np.zeros((0, 0), np.uint8), x[0])
        stream = Stream.made(a_book, heads=1)
        stream.blocks = [(0, 64, build_payload(parts))]
        with pytest.raises(error) as expected:
            stream.add(Plan(), 0, 64, np.zeros((1, 64, 8), np.float16)).run()
        plan = stream.add(Plan(), 0, 64, gpu.put(np.zeros((1, 64, 8), np.float16)))
        with pytest.raises(error) as found:
            kvgpu.decode(plan)
        assert str(found.value) == str(expected.value)


@every_rotation
def test_floats_below_the_normal_ones(gpu, rotation):
    """Flush-to-zero, which CuPy asks its compiler for, would change them."""
    stream = Stream.made(book(rotation, 32, 4, 60), form="coded", scale=2e-39)
    want = stream.decode(0, 70, np.float32)
    assert (np.abs(want[want != 0]) < np.finfo(np.float32).tiny).any()
    out = gpu.put(np.zeros_like(want))
    kvgpu.decode(stream.add(Plan(), 0, 70, out))
    assert_same(gpu.get(out), want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_of_a_cache(gpu, layout):
    """Rows go to the pages of a block table, and nothing else of the pool changes."""
    stream = Stream.made(book(HADAMARD, 24, 3, 20), heads=3)
    want = stream.decode(0, 70, np.float16)
    axes = (9, 16, 3, 24) if layout == "NHD" else (9, 3, 16, 24)
    pool = gpu.put(np.full(axes, 7, np.float16))
    pages = [8, 2, 5, 0, 7]
    paged = kvgpu.Paged(pool, pages, n_rows=70, first_row=9, layout=layout)
    kvgpu.decode(stream.add(Plan(), 0, 70, paged))
    found = gpu.get(pool)
    if layout == "NHD":
        found = found.swapaxes(1, 2)
    rows = found[pages].swapaxes(0, 1).reshape(3, 80, 24)
    assert_same(np.ascontiguousarray(rows[:, 9:79]), want)
    for others in (rows[:, :9], rows[:, 79:], np.delete(found, pages, axis=0)):
        assert (others == 7).all()


def test_payloads_of_the_device(gpu):
    """In place of those that the plan was given, which may have been others."""
    a_book = book(HAAR, 16, 4, 30)
    planned, other = (Stream.made(a_book, form=form) for form in ("coded", "mixed"))
    want = other.decode(0, 70, np.float32)
    out = gpu.put(np.zeros_like(want))
    plan = replace(planned, tables=other.tables).add(Plan(), 0, 70, out)
    payloads = [gpu.put(np.frombuffer(payload, np.uint8)) for _, _, payload in other.blocks]
    kvgpu.decode(plan, payloads)
    assert_same(gpu.get(out), want)
    short = [gpu.put(np.frombuffer(other.blocks[0][2][:40], np.uint8)), *payloads[1:]]
    with pytest.raises(Corrupt, match="block at 0: the block does not decode"):
        kvgpu.decode(plan, short)


def test_what_a_plan_does_not_want_is_not_touched(gpu):
    """Rows of other tokens, and blocks of which no token is wanted."""
    stream = Stream.made(book(HADAMARD, 16, 4, 30))
    want = np.full((2, 70, 16), 5, np.float16)
    out = gpu.put(want)
    stream.add(Plan(), 30, 41, want[:, 30:41]).run()
    first, n, payload = stream.blocks[2]
    nothing = Placement(first, first, n, out[:, :0], None, "")
    plans = stream.add(Plan(), 30, 41, out[:, 30:41]), Plan()
    for plan in plans:
        plan.decode_vectors(stream.tables, b"damaged" + payload, first, nothing)
        kvgpu.decode(plan)
    assert_same(gpu.get(out), want)


def test_no_table_reads_outside_its_buffers(gpu):
    """A plan out of range is refused before anything runs, by the device as by the CPU."""
    stream = Stream.made(book(HADAMARD, 16, 4, 30))
    for change in (
        {"heads": 3},
        {"head_dim": 12},
        {"order": np.arange(16, 32, dtype=np.uint32)},
        {"channels": np.zeros(50, np.float32)},
        {"order": np.arange(8, dtype=np.uint32)},
    ):
        bad = replace(stream, tables=replace(stream.tables, **change))
        out = np.zeros((2, 70, 16), np.float32)
        with pytest.raises(InvalidArgument, match=r"plan: block \d+") as expected:
            bad.add(Plan(), 0, 70, out).run()
        with pytest.raises(InvalidArgument) as found:
            kvgpu.decode(bad.add(Plan(), 0, 70, gpu.put(out)))
        assert str(found.value) == str(expected.value)


def test_more_vectors_than_kernels_number_are_refused():
    stream = Stream.made(book(HADAMARD, 16, 4, 30))
    arrays = stream.add(Plan(), 0, 70, np.zeros((2, 70, 16), np.float32)).vectors.arrays()
    sizes = (
        np.full(3, 1 << 40, np.uint64),
        np.array([(2, n, 16) for n in (32, 32, 6)], np.uint64),
        np.zeros((0, 2), np.uint64),
    )
    arrays[1]["n_tokens"][1] = (1 << 31) - 1
    _core.check_fib_blocks(*arrays, *sizes)
    arrays[1]["n_tokens"][1] = 1 << 31
    with pytest.raises(InvalidArgument, match="block 1: 2\\^32 vectors"):
        _core.check_fib_blocks(*arrays, *sizes)


@every_rotation
def test_sessions(gpu, rotation, tmp_path, monkeypatch):
    """Protected tokens and heads, statistics of channels, a tail, tokens kept raw by commits."""
    monkeypatch.setenv("KVSTORE_CACHE", str(tmp_path / "books"))
    model = kvstore.Model.uniform(
        name="m", n_layers=2, n_kv_heads=2, head_dim=16, rope=Rope.from_theta(1e4, 16)
    )
    config = kvstore.FibQuant(
        4, 16, rotation=("haar", "hadamard")[rotation], last_tokens=3, raw_heads=(1,),
        raw_layers=(1,),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    with kvstore.open(tmp_path / "a.kv", mode="a") as archive:
        options = {"codec": config, "model": model, "block_tokens": 16, "fit_tokens": 8}
        with archive.create_session("s", **options) as session:
            for n in (5, 60, 30):
                session.append(*rng.standard_normal((2, 2, 2, n, 16), dtype=np.float32))
                session.commit()
        session = archive.session("s")
        for at, (start, stop) in enumerate([(None, None), (3, 93), (40, 41)]):
            for state in ("pre", "post"):
                for layer, kind in ((0, "k"), (0, "v"), (1, "k")):
                    args = layer, kind, start, stop, state, DTYPES[at]
                    assert_same(gpu.get(session.read(*args, device="cuda")), session.read(*args))


def test_a_book_shows_what_it_was_made_of():
    data, codewords = np.eye(6, dtype=np.float32), np.arange(8, dtype=np.float32).reshape(4, 2)
    a_book = _core.FibBook(HAAR, data, codewords)
    assert a_book.rotation == HAAR
    np.testing.assert_array_equal(a_book.rotation_data, data)
    shown = a_book.codewords
    del a_book
    np.testing.assert_array_equal(shown, codewords)
    assert not shown.flags.writeable
