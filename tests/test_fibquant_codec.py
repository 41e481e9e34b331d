"""FibQuant's blocks: reference and core, ranges, chunks, going on, what is kept raw, damage."""

import functools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from fibquant_books import random_book
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs import FibQuant, Rope, StreamSpec, _core
from kvcodecs.blocks import SIMD_LEVELS
from kvcodecs.codec import codec_by_name, codec_by_number, codec_for
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, NotFound, Truncated, Unsupported
from kvcodecs.fibquant import CODEC, QualityBudget, key_quality, own_probes, value_quality
from kvcodecs.fibquant.encoder import encode_vectors
from kvcodecs.fibquant.payload import REASONS, Vectors, build_payload, parse_payload
from kvcodecs.fibquant.reference import coding as reference
from kvcodecs.frame import ErrorStats
from kvcodecs.plan import Plan, check_payload
from kvcodecs.rope import from_coded
from kvtools.sample import load_sample

quick = settings(deadline=None, max_examples=25)
#: head_dim, block_dim, codebook_size, rotation: every kernel, powers of two and others.
SHAPES = [
    (16, 2, 16, "hadamard"),
    (24, 3, 33, "haar"),
    (24, 4, 32, "hadamard"),
    (16, 8, 40, "haar"),
    (6, 2, 5, "hadamard"),
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def values(heads=3, n=50, d=16, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((heads, n, d)) * rng.uniform(0.2, 3, (heads, 1, d))
    return (x + 2 * rng.standard_normal((heads, 1, d))).astype(np.float32)


def fit(config, x, kind="v", rope=None, book=None, chunks=None):
    heads, _, d = x.shape
    spec = StreamSpec(kind, heads, d, rope)
    if book is None:
        book = random_book(d, config.block_dim, config.codebook_size, config.rotation)
    return CODEC.fit(config, spec, chunks or (lambda: [x]), book=book)


def encode(params, x, first=0, **options):
    encoder = CODEC.encoder(params, first)
    encoder.push(np.ascontiguousarray(x), **options)
    return encoder


def decode(params, payload, n, first=0, lo=0, hi=None, dtype=np.float32, rope=None, **options):
    hi = n if hi is None else hi
    out = np.full((params.spec.heads, hi - lo, params.spec.head_dim), 7, dtype)
    plan = Plan()
    plan.add(
        CODEC, params, payload,
        first_token=first, n_tokens=n, start=first + lo, stop=first + hi,
        out=out, rope=rope, where="here",
    )  # fmt: skip
    plan.run(**options)
    return out


def states_of(params, payload, n):
    spec = params.spec
    vectors = parse_payload(payload, spec.heads * n, params.index_bytes, spec.head_dim)
    return vectors.states.reshape(spec.heads, n)


def of_every_form(config, x):
    """Parameters, tokens and payloads of a block coded, raw, and in parts of both."""
    params = fit(config, x)
    plain = replace(params, first_tokens=0, raw_heads={})
    mixed = x.copy()
    mixed[0, 7] = 0 if params.mean is None else params.mean[: x.shape[2]]
    mixed[2, 9:11] = 1e30
    yield plain, x, encode(plain, x).payload()
    raw = replace(params, raw_heads=dict.fromkeys(range(3), 5))
    yield raw, x, encode(raw, x, 5).payload()
    yield params, mixed, encode(params, mixed).payload()


# -- the second implementation


@every_shape
@pytest.mark.parametrize("axis", ["per_token", "per_channel"])
def test_the_core_does_what_the_reference_does(shape, axis):
    d, k, n, rotation = shape
    x = values(d=d)
    config = FibQuant(k, n, rotation=rotation, axis=axis, raw_heads=(1,))
    for params, given_, payload in of_every_form(config, x):
        keep = params.keep(0, 50)
        u = reference.centred(params, given_)
        want = reference.encode(params.book, u[keep == 0])
        found = encode_vectors(params, given_, keep)
        np.testing.assert_array_equal(found.states[keep == 0], want.states)
        np.testing.assert_array_equal(found.norms[keep == 0], want.norms)
        np.testing.assert_array_equal(found.indices[keep == 0], want.indices)
        coded = reference.decode_block(params, payload, 50)
        for simd in SIMD_LEVELS:
            np.testing.assert_array_equal(
                decode(params, payload, 50, simd=simd, n_threads=2).view(np.uint32),
                coded.view(np.uint32),
            )
        is_raw = states_of(params, payload, 50) > 0
        np.testing.assert_array_equal(coded[is_raw], given_[is_raw])


@every_shape
def test_errors_are_those_of_all_values(shape):
    d, k, n, rotation = shape
    x = values(d=d)
    for params, given_, payload in of_every_form(FibQuant(k, n, rotation=rotation), x):
        encoder = encode(params, given_)
        y = decode(params, encoder.payload(), 50).astype(np.float64)
        difference = np.abs(given_ - y)
        assert encoder.error.max_error == pytest.approx(difference.max(), rel=1e-6)
        assert encoder.error.sum_squares == pytest.approx((difference**2).sum(), rel=1e-9)
        assert encoder.error.n_values == x.size
        assert len(payload) <= CODEC.worst_case_bytes(params, 50)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("style", ["half", "interleaved", "partial"])
def test_k_ranges_orders_and_rotations(dtype, style):
    pairs, rope_style = (5, "half") if style == "partial" else (8, style)
    rope = Rope((1e4 ** -np.linspace(0, 1, pairs)).astype(np.float32), style=rope_style)
    x = values()
    params = fit(FibQuant(2, 16, raw_heads=(2,)), x, "k", rope)
    assert params.mean is not None
    payload = encode(params, x, 3).payload()
    coded = reference.decode_block(params, payload, 50)[:, 3:41]
    for table in (None, rope.table(0, 60)):
        expected = from_coded(coded, params.spec, "pre" if table is None else "post", 6, table)
        for simd in SIMD_LEVELS:
            found = decode(params, payload, 50, 3, 3, 41, dtype, table, simd=simd)
            np.testing.assert_array_equal(found, expected.astype(dtype))


@every_shape
@quick
@given(
    first=st.sampled_from([0, 2, 1 << 40]),
    ends=st.tuples(st.integers(0, 50), st.integers(0, 50)),
    alone=st.integers(0, 49),
)
def test_a_range_of_a_block_is_a_slice_of_it(shape, first, ends, alone):
    params, payload = _range_case(shape)
    whole = decode(params, payload, 50, first)
    for lo, hi in (sorted(ends), (alone, alone + 1)):
        np.testing.assert_array_equal(decode(params, payload, 50, first, lo, hi), whole[:, lo:hi])


@functools.cache
def _range_case(shape):
    d, k, n, rotation = shape
    x = values(d=d)
    x[1, 11:14] = 0
    params = fit(FibQuant(k, n, rotation=rotation, raw_heads=(2,), axis="per_channel"), x)
    return params, encode(params, x).payload()


# -- encoders


@quick
@given(cuts=st.lists(st.integers(0, 50), max_size=6), shape=st.sampled_from(SHAPES))
def test_chunks_and_threads_do_not_change_a_block(cuts, shape):
    d, k, n, rotation = shape
    x = values(d=d)
    x[0, 20] = 0
    params = fit(FibQuant(k, n, rotation=rotation, first_tokens=9), x)
    whole = encode(params, x, 2)
    encoder = CODEC.encoder(params, 2)
    for part in np.split(x, sorted(cuts), axis=1):
        encoder.push(np.ascontiguousarray(part), 3)
        encoder.payload()  # a snapshot; the encoder goes on
    assert encoder.payload() == whole.payload()
    assert encoder.error.max_error == whole.error.max_error
    assert encoder.error.sum_squares == pytest.approx(whole.error.sum_squares, rel=1e-12)
    assert (encoder.n_tokens, encoder.error.n_values) == (50, x.size)


def test_threads_do_not_change_a_large_block():
    x = values(5, 300, 24)
    params = fit(FibQuant(4, 32), x)
    one, many = encode(params, x), encode(params, x, n_threads=3)
    assert (one.payload(), one.error) == (many.payload(), many.error)


@quick
@given(
    cut=st.integers(1, 49),
    more=st.integers(0, 50),
    config=st.sampled_from(
        [
            FibQuant(2, 16, axis="per_channel"),
            FibQuant(2, 16, first_tokens=9, raw_heads=(2,)),
            FibQuant(axis="raw"),
            FibQuant(2, 16, first_tokens=60),
        ]
    ),
)
def test_a_block_goes_on_without_a_value_moving(cut, more, config):
    x = values()
    x[1, 3] = x[1, 40] = 0
    params = fit(config, x)
    whole, before = encode(params, x), encode(params, x[:, :cut])
    # Of a frame that may have more tokens than are wanted.
    payload = encode(params, x[:, : max(cut, more)]).payload()
    resumed = CODEC.encoder(params, 0)
    resumed.resume(decode(params, payload, max(cut, more), hi=cut), payload, before.error)
    assert resumed.payload() == before.payload()
    resumed.push(np.ascontiguousarray(x[:, cut:]))
    assert resumed.payload() == whole.payload()
    assert resumed.error.sum_squares == pytest.approx(whole.error.sum_squares, rel=1e-12)
    assert resumed.error.n_values == x.size


def test_unknown_errors_stay_unknown():
    x = values()
    params = fit(FibQuant(2, 16), x)
    head = encode(params, x[:, :10]).payload()
    encoder = CODEC.encoder(params, 0)
    encoder.resume(decode(params, head, 10), head, ErrorStats.unknown())
    encoder.push(np.ascontiguousarray(x[:, 10:]))
    assert not encoder.error.is_known
    with pytest.raises(Corrupt, match="vectors of 3 heads"):
        CODEC.encoder(params, 0).resume(x[:, :20], head, ErrorStats.none())


def test_kept_tokens_are_raw_for_good():
    x = values()
    params = fit(FibQuant(2, 16, raw_heads=(2,), first_tokens=2), x)
    encoder = encode(params, x[:, :40])
    encoder.keep(np.ascontiguousarray(x[:, 40:44]))
    encoder.push(np.ascontiguousarray(x[:, 44:]))
    payload = encoder.payload()
    states = states_of(params, payload, 50)
    assert (states[:, 40:44] == 1).all()
    assert not states[:2, 44:].any()
    y = decode(params, payload, 50)
    np.testing.assert_array_equal(y[:, 40:44], x[:, 40:44])
    resumed = CODEC.encoder(params, 0)
    resumed.resume(y[:, :42], payload, ErrorStats.none())
    assert (states_of(params, resumed.payload(), 42) == states[:, :42]).all()


def test_an_empty_block_is_one_byte():
    for config in (FibQuant(2, 16), FibQuant(axis="raw")):
        params = fit(config, values())
        assert CODEC.encoder(params, 0).payload() == b"\0"
        assert CODEC.encoder(params, 0).n_tokens == 0


# -- what is kept raw, and what is refused


def test_protected_regions_are_exact_and_say_why():
    x = values()
    x[0, 30] = 0
    x[1, 31] = 1e-9
    x[1, 32] = 1e9
    params = fit(FibQuant(2, 16, axis="per_token", first_tokens=6, raw_heads=(2,)), x)
    payload = encode(params, x, 4).payload()
    states = states_of(params, payload, 50)
    assert (states[:, :2] == 1).all()
    assert (states[2] == 1).all()
    assert (states[0, 30], *states[1, 31:33]) == (3, 4, 4)
    assert np.count_nonzero(states[:2, 2:]) == 3
    y = decode(params, payload, 50, 4)
    np.testing.assert_array_equal(y[states > 0].view(np.uint32), x[states > 0].view(np.uint32))
    assert [REASONS[n] for n in (1, 3, 4)] == [
        "protected_region",
        "encode_fallback:zero norm",
        "encode_fallback:norm leaves float16",
    ]


@pytest.mark.parametrize(
    ("scale", "itemsize"), [(1, 2), (1e30, 2), (None, 4)], ids=["float16", "bfloat16", "float32"]
)
def test_raw_values_take_the_narrowest_exact_type(scale, itemsize):
    x = values()
    if scale is not None:
        factor = ml_dtypes.bfloat16(scale)
        x = (np.maximum(x, 0.1).astype(ml_dtypes.bfloat16) * factor).astype(np.float32)
        x[0, 0, 0] = -0.0
    params = fit(FibQuant(axis="raw"), x)
    payload = encode(params, x).payload()
    assert len(payload) == 3 + itemsize * x.size
    y = decode(params, payload, 50)
    np.testing.assert_array_equal(y.view(np.uint32), x.view(np.uint32))
    assert encode(params, x).error == ErrorStats(0.0, 0.0, x.size)
    assert CODEC.name_of(params) == "fibquant.raw"
    assert codec_by_name("fibquant.raw") is CODEC


def test_layers_that_are_raw_say_protected_and_axes_say_policy():
    x = values()
    config = FibQuant(2, 16, raw_layers=(3,))
    for asked, reason in (
        (config.of_layer(3), "protected_region"),
        (FibQuant(axis="raw"), "raw_axis_policy"),
        (replace(config, axis="raw").of_layer(2), "raw_axis_policy"),
    ):
        params = fit(asked, x)
        assert REASONS[encode(params, x).payload()[1]] == reason
        assert CODEC.needs(CODEC.pack(params)) == ()
        assert CODEC.shared(params) == {}
    assert fit(config.of_layer(2), x).book is not None


def test_without_a_book_only_raw_vectors_are_read():
    x = values()
    coded = fit(FibQuant(2, 16, first_tokens=0), x)
    raw = fit(FibQuant(axis="raw"), x)
    for payload, kind in (
        (encode(coded, x).payload(), KvError),
        (bytes([0]) + bytes(2 * 150), Corrupt),
        (b"", Truncated),
    ):
        with pytest.raises(kind, match="here: "):
            decode(raw, payload, 50)
    infinite = x.copy()
    infinite[2, 9, 3] = np.inf
    payload = encode(raw, infinite).payload()
    with pytest.raises(Corrupt, match=r"here: .* raw value is not finite"):
        decode(raw, payload, 50)
    np.testing.assert_array_equal(decode(raw, payload, 50, hi=9), x[:, :9])


def test_fail_closed_names_the_vector():
    x = values()
    params = fit(FibQuant(2, 16, axis="per_token", on_failure="fail_closed", raw_heads=(0,)), x)
    CODEC.check(params, x, 0)
    for value, reason in ((0, "zero norm"), (1e-9, "norm leaves float16"), (1e9, "norm leaves")):
        y = x.copy()
        y[0, 20] = y[2, 2] = value  # protected: a raw head, a first token
        CODEC.check(params, y, 0)
        y[1, 17] = y[2, 5] = value
        with pytest.raises(InvalidArgument, match=f"head 1, token 117 cannot be coded: {reason}"):
            CODEC.check(params, y, 100)
        CODEC.check(replace(params, fail_closed=False), y, 100)
    # It is in the stream header.
    again = CODEC.unpack(params.spec, CODEC.pack(params), lambda digest: params.book.pack())
    with pytest.raises(InvalidArgument, match="head 1, token 17"):
        CODEC.check(again, y, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_named(bad):
    x = values()
    spec = StreamSpec("k", 3, 16, Rope.from_theta(1e4, 16, style="interleaved"))
    params = fit(FibQuant(2, 16), x, "k", spec.rope)
    y = x.copy()
    y[1, 17, 1] = y[1, 30, 0] = bad
    with pytest.raises(InvalidArgument, match="head 1, token 117, channel 2 is not finite"):
        CODEC.check(params, y, 100)
    with pytest.raises(InvalidArgument, match="head 1, token 17, channel 2 is not finite"):
        fit(FibQuant(2, 16), y, "k", spec.rope)
    with pytest.raises(InvalidArgument, match="token 17, channel 2 is not finite"):
        fit(FibQuant(axis="raw"), y, "k", spec.rope, chunks=lambda: [y[:, :10], y[:, 10:]])


def test_streams_that_cannot_be_coded_are_refused():
    for config, spec, message in (
        (FibQuant(raw_heads=(1, 3)), StreamSpec("v", 3, 16), "raw head 3: there are 3 heads"),
        (FibQuant(), StreamSpec("v", 3, 6), "does not divide"),
        (FibQuant(8, 16), StreamSpec("v", 3, 8), "8 does not divide head_dim 8 into two"),
        (FibQuant(rotation="haar"), StreamSpec("v", 3, 8192), "hadamard"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            CODEC.check_stream(config, spec)
    CODEC.check_stream(FibQuant(axis="raw"), StreamSpec("v", 3, 6))


# -- statistics and the quality budget


@quick
@given(cuts=st.lists(st.integers(0, 600), max_size=6), first=st.sampled_from([0, 4, 290, 400]))
def test_statistics_do_not_depend_on_chunks(cuts, first):
    x = values(2, 600, 4, seed=3)
    config = FibQuant(2, 4, axis="per_channel", first_tokens=first)
    book = random_book(4, 2, 4)
    whole = CODEC.pack(fit(config, x, book=book))
    parts = np.split(x, sorted(cuts), axis=1)
    assert CODEC.pack(fit(config, x, book=book, chunks=lambda: parts)) == whole


def test_statistics_are_mean_and_deviation_without_the_first_tokens():
    x = values(2, 400, 8)
    x[:, :4] += 1000
    params = fit(FibQuant(2, 4, axis="per_channel"), x)
    wide = x[:, 4:].astype(np.float64)
    np.testing.assert_allclose(params.mean, wide.mean(axis=1).ravel(), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(params.scale, np.sqrt(wide.std(axis=1)).ravel(), rtol=1e-3)
    few = fit(FibQuant(2, 4, axis="per_channel"), x[:, :8])
    np.testing.assert_allclose(few.mean, x[:, :8].mean(axis=1).ravel(), rtol=1e-3, atol=1e-3)
    assert fit(FibQuant(2, 4, axis="per_token"), x).mean is None


def test_odd_prefills_have_statistics():
    for x in (
        np.zeros((2, 9, 4), np.float32),
        np.full((2, 1, 4), 1e9, np.float32),
        np.full((2, 9, 4), -1e-20, np.float32),
        values(2, 9, 4) * 1e30,
        values(2, 0, 4),
    ):
        params = fit(FibQuant(2, 4, axis="per_channel"), x)
        assert np.isfinite(params.mean).all()
        assert (params.scale > 0).all()
        later = values(2, 30, 4)
        payload = encode(params, later).payload()
        assert np.isfinite(decode(params, payload, 30)).all()
        assert CODEC.unpack(params.spec, CODEC.pack(params), header_of(params)[1])
    constant = values(1, 50, 4)
    constant[:, :, 2] = 5
    params = fit(FibQuant(2, 4, axis="per_channel"), constant)
    assert 0 < params.scale[2] < 0.1 * params.scale[0]


def test_a_broken_budget_keeps_heads_raw():
    x = values(3, 60, 16)
    x[1] *= 30
    for kind, limit in (("k", "max_logit_mse"), ("v", "max_value_aggregation_mse")):
        config = FibQuant(2, 16, axis="per_token")
        params = fit(config, x, kind)
        y = decode(params, encode(params, x).payload(), 60)
        found = [
            key_quality(own_probes(a), a, b).logit_mse
            if kind == "k"
            else value_quality(a, b).value_aggregation_mse
            for a, b in zip(x, y, strict=True)
        ]
        assert found[1] > 10 * max(found[0], found[2])
        loose = QualityBudget(**{limit: 2 * max(found)})
        assert fit(replace(config, budget=loose), x, kind).raw_heads == {}
        tight = QualityBudget(**{limit: 0.5 * found[1]})
        asked = replace(config, budget=tight, raw_heads=(0,))
        kept = fit(asked, x, kind)
        assert kept.raw_heads == {0: 1, 1: 5}
        parts = [x[:, :10], x[:, 10:17], x[:, 17:]]
        assert fit(asked, x, kind, chunks=lambda parts=parts: parts).raw_heads == kept.raw_heads
        states = states_of(kept, encode(kept, x).payload(), 60)
        assert [REASONS[s] for s in states[:, 50] if s] == ["protected_region", "quality_budget"]
        assert fit(replace(config, budget=QualityBudget()), x, kind).raw_heads == {}
        for closed in (
            replace(config, budget=replace(tight, fallback_on_violation=False)),
            replace(config, budget=tight, on_failure="fail_closed"),
        ):
            with pytest.raises(InvalidArgument, match=f"head 1 breaks the quality budget: {limit}"):
                fit(closed, x, kind)


def test_per_channel_is_much_better_for_k_of_a_model():
    sample = load_sample()
    for k in sample.k:
        x = np.ascontiguousarray(k, np.float32)
        errors = {}
        for axis in ("per_token", "per_channel", "role_aware"):
            params = fit(FibQuant(4, 64, axis=axis), x, "k", book=random_book(64, 4, 64))
            errors[axis] = encode(params, x).error.rms
        assert errors["per_channel"] < 0.6 * errors["per_token"]
        assert errors["role_aware"] == errors["per_channel"]


# -- bytes


@quick
@given(data=st.data())
def test_payloads_come_back(data):
    n = data.draw(st.integers(0, 40))
    states = np.array(data.draw(st.lists(st.sampled_from([0, 0, 1, 3, 5]), min_size=n, max_size=n)))
    states = states.astype(np.uint8)
    rng = np.random.default_rng(n)
    n_raw = int(np.count_nonzero(states))
    vectors = Vectors(
        states,
        rng.integers(0, 1 << 16, n - n_raw, np.uint16),
        rng.integers(0, 256, (n - n_raw, 3), np.uint8),
        rng.standard_normal((n_raw, 4), np.float32),
    )
    payload = build_payload(vectors)
    for count in (n, None) if n else (n,):
        for a, b in zip(parse_payload(payload, count, 3, 4), vectors, strict=True):
            np.testing.assert_array_equal(a, b)


def kind_of(function, *arguments):
    """Return the kind of error of a call, None if there is none."""
    try:
        function(*arguments)
    except (Truncated, Corrupt, Unsupported) as error:
        return type(error)
    return None


KINDS = {0: None, 1: Truncated, 2: Corrupt, 3: Unsupported}


def test_damaged_payloads_are_errors_the_same_in_both_parsers():
    x = values(3, 12)
    rng = np.random.default_rng(0)
    for config in (FibQuant(2, 16), FibQuant(2, 16, axis="per_channel", raw_heads=(1,))):
        for params, _, payload in of_every_form(config, x):
            sizes = 36, params.index_bytes, 16
            for n in range(len(payload)):
                assert kind_of(parse_payload, payload[:n], *sizes) is Truncated
                assert _core.fib_check_payload(payload[:n], *sizes) == 1
            with pytest.raises(Corrupt, match="here: "):
                decode(params, payload + b"\0", 12)
            for at in [*range(min(30, len(payload))), *rng.integers(0, len(payload), 40)]:
                flipped = bytearray(payload)
                flipped[at] ^= 1 << rng.integers(8)
                found = kind_of(parse_payload, flipped, *sizes)
                assert KINDS[_core.fib_check_payload(flipped, *sizes)] is found
                assert kind_of(check_payload, CODEC, params, flipped, 0, 12, "here") is found
                done = kind_of(decode, params, flipped, 12)
                assert done in ((found,) if found else (None, Corrupt))


def test_indices_beyond_the_codewords_are_damage():
    x = values(1, 4, 6)
    params = fit(FibQuant(2, 5, first_tokens=0), x)
    payload = bytearray(encode(params, x).payload())
    assert params.index_bytes == 2  # 9 bits, and 7 that are 0
    good = bytes(payload)
    for at, bit in ((9, 7), (10, 1)):  # an index of 7, and a bit behind the indices
        payload[:] = good
        payload[at] |= 0b111 if bit == 7 else 1 << bit
        with pytest.raises(Corrupt, match=r"here: .*does not decode"):
            decode(params, bytes(payload), 4)
        np.testing.assert_array_equal(
            decode(params, bytes(payload), 4, lo=1), decode(params, good, 4, lo=1)
        )


def header_of(params, book=None):
    book = params.book if book is None else book
    return CODEC.pack(params), lambda digest: book.pack()


def test_stream_headers_come_back():
    x = values()
    for config in (
        FibQuant(2, 16),
        FibQuant(2, 16, axis="per_channel", raw_heads=(0, 2), first_tokens=300),
        FibQuant(2, 16, on_failure="fail_closed", first_tokens=0),
        FibQuant(axis="raw"),
    ):
        params = fit(config, x)
        header = CODEC.pack(params)
        wanted = []

        def shared(digest, params=params, wanted=wanted):
            wanted.append(digest)
            return params.book.pack()

        found = CODEC.unpack(params.spec, header, shared)
        assert CODEC.pack(found) == header
        assert tuple(wanted) == CODEC.needs(header) == tuple(CODEC.shared(params))
        assert CODEC.name_of(found) == CODEC.name_of(params)
        assert codec_by_name(CODEC.name_of(found)) is CODEC
        np.testing.assert_array_equal(found.keep(1, 7), params.keep(1, 7))
        payload = encode(found, x).payload()
        assert payload == encode(params, x).payload()
        np.testing.assert_array_equal(decode(found, payload, 50), decode(params, payload, 50))
        for n in range(len(header)):
            with pytest.raises(Truncated, match="FibQuant stream header"):
                CODEC.unpack(params.spec, header[:n], shared)
        with pytest.raises(Corrupt, match="bytes, expected"):
            CODEC.unpack(params.spec, header + b"\0", shared)
        with pytest.raises(Corrupt, match="3 heads of 16, expected 2 of 16"):
            CODEC.unpack(StreamSpec("v", 2, 16), header, shared)


@pytest.mark.parametrize(
    ("offset", "new", "error", "message"),
    [
        (0, b"\0", Corrupt, "version 0"),
        (0, b"\2", Unsupported, "version 2"),
        (1, b"\x08", Unsupported, "flags 0x8"),
        (1, b"\3", Corrupt, "statistics of channels"),
        (2, b"\4", Corrupt, "4 heads of 4"),
        (4, b"\0", Corrupt, "another digest"),
        (40, b"\0", Corrupt, "raw head 0 of 3, not in order"),
        (40, b"\3", Corrupt, "raw head 3 of 3"),
        (39, b"\0", Unsupported, "reason 0"),
        (41, b"\6", Unsupported, "reason 6"),
        (42, b"\0\x7c", Corrupt, "mean that is not finite"),
        (-2, b"\0\0", Corrupt, "scale"),
        (-2, b"\0\x80", Corrupt, "scale"),
        (-2, b"\1\xfc", Corrupt, "not finite"),
    ],
)
def test_stream_headers_that_no_encoder_writes(offset, new, error, message):
    params = fit(FibQuant(2, 4, axis="per_channel", raw_heads=(0, 1)), values(d=4))
    header, shared = header_of(params)
    header = bytearray(header)
    assert header[36:42] == bytes([4, 2, 0, 1, 1, 1])
    offset %= len(header)
    header[offset : offset + len(new)] = new
    with pytest.raises(error, match=f"FibQuant .*{message}"):
        CODEC.unpack(params.spec, header, shared)


def test_headers_flipped_anywhere_are_errors_or_read():
    params = fit(FibQuant(2, 4, axis="per_channel", raw_heads=(0, 1)), values(d=4))
    header, shared = header_of(params)
    for at in range(len(header)):
        for bit in range(8):
            flipped = bytearray(header)
            flipped[at] ^= 1 << bit
            kind_of(CODEC.unpack, params.spec, flipped, shared)


def test_the_book_is_the_one_that_the_header_names():
    params = fit(FibQuant(2, 16), values(), book=random_book(16, 2, 16, seed=8))
    header, _ = header_of(params)
    with pytest.raises(NotFound, match="shared object"):
        CODEC.unpack(params.spec, header)
    with pytest.raises(Corrupt, match="digest"):
        CODEC.unpack(params.spec, header, lambda _: random_book(16, 2, 16, seed=9).pack())
    other = random_book(24, 2, 16)
    header = header[:4] + other.digest + header[36:]
    with pytest.raises(Corrupt, match="for heads of 24, expected 16"):
        CODEC.unpack(params.spec, header, lambda _: other.pack())


def test_the_registry_has_it():
    assert codec_by_number(4) is codec_by_name("fibquant") is codec_for(FibQuant()) is CODEC
    assert codec_by_name("fibquant.4x256") is CODEC
    for name in ("fibquant.1x16", "fibquant.4", "fibquant.q8_0"):
        with pytest.raises(Unsupported, match="unknown"):
            codec_by_name(name)
    params = fit(FibQuant(2, 16), values())
    assert (CODEC.name_of(params), CODEC.step(params)) == ("fibquant.2x16", None)


def test_the_worked_example_of_the_format():
    """FORMAT.md section 13."""
    book = random_book(4, 2, 4)
    codewords = np.array([[0.5, 0.5], [0.5, 0], [0, -0.5], [-0.5, 0]], np.float32)
    book = replace(book, rotation_data=np.ones((2, 4), np.float32), codewords=codewords)
    x = np.array([[[1, 2, 3, 4], [1, 0, 0, -1], [-0.25, 0, 0.25, 0.25]]], np.float32)
    params = fit(FibQuant(2, 4, axis="per_token", first_tokens=1), x, book=book)
    header = CODEC.pack(params)
    assert (header[:4].hex(), header[36:].hex()) == ("01000104", "0100")
    payload = bytes.fromhex("02 01 000101 01 00400038 0903 003c004000420044")
    want = np.float32([[[1, 2, 3, 4], [1, 0, 0, -1], [-0.25, 0, 0.25, 0.25]]])
    np.testing.assert_array_equal(decode(params, payload, 3), want)
    np.testing.assert_array_equal(reference.decode_block(params, payload, 3), want)
