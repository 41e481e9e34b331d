"""Rows of ggml's blocks: arrays, frames in plans, encoders that go on, numcodecs and zarr."""

import json
import struct

import ml_dtypes
import numcodecs
import numpy as np
import pytest
import zarr
from kvcodecs import KVR1, TKV1, FibQuant, Raw, _core, rows
from kvcodecs.blocks import SIMD_LEVELS
from kvcodecs.codec import (
    codec_by_name,
    codec_by_number,
    codec_for,
    config_by_name,
    config_from_json,
)
from kvcodecs.errors import Corrupt, InvalidArgument, Truncated, Unsupported
from kvcodecs.frame import ErrorStats
from kvcodecs.ggml import GGML, SCHEMES, dequantise, quantise, scheme_by_name
from kvcodecs.numcodecs_codecs import GGMLCodec
from kvcodecs.plan import Plan
from kvcodecs.rope import Rope, from_coded
from kvcodecs.spec import StreamSpec
from kvcodecs.zarr_codec import FrameCodec
from kvtools.packing_commands import SCHEMES as LISTED

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
V = StreamSpec("v", 2, 128)


def coded(scheme):
    """Whether this build quantises to a scheme."""
    try:
        _core.row_encoder(scheme_by_name(scheme).number, 2, 128)
    except InvalidArgument:
        return False
    return True


#: A plain one, one whose values move when they are coded again, one of large blocks, a small one.
SOME = [name for name in ("q8_0", "q4_0", "q4_k", "iq2_xxs") if coded(name)]
some = pytest.mark.parametrize("scheme", SOME)


def values(n_tokens=50, heads=2, head_dim=128, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((heads, n_tokens, head_dim)) + 2 * rng.standard_normal((heads, 1, 1))
    return x.astype(np.float32)


def rows_of(x):
    """[heads][tokens][head_dim] to [tokens][heads * head_dim]."""
    return np.ascontiguousarray(x.transpose(1, 0, 2)).reshape(x.shape[1], -1)


def encode(scheme, x, spec=V, n_threads=1):
    codec = codec_for(GGML(scheme))
    encoder = codec.encoder(codec.fit(GGML(scheme), spec, list), 0)
    encoder.push(x, n_threads)
    return encoder


def decode(scheme, payload, n, spec=V, lo=0, hi=None, dtype=np.float32, rope=None, **options):
    codec = codec_for(GGML(scheme))
    hi = n if hi is None else hi
    out = np.zeros((spec.heads, hi - lo, spec.head_dim), dtype)
    plan = Plan()
    params = codec.fit(GGML(scheme), spec, list)
    plan.add(
        codec, params, payload,
        first_token=5, n_tokens=n, start=5 + lo, stop=5 + hi, out=out, rope=rope, where="here",
    )  # fmt: skip
    plan.run(**options)
    return out


# -- arrays


@some
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_arrays_come_back_in_any_dtype(scheme, dtype):
    x = values().astype(dtype).reshape(2, 25, 2, 128).reshape(2, 25, 256)
    packed = quantise(x, scheme)
    found = scheme_by_name(scheme)
    assert packed.shape == (2, 25, found.row_bytes(256))
    assert packed.dtype == np.uint8
    wide = x.astype(np.float32)
    np.testing.assert_array_equal(packed, quantise(wide, found))
    flat = _core.ggml_encode(found.number, wide.ravel())
    assert flat is not None
    np.testing.assert_array_equal(packed.ravel(), flat)
    y = dequantise(packed, scheme)
    np.testing.assert_array_equal(y.ravel(), _core.ggml_decode(found.number, packed.ravel()))
    narrow = dequantise(packed, scheme, np.dtype(dtype).name)
    assert narrow.dtype == dtype
    np.testing.assert_array_equal(narrow, y.astype(dtype))
    out = np.empty_like(narrow)
    assert dequantise(packed, scheme, out=out) is out
    np.testing.assert_array_equal(out, narrow)
    np.testing.assert_array_equal(dequantise(packed[:, 3:7], scheme), y[:, 3:7])


def test_threads_and_odd_memory_change_nothing():
    x = np.random.default_rng(1).standard_normal((700, 1024)).astype(np.float16)
    one = quantise(x, "q8_0", n_threads=1)
    np.testing.assert_array_equal(one, quantise(x, "q8_0", n_threads=3))
    np.testing.assert_array_equal(one, quantise(x.astype(">f2"), "q8_0"))
    np.testing.assert_array_equal(one[::-1], quantise(x[::-1], "q8_0"))
    y = dequantise(one, "q8_0", "float16", n_threads=1)
    np.testing.assert_array_equal(y, dequantise(one, "q8_0", "float16", n_threads=3))
    np.testing.assert_array_equal(y[::-1], dequantise(one[::-1], "q8_0", "float16"))
    assert quantise(x[:0], "q8_0").shape == (0, 1024 // 32 * 34)
    assert dequantise(one[:, :0], "q8_0").shape == (700, 0)


def test_arrays_that_cannot_be_quantised_are_refused():
    x = values()
    with pytest.raises(InvalidArgument, match="whole blocks of 256; these fit: f16, q8_0"):
        quantise(x[..., :64], "Q4_K")
    for bad, dtype in ((np.nan, np.float32), (np.inf, np.float16), (-np.inf, ml_dtypes.bfloat16)):
        broken = x.astype(dtype)
        broken[1, 7, 33] = bad
        with pytest.raises(InvalidArgument, match=r"index \(1, 7, 33\) is not finite"):
            quantise(broken, "q8_0")
    x[1, 30, 40] = 1e9
    with pytest.raises(InvalidArgument, match=r"block from index \(1, 30, 32\).*leaves float16"):
        quantise(x, "q8_0")
    for wrong in (np.zeros((2, 32), np.int32), np.zeros((2, 32)), np.float32(1)):
        with pytest.raises(InvalidArgument, match="expected rows"):
            quantise(wrong, "q8_0")
    with pytest.raises(InvalidArgument, match="scheme 'q9' is unknown; some are f16, q8_0"):
        quantise(x, "q9")
    for n_threads in (-1, 0, 1 << 32, 1.5, True):
        with pytest.raises(InvalidArgument, match="n_threads"):
            quantise(x, "q8_0", n_threads=n_threads)
        with pytest.raises(InvalidArgument, match="n_threads"):
            Plan().run(n_threads)
    with pytest.raises(InvalidArgument, match="not an array"):
        quantise([[1.0], [1.0, 2.0]], "q8_0")


def test_rows_that_are_none_are_refused():
    packed = quantise(np.full((3, 32), 65504, np.float32), "q8_0")
    with pytest.raises(InvalidArgument, match="overflows float16"):
        dequantise(packed, "q8_0", "float16")
    for wrong in (packed[:, :33], packed.astype(np.int8), packed[0, 0]):
        with pytest.raises(InvalidArgument, match="multiple of 34"):
            dequantise(wrong, "q8_0")
    for dtype in (5, None, "float64", [("a", 5)], np.int8):
        with pytest.raises(InvalidArgument, match="dtype"):
            dequantise(packed, "q8_0", dtype)
    with pytest.raises(InvalidArgument, match="not an array"):
        dequantise([[1], [1, 2]], "q8_0")
    for out in (np.empty((3, 31), "f4"), np.empty((3, 32)), np.empty((32, 3), "f4").T, []):
        with pytest.raises(InvalidArgument, match="out: expected"):
            dequantise(packed, "q8_0", out=out)


# -- configuration and registry


def test_names_mean_one_scheme_each_in_any_case():
    for scheme in SCHEMES:
        for name in (scheme.name, *scheme.aliases):
            for written in (name, name.upper(), f"ggml.{name}", f"GGML.{name.upper()}"):
                assert GGML(written) == GGML(scheme.name)
            assert codec_by_name(f"ggml.{name}") is codec_by_number(3)
        config = GGML(scheme.name)
        assert config.codec == f"ggml.{scheme.name}"
        assert config.bits_per_value == 8 * scheme.block_bytes / scheme.block_values
        assert config_from_json(json.loads(json.dumps(config.to_json()))) == config
    assert codec_by_name("GGML.Q8").name == codec_by_name("ggml").name == "ggml"
    assert ", ".join(scheme.name for scheme in SCHEMES) == LISTED


def test_a_scheme_is_given_by_name_by_configuration_or_itself():
    x = values()
    for scheme in SCHEMES[:3]:
        rows = quantise(x, scheme.name)
        for same in (GGML(scheme.name), scheme, f"ggml.{scheme.name}"):
            assert np.array_equal(quantise(x, same), rows)
            assert np.array_equal(dequantise(rows, same), dequantise(rows, scheme.name))


def test_a_name_stands_for_a_codec_without_options():
    for name, config in (
        ("kvr1", KVR1()), ("TKV1", TKV1()), ("raw", Raw()), (" GGML.Q8 ", GGML("q8_0")),
        ("fibquant", FibQuant()), ("FibQuant.2x64", FibQuant(2, 64)),
        ("fibquant.raw", FibQuant(axis="raw")),
    ):  # fmt: skip
        assert config_by_name(name) == config
    for name, message in (
        ("q8_0", r"did you mean ggml\.q8_0\? there are raw, tkv1, kvr1, fibquant and ggml\.SCHEME"),
        ("ggml.q4_k_m", "did you mean q4_k"), ("kvr2", "did you mean kvr1"), ("", "unknown; there"),
        ("ggml", "unknown"), ("raw.float16", "unknown"),
        ("fibquant.1x16", "block_dim 1 is not 2 to 256"), ("fibquant.q8_0", "as in fibquant.4x256"),
        ("zstd", "unknown; there are raw"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=message):
            config_by_name(name)


def test_unknown_schemes_and_fields_are_refused():
    for name, meant in (("Q4_K_M", "q4_k"), ("q4-k", "q4_k"), ("ggml.bf16", "f16")):
        with pytest.raises(InvalidArgument, match=rf"is unknown, did you mean {meant}\? some are"):
            GGML(name)
    with pytest.raises(InvalidArgument, match=r"'q9_9' is unknown; some are f16.*ggml\.SCHEMES$"):
        GGML("q9_9")
    with pytest.raises(InvalidArgument):
        GGML(8)
    for name in (None, 3, ["ggml"]):
        with pytest.raises(InvalidArgument, match="give its name"):
            codec_by_name(name)
    for name in ("ggml.q9_9", "raw.x", "kvr1.q8_0", "q8_0", "ggml2", "ggml.ggml.q8_0"):
        with pytest.raises(Unsupported, match="unknown"):
            codec_by_name(name)
        with pytest.raises(Unsupported, match="unknown"):
            config_from_json({"codec": name})
    for data in (
        {"codec": "ggml"},
        {"codec": "ggml.q8_0", "step": 1},
        {"codec": "ggml.q8_0", "scheme": "q4_0"},
    ):
        with pytest.raises(Corrupt):
            config_from_json(data)


def test_stream_headers_say_the_scheme():
    codec = codec_by_number(3)
    for scheme in SCHEMES:
        params = codec.fit(GGML(scheme.name), V, list)
        header = codec.pack(params)
        assert header == bytes([1, scheme.number])
        again = codec.unpack(V, header)
        assert codec.name_of(again) == f"ggml.{scheme.name}"
        assert codec.worst_case_bytes(again, 3) == 3 * scheme.row_bytes(256)
        assert codec.step(again) is None
    for data, kind in (
        (b"", Truncated), (b"\1", Truncated), (b"\0\10", Corrupt), (b"\2\10", Unsupported),
        (b"\1\377", Unsupported), (b"\1\10\0", Corrupt),
    ):  # fmt: skip
        with pytest.raises(kind, match="ggml stream header"):
            codec.unpack(V, data)
    with pytest.raises(Corrupt, match="whole blocks"):
        codec.unpack(StreamSpec("v", 3, 64), bytes([1, 12]))
    with pytest.raises(InvalidArgument, match="these fit: f16, q8_0"):
        codec.check_stream(GGML("q4_k"), StreamSpec("v", 3, 64))


# -- frames


@some
def test_a_frame_is_the_rows_of_its_tokens(scheme):
    x = values()
    encoder = encode(scheme, x)
    payload = encoder.payload()
    assert payload == quantise(rows_of(x), scheme).tobytes()
    y = decode(scheme, payload, 50)
    np.testing.assert_array_equal(rows_of(y), dequantise(quantise(rows_of(x), scheme), scheme))
    difference = np.abs(x.astype(np.float64) - y)
    assert encoder.error.max_error == difference.max()
    assert encoder.error.sum_squares == pytest.approx((difference**2).sum(), rel=1e-12)
    assert encoder.error.n_values == x.size


@some
def test_how_tokens_come_in_does_not_matter(scheme):
    x = values(900)
    whole = encode(scheme, x)
    parts = encode(scheme, x[:, :0], n_threads=2)
    at = 0
    for n in (1, 7, 300, 64, 528):
        parts.push(x[:, at : at + n], 3)
        at += n
    assert (parts.payload(), parts.error) == (whole.payload(), whole.error)
    assert parts.n_tokens == 900


@some
@pytest.mark.parametrize("cut", [1, 17, 49])
def test_a_frame_goes_on_without_its_values_moving(scheme, cut):
    x = values()
    whole, before = encode(scheme, x), encode(scheme, x[:, :cut])
    codec = codec_for(GGML(scheme))
    resumed = codec.encoder(codec.fit(GGML(scheme), V, list), 0)
    # Of a frame that has more tokens than are wanted.
    resumed.resume(decode(scheme, whole.payload(), 50, hi=cut), whole.payload(), before.error)
    assert resumed.payload() == before.payload()
    resumed.push(np.ascontiguousarray(x[:, cut:]))
    assert (resumed.payload(), resumed.error) == (whole.payload(), whole.error)
    resumed.resume(x[:, :1], whole.payload(), ErrorStats.unknown())
    resumed.push(np.ascontiguousarray(x[:, 1:9]))
    assert not resumed.error.is_known


@some
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("style", ["half", "interleaved", "partial", "none"])
def test_ranges_orders_and_rotations(scheme, dtype, style):
    pairs, rope_style = (32, "half") if style == "partial" else (64, style)
    frequencies = (1e4 ** -np.linspace(0, 1, pairs)).astype(np.float32)
    rope = None if style == "none" else Rope(frequencies, style=rope_style)
    spec = StreamSpec("k", 2, 128, rope)
    payload = encode(scheme, values(), spec).payload()
    coded = np.ascontiguousarray(decode(scheme, payload, 50)[:, 3:41])
    table = None if rope is None else rope.table(0, 60)
    for lay in [None] if table is None else [None, table]:
        state = "pre" if lay is None else "post"
        expected = from_coded(coded, spec, state, 8, lay).astype(dtype)
        for options in ({"simd": level} for level in SIMD_LEVELS):
            found = decode(scheme, payload, 50, spec, 3, 41, dtype, lay, n_threads=2, **options)
            np.testing.assert_array_equal(found, expected)
    assert decode(scheme, payload, 50, spec, 7, 7).size == 0


def test_wide_rows_and_strided_outputs():
    spec = StreamSpec("v", 3, 2048)
    x = values(9, 3, 2048)
    payload = encode("q8_0", x, spec).payload()
    want = decode("q8_0", payload, 9, spec, dtype=np.float16)
    room = np.zeros((9, 3, 4096), np.float16)
    codec = codec_by_number(3)
    plan = Plan()
    plan.add(
        codec, codec.fit(GGML("q8_0"), spec, list), payload,
        first_token=0, n_tokens=9, start=0, stop=9, out=room.transpose(1, 0, 2)[:, :, 7:2055],
    )  # fmt: skip
    plan.run()
    np.testing.assert_array_equal(room.transpose(1, 0, 2)[:, :, 7:2055], want)
    assert not room[:, :, :7].any()
    assert not room[:, :, 2055:].any()


def test_damaged_payloads_are_errors():
    payload = encode("q8_0", values()).payload()
    with pytest.raises(Truncated, match="here: 13599 bytes of rows, expected 13600"):
        decode("q8_0", payload[:-1], 50)
    with pytest.raises(Corrupt, match="here: 13601 bytes"):
        decode("q8_0", payload + b"\0", 50)
    infinite = bytearray(payload)
    for scale in (b"\xff\x7f", b"\xff\xff", struct.pack("<e", np.inf)):  # NaN, and again
        infinite[34 * 8 * 20 : 34 * 8 * 20 + 2] = scale
        for dtype in DTYPES:
            with pytest.raises(Corrupt, match="here: the block does not decode"):
                decode("q8_0", bytes(infinite), 50, dtype=dtype)
    np.testing.assert_array_equal(
        decode("q8_0", bytes(infinite), 50, hi=20), decode("q8_0", payload, 50, hi=20)
    )
    big = encode("q8_0", np.full((2, 3, 128), 65504, np.float32)).payload()
    with pytest.raises(InvalidArgument, match="here: a value overflows float16"):
        decode("q8_0", big, 3, dtype=np.float16)


def test_no_plan_reads_or_writes_outside_its_tables():
    assert rows.BLOCK_DTYPE.itemsize == _core.ROW_BLOCK_BYTES
    assert rows.STREAM_DTYPE.itemsize == _core.ROW_STREAM_BYTES
    payload = encode("q8_0", values(4)).payload()
    stream = {"order": 0, "scheme": 8, "heads": 2, "head_dim": 128, "n_pairs": 64}
    block = {"n_tokens": 4, "stop": 4, "rope": 0}
    table = np.ones((4, 64), np.float32)

    def run(field=None, value=0):
        streams, blocks = np.zeros(1, rows.STREAM_DTYPE), np.zeros(1, rows.BLOCK_DTYPE)
        for array, fields in ((streams, stream), (blocks, block)):
            for name, number in fields.items():
                array[name] = number
            if field in array.dtype.names:
                array[field] = value
        order = np.arange(128, dtype=np.uint32)
        if field == "channel":
            order[5] = value
        out = np.zeros((2, 4, 128), np.float32)
        return _core.run_row_blocks(
            blocks, streams, order, [payload], [out], [0], [(table, table)], 1, -1
        )

    assert run().tolist() == [0]
    for field, value in (
        ("order", 1), ("order", 2**64 - 1), ("scheme", 0), ("scheme", 255), ("scheme", 12),
        ("heads", 0), ("heads", 3), ("heads", 2**31), ("head_dim", 0), ("head_dim", 129),
        ("head_dim", 2**31), ("n_pairs", 65), ("stream", 1), ("payload", 1), ("output", 1),
        ("n_tokens", 0), ("n_tokens", 5), ("n_tokens", 2**32 - 1), ("stop", 5), ("skip", 5),
        ("row", 1), ("row", 2**32 - 1), ("rope_row", 1), ("rope", 1), ("channel", 128),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match="plan: block 0"):
            run(field, value)


@some
def test_values_that_cannot_be_coded_are_named(scheme):
    codec = codec_for(GGML(scheme))
    params = codec.fit(GGML(scheme), V, list)
    x = values()
    codec.check(params, x, 0)
    codec.check(params, x * 3000, 0)  # beyond what is sure, and yet it fits
    x[1, 30, 40] = np.nan
    with pytest.raises(InvalidArgument, match="head 1, token 37, channel 40 is not finite"):
        codec.check(params, x, 7)
    x[1, 30, 40] = 1e12
    with pytest.raises(InvalidArgument, match="head 1, token 37, channel 40 is too large"):
        codec.check(params, x, 7)
    encoder = encode(scheme, values())
    before = encoder.payload(), encoder.error
    with pytest.raises(InvalidArgument, match="leaves float16"):
        encoder.push(np.nan_to_num(x))
    assert (encoder.payload(), encoder.error) == before


@pytest.mark.parametrize("scheme", [s.name for s in SCHEMES if coded(s.name)])
def test_below_a_limit_every_scale_fits(scheme):
    rng = np.random.default_rng(0)
    exponents = rng.integers(-30, 14, (64, 1))
    x = (rng.uniform(-1, 1, (64, 512)) * 2.0**exponents).astype(np.float32)
    x[:32] = np.where(rng.random((32, 512)) < 0.01, 16383.0, x[:32])
    x[0], x[1], x[2, ::2] = 16383.0, -16383.0, -16383.0
    y = dequantise(quantise(x, scheme), scheme)
    assert np.isfinite(y).all()


# -- numcodecs and zarr


@some
@pytest.mark.parametrize("dtype", [*DTYPES, np.float64], ids=lambda d: np.dtype(d).name)
def test_numcodecs_round_trip(scheme, dtype):
    x = values(100).astype(dtype)
    codec = GGMLCodec(scheme.upper(), "k", block_tokens=32)
    config = codec.get_config()
    assert config == {"id": "ggml", "scheme": scheme, "kind": "k", "block_tokens": 32}
    data = codec.encode(x)
    y = numcodecs.get_codec(json.loads(json.dumps(config))).decode(data)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    want = dequantise(quantise(rows_of(x.astype(np.float32)), scheme), scheme)
    np.testing.assert_array_equal(rows_of(y), want.astype(dtype))
    # Whichever class decodes, and only what was written.
    np.testing.assert_array_equal(numcodecs.get_codec({"id": "kvr1"}).decode(data), y)
    for damaged in (data[:-1], data[:40], data[:200] + b"\0" + data[201:]):
        with pytest.raises((Truncated, Corrupt)):
            codec.decode(damaged)


def test_numcodecs_refuses_what_would_overflow():
    codec = GGMLCodec("q8_0")
    with pytest.raises(InvalidArgument, match="decode beyond float16"):
        codec.encode(np.full((1, 2, 32), 65504, np.float16))
    with pytest.raises(InvalidArgument, match="these fit"):
        codec.encode(np.zeros((1, 2, 30), np.float16))
    assert codec.decode(codec.encode(np.zeros((1, 0, 32), "f4"))).shape == (1, 0, 32)


def test_zarr_arrays_of_anybody():
    x = values(64, 1, 256).astype(np.float16)

    def create(codec, **options):
        configuration = {"codec": codec, "kind": "v", **options}
        serializer = {"name": "kvstore.frame", "configuration": configuration}
        return zarr.create_array(
            store, shape=(1, 64, 256), chunks=(1, 32, 256), dtype="float16",
            fill_value=float("nan"), serializer=serializer, compressors=None,
        )  # fmt: skip

    store = {}
    create("GGML.Q8")[:] = x
    array = zarr.open_array(store, mode="r")
    assert array.metadata.codecs[0].to_dict()["configuration"]["codec"] == "ggml.q8_0"
    want = dequantise(quantise(x, "q8_0"), "q8_0", "float16")
    np.testing.assert_array_equal(array[:], want)
    np.testing.assert_array_equal(array[0, 40:50, 7], want[0, 40:50, 7])
    store = {}
    with pytest.raises(InvalidArgument, match="needs a scheme"):
        create("ggml")
    with pytest.raises(InvalidArgument, match="give it no step"):
        create("ggml.q8_0", step=0.5)
    with pytest.raises(InvalidArgument, match="these fit"):
        zarr.create_array(
            {}, shape=(1, 64, 30), chunks=(1, 32, 30), dtype="float16", compressors=None,
            serializer=FrameCodec(codec="ggml.q8_0", kind="v"),
        )  # fmt: skip
