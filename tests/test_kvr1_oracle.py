"""The core's KVR1 against the readable one: the same bytes, the same values, the same refusals."""

from dataclasses import replace
from functools import partial
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs import _core
from kvcodecs.blocks import SIMD_LEVELS
from kvcodecs.errors import Corrupt, KvError, Truncated
from kvcodecs.kvr1 import CODEC, KVR1, KVR1Params
from kvcodecs.kvr1 import reference as ref
from kvcodecs.plan import Plan
from kvcodecs.spec import StreamSpec

thorough = settings(deadline=None, max_examples=150)


@st.composite
def streams(draw, max_tokens=12):
    """Draw parameters, a block and its first token; statistics need not fit the values."""
    heads = draw(st.sampled_from([1, 2, 3, 5]))
    head_dim = 2 * draw(st.sampled_from([1, 2, 8, 15, 16, 17, 24, 32]))
    n = draw(st.integers(1, max_tokens))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.normal(0, rng.uniform(0.1, 5, head_dim), (heads, n, head_dim)).cumsum(axis=1)
    x[rng.random(x.shape) < 0.05] *= draw(st.sampled_from([1, 50, 2000]))
    params = ref.Params(
        heads,
        head_dim,
        step=draw(st.sampled_from([64.0, 1.0, 0.3, 2.0**-9])),
        sink=draw(st.integers(0, 6)),
        sink_div=draw(st.sampled_from([1, 2, 7, 16, 512])),
        ar=draw(st.booleans()),
    )
    # Below 2^23 units, as codecs see to.
    x = np.clip(x, -(2.0**22) * params.unit, 2.0**22 * params.unit).astype(np.float32)
    params = ref.fit(params, x)
    if draw(st.booleans()):
        lowest, top = draw(st.sampled_from([(0, 12), (0, 40), (20, 36), (0, 87), (80, 87)]))
        classes = rng.integers(lowest, top + 1, params.n_components).tolist()
        params = replace(params, classes=tuple(classes))
    return params, x, draw(st.integers(0, 6))


def fast_params(p, kind="v"):
    """Return the core's parameters for the reference's."""
    return KVR1Params(
        StreamSpec(kind, p.heads, p.head_dim),
        p.step,
        p.sink,
        p.sink_div,
        p.ar,
        np.array(p.mu, np.int32),
        np.array(p.rho, np.uint8),
        np.array(p.classes, np.uint8),
    )


def decode(params, payload, first, n_tokens, simd, start=None, stop=None, dtype=np.float32):
    start, stop = first if start is None else start, first + n_tokens if stop is None else stop
    out = np.full((params.spec.heads, stop - start, params.spec.head_dim), np.nan, dtype)
    plan = Plan()
    where = {"first_token": first, "n_tokens": n_tokens, "start": start, "stop": stop}
    plan.add(CODEC, params, payload, out=out, **where)
    plan.run(1, simd)
    return out


def encoder_of(fast, first, wide):
    """Return the codec's encoder, with AVX-512 or without."""
    make = _core.kvr1_encoder
    with mock.patch.object(_core, "kvr1_encoder", partial(make, wide=wide)):
        return CODEC.encoder(fast, first)


@pytest.mark.parametrize("wide", [True, False])
@thorough
@given(streams(), st.integers(0, 12))
def test_encoding_gives_the_same_bytes(wide, stream, cut):
    params, x, first = stream
    payload, values = ref.encode_block(params, x, first)
    encoder = encoder_of(fast_params(params), first, wide)
    for part in (x[:, :cut], x[:, cut:]):
        encoder.push(np.ascontiguousarray(part))
    assert encoder.payload() == payload
    error = np.abs(ref.floats(params, values).astype(np.float64) - x)
    assert encoder.error.max_error == error.max()
    assert len(payload) <= CODEC.worst_case_bytes(fast_params(params), x.shape[1])


@pytest.mark.parametrize("simd", SIMD_LEVELS)
@thorough
@given(streams(), st.data())
def test_decoding_gives_the_same_bits(simd, stream, data):
    params, x, first = stream
    n = x.shape[1]
    payload, values = ref.encode_block(params, x, first)
    whole = ref.floats(params, values)
    fast = fast_params(params)
    assert decode(fast, payload, first, n, simd).tobytes() == whole.tobytes()
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    part = decode(fast, payload, first, n, simd, first + start, first + stop)
    assert part.tobytes() == whole[:, start:stop].tobytes()
    for dtype in (np.float16, ml_dtypes.bfloat16):
        with np.errstate(over="ignore"):
            narrow = whole.astype(dtype)
        if np.isfinite(narrow.astype(np.float32)).all():
            found = decode(fast, payload, first, n, simd, dtype=dtype)
            assert found.tobytes() == narrow.tobytes()


def check_outcome(params, payload, first, n, stop):
    """Assert that all decoders give the same values, or an error."""
    try:
        expected = ref.floats(params, ref.decode_block(params, payload, first, n, stop)).tobytes()
    except KvError:
        expected = None
    fast = fast_params(params)
    found = []
    for simd in SIMD_LEVELS:
        try:
            found.append(decode(fast, payload, first, n, simd, stop=first + stop).tobytes())
        except (Corrupt, Truncated):
            found.append(None)
    assert len(set(found)) == 1
    assert found[0] == expected


@settings(deadline=None, max_examples=100)
@given(streams(max_tokens=4), st.integers(0, 2**32 - 1))
def test_damage_has_the_same_outcome(stream, seed):
    params, x, first = stream
    n = x.shape[1]
    payload, _ = ref.encode_block(params, x, first)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        bad = bytearray(payload)
        for at in rng.integers(0, len(bad), rng.integers(1, 4)):
            bad[at] = rng.integers(0, 256)
        if rng.random() < 0.3:
            del bad[129 + int(rng.integers(0, len(bad) - 128)) // 2 * 2 :]
        check_outcome(params, bytes(bad), first, n, int(rng.integers(1, n + 1)))


@settings(deadline=None, max_examples=100)
@given(streams(max_tokens=4), st.binary(max_size=200), st.integers(0, 2**32 - 1))
def test_noise_has_the_same_outcome(stream, tail, seed):
    params, x, first = stream
    rng = np.random.default_rng(seed)
    states = rng.integers(1 << 16, 1 << 32, 32, np.uint32).tobytes()
    payload = bytes([int(rng.integers(0, 4))]) + states + tail
    for stop in range(1, x.shape[1] + 1):
        check_outcome(params, payload, first, x.shape[1], stop)


@settings(deadline=None, max_examples=60)
@given(streams())
def test_fitting_gives_the_same_header(stream):
    params, x, _ = stream
    spec = StreamSpec("k", params.heads, params.head_dim)
    asked = KVR1(step=params.step, sink=params.sink, sink_div=params.sink_div, ar=params.ar)
    fast = CODEC.fit(asked, spec, lambda: [x])
    expected = ref.fit(replace(params, step=fast.step), x)  # the step gets a short unit
    header = ref.pack_header(expected)
    assert CODEC.pack(fast) == header
    assert ref.parse_header(header) == expected
    assert CODEC.pack(CODEC.unpack(spec, header)) == header


@pytest.mark.parametrize("n_tokens", [1, 2, 127, 128, 254, 255, 256, 300])
def test_the_longest_bare_ends(n_tokens):
    """Zeros of the narrowest class: hundreds of steps fit into the states."""
    params = ref.fit(ref.Params(1, 34, 1.0), np.zeros((1, 1, 34), np.float32))
    x = np.zeros((1, n_tokens, 34), np.float32)
    payload, _ = ref.encode_block(params, x, 0)
    assert payload[0] == min(2 * n_tokens, 255)
    encoder = CODEC.encoder(fast_params(params), 0)
    encoder.push(x)
    assert encoder.payload() == payload
    for simd in SIMD_LEVELS:
        assert not decode(fast_params(params), payload, 0, n_tokens, simd).any()
