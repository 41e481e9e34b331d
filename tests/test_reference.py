"""The readable TKV1 reference gives the golden lane-layout streams byte for byte."""

import hashlib
import json
import math
import re
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs.errors import Corrupt, InvalidArgument, Truncated
from kvcodecs.tkv1 import reference as ref
from kvcodecs.tkv1 import reference_file as files

GOLDEN = Path(__file__).parent / "golden" / "tkv1"
CASES = {c["name"]: c for c in json.loads((GOLDEN / "MANIFEST.json").read_text())}
LANE_CASES = [name for name, c in CASES.items() if c["params"]["gpu"]]
PRIOR_SHA256 = "c11c735091c359b11e4f6885cc015624f32ee25b376eb9b658a55e6f9935453d"


def golden_input(case):
    return np.fromfile(GOLDEN / case["input"], "<f4").reshape(case["shape"])


def test_prior_table_is_the_frozen_one():
    raw = resources.files("kvcodecs.tkv1").joinpath("prior_table.u32").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == PRIOR_SHA256
    assert len(ref.prior_table()) == 7056
    # A few entries anyone can follow: class 8 (spread of one step) after a small residual.
    context = ref.first_model(8, 1)
    words = [word & 0xFFFF for word in ref.prior_table()[context : context + 49]]
    assert words[:6] == [33222, 15932, 3873, 228, 64, 64]
    assert words[25:29] == [21845, 12816, 3657, 228]
    assert all(word >> 16 == word & 0xFFFF for word in ref.prior_table())


def test_manifest_lists_every_golden_file():
    assert len(CASES) == 33
    assert len(LANE_CASES) == 16
    named = {c["input"] for c in CASES.values()} | {f"{name}.tkv" for name in CASES}
    named |= {c["decoded"] for c in CASES.values() if c["decoded"]}
    assert {p.name for p in GOLDEN.iterdir()} == named | {"MANIFEST.json", "README.md"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] if n.startswith("real_l0") else [])
        for n in LANE_CASES
    ],
)
def test_golden_lane_streams(name):
    case = CASES[name]
    p = case["params"]
    params = ref.Params(
        kind=p["kind"],
        heads=case["shape"][0],
        head_dim=case["shape"][2],
        step=p["step"],
        sink=p["sink"],
        sink_div=p["sinkdiv"],
        ar=bool(p["ar"]),
        lane_channels=p["lanech"],
    )
    stream = files.encode_file(
        params,
        golden_input(case),
        block_tokens=p["block"],
        prefill=p["prefill"] or None,
        theta=p["theta"],
        pre_rope=bool(p["prerope"]),
    )
    assert stream == (GOLDEN / f"{name}.tkv").read_bytes()
    decoded = files.parse_file(stream).decode()
    assert hashlib.sha256(decoded.tobytes()).hexdigest() == case["decoded_sha256"]


@pytest.mark.parametrize(
    ("x", "rounded"),
    [
        (0.5, 1),
        (-0.5, -1),
        (2.5, 3),
        (math.nextafter(0.5, 0), 0),
        (2.0**52 + 1, 2**52 + 1),
        (-3.49, -3),
    ],
)
def test_halves_round_away_from_zero(x, rounded):
    assert ref.round_away(x) == rounded


def test_zigzag_pinned():
    assert [ref.zigzag(v) for v in (0, -1, 1, -2, 2)] == [0, 1, 2, 3, 4]
    out = bytearray()
    ref.put_varint(out, 300)
    assert out.hex() == "ac02"
    assert ref.Reader(b"\xac\x02\x03").varint() == 300
    assert ref.Reader(b"\x03").svarint() == -2


@pytest.mark.parametrize("data", [b"\x80" * 10 + b"\x01", b"\xff" * 9 + b"\x02"])
def test_overlong_varint_is_corrupt(data):
    with pytest.raises(Corrupt):
        ref.Reader(data).varint()


@settings(deadline=None)
@given(
    bits=st.lists(st.tuples(st.booleans(), st.integers(32, 65504)), max_size=400),
)
def test_range_coder_round_trip(bits):
    coder = ref.RangeEncoder()
    for bit, p in bits:
        coder.encode(int(bit), p)
    data = coder.finish()
    assert not data.endswith(b"\0")
    decoder = ref.RangeDecoder(data)
    assert [decoder.decode(p) for _, p in bits] == [int(bit) for bit, _ in bits]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, ref.N_CLASSES - 1),
            st.integers(0, 2),
            st.one_of(st.integers(-3, 3), st.integers(-(2**24) + 1, 2**24 - 1)),
        ),
        max_size=60,
    )
)
def test_residuals_round_trip(symbols):
    coder, models = ref.RangeEncoder(), ref.Models()
    for klass, activity, q in symbols:
        ref.put_symbol(coder, models, ref.first_model(klass, activity), q)
    decoder, models = ref.RangeDecoder(coder.finish()), ref.Models()
    for klass, activity, q in symbols:
        assert ref.get_symbol(decoder, models, ref.first_model(klass, activity)) == q


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from("kv"),
    n=st.integers(1, 20),
    sink=st.integers(0, 9),
    first=st.integers(0, 9),
)
def test_block_round_trip_is_within_the_bound(seed, kind, n, sink, first):
    rng = np.random.default_rng(seed)
    y = rng.normal(0, 2, (2, n, 6)).astype(np.float32)
    params = files.fit(ref.Params(kind, 2, 6, 0.25, sink, 16, lane_channels=2), y)
    decoded = ref.decode_block(params, ref.encode_block(params, y, first), first, n)
    step = np.where(np.arange(first, first + n) < sink, 0.25 / 16, 0.25).astype(np.float32)
    assert (np.abs(decoded - y) <= step[:, None] / 2).all()


def test_residual_and_value_limits():
    params = ref.Params("v", 1, 2, 1.0, 0, 1, mu=(0, 0), rho=(0, 0), classes=(0, 0))
    fits = np.full((1, 1, 2), 2.0**24 - 1, np.float32)
    assert (ref.decode_block(params, ref.encode_block(params, fits, 0), 0, 1) == fits).all()
    with pytest.raises(InvalidArgument):
        ref.encode_block(params, np.full((1, 1, 2), 2.0**24, np.float32), 0)
    # A lane that no encoder writes: 24 ones where at most 23 come before the zero.
    coder, models = ref.RangeEncoder(), ref.Models()
    context = ref.first_model(0, 0)
    coder.encode(0, models.p(context))
    coder.encode(0, ref.HALF)
    for i in range(24):
        coder.encode(1, models.p(context + ref.UNARY + i))
    lane = coder.finish()
    with pytest.raises(Corrupt, match="24 bits"):
        ref.decode_block(params, bytes([len(lane)]) + lane, 0, 1)


def test_payload_lengths_are_checked():
    y = np.ones((1, 2, 4), np.float32)
    params = files.fit(ref.Params("v", 1, 4, 0.1), y)
    payload = ref.encode_block(params, y, 0)
    assert ref.decode_block(params, payload, 0, 2).shape == (1, 2, 4)
    with pytest.raises(Corrupt):
        ref.decode_block(params, payload + b"\0", 0, 2)
    for n in range(len(payload)):
        with pytest.raises(Truncated):
            ref.decode_block(params, payload[:n], 0, 2)


def test_every_truncation_of_a_file_is_truncated():
    data = (GOLDEN / "synth_v_lane_n1.tkv").read_bytes()
    for n in range(len(data)):
        with pytest.raises(Truncated):
            files.parse_file(data[:n])
    with pytest.raises(Corrupt):
        files.parse_file(data + b"\0")


def test_worked_example_of_the_format_document():
    text = (Path(__file__).parents[1] / "codecs" / "FORMAT.md").read_text()
    dump = re.findall(r"```\n((?: *\d+  [0-9a-f]{2}[^`]*\n)+)```", text)[2]
    data = b"".join(
        bytes.fromhex(re.split(r" {2,}", line.strip())[1]) for line in dump.splitlines()
    )
    file = files.parse_file(data)
    assert file.params.mu == (32, -48)
    assert file.payloads == (b"\0",)
    assert file.decode().tolist() == [[[2.0, -3.0]]]
    x = np.float32([[[2.0, -3.0]]])
    assert files.encode_file(ref.Params("k", 1, 2, 1.0), x, block_tokens=128) == data
