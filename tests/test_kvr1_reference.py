"""The readable KVR1 reference: its values, its bytes, and what it refuses."""

import math
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, Truncated, Unsupported
from kvcodecs.kvr1 import reference as ref
from kvcodecs.kvr1 import tables
from kvcodecs.tkv1 import reference as tkv1

quick = settings(deadline=None, max_examples=40)


@st.composite
def streams(draw):
    """Draw parameters, a block and its first token; classes may not fit the values."""
    heads = draw(st.sampled_from([1, 2, 3]))
    head_dim = 2 * draw(st.sampled_from([1, 3, 8, 17, 20]))
    n = draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.normal(0, rng.uniform(0.1, 5, head_dim), (heads, n, head_dim)).cumsum(axis=1)
    x[rng.random(x.shape) < 0.05] *= draw(st.sampled_from([1, 50, 2000]))
    params = ref.Params(
        heads,
        head_dim,
        step=draw(st.sampled_from([8.0, 1.0, 0.3, 2.0**-9])),
        sink=draw(st.integers(0, 6)),
        sink_div=draw(st.sampled_from([1, 2, 7, 16, 512])),
        ar=draw(st.booleans()),
    )
    # Below 2^23 units, as codecs see to.
    x = np.clip(x, -(2.0**22) * params.unit, 2.0**22 * params.unit).astype(np.float32)
    params = ref.fit(params, x)
    if draw(st.booleans()):
        top = draw(st.sampled_from([12, 40, 87]))
        classes = rng.integers(0, top + 1, params.n_components).tolist()
        params = replace(params, classes=tuple(classes))
    return params, x, draw(st.integers(0, 6))


def quantised(params, x, first_token):
    """Return the values of section 4.5 in units, computed for all components at once."""
    rows = x.transpose(1, 0, 2).reshape(x.shape[1], -1).astype(np.float64)
    mu, rho = np.array(params.mu), np.array(params.rho)
    out, pred = [], mu
    for t, row in enumerate(rows):
        scale = 1 if first_token + t < params.sink else params.sink_div
        z = (row / np.float64(params.unit) - pred) / scale
        q = (np.sign(z) * np.floor(np.abs(z) + 0.5)).astype(np.int64)
        out.append(pred + q * scale)
        pred = mu + (rho * (out[-1] - mu) >> 4)
    return np.array(out)


@quick
@given(streams())
def test_values_are_the_quantisers_and_survive_the_round_trip(stream):
    params, x, first = stream
    payload, values = ref.encode_block(params, x, first)
    assert (values == quantised(params, x, first)).all()
    assert (ref.decode_block(params, payload, first, x.shape[1]) == values).all()
    assert ref.encode_block(params, x, first)[0] == payload
    for n in range(x.shape[1]):
        part = ref.decode_block(params, payload, first, x.shape[1], n)
        assert (part == values[:n]).all()


@quick
@given(streams())
def test_values_are_those_of_tkv1(stream):
    params, x, first = stream
    theirs = tkv1.Params(
        "v",
        params.heads,
        params.head_dim,
        params.step,
        params.sink,
        params.sink_div,
        params.ar,
        0,
        params.mu,
        params.rho,
        tuple(min(c, 47) for c in params.classes),
    )
    n = x.shape[1]
    y = tkv1.decode_block(theirs, tkv1.encode_block(theirs, x, first), first, n)
    assert ref.floats(params, ref.encode_block(params, x, first)[1]).tobytes() == y.tobytes()


@quick
@given(streams())
def test_decoded_values_are_in_the_bound_and_code_to_themselves(stream):
    params, x, first = stream
    payload, values = ref.encode_block(params, x, first)
    y = ref.floats(params, values)
    step = np.array([params.scale_at(first + t) for t in range(x.shape[1])]) * float(params.unit)
    rounding = np.spacing(np.abs(y)) / 2
    assert (np.abs(y.astype(np.float64) - x) <= step[:, None] / 2 + rounding).all()
    assert ref.encode_block(params, y, first)[0] == payload


@quick
@given(streams())
def test_headers_round_trip(stream):
    params, _, _ = stream
    header = ref.pack_header(params)
    assert ref.parse_header(header) == params
    with pytest.raises(Corrupt):
        ref.parse_header(header + b"\0")
    for n in range(len(header)):
        with pytest.raises(Truncated):
            ref.parse_header(header[:n])


@st.composite
def steps(draw):
    """Draw the classes of some steps and residuals near every border."""
    classes = draw(st.lists(st.lists(st.integers(0, 87), min_size=1, max_size=32), max_size=12))
    near = st.builds(lambda u, d: u + d, st.sampled_from([-31, 0, 31, -(2**14), 2**14]), small)
    flat = [
        draw(st.one_of(small, near, st.integers(-(2**29), 2**29))) << ref.shift_of(c)
        | draw(st.integers(0, (1 << ref.shift_of(c)) - 1))
        for step in classes
        for c in step
    ]
    return classes, flat


small = st.integers(-2, 2)


def decoded(payload, classes):
    decoder = ref.Decoder(payload, len(classes))
    residuals = [q for step in classes for q in decoder.step(step)]
    decoder.finish()
    return residuals


@quick
@given(steps())
def test_residuals_of_any_class_round_trip(case):
    classes, residuals = case
    payload = ref.encode_steps(classes, residuals)
    assert decoded(payload, classes) == residuals
    assert min(1, len(classes)) <= payload[0] <= len(classes)


def test_any_number_of_bare_steps_decodes(monkeypatch):
    classes = [[12] * 32 for _ in range(20)]
    residuals = np.random.default_rng(0).integers(-2, 3, 640).tolist()
    sizes = []
    for most in (0, 1, 3, 255):
        monkeypatch.setattr(ref.coding, "MAX_BARE", most)
        payload = ref.encode_steps(classes, residuals)
        assert payload[0] <= most
        assert decoded(payload, classes) == residuals
        sizes.append(len(payload))
    assert sizes == sorted(sizes, reverse=True)


def test_bare_steps_end_at_255():
    classes = [[0, 0]] * 300
    payload = ref.encode_steps(classes, [0] * 600)
    assert payload[0] == 255
    assert decoded(payload, classes) == [0] * 600


@pytest.mark.parametrize(
    ("q", "klass", "symbol", "low", "escape"),
    [
        (0, 12, 32, 0, ()),
        (-5, 12, 27, 0, ()),
        (6, 12, 0, 0, (12,)),  # a value without a frequency
        (-16384, 0, 0, 0, (2**15 - 1,)),
        (16384, 0, 0, 0, (2**15, 1)),
        (-1, 27, 31, 1, ()),
        (-32 * 2**16, 87, 0, 0, (63,)),
        (2**16 - 1, 87, 32, 2**16 - 1, ()),
    ],
)
def test_symbols_pinned(q, klass, symbol, low, escape):
    assert ref.split(q, klass) == ref.Residual(symbol, low, escape)
    assert decoded(ref.encode_steps([[klass]], [q]), [[klass]]) == [q]


def test_an_escape_has_31_bits():
    assert ref.split(2**30 - 1, 0).escape == (0x7FFE | 0x8000, 0xFFFF)
    assert ref.split(-(2**30), 0).escape == (0xFFFF, 0xFFFF)
    with pytest.raises(InvalidArgument):
        ref.split(2**30, 0)


def test_classes_pinned():
    assert [ref.shift_of(c) for c in (0, 23, 24, 27, 28, 35, 36, 87)] == [0, 0, 1, 1, 2, 3, 4, 16]
    assert [ref.table_of(c) for c in (0, 35, 36, 39, 40, 87)] == [0, 35, 32, 35, 32, 35]
    for klass in range(ref.N_CLASSES):
        assert tables.shift_of(klass) == ref.shift_of(klass)
        assert tables.table_of(klass) == ref.table_of(klass)
    for div in range(1, ref.MAX_SINK_DIV + 1):
        expected = math.floor(4 * math.log2(div) + 0.5)
        assert ref.sink_classes(div) == tables.sink_classes(div) == expected
    assert tuple(map(tuple, tables.frequencies().tolist())) == ref.tables()
    assert not tables.frequencies().flags.writeable


# --- damage -------------------------------------------------------------------------------


def small_block():
    rng = np.random.default_rng(5)
    x = rng.normal(0, 1, (1, 5, 34)).astype(np.float32)
    x[0, 3, 7] = 900.0
    params = ref.fit(ref.Params(1, 34, 0.125, 1, 16), x[:, :3])
    payload, values = ref.encode_block(params, x, 0)
    return params, payload, values


def outcome(params, payload, n_tokens, wanted=None):
    """Return values, or the kind of error; anything but an error of ours propagates."""
    try:
        values = ref.decode_block(params, payload, 0, n_tokens, wanted)
    except KvError as error:
        return type(error)
    assert values.shape == (n_tokens if wanted is None else wanted, params.n_components)
    assert (np.abs(values) < 2**24).all()
    return values


def test_every_truncation_is_refused():
    params, payload, values = small_block()
    assert len(payload) > ref.HEAD.size + 50
    for n in range(len(payload)):
        odd = n > ref.HEAD.size and (n - ref.HEAD.size) % 2
        assert outcome(params, payload[:n], 5) is (Corrupt if odd else Truncated)
        first = outcome(params, payload[:n], 5, 1)
        assert (
            first in (Corrupt, Truncated)
            if isinstance(first, type)
            else (first == values[:1]).all()
        )


def test_any_flipped_byte_gives_values_or_an_error():
    params, payload, _ = small_block()
    kinds = []
    for at in range(len(payload)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(payload)
            damaged[at] ^= flip
            result = outcome(params, bytes(damaged), 5)
            kinds.append(result if isinstance(result, type) else None)
    assert set(kinds) <= {Corrupt, Truncated, None}
    # The end check finds most of it, but neither raw low bits nor escapes: frames have a crc.
    assert kinds.count(None) < len(kinds) / 4


@quick
@given(
    bare=st.integers(0, 255),
    states=st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32),
    valid=st.booleans(),
    tail=st.binary(max_size=80),
    wanted=st.integers(0, 5),
)
def test_random_payloads_give_values_or_an_error(bare, states, valid, tail, wanted):
    params, _, _ = small_block()
    if valid:
        bare, states = bare % 11, [x | 2**16 for x in states]
        tail = tail[: len(tail) // 2 * 2]
    outcome(params, struct.pack("<B32I", bare, *states) + tail, 5, wanted)
    outcome(params, tail, 5, wanted)


def test_what_no_encoder_writes_is_refused():
    params, payload, values = small_block()
    bare = payload[0]
    for changed, why in [
        (payload + b"\0\0", "words are left"),
        (payload + b"\0", "half a word"),
        (bytes([11]) + payload[1:], "11 bare steps of 10"),
        (payload[:5] + b"\xff\xff\0\0" + payload[9:], "a state of 65535"),
        # One bare step too few: it wants words that are not there.
        (bytes([bare - 1]) + payload[1:], None),
    ]:
        with pytest.raises((Corrupt, Truncated), match=why):
            ref.decode_block(params, changed, 0, 5)
    # Who stops early does not see what is wrong at the end.
    assert (ref.decode_block(params, payload + b"\0\0", 0, 5, 4) == values[:4]).all()


def test_residuals_and_values_have_limits():
    params = ref.Params(1, 2, 1.0, 0, 512, True, (0, 0), (0, 0), (0, 0))
    classes = ref.steps_of(params, 0, 1)
    fits = ref.encode_steps(classes, [2**15 - 1, -(2**15) + 1])
    assert ref.decode_block(params, fits, 0, 1).tolist() == [
        [(2**15 - 1) * 512, -(2**15 - 1) * 512]
    ]
    for q in (2**15, -(2**15), 2**21, -(2**30)):
        with pytest.raises(Corrupt):
            ref.decode_block(params, ref.encode_steps(classes, [0, q]), 0, 1)
    with pytest.raises(InvalidArgument):
        ref.encode_block(params, np.full((1, 1, 2), 2.0**15, np.float32), 0)


def test_headers_that_no_encoder_writes():
    params = ref.Params(1, 2, 1.0, 4, 16, True, (0, 1), (0, 15), (0, 87))
    header = ref.pack_header(params)
    assert ref.parse_header(header) == params
    for changed in (
        replace(params, classes=(0, 88)),
        replace(params, sink_div=513),
        replace(params, sink_div=0),
        replace(params, step=math.nan),
        replace(params, step=-1.0),
        replace(params, step=2.0**-123),
        replace(params, step=2.0**110),
        replace(params, mu=(2**24, 0)),
        replace(params, head_dim=3),
        replace(params, heads=0),
        replace(params, heads=2**20),
    ):
        with pytest.raises(Corrupt):
            ref.parse_header(ref.pack_header(changed))
    for at, value in ((0, 2), (1, 2)):
        with pytest.raises(Unsupported):
            ref.parse_header(header[:at] + bytes([value]) + header[at + 1 :])


def test_worked_example_of_the_format_document():
    text = (Path(__file__).parents[1] / "codecs" / "FORMAT.md").read_text()
    dumps = re.findall(r"```\n((?: *\d+  [0-9a-f]{2}[^`]*\n)+)```", text)
    header, payload = (
        b"".join(bytes.fromhex(re.split(r" {2,}", line.strip())[1]) for line in dump.splitlines())
        for dump in dumps[3:5]
    )
    params = ref.Params(1, 2, 1.0, 0, 16, True, (32, -48), (0, 8), (12, 24))
    assert ref.pack_header(params) == header
    x = np.float32([[[2.0, -3.0], [42.0, -6.0]]])
    assert ref.encode_block(params, x, 0)[0] == payload
    assert (ref.floats(params, ref.decode_block(params, payload, 0, 2)) == x).all()
