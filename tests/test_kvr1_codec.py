"""What only KVR1 has: classes, limits, payloads. `test_lossy_codecs` has what codecs share."""

import math

import numpy as np
import pytest
from kvcodecs.codec import codec_by_number
from kvcodecs.errors import Corrupt, InvalidArgument, Truncated
from kvcodecs.kvr1 import CODEC, KVR1
from kvcodecs.kvr1.tables import MAX_SINK_DIV, N_CLASSES, frequencies, sink_classes, table_of
from kvcodecs.plan import Plan
from kvcodecs.spec import StreamSpec

SPEC = StreamSpec("v", 2, 20)


def fit(x, spec=SPEC, **fields):
    return CODEC.fit(KVR1(**fields), spec, lambda: [x])


def encode(params, x):
    encoder = CODEC.encoder(params, 0)
    encoder.push(x)
    return encoder.payload()


def decode(params, payload, n_tokens, stop=None):
    stop = n_tokens if stop is None else stop
    out = np.empty((params.spec.heads, stop, params.spec.head_dim), np.float32)
    plan = Plan()
    plan.add(CODEC, params, payload, first_token=0, n_tokens=n_tokens, start=0, stop=stop, out=out)
    plan.run()
    return out


def values(n_tokens=200, spec=SPEC, seed=0):
    shape = (spec.heads, n_tokens, spec.head_dim)
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def test_it_is_number_2():
    assert codec_by_number(2) is CODEC
    assert (CODEC.number, CODEC.name) == (2, "kvr1")


def test_configurations():
    assert KVR1() == KVR1(rel_step=0.25, sink=4, sink_div=16, ar=True)
    KVR1(sink_div=512)
    with pytest.raises(InvalidArgument, match="KVR1: sink_div 513 is not 1 to 512"):
        KVR1(sink_div=513)
    with pytest.raises(TypeError):
        KVR1(lane_channels=2)


def test_the_classes_of_sinks_are_rounded_logarithms():
    for sink_div in range(1, MAX_SINK_DIV + 1):
        assert sink_classes(sink_div) == round(4 * math.log2(sink_div))


def test_every_table_can_escape_and_none_is_one_symbol():
    assert frequencies().shape == (36, 64)
    assert (frequencies().sum(axis=1) == 2048).all()
    assert frequencies()[:, 0].min() >= 1
    assert frequencies().max() <= 2047
    assert {table_of(c) for c in range(N_CLASSES)} == set(range(36))


def test_classes_follow_the_spread_in_steps():
    spec = StreamSpec("k", 1, 8)
    x = values(4000, spec) * np.float32(2.0) ** np.arange(8, dtype=np.float32)
    params = fit(x, spec, step=1.0, ar=False)
    # A spread of one step is class 12, an octave four classes; pairs of K do not share theirs.
    np.testing.assert_array_equal(params.cls, 12 + 4 * np.arange(8))


@pytest.mark.parametrize("cls", [88, 255])
def test_classes_beyond_the_tables_are_corrupt(cls):
    params = fit(values())
    header = bytearray(CODEC.pack(params))
    header[-SPEC.channels // 2 - 1] = cls
    with pytest.raises(Corrupt, match="class out of range"):
        CODEC.unpack(SPEC, header)
    header[-SPEC.channels // 2 - 1] = 87
    assert CODEC.unpack(SPEC, header).cls[-1] == 87


def test_a_finer_sink_than_tables_allow_is_corrupt():
    header = CODEC.pack(fit(values(), sink_div=512))
    at = header.index(b"\x80\x04", 12)
    with pytest.raises(Corrupt, match="sink_div 513"):
        CODEC.unpack(SPEC, header[:at] + b"\x81\x04" + header[at + 2 :])


def test_payloads_of_impossible_lengths():
    x = values()
    params = fit(x)
    payload = encode(params, x)
    for n in (0, 1, 127, 128):
        with pytest.raises(Truncated):
            decode(params, payload[:n], 200)
    for bad in (payload[:-1], payload + b"\0"):
        with pytest.raises(Corrupt, match="half a word"):
            decode(params, bad, 200)


def test_every_truncation_and_every_longer_payload_is_an_error():
    x = values(20)
    params = fit(x)
    payload = encode(params, x)
    for n in range(len(payload)):
        with pytest.raises((Corrupt, Truncated)):
            decode(params, payload[:n], 20)
    with pytest.raises(Corrupt):
        decode(params, payload + b"\0\0", 20)
    for n_tokens in (1, 19, 21, 200):
        with pytest.raises((Corrupt, Truncated)):
            decode(params, payload, n_tokens)


def test_damage_is_an_error_or_other_values():
    """Frames have a checksum; without one a flip must do no harm, and most do not decode.

    What stands in low bits is another value, and nothing else notices.
    """
    x = values(20)
    params = fit(x)
    payload = encode(params, x)
    rng = np.random.default_rng(0)
    n_found = 0
    for at in rng.integers(0, 8 * len(payload), 400):
        bad = bytearray(payload)
        bad[at // 8] ^= 1 << at % 8
        try:
            decode(params, bad, 20)
        except (Corrupt, Truncated):
            n_found += 1
    assert n_found > 300


def test_a_block_without_tokens():
    params = fit(values())
    payload = encode(params, np.empty((2, 0, 20), np.float32))
    assert payload == bytes(1) + 32 * (1 << 16).to_bytes(4, "little")
    assert decode(params, payload, 0).shape == (2, 0, 20)


def test_a_few_tokens_need_no_words():
    """Bare steps: what fits into the states costs nothing more."""
    x = np.zeros((2, 200, 20), np.float32)
    params = fit(x)
    assert len(encode(params, x[:, :8])) == 129
    np.testing.assert_array_equal(decode(params, encode(params, x), 200), x)


def test_a_part_of_a_block_does_not_need_its_end():
    x = values()
    params = fit(x)
    payload = encode(params, x)
    whole = decode(params, payload, 200)
    for stop in (0, 1, 100, 199):
        np.testing.assert_array_equal(decode(params, payload, 200, stop), whole[:, :stop])


def test_huge_first_tokens_do_not_widen_the_others():
    """As attention sinks are: the statistics leave them out."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((2, 1024, 64)).astype(np.float32)
    plain, huge = (len(coded(values, sink=4)) for values in (x, with_huge_first(x)))
    assert huge < 1.03 * plain
    assert len(coded(with_huge_first(x), sink=0)) > 1.2 * plain


def test_short_prefills_count_whole():
    """With up to twice as many tokens as sinks, all of them speak for the rest."""
    x = np.random.default_rng(6).standard_normal((1, 8, 16)).astype(np.float32)
    spec = StreamSpec("v", 1, 16)
    short = CODEC.fit(KVR1(step=0.1, sink=4), spec, lambda: [x])
    whole = CODEC.fit(KVR1(step=0.1, sink=0), spec, lambda: [x])
    # Means of the first are in finer units.
    np.testing.assert_array_equal(short.rho, whole.rho)
    np.testing.assert_array_equal(short.cls, whole.cls)


def with_huge_first(x):
    changed = x.copy()
    changed[:, 0] *= 200
    return changed


def coded(x, sink):
    spec = StreamSpec("v", x.shape[0], x.shape[2])
    encoder = CODEC.encoder(CODEC.fit(KVR1(step=0.25, sink=sink), spec, lambda: [x]), 0)
    encoder.push(x)
    return encoder.payload()
