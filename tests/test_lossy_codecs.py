"""What every lossy codec keeps: bounds, steps, refusals, and blocks that can be taken up again."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs.codec import codec_by_name, codec_by_number, codec_for, config_from_json
from kvcodecs.errors import Corrupt, InvalidArgument, Truncated, Unsupported
from kvcodecs.fibquant import FibQuant
from kvcodecs.frame import ErrorStats
from kvcodecs.kvr1 import KVR1
from kvcodecs.plan import Plan
from kvcodecs.raw import Raw
from kvcodecs.rope import Rope
from kvcodecs.spec import StreamSpec
from kvcodecs.tkv1 import TKV1

quick = settings(deadline=None, max_examples=60)
both = pytest.mark.parametrize("lossy", [TKV1, KVR1], ids=["tkv1", "kvr1"])
V = StreamSpec("v", 2, 8)


def values(shape=(2, 150, 8), seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).cumsum(axis=1) * 0.2 + 2 * rng.standard_normal((shape[0], 1, 8))
    return (x * scale).astype(np.float32)


class Stream:
    """A codec and what it fitted."""

    def __init__(self, config, x, spec=V, k_state="pre"):
        self.codec = codec_for(config)
        self.params = self.codec.fit(config, spec, lambda: [x], k_state)
        self.step = self.codec.step(self.params)

    def check(self, x, first_token=0):
        self.codec.check(self.params, x, first_token)

    def encode(self, x, first_token=0):
        encoder = self.codec.encoder(self.params, first_token)
        encoder.push(np.ascontiguousarray(x))
        return encoder

    def decode(self, payload, n_tokens, first_token=0, start=None, stop=None):
        start = first_token if start is None else start
        stop = first_token + n_tokens if stop is None else stop
        spec = self.params.spec
        out = np.empty((spec.heads, stop - start, spec.head_dim), np.float32)
        plan = Plan()
        plan.add(
            self.codec,
            self.params,
            payload,
            first_token=first_token,
            n_tokens=n_tokens,
            start=start,
            stop=stop,
            out=out,
        )
        plan.run()
        return out


@both
@quick
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-30, 1e-4, 1.0, 1e4, 1e30]),
    rel_step=st.sampled_from([2.0, 0.5, 0.25, 0.01]),
    sink=st.integers(0, 200),
    sink_div=st.integers(1, 100),
    first=st.sampled_from([0, 2, 10_000, 1 << 40]),
)
def test_every_value_is_within_half_a_step(lossy, seed, scale, rel_step, sink, sink_div, first):
    x = values(seed=seed, scale=scale)
    x[0, 3, 2] = x[1, 40, 5] * 50
    stream = Stream(lossy(rel_step=rel_step, sink=sink, sink_div=sink_div), x)
    encoder = stream.encode(x, first)
    y = stream.decode(encoder.payload(), 150, first)
    error = np.abs(x.astype(np.float64) - y)
    bound = np.full(150, stream.step / 2)
    bound[first + np.arange(150) < sink] /= sink_div
    assert (error <= bound[:, None]).all()  # exactly: no tolerance
    assert encoder.error.max_error == error.max()
    assert encoder.error.n_values == x.size
    rms = math.sqrt((error**2).mean())
    assert encoder.error.rms == pytest.approx(rms, rel=0.01, abs=stream.params.unit / 256)


@both
@quick
@given(
    seed=st.integers(0, 2**32 - 1),
    first=st.sampled_from([0, 3, 512]),
    cuts=st.lists(st.integers(1, 149), max_size=6, unique=True),
)
def test_chunks_do_not_change_a_block(lossy, seed, first, cuts):
    x = values(seed=seed)
    stream = Stream(lossy(), x)
    whole = stream.encode(x, first)
    encoder = stream.codec.encoder(stream.params, first)
    for part in np.split(x, sorted(cuts), axis=1):
        encoder.push(np.ascontiguousarray(part))
        encoder.payload()  # a snapshot; the encoder goes on
    assert encoder.payload() == whole.payload()
    assert encoder.error == whole.error
    assert encoder.n_tokens == 150


@both
@pytest.mark.parametrize("n_threads", [2, 3, 16])
def test_threads_do_not_change_a_block(lossy, n_threads):
    spec = StreamSpec("v", 5, 26)
    x = np.random.default_rng(0).standard_normal((5, 300, 26), dtype=np.float32)
    stream = Stream(lossy(), x, spec)
    encoder = stream.codec.encoder(stream.params, 0)
    encoder.push(x, n_threads)
    assert encoder.payload() == stream.encode(x).payload()
    assert encoder.error == stream.encode(x).error


@both
@quick
@given(
    seed=st.integers(0, 2**32 - 1),
    first=st.sampled_from([0, 2, 512]),
    cut=st.integers(1, 149),
    rel_step=st.sampled_from([4.0, 0.25, 1e-3]),
)
def test_a_decoded_tail_goes_on_as_if_it_had_never_stopped(lossy, seed, first, cut, rel_step):
    x = values(seed=seed)
    stream = Stream(lossy(rel_step=rel_step, sink=4), x)
    whole = stream.encode(x, first)
    before = stream.encode(x[:, :cut], first)
    tail = stream.decode(before.payload(), cut, first)
    resumed = stream.codec.encoder(stream.params, first)
    resumed.resume(tail, before.payload(), before.error)
    resumed.push(np.ascontiguousarray(x[:, cut:]))
    assert resumed.payload() == whole.payload()
    assert resumed.error == whole.error


@both
@quick
@given(
    seed=st.integers(0, 2**32 - 1),
    first=st.sampled_from([0, 2, 512]),
    ends=st.tuples(st.integers(0, 150), st.integers(0, 150)),
)
def test_a_range_of_a_block_is_a_slice_of_it(lossy, seed, first, ends):
    x = values(seed=seed)
    lo, hi = min(ends), max(ends)
    stream = Stream(lossy(), x)
    payload = stream.encode(x, first).payload()
    part = stream.decode(payload, 150, first, first + lo, first + hi)
    np.testing.assert_array_equal(part, stream.decode(payload, 150, first)[:, lo:hi])


@quick
@given(
    seed=st.integers(0, 2**32 - 1),
    sink=st.integers(0, 20),
    sink_div=st.integers(1, 512),
    rel_step=st.sampled_from([4.0, 0.25, 1e-3]),
    kind=st.sampled_from("kv"),
    ar=st.booleans(),
)
def test_codecs_decode_to_the_same_values(seed, sink, sink_div, rel_step, kind, ar):
    """They share the quantiser: only what they make of its residuals differs."""
    x = values(seed=seed)
    spec = StreamSpec(kind, 2, 8)
    asked = {"rel_step": rel_step, "sink": sink, "sink_div": sink_div, "ar": ar}
    stream, other = Stream(TKV1(**asked), x, spec), Stream(KVR1(**asked), x, spec)
    # Their statistics differ; with the same ones, everything else is the same.
    means, rhos = other.params.mean, other.params.rho
    stream.params = replace(stream.params, mean=means, rho=rhos)
    encoder, other_encoder = stream.encode(x), other.encode(x)
    a = stream.decode(encoder.payload(), 150)
    b = other.decode(other_encoder.payload(), 150)
    np.testing.assert_array_equal(a, b)
    assert encoder.error == other_encoder.error


@both
def test_unknown_errors_stay_unknown(lossy):
    x = values()
    stream = Stream(lossy(), x)
    encoder = stream.codec.encoder(stream.params, 0)
    head = stream.encode(x[:, :10]).payload()
    encoder.resume(stream.decode(head, 10), head, ErrorStats.unknown())
    encoder.push(np.ascontiguousarray(x[:, 10:]))
    assert not encoder.error.is_known


@both
def test_the_step_follows_the_policy(lossy):
    x = values(scale=3.0)
    rms = math.sqrt(float(np.mean(x.astype(np.float64) ** 2)))
    for config, asked in (
        (lossy(), rms / 4),
        (lossy(rel_step=0.5), rms / 2),
        (lossy(step=0.1), 0.1),
        (lossy(max_error=0.1), 0.2),
        (lossy(rmse=0.1), 0.1 * math.sqrt(12)),
    ):
        step = Stream(config, x).step
        assert asked * (1 - 1 / 128) < step <= asked


@both
def test_max_error_holds_for_k_given_after_rope(lossy):
    rope = Rope.from_theta(1e4, 8, scaling=1.5)
    spec = StreamSpec("k", 2, 8, rope)
    x = values()
    pre = Stream(lossy(max_error=0.1), x, spec, "pre").step
    post = Stream(lossy(max_error=0.1), x, spec, "post").step
    assert post == pytest.approx(pre / math.sqrt(2) / 1.5, rel=1 / 64)


@both
@pytest.mark.parametrize("bpv", [2.0, 3.5, 6.0])
def test_a_rate_is_met_from_below(lossy, bpv):
    x = values((2, 1000, 8))
    stream = Stream(lossy(bpv=bpv), x)
    rate = 8 * len(stream.encode(x).payload()) / x.size
    assert bpv - 0.15 < rate <= bpv


@both
def test_a_prefill_of_zeros_can_be_coded(lossy):
    x = np.zeros((2, 150, 8), np.float32)
    stream = Stream(lossy(), x)
    later = np.linspace(-50, 50, x.size, dtype=np.float32).reshape(x.shape)
    stream.check(later)
    y = stream.decode(stream.encode(later).payload(), 150)
    assert np.abs(y - later).max() <= stream.step / 2


@both
@pytest.mark.parametrize(
    "fields",
    [
        {"step": 0.0},
        {"step": -1.0},
        {"step": math.nan},
        {"rel_step": math.inf},
        {"bpv": "3"},
        {"step": 1.0, "rel_step": 0.5},
        {"step": 10**400},
        {"step": True},
        {"ar": "yes"},
        {"sink": True},
        {"sink": -1},
        {"sink": 1 << 32},
        {"sink_div": 2.5},
        {"sink_div": 0},
        {"sink_div": 1 << 17},
    ],
)
def test_configurations_that_cannot_be(lossy, fields):
    with pytest.raises(InvalidArgument, match=f"^{lossy.__name__}: "):
        lossy(**fields)


@both
def test_requests_that_values_make_impossible(lossy):
    x = values()
    for config, message in (
        (lossy(step=1e-45), "float32"),
        (lossy(step=1e-9), "too small"),
        (lossy(bpv=0.01), "not reachable"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            Stream(config, x)


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_named(lossy, bad):
    x = values()
    stream = Stream(lossy(), x)
    y = x.copy()
    y[1, 17, 5] = y[1, 30, 0] = bad
    with pytest.raises(InvalidArgument, match=r"head 1, token 117, channel 5 is not finite"):
        stream.check(y, 100)
    with pytest.raises(InvalidArgument, match=r"head 1, token 17, channel 5 is not finite"):
        Stream(lossy(), y)


@both
def test_values_beyond_the_units_are_named_and_the_rest_fits(lossy):
    x = values()
    stream = Stream(lossy(), x)
    limit = (1 << 23) * stream.params.unit
    y = x.copy()
    y[0, 9, 1] = -limit
    with pytest.raises(InvalidArgument, match=r"head 0, token 9, channel 1 is beyond 2\^23 units"):
        stream.check(y)
    y[0, 9, 1] = -limit * 0.999
    y[0, 10, 1] = limit * 0.999
    stream.check(y)
    out = stream.decode(stream.encode(y).payload(), 150)
    # Beyond 2^16 units float32 rounds the product: half an ulp comes on top.
    assert np.abs(out - y).max() <= stream.step / 2 + np.spacing(np.float32(limit)) / 2


@both
def test_channels_are_named_as_users_index_them(lossy):
    spec = StreamSpec("k", 1, 8, Rope.from_theta(1e4, 8, style="interleaved"))
    x = values((1, 150, 8))
    stream = Stream(lossy(), x, spec)
    x[0, 0, 1] = math.nan  # coded channel 1 is the first of pair 1: tensor channel 2
    with pytest.raises(InvalidArgument, match="channel 2 "):
        stream.check(x)


@both
def test_worst_case_is_one(lossy):
    rng = np.random.default_rng(0)
    x = values()
    stream = Stream(lossy(rel_step=8.0), x)
    y = ((1 << 22) * stream.params.unit * rng.choice([-1.0, 1.0], x.shape)).astype(np.float32)
    for tokens in (y, y[:, :1], x[:, :1]):
        bound = stream.codec.worst_case_bytes(stream.params, tokens.shape[1])
        assert len(stream.encode(tokens).payload()) <= bound


@both
@pytest.mark.parametrize(
    ("max_error", "sink_div", "low", "high"),
    [(1e-3, 16, 400, 900), (1e-5, 16, 4, 9), (1e-5, 1, 40, 80), (0.5, 16, -1, 1)],
)
def test_max_error_holds_after_float32_has_rounded(lossy, max_error, sink_div, low, high):
    """Beyond 2^16 units integer times unit is not exact in float32 any more."""
    rng = np.random.default_rng(0)
    x = rng.uniform(low, high, (2, 400, 8)).astype(np.float32)
    stream = Stream(lossy(max_error=max_error, sink=0, sink_div=sink_div), x)
    y = stream.decode(stream.encode(x).payload(), 400)
    error = np.abs(x.astype(np.float64) - y).max()
    assert 0.6 * max_error < error <= max_error


@both
def test_a_bound_below_the_resolution_of_float32_is_refused(lossy):
    x = np.full((2, 150, 8), 1e6, np.float32)
    with pytest.raises(InvalidArgument, match="float32 resolves"):
        Stream(lossy(max_error=0.05), x)


@both
def test_stream_headers_round_trip_and_are_checked(lossy):
    spec = StreamSpec("k", 3, 6)
    x = np.random.default_rng(0).standard_normal((3, 200, 6), dtype=np.float32)
    for ar in (True, False):
        stream = Stream(lossy(ar=ar, sink=300, sink_div=400), x, spec)
        header = stream.codec.pack(stream.params)
        found = stream.codec.unpack(spec, header)
        assert stream.codec.pack(found) == header
        assert (found.step, found.sink, found.sink_div, found.ar) == (stream.step, 300, 400, ar)
        for name in ("mean", "rho", "cls"):
            np.testing.assert_array_equal(getattr(found, name), getattr(stream.params, name))
            assert getattr(found, name).dtype == getattr(stream.params, name).dtype
        for n in range(len(header)):
            with pytest.raises(Truncated):
                stream.codec.unpack(spec, header[:n])
        with pytest.raises(Corrupt, match="bytes for 18 channels"):
            stream.codec.unpack(spec, header + b"\0")
        with pytest.raises(Corrupt, match="3 heads of 6, expected 2 of 6"):
            stream.codec.unpack(StreamSpec("k", 2, 6), header)


@both
@pytest.mark.parametrize(
    ("offset", "new", "error", "message"),
    [
        (0, b"\x02", Unsupported, "version 2"),
        (1, b"\x02", Unsupported, "flags 0x2"),
        (4, b"\0" * 8, Corrupt, "step 0.0"),
        (4, b"\0" * 6 + b"\xf8\x7f", Corrupt, "step nan"),
        (4, b"\0" * 6 + b"\xf0\x7f", Corrupt, "step inf"),
        (4, b"\0" * 7 + b"\xbf", Corrupt, "step -"),
        (4, b"\xff" * 6 + b"\xef\x7f", Corrupt, "over sink_div 16"),
        (13, b"\0", Corrupt, "sink_div 0"),
        (-3, b"\xff", Corrupt, "class out of range"),
    ],
)
def test_stream_headers_that_no_encoder_writes(lossy, offset, new, error, message):
    spec = StreamSpec("v", 1, 2)
    x = np.random.default_rng(0).standard_normal((1, 200, 2), dtype=np.float32)
    codec = codec_for(lossy())
    header = bytearray(codec.pack(Stream(lossy(), x, spec).params))
    offset %= len(header)
    header[offset : offset + len(new)] = new
    with pytest.raises(error, match=f"{lossy.__name__} stream header.*{message}"):
        codec.unpack(spec, header)


@pytest.mark.parametrize(
    "config",
    [
        KVR1(),
        KVR1(max_error=0.1, sink_div=512),
        TKV1(),
        TKV1(bpv=3.0, ar=False, sink=0),
        Raw(),
        Raw("float16"),
        FibQuant(2, 17, raw_heads=(1,)),
    ],
)
def test_configurations_survive_json(config):
    assert config_from_json(config.to_json()) == config
    assert codec_for(config).name == config.codec
    assert codec_by_number(codec_for(config).number) is codec_by_name(config.codec)


def test_unknown_codecs_are_unsupported():
    with pytest.raises(Unsupported, match="codec number 99"):
        codec_by_number(99)
    with pytest.raises(Unsupported, match="'zip'"):
        config_from_json({"codec": "zip"})
    with pytest.raises(InvalidArgument, match="KVR1"):
        codec_for("kvr1")


@both
def test_unknown_fields_are_unsupported(lossy):
    name = lossy.codec
    with pytest.raises(Unsupported, match="frobnicate"):
        config_from_json({"codec": name, "frobnicate": 1})
    with pytest.raises(Corrupt):
        config_from_json({"codec": name, "step": -1})


@both
@pytest.mark.parametrize("step", [np.float32(0.25), np.float64(0.25), 1])
def test_numbers_of_numpy_are_numbers(lossy, step):
    config = lossy(step=step)
    assert type(config.step) is float
    assert config_from_json(config.to_json()) == config


@both
def test_threads_may_meet_in_one_encoder(lossy):
    x = values((2, 8, 8))
    encoder = Stream(lossy(), x).encode(x)

    def work(_):
        for _ in range(50):
            encoder.push(x)
            encoder.payload()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert encoder.n_tokens == 201 * 8
    assert encoder.error.n_values == 201 * x.size
