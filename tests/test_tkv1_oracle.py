"""The C++ lane layout against the readable reference: same bytes, same values, same refusals."""

import dataclasses
import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, Truncated
from kvcodecs.plan import Plan
from kvcodecs.spec import StreamSpec
from kvcodecs.tkv1 import (
    CODEC,
    TKV1,
    TKV1Params,
    TkvFile,
    encode_stream,
    lane_channel,
    step_for_bpv,
)
from kvcodecs.tkv1 import reference as ref
from kvcodecs.tkv1 import reference_file as files

GOLDEN = Path(__file__).parent / "golden" / "tkv1"
quick = settings(deadline=None, max_examples=60)


@st.composite
def geometries(draw):
    """Draw heads, head_dim, lane_channels (0 or an even divisor)."""
    # Six lanes and more may be decoded at once, sixteen at most.
    heads = draw(st.sampled_from([1, 2, 3, 7, 18]))
    head_dim = 2 * draw(st.sampled_from([1, 2, 3, 5, 6, 8] if heads <= 3 else [1, 2]))
    widths = [w for w in range(2, head_dim + 1, 2) if head_dim % w == 0]
    return heads, head_dim, draw(st.sampled_from([0, *widths]))


@st.composite
def tensors(draw, heads, head_dim, max_tokens=24):
    """Draw K/V-like values: means, drift, spikes, constants and tiny numbers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(1, max_tokens))
    scale = draw(st.sampled_from([1e-3, 1.0, 30.0]))
    x = rng.normal(0, scale, (heads, n, head_dim)).cumsum(axis=1) * rng.uniform(0, 1, head_dim)
    x += rng.normal(0, 3 * scale, (heads, 1, head_dim))
    if draw(st.booleans()):
        x[rng.random(x.shape) < 0.05] *= 20.0
    if draw(st.booleans()):
        x[..., rng.integers(head_dim)] = draw(st.sampled_from([0.0, -0.0, 1e-42, 2.5]))
    return x.astype(np.float32), scale


@st.composite
def settings_of_a_stream(draw):
    heads, head_dim, lane_channels = draw(geometries())
    x, scale = draw(tensors(heads, head_dim))
    fields = {
        "kind": draw(st.sampled_from("kv")),
        "step": scale * draw(st.floats(0.05, 4.0)),
        "sink": draw(st.integers(0, 12)),
        "sink_div": draw(st.sampled_from([1, 2, 7, 16, 255])),
        "ar": draw(st.booleans()),
        "lane_channels": lane_channels,
    }
    return x, fields


@st.composite
def params_with_any_statistics(draw):
    heads, head_dim, lane_channels = draw(geometries())
    n = heads * head_dim
    large = st.integers(-(2**24) + 1, 2**24 - 1)
    return ref.Params(
        kind=draw(st.sampled_from("kv")),
        heads=heads,
        head_dim=head_dim,
        step=draw(st.floats(0.001, 100.0)),
        sink=draw(st.integers(0, 20)),
        sink_div=draw(st.sampled_from([1, 16, 255, 2**16])),
        ar=True,
        lane_channels=lane_channels,
        mu=tuple(draw(st.lists(st.integers(-99, 99) | large, min_size=n, max_size=n))),
        rho=tuple(draw(st.lists(st.integers(0, 15), min_size=n, max_size=n))),
        classes=tuple(draw(st.lists(st.integers(0, 47), min_size=n, max_size=n))),
    )


def fast_params(p):
    """Return the fast path's parameters for the reference's."""
    return TKV1Params(
        StreamSpec(p.kind, p.heads, p.head_dim),
        p.step,
        p.sink,
        p.sink_div,
        p.ar,
        np.array(p.mu, np.int32),
        np.array(p.rho, np.uint8),
        np.array(p.classes, np.uint8),
        p.lane_width,
    )


def reference_params(p):
    """Return the reference's parameters for the fast path's."""
    return ref.Params(
        kind=p.spec.kind,
        heads=p.spec.heads,
        head_dim=p.spec.head_dim,
        step=p.step,
        sink=p.sink,
        sink_div=p.sink_div,
        ar=p.ar,
        lane_channels=p.width,
        mu=tuple(p.mean.tolist()),
        rho=tuple(p.rho.tolist()),
        classes=tuple(p.cls.tolist()),
    )


def fast_decode(params, payload, first, n, start=None, stop=None, n_threads=1):
    start, stop = first if start is None else start, first + n if stop is None else stop
    out = np.full((params.spec.heads, stop - start, params.spec.head_dim), np.nan, np.float32)
    plan = Plan()
    plan.add(
        CODEC,
        params,
        payload,
        first_token=first,
        n_tokens=n,
        start=start,
        stop=stop,
        out=out,
    )
    plan.run(n_threads)
    return out


def outcome(call):
    """Return the bytes of an array, or None for an error of ours; anything else propagates."""
    try:
        return call().tobytes()
    except KvError:
        return None


@quick
@given(stream=settings_of_a_stream(), block=st.integers(1, 30), data=st.data())
def test_streams_are_the_same_bytes(stream, block, data):
    x, fields = stream
    heads, n, head_dim = x.shape
    prefill = data.draw(st.none() | st.integers(1, n))
    chunk = data.draw(st.integers(1, n))
    fast = encode_stream(
        x, layout="lane", block_tokens=block, prefill=prefill, chunk=chunk, **fields
    )
    params = ref.Params(heads=heads, head_dim=head_dim, **fields)
    slow = files.encode_file(params, x, block_tokens=block, prefill=prefill)
    assert fast == slow
    parsed = files.parse_file(fast)
    assert TkvFile.parse(fast).decode(n_threads=2).tobytes() == parsed.decode().tobytes()
    bound = np.where(np.arange(n) < fields["sink"], 1 / fields["sink_div"], 1.0) / 2
    error = np.abs(parsed.decode().astype(np.float64) - x).max(axis=(0, 2))
    # Here the unit has any bits, so a value may be off by half an ulp more than half a step.
    assert (error <= bound * fields["step"] * (1 + 1e-6) + np.abs(x).max() * 2.0**-23).all()


@quick
@given(stream=settings_of_a_stream(), first=st.integers(0, 9), data=st.data())
def test_blocks_of_sessions_are_the_same_bytes(stream, first, data):
    x, fields = stream
    spec = StreamSpec(fields.pop("kind"), x.shape[0], x.shape[2])
    params = CODEC.fit(TKV1(**fields), spec, lambda: [x])
    oracle = reference_params(params)
    assert files.fit(dataclasses.replace(oracle, mu=(), rho=(), classes=()), x) == oracle
    encoder = CODEC.encoder(params, first)
    at = 0
    while at < x.shape[1]:
        n = data.draw(st.integers(1, x.shape[1] - at))
        encoder.push(x[:, at : at + n])
        at += n
        assert encoder.n_tokens == at
        assert encoder.payload() == ref.encode_block(oracle, x[:, :at], first)
    decoded = fast_decode(params, encoder.payload(), first, at)
    assert decoded.tobytes() == ref.decode_block(oracle, encoder.payload(), first, at).tobytes()
    start = data.draw(st.integers(first, first + at))
    stop = data.draw(st.integers(start, first + at))
    part = fast_decode(params, encoder.payload(), first, at, start, stop)
    assert part.tobytes() == decoded[:, start - first : stop - first].tobytes()
    error = np.abs(decoded.astype(np.float64) - x)
    assert encoder.error.max_error == error.max()
    assert encoder.error.n_values == x.size
    # Errors are summed in multiples of unit / 256, so that no order of adding matters.
    quantum = params.unit / 256
    slack = (error * quantum + quantum**2 / 4).sum()
    assert abs(encoder.error.sum_squares - (error**2).sum()) <= slack * (1 + 1e-9)
    assert len(encoder.payload()) <= CODEC.worst_case_bytes(params, at)


@quick
@given(params=params_with_any_statistics(), first=st.integers(0, 30), data=st.data())
def test_any_statistics_code_any_values_alike(params, first, data):
    n = data.draw(st.integers(1, 6))
    seed = data.draw(st.integers(0, 2**32 - 1))
    spread = data.draw(st.sampled_from([1.0, 1e3, 2.0**22, 2.0**24]))
    shape = (params.heads, n, params.head_dim)
    y = np.random.default_rng(seed).uniform(-spread, spread, shape) * float(params.unit)
    y = y.astype(np.float32)

    def fast():
        encoder = CODEC.encoder(fast_params(params), first)
        encoder.push(y)
        return np.frombuffer(encoder.payload(), np.uint8)

    def slow():
        return np.frombuffer(ref.encode_block(params, y, first), np.uint8)

    coded = outcome(fast)
    assert coded == outcome(slow)
    if coded is not None:
        values = fast_decode(fast_params(params), coded, first, n)
        assert values.tobytes() == ref.decode_block(params, coded, first, n).tobytes()
        assert len(coded) <= CODEC.worst_case_bytes(fast_params(params), n)


@settings(deadline=None, max_examples=150)
@given(params=params_with_any_statistics(), first=st.integers(0, 30), data=st.data())
def test_arbitrary_lane_bytes_decode_alike_or_not_at_all(params, first, data):
    n = data.draw(st.integers(1, 12))
    payload = bytearray()
    for _ in range(params.heads * params.n_groups):
        lane = data.draw(st.binary(max_size=60))
        ref.put_varint(payload, len(lane))
        payload += lane
    fast = fast_params(params)
    slow = outcome(lambda: ref.decode_block(params, bytes(payload), first, n))
    for k in (1, 3):  # lanes are grouped differently
        assert outcome(lambda k=k: fast_decode(fast, payload, first, n, n_threads=k)) == slow


@settings(deadline=None, max_examples=150)
@given(params=params_with_any_statistics(), payload=st.binary(max_size=80))
def test_arbitrary_payloads_decode_alike_or_not_at_all(params, payload):
    fast = outcome(lambda: fast_decode(fast_params(params), payload, 0, 3))
    slow = outcome(lambda: ref.decode_block(params, payload, 0, 3))
    assert fast == slow


@quick
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_flipped_payloads_decode_alike_or_not_at_all(data, seed):
    x = np.random.default_rng(seed).normal(0, 1, (2, 10, 4)).astype(np.float32)
    params = CODEC.fit(TKV1(step=0.1), StreamSpec("k", 2, 4), lambda: [x])
    encoder = CODEC.encoder(params, 0)
    encoder.push(x)
    payload = bytearray(encoder.payload())
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    oracle = reference_params(params)
    fast = outcome(lambda: fast_decode(params, bytes(payload), 0, 10))
    assert fast == outcome(lambda: ref.decode_block(oracle, bytes(payload), 0, 10))


def test_24_ones_are_corrupt_and_23_are_not():
    params = ref.Params("v", 1, 2, 1.0, 0, 1, mu=(0, 0), rho=(0, 0), classes=(47, 47))
    for q in (2**24 - 1, -(2**24) + 1, 2**23):
        y = np.array([[[q, 0]]], np.float32)
        payload = ref.encode_block(params, y, 0)
        assert fast_decode(fast_params(params), payload, 0, 1).tobytes() == y.tobytes()
    coder, models = ref.RangeEncoder(), ref.Models()
    context = ref.first_model(47, 0)
    for bit, p in [(0, models.p(context)), (0, ref.HALF)]:
        coder.encode(bit, p)
    for i in range(24):
        coder.encode(1, models.p(context + ref.UNARY + i))
    lane = coder.finish()
    with pytest.raises(Corrupt, match="residual"):
        fast_decode(fast_params(params), bytes([len(lane)]) + lane, 0, 1)


def test_a_value_of_2_to_the_24_units_is_corrupt():
    top = 2**24 - 1
    params = ref.Params("v", 1, 2, 1.0, 0, 1, mu=(top, 0), rho=(0, 0), classes=(8, 8))
    coder, models = ref.RangeEncoder(), ref.Models()
    ref.put_symbol(coder, models, ref.first_model(8, 0), 1)
    lane = coder.finish()
    payload = bytes([len(lane)]) + lane
    assert outcome(lambda: ref.decode_block(params, payload, 0, 1)) is None
    with pytest.raises(Corrupt, match="value"):
        fast_decode(fast_params(params), payload, 0, 1)


@pytest.mark.parametrize("config", [TKV1(), TKV1(bpv=4.0), TKV1(step=0.1), TKV1(rmse=0.1)], ids=str)
def test_statistics_do_not_depend_on_chunking(config):
    rng = np.random.default_rng(5)
    for _ in range(5):
        x = rng.normal(0, 1, (3, 101, 8)).astype(np.float32)
        spec = StreamSpec("k", 3, 8)
        whole = CODEC.pack(CODEC.fit(config, spec, lambda x=x: [x]))
        for size in (1, 7, 100):
            parts = [np.ascontiguousarray(x[:, at : at + size]) for at in range(0, 101, size)]
            assert CODEC.pack(CODEC.fit(config, spec, lambda parts=parts: parts)) == whole


@quick
@given(params=params_with_any_statistics())
def test_stream_header_round_trip(params):
    fast = fast_params(params)
    data = CODEC.pack(fast)
    again = CODEC.unpack(fast.spec, data)
    assert reference_params(again) == reference_params(fast)
    assert CODEC.pack(again) == data
    for n in range(len(data)):
        with pytest.raises(Truncated):
            CODEC.unpack(fast.spec, data[:n])
    with pytest.raises(Corrupt):
        CODEC.unpack(fast.spec, data + b"\0")


def test_stream_header_layout_pinned():
    params = ref.Params(
        "k", 1, 4, 0.5, 4, 16, True, 2, mu=(1, -1, 300, 0), rho=(1, 2, 3, 15), classes=(0, 8, 47, 9)
    )
    data = CODEC.pack(fast_params(params))
    assert data.hex(" ") == (
        "01 01 01 04 00 00 00 00 00 00 e0 3f 04 10 02 02 01 d8 04 00 00 08 2f 09 21 f3"
    )
    assert data[4:12] == struct.pack("<d", 0.5)


@pytest.mark.parametrize("width", [2, 4, 6, 12])
def test_lane_channels_partition_the_head_by_pairs(width):
    groups = 12 // width
    lanes = [[lane_channel(12, width, g, i) for i in range(width)] for g in range(groups)]
    assert sorted(c for lane in lanes for c in lane) == list(range(12))
    params = ref.Params("k", 1, 12, 1.0, lane_channels=width)
    for g, lane in enumerate(lanes):
        assert lane == [params.lane_channel(g, i) for i in range(width)]
        assert [c + 6 for c in lane[: width // 2]] == lane[width // 2 :]


def small_file(layout, **fields):
    x = np.random.default_rng(9).normal(0, 1, (1, 5, 2)).astype(np.float32)
    return encode_stream(x, kind="k", step=0.25, layout=layout, block_tokens=2, sink=1, **fields)


@pytest.mark.parametrize("layout", ["lane", "stream"])
@pytest.mark.parametrize("ar", [True, False])
def test_every_truncation_of_a_file_is_truncated(layout, ar):
    data = small_file(layout, ar=ar)
    TkvFile.parse(data).decode()
    for n in range(len(data)):
        with pytest.raises(Truncated):
            TkvFile.parse(data[:n])


@pytest.mark.parametrize("name", ["synth_v_lane_n33", "synth_k_stream_n33", "synth_v_lane2"])
def test_every_truncation_of_a_golden_header_is_truncated(name):
    data = (GOLDEN / f"{name}.tkv").read_bytes()
    for n in [*range(260), len(data) // 2, len(data) - 1]:
        with pytest.raises(Truncated):
            TkvFile.parse(data[:n])


@pytest.mark.parametrize("layout", ["lane", "stream"])
def test_no_flip_of_a_file_does_harm(layout):
    data = small_file(layout)
    for at in range(len(data)):
        for mask in [1 << bit for bit in range(8)] + [0xFF]:
            bad = bytearray(data)
            bad[at] ^= mask
            fast = outcome(lambda bad=bad: TkvFile.parse(bytes(bad)).decode())
            if layout == "lane" and bad[4] & 8:
                slow = outcome(lambda bad=bad: files.parse_file(bytes(bad)).decode())
                # The fast path also refuses numbers that no encoder writes (steps, sizes).
                assert fast is None or slow is None or fast == slow


def header(**change):
    """Return a small lane-layout file with some header fields changed."""
    f = {"flags": 0x0C, "heads": 1, "head_dim": 2, "theta": 1e5, "step": 1.0}
    f |= {"sink": 4, "sink_div": 16, "block": 2, "tokens": 1, "lane": None, "mu": 0}
    f |= {"class": 0, "rho": 0, "magic": b"TKV1", "length": 0}
    f |= change
    out = bytearray(f["magic"]) + bytes([f["flags"]])
    ref.put_varint(out, f["heads"])
    ref.put_varint(out, f["head_dim"])
    out += struct.pack("<dd", f["theta"], f["step"])
    for name in ("sink", "sink_div", "block", "tokens"):
        ref.put_varint(out, f[name])
    if f["lane"] is not None:
        ref.put_varint(out, f["lane"])
    for _ in range(2):
        ref.put_varint(out, ref.zigzag(f["mu"]))
        out += bytes([f["class"], f["rho"]])
    ref.put_varint(out, f["length"])
    return bytes(out)


def test_the_header_of_these_tests_is_valid():
    assert TkvFile.parse(header()).decode().tolist() == [[[0.0, 0.0]]]
    assert TkvFile.parse(header(tokens=0)[:-1]).decode().shape == (1, 0, 2)
    assert TkvFile.parse(header(rho=200)).gpu_tables().rho.tolist() == [15, 15]


@pytest.mark.parametrize(
    "change",
    [
        {"magic": b"TKV2"},
        {"heads": 0},
        {"head_dim": 0},
        {"head_dim": 3},
        {"block": 0},
        {"sink_div": 0},
        {"flags": 0x1C, "lane": 1},
        {"flags": 0x1C, "lane": 4},
        {"class": 48},
        {"class": 0x7F},
        {"mu": 2**24},
        {"mu": -(2**24)},
        {"mu": 2**62},
        {"step": math.nan},
        {"step": math.inf},
        {"step": 0.0},
        {"step": -1.0},
        {"step": 1e-44},
        {"step": 1e300},
        {"heads": 2**40},
        {"head_dim": 2**40},
        {"heads": 2**63},
        {"sink_div": 2**32},
        {"flags": 0x0E},  # the lane layout codes K as given
    ],
    ids=str,
)
def test_malformed_headers_are_corrupt(change):
    with pytest.raises(Corrupt):
        TkvFile.parse(header(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 5},
        {"tokens": 2**32},
        {"heads": 1000},
        {"head_dim": 2**15},
        {"length": 1},
        {"length": 2**63},
        {"length": 2**64 - 1},
    ],
    ids=str,
)
def test_counts_beyond_the_bytes_are_truncated(change):
    with pytest.raises(Truncated):
        TkvFile.parse(header(**change))


@pytest.mark.parametrize("tokens", [2**34, 2**64 - 1])
def test_no_header_asks_for_any_amount_of_memory(tokens):
    """A run of equal values codes to no bytes, so the bytes do not bound the tokens."""
    with pytest.raises(Corrupt, match="tokens of"):
        TkvFile.parse(header(tokens=tokens))
    with pytest.raises(Corrupt, match="block_tokens"):
        TkvFile.parse(header(block=2**20 + 1))


@pytest.mark.parametrize("mu", [2**24, -(2**24), 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("flags", [0x0C, 0x04], ids=["lane", "stream"])
def test_means_beyond_2_to_the_24_are_corrupt(mu, flags):
    with pytest.raises(Corrupt, match="mean out of range"):
        TkvFile.parse(header(mu=mu, flags=flags))
    TkvFile.parse(header(mu=2**24 - 1, flags=flags))


def test_lengths_may_be_longer_varints_than_they_need():
    x = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)
    data = encode_stream(x, kind="v", step=0.1, block_tokens=2)
    file = TkvFile.parse(data)
    blocks = [bytes(file.block_entries(i)) for i in range(3)]
    n_head = len(data) - sum(map(len, blocks))
    longer = b""
    for block in blocks:
        first = block[0]
        second = block[1 + first]
        longer += bytes([first | 0x80, 0]) + block[1 : 1 + first]
        longer += bytes([second | 0x80, 0x80, 0]) + block[2 + first :]
    other = TkvFile.parse(data[:n_head] + longer)
    np.testing.assert_array_equal(other.decode(), file.decode())
    assert b"".join(bytes(other.block_entries(i)) for i in range(3)) == longer


@pytest.mark.parametrize("step", [1e-37, 1e33, 1e300])
def test_units_outside_float32_are_corrupt(step):
    with pytest.raises(Corrupt):
        TkvFile.parse(header(step=step))
    params = CODEC.fit(TKV1(), StreamSpec("v", 1, 2), lambda: [np.ones((1, 9, 2), np.float32)])
    packed = CODEC.pack(params)
    with pytest.raises(Corrupt, match="step"):
        CODEC.unpack(
            params.spec, packed.replace(struct.pack("<d", params.step), struct.pack("<d", step))
        )


def test_a_varint_of_more_than_64_bits_is_corrupt():
    good = header()
    for varint in (b"\xff" * 9 + b"\x02", b"\x80" * 10 + b"\x00"):
        with pytest.raises(Corrupt):
            TkvFile.parse(good[:5] + varint + good[6:])


def test_bits_per_value_are_met():
    manifest = {c["name"]: c for c in json.loads((GOLDEN / "MANIFEST.json").read_text())}
    case = manifest["synth_v_lane0"]
    x = np.fromfile(GOLDEN / case["input"], "<f4").reshape(case["shape"])[:, :128]
    for bpv in (3.0, 5.0):
        step = step_for_bpv(x, bpv, kind="v", layout="lane")
        rate = 8 * len(encode_stream(x, kind="v", layout="lane", step=step)) / x.size
        assert 0.97 * bpv < rate <= bpv
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(InvalidArgument):
            step_for_bpv(x, bad, kind="v")


@pytest.mark.parametrize(
    "change",
    [
        {"step": 0.0},
        {"step": math.nan},
        {"step": 1e-44},
        {"kind": "q"},
        {"layout": "rows"},
        {"block_tokens": 0},
        {"sink": -1},
        {"sink_div": 0},
        {"lane_channels": 3},
        {"lane_channels": 8},
        {"pre_rope": True},
    ],
    ids=str,
)
def test_what_cannot_be_encoded_is_refused(change):
    x = np.ones((1, 3, 4), np.float32)
    with pytest.raises(InvalidArgument):
        encode_stream(x, **({"kind": "k", "step": 0.5} | change))


@pytest.mark.parametrize("layout", ["lane", "stream"])
def test_values_that_cannot_be_encoded_are_named(layout):
    x = np.ones((2, 5, 4), np.float32)
    for bad in (math.nan, math.inf):
        x[1, 3, 2] = bad
        with pytest.raises(InvalidArgument, match="head 1, token 3, channel 2"):
            encode_stream(x, kind="v", step=0.5, layout=layout)
    x[1, 3, 2] = 1e9
    with pytest.raises(InvalidArgument, match="too small"):
        encode_stream(x, kind="v", step=0.5, layout=layout)
    with pytest.raises(InvalidArgument):
        encode_stream(x[:, :0], kind="v", step=0.5, layout=layout)
