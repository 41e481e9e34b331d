"""TKV1 as sessions use it: steps, bounds, refusals, and blocks that can be taken up again."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs.codec import codec_by_number, codec_for, config_from_json
from kvcodecs.errors import Corrupt, InvalidArgument, Unsupported
from kvcodecs.frame import ErrorStats
from kvcodecs.plan import Plan
from kvcodecs.raw import Raw
from kvcodecs.rope import Rope
from kvcodecs.spec import StreamSpec
from kvcodecs.tkv1 import CODEC, TKV1, prior_table

quick = settings(deadline=None, max_examples=60)
V = StreamSpec("v", 2, 8)


def values(shape=(2, 150, 8), seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).cumsum(axis=1) * 0.2 + 2 * rng.standard_normal((shape[0], 1, 8))
    return (x * scale).astype(np.float32)


def fit(x, config=TKV1(), spec=V, **kw):  # noqa: B008
    return CODEC.fit(config, spec, lambda: [x], **kw)


def encode(params, x, first_token=0):
    encoder = CODEC.encoder(params, first_token)
    encoder.push(np.ascontiguousarray(x))
    return encoder


def decode(params, payload, n_tokens, first_token=0):
    out = np.empty((params.spec.heads, n_tokens, params.spec.head_dim), np.float32)
    plan = Plan()
    plan.add(
        CODEC,
        params,
        payload,
        first_token=first_token,
        n_tokens=n_tokens,
        start=first_token,
        stop=first_token + n_tokens,
        out=out,
    )
    plan.run()
    return out


def test_the_prior_table_is_the_frozen_one():
    table = prior_table()
    digest = hashlib.sha256(table.astype("<u4").tobytes()).hexdigest()
    assert digest == "c11c735091c359b11e4f6885cc015624f32ee25b376eb9b658a55e6f9935453d"


def test_no_model_of_the_prior_can_reach_the_clamp():
    """The core leaves the clamp to [32, 65504] out: see model_probability in lane.hpp."""
    fast, slow = prior_table() & 0xFFFF, prior_table() >> 16
    for part in (fast, slow):
        assert part.min() >= 64
        assert part.max() <= 65472

    def limits(start, shift):
        low = high = start
        while low > low - (low >> shift) or high < high + ((65536 - high) >> shift):
            low, high = low - (low >> shift), high + ((65536 - high) >> shift)
        return low, high

    reach = [limits(start, shift) for start in (64, 65472) for shift in (4, 7)]
    assert (min(limits(64, 4)[0], 15) + limits(64, 7)[0]) >> 1 >= 32
    assert (limits(65472, 4)[1] + limits(65472, 7)[1]) >> 1 <= 65504
    assert all(low > 0 and high < 65536 for low, high in reach)


@quick
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-30, 1e-4, 1.0, 1e4, 1e30]),
    rel_step=st.sampled_from([2.0, 0.5, 0.25, 0.01]),
    sink=st.integers(0, 200),
    sink_div=st.integers(1, 100),
    first=st.sampled_from([0, 2, 10_000, 1 << 40]),
)
def test_every_value_is_within_half_a_step(seed, scale, rel_step, sink, sink_div, first):
    x = values(seed=seed, scale=scale)
    x[0, 3, 2] = x[1, 40, 5] * 50
    params = fit(x, TKV1(rel_step=rel_step, sink=sink, sink_div=sink_div))
    encoder = encode(params, x, first)
    y = decode(params, encoder.payload(), 150, first)
    error = np.abs(x.astype(np.float64) - y)
    bound = np.full(150, params.step / 2)
    bound[first + np.arange(150) < sink] /= sink_div
    assert (error <= bound[:, None]).all()  # exactly: no tolerance
    assert encoder.error.max_error == error.max()
    assert encoder.error.n_values == x.size
    rms = math.sqrt((error**2).mean())
    assert encoder.error.rms == pytest.approx(rms, rel=0.01, abs=params.unit / 256)


@quick
@given(
    seed=st.integers(0, 2**32 - 1),
    first=st.sampled_from([0, 3, 512]),
    cuts=st.lists(st.integers(1, 149), max_size=6, unique=True),
)
def test_chunks_do_not_change_a_block(seed, first, cuts):
    x = values(seed=seed)
    params = fit(x)
    whole = encode(params, x, first)
    encoder = CODEC.encoder(params, first)
    for part in np.split(x, sorted(cuts), axis=1):
        encoder.push(np.ascontiguousarray(part))
        encoder.payload()  # a snapshot; the encoder goes on
    assert encoder.payload() == whole.payload()
    assert encoder.error == whole.error
    assert encoder.n_tokens == 150


@quick
@given(
    seed=st.integers(0, 2**32 - 1),
    first=st.sampled_from([0, 2, 512]),
    cut=st.integers(1, 149),
    rel_step=st.sampled_from([4.0, 0.25, 1e-3]),
)
def test_a_decoded_tail_goes_on_as_if_it_had_never_stopped(seed, first, cut, rel_step):
    x = values(seed=seed)
    params = fit(x, TKV1(rel_step=rel_step, sink=4))
    whole = encode(params, x, first)
    before = encode(params, x[:, :cut], first)
    tail = decode(params, before.payload(), cut, first)
    resumed = encode(params, tail, first)
    resumed.resume(before.error)
    resumed.push(np.ascontiguousarray(x[:, cut:]))
    assert resumed.payload() == whole.payload()
    assert resumed.error == whole.error


def test_unknown_errors_stay_unknown():
    x = values()
    params = fit(x)
    encoder = encode(params, x[:, :10])
    encoder.resume(ErrorStats.unknown())
    encoder.push(np.ascontiguousarray(x[:, 10:]))
    assert not encoder.error.is_known


def test_the_step_follows_the_policy():
    x = values(scale=3.0)
    rms = math.sqrt(float(np.mean(x.astype(np.float64) ** 2)))
    for config, asked in (
        (TKV1(), rms / 4),
        (TKV1(rel_step=0.5), rms / 2),
        (TKV1(step=0.1), 0.1),
        (TKV1(max_error=0.1), 0.2),
        (TKV1(rmse=0.1), 0.1 * math.sqrt(12)),
    ):
        step = CODEC.step(fit(x, config))
        assert asked * (1 - 1 / 128) < step <= asked


def test_max_error_holds_for_k_given_after_rope():
    rope = Rope.from_theta(1e4, 8, scaling=1.5)
    spec = StreamSpec("k", 2, 8, rope)
    x = values()
    pre = CODEC.step(fit(x, TKV1(max_error=0.1), spec, k_state="pre"))
    post = CODEC.step(fit(x, TKV1(max_error=0.1), spec, k_state="post"))
    assert post == pytest.approx(pre / math.sqrt(2) / 1.5, rel=1 / 64)


@pytest.mark.parametrize("bpv", [2.0, 3.5, 6.0])
def test_a_rate_is_met_from_below(bpv):
    x = values((2, 1000, 8))
    params = fit(x, TKV1(bpv=bpv))
    rate = 8 * len(encode(params, x).payload()) / x.size
    assert bpv - 0.15 < rate <= bpv


def test_a_prefill_of_zeros_can_be_coded():
    x = np.zeros((2, 150, 8), np.float32)
    params = fit(x)
    later = np.linspace(-50, 50, x.size, dtype=np.float32).reshape(x.shape)
    CODEC.check(params, later, 0)
    y = decode(params, encode(params, later).payload(), 150)
    assert np.abs(y - later).max() <= params.step / 2


@pytest.mark.parametrize(
    "fields",
    [
        {"step": 0.0},
        {"step": -1.0},
        {"step": math.nan},
        {"rel_step": math.inf},
        {"bpv": "3"},
        {"step": 1.0, "rel_step": 0.5},
        {"sink": -1},
        {"sink_div": 0},
        {"sink_div": 1 << 17},
        {"lane_channels": 3},
        {"lane_channels": -2},
    ],
)
def test_configurations_that_cannot_be(fields):
    with pytest.raises(InvalidArgument):
        TKV1(**fields)


def test_requests_that_values_make_impossible():
    x = values()
    for config, message in (
        (TKV1(lane_channels=6), "divisor"),
        (TKV1(step=1e-45), "float32"),
        (TKV1(step=1e-9), "too small"),
        (TKV1(bpv=0.01), "not reachable"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            fit(x, config)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_named(bad):
    x = values()
    params = fit(x)
    y = x.copy()
    y[1, 17, 5] = y[1, 30, 0] = bad
    with pytest.raises(InvalidArgument, match=r"head 1, token 117, channel 5 is not finite"):
        CODEC.check(params, y, 100)
    with pytest.raises(InvalidArgument, match=r"head 1, token 17, channel 5 is not finite"):
        fit(y)


def test_values_beyond_the_units_are_named_and_the_rest_fits():
    x = values()
    params = fit(x)
    limit = (1 << 23) * params.unit
    y = x.copy()
    y[0, 9, 1] = -limit
    with pytest.raises(InvalidArgument, match=r"head 0, token 9, channel 1 is beyond 2\^23 units"):
        CODEC.check(params, y, 0)
    y[0, 9, 1] = -limit * 0.999
    y[0, 10, 1] = limit * 0.999
    CODEC.check(params, y, 0)
    out = decode(params, encode(params, y).payload(), 150)
    # Beyond 2^16 units float32 rounds the product: half an ulp comes on top.
    assert np.abs(out - y).max() <= params.step / 2 + np.spacing(np.float32(limit)) / 2


def test_channels_are_named_as_users_index_them():
    spec = StreamSpec("k", 1, 8, Rope.from_theta(1e4, 8, style="interleaved"))
    x = values((1, 150, 8))
    params = CODEC.fit(TKV1(), spec, lambda: [x])
    x[0, 0, 1] = math.nan  # coded channel 1 is the first of pair 1: tensor channel 2
    with pytest.raises(InvalidArgument, match="channel 2 "):
        CODEC.check(params, x, 0)


def test_worst_case_is_one():
    rng = np.random.default_rng(0)
    x = values()
    params = fit(x, TKV1(rel_step=8.0))
    y = ((1 << 22) * params.unit * rng.choice([-1.0, 1.0], x.shape)).astype(np.float32)
    assert len(encode(params, y).payload()) <= CODEC.worst_case_bytes(params, 150)
    assert len(encode(params, x[:, :1]).payload()) <= CODEC.worst_case_bytes(params, 1)


@pytest.mark.parametrize("config", [TKV1(), TKV1(bpv=3.0, ar=False, sink=0), Raw(), Raw("float16")])
def test_configurations_survive_json(config):
    assert config_from_json(config.to_json()) == config
    assert codec_for(config).name == config.codec


def test_unknown_codecs_are_unsupported():
    with pytest.raises(Unsupported, match="codec number 99"):
        codec_by_number(99)
    with pytest.raises(Unsupported, match="'zip'"):
        config_from_json({"codec": "zip"})
    with pytest.raises(Unsupported, match="frobnicate"):
        config_from_json({"codec": "tkv1", "frobnicate": 1})
    with pytest.raises(Corrupt):
        config_from_json({"codec": "tkv1", "step": -1})
    with pytest.raises(InvalidArgument, match="TKV1"):
        codec_for("tkv1")


@pytest.mark.parametrize(
    ("max_error", "sink_div", "low", "high"),
    [(1e-3, 16, 400, 900), (1e-5, 16, 4, 9), (1e-5, 1, 40, 80), (0.5, 16, -1, 1)],
)
def test_max_error_holds_after_float32_has_rounded(max_error, sink_div, low, high):
    """Beyond 2^16 units integer times unit is not exact in float32 any more."""
    rng = np.random.default_rng(0)
    x = rng.uniform(low, high, (2, 400, 8)).astype(np.float32)
    params = fit(x, TKV1(max_error=max_error, sink=0, sink_div=sink_div))
    y = decode(params, encode(params, x).payload(), 400)
    error = np.abs(x.astype(np.float64) - y).max()
    assert 0.6 * max_error < error <= max_error


def test_a_bound_below_the_resolution_of_float32_is_refused():
    x = np.full((2, 150, 8), 1e6, np.float32)
    with pytest.raises(InvalidArgument, match="float32 resolves"):
        fit(x, TKV1(max_error=0.05))


@pytest.mark.parametrize("step", [np.float32(0.25), np.float64(0.25), 1])
def test_numbers_of_numpy_are_numbers(step):
    config = TKV1(step=step)
    assert type(config.step) is float
    assert config_from_json(config.to_json()) == config


@pytest.mark.parametrize(
    "fields", [{"step": 10**400}, {"step": True}, {"ar": "yes"}, {"sink": True}, {"sink_div": 2.5}]
)
def test_fields_of_wrong_types(fields):
    with pytest.raises(InvalidArgument):
        TKV1(**fields)
