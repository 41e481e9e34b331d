"""The executor: one call, any lanes, any threads, the same bits as the readable path."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from kvcodecs import FibQuant, _core, vectors
from kvcodecs.blocks import BLOCK_DTYPE, SIMD_LEVELS, STREAM_DTYPE
from kvcodecs.codec import codec_for
from kvcodecs.errors import Corrupt, InvalidArgument, Truncated
from kvcodecs.kvr1 import KVR1
from kvcodecs.lanes import CHANNEL_DTYPE, LANE_DTYPE
from kvcodecs.plan import Plan
from kvcodecs.raw import Raw
from kvcodecs.rope import Rope, from_coded, to_coded
from kvcodecs.spec import StreamSpec
from kvcodecs.tkv1 import TKV1, prior_table, reference

DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


class Stream:
    """A coded stream of a few blocks."""

    def __init__(self, spec, n_tokens, config, block=32, seed=0, scale=1.0):
        rng = np.random.default_rng(seed)
        x = scale * rng.standard_normal((spec.heads, n_tokens, spec.head_dim))
        self.x = (
            x * rng.uniform(0.1, 4, spec.head_dim) + scale * rng.normal(0, 3, spec.head_dim)
        ).astype(np.float32)
        self.spec, self.codec = spec, codec_for(config)
        coded = to_coded(self.x, spec)
        self.params = self.codec.fit(config, spec, lambda: [coded])
        self.blocks = []
        for first in range(0, n_tokens, block):
            encoder = self.codec.encoder(self.params, first)
            part = np.ascontiguousarray(coded[:, first : first + block])
            encoder.push(part)
            self.blocks.append((first, part.shape[1], encoder.payload()))

    def add(self, plan, start, stop, out, rope=None):
        for first, n, payload in self.blocks:
            lo, hi = max(start, first), min(stop, first + n)
            if lo < hi:
                plan.add(
                    self.codec,
                    self.params,
                    payload,
                    first_token=first,
                    n_tokens=n,
                    start=lo,
                    stop=hi,
                    out=out[:, lo - start : hi - start],
                    rope=rope,
                    where=f"block at {first}",
                )

    def decode(self, start, stop, dtype=np.float32, rope=None, n_threads=1):
        out = np.zeros((self.spec.heads, stop - start, self.spec.head_dim), dtype)
        plan = Plan()
        self.add(plan, start, stop, out, rope)
        plan.run(n_threads)
        return out


ROPES = {
    "half": Rope.from_theta(1e4, 16),
    "partial": Rope.from_theta(1e4, 10),
    "interleaved": Rope.from_theta(1e4, 16, style="interleaved"),
    "interleaved partial, scaled": Rope.from_theta(1e4, 6, style="interleaved", scaling=1.25),
}


def bits(x):
    return x.view({4: np.uint32, 2: np.uint16}[x.itemsize])


@pytest.fixture(
    params=[KVR1(), TKV1(lane_channels=0), TKV1(lane_channels=4), Raw(), FibQuant(2, 16)],
    ids=lambda c: c.codec,
)
def config(request):
    return request.param


def test_structs_match_the_core():
    assert LANE_DTYPE.itemsize == _core.LANE_BYTES
    assert CHANNEL_DTYPE.itemsize == _core.CHANNEL_BYTES
    assert BLOCK_DTYPE.itemsize == _core.BLOCK_BYTES
    assert STREAM_DTYPE.itemsize == _core.STREAM_BYTES
    assert vectors.STREAM_DTYPE.itemsize == _core.FIB_STREAM_BYTES


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 100), (0, 1), (31, 33), (32, 64), (50, 50), (99, 100)]
)
def test_a_range_is_a_slice_of_the_whole(config, start, stop):
    stream = Stream(StreamSpec("v", 3, 16), 100, config)
    whole = stream.decode(0, 100)
    np.testing.assert_array_equal(stream.decode(start, stop), whole[:, start:stop])


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_rotation_on_write_equals_from_coded(config, rope, dtype):
    spec = StreamSpec("k", 2, 16, rope)
    stream = Stream(spec, 70, config)
    plain = StreamSpec("k", 2, 16)  # the same payloads without a RoPE: coded channel order
    coded = to_coded(stream.decode(0, 70), spec)
    expected = from_coded(coded, spec, "post", 0)[:, 20:65]
    table = rope.table(0, 70)
    out = stream.decode(20, 65, dtype, rope=table)
    np.testing.assert_array_equal(bits(out), bits(expected.astype(dtype)))
    assert plain.channels == spec.channels


def test_many_streams_in_one_plan_on_any_number_of_threads(config):
    rope = ROPES["half"]
    streams = [
        Stream(StreamSpec("k", 3, 16, rope), 90, config, seed=1),
        Stream(StreamSpec("v", 1, 20), 40, TKV1(sink=0, sink_div=3), seed=2),
        Stream(StreamSpec("v", 5, 16), 130, TKV1(step=0.01, sink=50, sink_div=100), seed=3),
        Stream(StreamSpec("v", 20, 4), 33, TKV1(ar=False), seed=4),
        Stream(StreamSpec("k", 3, 16, rope), 90, KVR1(), seed=5),
        Stream(StreamSpec("v", 1, 20), 40, KVR1(sink=0, sink_div=3), seed=6),
        Stream(StreamSpec("v", 20, 4), 70, KVR1(step=0.01, sink=50, sink_div=100), seed=7),
        Stream(StreamSpec("v", 2, 6), 33, Raw(), seed=8),
    ]
    alone = [s.decode(3, 33) for s in streams]
    for n_threads in (1, 2, 3, 7, 64, None):
        outs = [np.full((s.spec.heads, 30, s.spec.head_dim), np.nan, np.float32) for s in streams]
        plan = Plan()
        for stream, out in zip(streams, outs, strict=True):
            stream.add(plan, 3, 33, out)
        plan.run(n_threads)
        for out, expected in zip(outs, alone, strict=True):
            np.testing.assert_array_equal(bits(out), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_sixteen_lanes_at_once_decode_like_one(monkeypatch, dtype):
    if not _core.WIDE:
        pytest.xfail("this CPU has no AVX-512")
    run = _core.run_lanes
    streams = [Stream(StreamSpec("v", 7, 24), 200, TKV1(), block=64, seed=s) for s in range(3)]
    wide = [s.decode(5, 190, dtype) for s in streams]
    monkeypatch.setattr(_core, "run_lanes", lambda *a: run(*a, wide=False))
    for stream, expected in zip(streams, wide, strict=True):
        np.testing.assert_array_equal(bits(stream.decode(5, 190, dtype)), bits(expected))


def _lane_of_24_ones(params, head):
    """A substream whose second symbol claims a residual of 2^24 or more."""
    coder, models = reference.RangeEncoder(), reference.Models()
    first, second = (
        reference.first_model(int(c), 0) for c in params.cls[head * params.spec.head_dim :][:2]
    )
    coder.encode(1, models.p(first))  # the first channel's residual is zero
    models.update(first, 1)
    coder.encode(0, models.p(second))
    coder.encode(0, 32768)
    for i in range(24):
        coder.encode(1, models.p(second + 1 + i))
    return coder.finish()


def test_sixteen_lanes_at_once_fail_like_one(monkeypatch):
    """Damaged lanes among sound ones: the same values or the same error, lane by lane."""
    if not _core.WIDE:
        pytest.xfail("this CPU has no AVX-512")
    run, seen = _core.run_lanes, set()
    rng = np.random.default_rng(5)
    stream = Stream(StreamSpec("v", 16, 8), 64, TKV1(), block=64)
    mean = stream.params.mean.copy()
    mean[::3] = (1 << 24) - 1  # any residual above zero passes the limit of values
    params = replace(stream.params, mean=mean, cls=np.sort(stream.params.cls))
    for trial in range(40):
        lanes = [rng.integers(0, 256, rng.integers(0, 60), np.uint8).tobytes() for _ in range(16)]
        lanes[trial % 16] = _lane_of_24_ones(params, trial % 16)
        if trial % 2:
            params = replace(params, mean=stream.params.mean)
        payload = b"".join(bytes([len(lane)]) + lane for lane in lanes)
        results = []
        for wide in (True, False):
            statuses = []

            def call(*args, wide=wide, statuses=statuses):
                statuses.append(run(*args, wide=wide))
                return np.zeros_like(statuses[0])

            monkeypatch.setattr(_core, "run_lanes", call)
            out = np.zeros((16, 64, 8), np.float32)
            where = {"first_token": 0, "n_tokens": 64, "start": 0, "stop": 64}
            plan = Plan()
            plan.add(stream.codec, params, payload, out=out, **where)
            plan.run(1)
            results.append((statuses[0], out))
        (wide_status, wide_out), (status, out) = results
        np.testing.assert_array_equal(wide_status, status)
        good = status == 0
        np.testing.assert_array_equal(wide_out[good], out[good])
        seen |= set(status.tolist())
    assert seen == {0, 1, 2}  # sound, residual, value


def test_outputs_may_be_strided(config):
    stream = Stream(StreamSpec("v", 3, 16), 100, config)
    backing = np.full((100, 2, 3, 16), np.nan, np.float32)
    plan = Plan()
    stream.add(plan, 0, 100, backing[:, 1].transpose(1, 0, 2))
    plan.run()
    np.testing.assert_array_equal(backing[:, 1].transpose(1, 0, 2), stream.decode(0, 100))
    assert np.isnan(backing[:, 0]).all()


@pytest.mark.parametrize("lossy", [TKV1, KVR1])
@pytest.mark.parametrize("simd", SIMD_LEVELS)
def test_float16_rounds_every_value_like_numpy(lossy, simd):
    """All float32 patterns around the halves, subnormals and the overflow threshold."""
    spec = StreamSpec("v", 1, 2)
    codec = codec_for(lossy())
    for scale in (2.0**-26, 2.0**-16, 2.0**-3, 1.0, 4.0):
        x = np.arange(-8192, 8192, dtype=np.float32).reshape(1, -1, 2) * np.float32(scale)
        params = codec.fit(lossy(step=scale, sink=0, sink_div=1), spec, lambda x=x: [x])
        encoder = codec.encoder(params, 0)
        encoder.push(x)
        out = np.zeros(x.shape, np.float16)
        plan = Plan()
        plan.add(
            codec,
            params,
            encoder.payload(),
            first_token=0,
            n_tokens=x.shape[1],
            start=0,
            stop=x.shape[1],
            out=out,
        )
        plan.run(simd=simd)
        np.testing.assert_array_equal(bits(out), bits(x.astype(np.float16)))


@pytest.mark.parametrize(
    "config", [KVR1(step=1.0), TKV1(step=1.0), Raw(), FibQuant(2, 16)], ids=lambda c: c.codec
)
@pytest.mark.parametrize("heads", [1, 16])
def test_a_value_that_overflows_float16_raises(config, heads):
    spec = StreamSpec("v", heads, 16)
    codec = codec_for(config)
    x = np.zeros((heads, 10, 16), np.float32)
    x[-1, 7, 3] = 70000.0
    params = codec.fit(config, spec, lambda: [x])
    encoder = codec.encoder(params, 0)
    encoder.push(x)
    for dtype in (np.float16, np.float32):
        out = np.zeros(x.shape, dtype)
        plan = Plan()
        where = {"first_token": 0, "n_tokens": 10, "start": 0, "stop": 10, "where": "block 0"}
        plan.add(codec, params, encoder.payload(), out=out, **where)
        if dtype == np.float16:
            with pytest.raises(InvalidArgument, match=r"block 0: .*overflows float16.*float32"):
                plan.run()
        else:
            plan.run()


def test_wrong_requests_are_refused():
    stream = Stream(StreamSpec("v", 2, 16), 32, TKV1())
    (first, n, payload), out = stream.blocks[0], np.zeros((2, 32, 16), np.float32)

    def add(**changes):
        fields = {"first_token": first, "n_tokens": n, "start": 0, "stop": 32, "out": out}
        fields |= changes
        data = fields.pop("payload", payload)
        Plan().add(stream.codec, stream.params, data, **fields)

    add()
    for changes in (
        {"start": -1},
        {"stop": 33},
        {"start": 5, "stop": 4},
        {"out": out[:, :31]},
        {"out": out.astype(np.float64)},
        {"out": np.zeros((2, 32, 32), np.float32)[..., ::2]},
        {"out": out[:, ::-1]},
        {"out": np.broadcast_to(out[:1], (2, 32, 16))},
    ):
        with pytest.raises(InvalidArgument):
            add(**changes)
    for length in range(len(payload)):
        with pytest.raises(Truncated):
            add(payload=payload[:length])
    with pytest.raises(Corrupt):
        add(payload=payload + b"\x00")


def test_no_table_reads_outside_its_buffers():
    """Whatever stands in a lane row: an error, or a decode within bounds."""
    stream = Stream(StreamSpec("k", 2, 16, ROPES["half"]), 32, TKV1())
    out = np.zeros((2, 32, 16), np.float32)
    plan = Plan()
    stream.add(plan, 0, 32, out, ROPES["half"].table(0, 32))
    lanes = np.concatenate(plan.lanes.rows)
    tables = stream.params.lane_tables
    rng = np.random.default_rng(0)
    refused = 0
    for name in LANE_DTYPE.names:
        top = np.iinfo(LANE_DTYPE[name]).max if LANE_DTYPE[name].kind in "iu" else 0
        for value in (top, top // 2 + 1, 1 << 24, 1000, int(rng.integers(0, 64)), 0):
            changed = lanes.copy()
            changed[1][name] = value if LANE_DTYPE[name].kind == "f" else min(value, top)
            if name == "n_tokens" and value > 1 << 20:
                continue  # allowed by the table, bounded by the output rows
            try:
                _core.run_lanes(
                    prior_table(),
                    changed,
                    tables.channels,
                    tables.classes,
                    *plan.targets.arguments(plan.targets.on_host()),
                    2,
                )
            except InvalidArgument as error:
                assert "plan: lane 1" in str(error)  # noqa: PT017
                refused += 1
    assert refused > 30


def test_k_that_overflows_float32_when_rotated_raises():
    rope = ROPES["half"]
    spec = StreamSpec("k", 1, 16, rope)
    x = np.full((1, 64, 16), 3e38, np.float32)
    stream = Stream.__new__(Stream)
    stream.spec, stream.codec, stream.params = spec, codec_for(Raw()), None
    stream.params = stream.codec.fit(Raw(), spec, lambda: [x])
    encoder = stream.codec.encoder(stream.params, 0)
    encoder.push(x)
    stream.blocks = [(0, 64, encoder.payload())]
    np.testing.assert_array_equal(stream.decode(0, 64), x)
    with pytest.raises(InvalidArgument, match="overflows float32 when it is rotated"):
        stream.decode(0, 64, rope=rope.table(0, 64))
    stream = Stream(StreamSpec("k", 1, 16, rope), 64, TKV1(step=2.5e32), scale=5e36)
    stream.decode(0, 64)
    loud = Rope.from_theta(1e4, 16, scaling=100.0)
    with pytest.raises(InvalidArgument, match="overflows float32 when it is rotated"):
        stream.decode(0, 64, rope=loud.table(0, 64))


class OnDevice:
    """What an array of a GPU library looks like from here."""

    __cuda_array_interface__ = None

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype


def test_outputs_on_a_device_are_for_kvgpu():
    stream = Stream(StreamSpec("v", 1, 16), 32, KVR1())

    def plan_into(out, host=None):
        plan = Plan()
        for target in (out,) if host is None else (host, out):
            plan.add(
                stream.codec, stream.params, stream.blocks[0][2], first_token=0, n_tokens=32,
                start=0, stop=32, out=target,
            )  # fmt: skip
        return plan

    host = np.full((1, 32, 16), 7, np.float32)
    for dtype in (np.dtype(np.float16), "torch.bfloat16"):
        with pytest.raises(InvalidArgument, match=r"use kvgpu\.decode"):
            plan_into(OnDevice((1, 32, 16), dtype), host).run()
    assert (host == 7).all()
    with pytest.raises(InvalidArgument, match="of shape"):
        plan_into(OnDevice((1, 31, 16), "torch.float16"))
    with pytest.raises(InvalidArgument, match=r"of dtype torch\.int8"):
        plan_into(OnDevice((1, 32, 16), "torch.int8"))
    with pytest.raises(InvalidArgument, match="list: expected an array"):
        plan_into([0.0])


@pytest.mark.parametrize("n_threads", [-1, 1.5, "2", 1 << 20])
def test_numbers_of_threads_are_checked(n_threads):
    with pytest.raises(InvalidArgument, match="n_threads"):
        Stream(StreamSpec("v", 1, 16), 32, TKV1()).decode(0, 32, n_threads=n_threads)


def test_the_core_checks_what_it_is_given():
    """Python callers check as well; a mistake of theirs must not reach memory."""
    statistics = _core.Statistics(2, 4)
    x = np.zeros((2, 3, 4), np.float32)
    for wrong in (x[:1], x[..., :2], np.zeros((1, 1, 2), np.float32)):
        with pytest.raises(InvalidArgument, match="statistics"):
            statistics.add_mean(np.ascontiguousarray(wrong))
    with pytest.raises(InvalidArgument, match="finish_mean comes first"):
        statistics.add_moments(x)
    with pytest.raises(InvalidArgument, match="finish_mean comes first"):
        statistics.finish(1.0, 1.0, True, True)
    statistics.finish_mean()
    with pytest.raises(InvalidArgument, match="the mean is finished"):
        statistics.add_mean(x)
    for sizes in ((0, 4), (1 << 20, 1 << 20)):
        with pytest.raises(InvalidArgument, match="size"):
            _core.Statistics(*sizes)
    channels = (np.zeros(8, np.int64), np.zeros(8, np.uint8), np.zeros(8, np.uint8))
    with pytest.raises(MemoryError):
        _core.stream_decode(prior_table(), 2, 4, 1.0, 0, 1, *channels, 0, 2**63, b"")
    zero = np.zeros(7056, np.uint32)
    with pytest.raises(InvalidArgument, match="prior table"):
        _core.stream_decode(zero, 2, 4, 1.0, 0, 1, *channels, 0, 1, b"")
    mean, rho, cls = channels
    with pytest.raises(InvalidArgument, match="prior table"):
        _core.block_encoder(zero, 2, 4, 4, 1.0, 0, 1, 0, mean.astype(np.int32), rho, cls)
    memory = bytearray(b"x" * 10000)
    for view in (memory, memoryview(memory), np.zeros(10000, np.uint8)):
        with pytest.raises(InvalidArgument, match="release_pages"):
            _core.release_pages(view)
    assert memory == b"x" * 10000
