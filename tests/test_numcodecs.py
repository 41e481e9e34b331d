"""The numcodecs classes: any float array comes back within the bound, any damage is an error."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import ml_dtypes
import numcodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, Truncated, Unsupported
from kvcodecs.frame import crc32c
from kvcodecs.numcodecs_codecs import KVR1Codec, KVRawCodec, TKV1Codec

GOLDEN = Path(__file__).parent / "golden" / "tkv1"
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
# Half an ulp of a value near 8, beyond the step: output rounding.
ROUNDING = {"float16": 2.0**-8, "bfloat16": 2.0**-5, "float32": 2.0**-20, "float64": 2.0**-20}


#: What the classes write: layouts of containers.
every_layout = pytest.mark.parametrize("layout", ["lane", "stream", "kvr1"])


def make_codec(layout, *args, **fields):
    if layout == "kvr1":
        return KVR1Codec(*args, **fields)
    return TKV1Codec(*args, layout=layout, **fields)


def make_array(shape=(2, 37, 8), dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(0, 1.5, shape).astype(dtype)


def distance(x, y):
    return np.abs(x.astype(np.float64) - y.astype(np.float64))


def bits(x):
    return np.ascontiguousarray(x).tobytes()


@every_layout
@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_round_trip_keeps_dtype_shape_and_bound(dtype, kind, layout):
    x = make_array(dtype=dtype)
    codec = make_codec(layout, kind, step=0.25, block_tokens=16)
    y = codec.decode(codec.encode(x))
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    bound = 0.25 / np.sqrt(2) if layout == "stream" and kind == "k" else 0.125
    assert distance(x, y).max() <= bound + ROUNDING[x.dtype.name]
    # Sinks are finer, and tokens after them are really coded with the step that was asked for.
    assert distance(x, y)[:, :4].max() <= bound / 16 + ROUNDING[x.dtype.name]
    assert distance(x, y).max() > 0.25 / 8


@pytest.mark.parametrize("dtype", [*DTYPES, ">f2", ">f4"], ids=str)
@every_layout
def test_order_strides_and_write_protection_do_not_matter(dtype, layout):
    x = make_array(dtype=dtype)
    x.flags.writeable = False
    codec = make_codec(layout, "k", step=0.1, block_tokens=16)
    want = codec.encode(x)
    padded = np.zeros((4, 40, 24), x.dtype)
    view = padded[::2, :37, 8:16]
    view[...] = x
    for form in (view, x[:, ::-1][:, ::-1]):
        assert codec.encode(form) == want
    fortran = codec.decode(codec.encode(np.asfortranarray(x)))
    assert bits(np.ascontiguousarray(fortran)) == bits(codec.decode(want))
    assert bits(codec.decode(want)) == bits(codec.decode(bytearray(want)))


@pytest.mark.parametrize(
    ("policy", "value", "largest"),
    [
        ("step", 0.5, 0.25),
        ("max_error", 0.125, 0.125),
        ("rel_step", 0.25, 1.6 / 8),
        ("rmse", 0.05, 0.05 * np.sqrt(3)),
    ],
)
@every_layout
def test_policies(layout, policy, value, largest):
    x = make_array((2, 300, 16))
    codec = make_codec(layout, "v", **{policy: value})
    error = distance(x, codec.decode(codec.encode(x)))
    assert largest / 2 < error.max() <= largest + 1e-6
    if policy == "rmse":
        assert 0.9 < np.sqrt((error[:, 4:] ** 2).mean()) / value < 1.05


@every_layout
@pytest.mark.parametrize("kind", ["k", "v"])
def test_max_error_holds_on_the_output(kind, layout):
    x = make_array((2, 100, 16))
    codec = make_codec(layout, kind, max_error=0.1)
    assert distance(x, codec.decode(codec.encode(x))).max() <= 0.1 + 1e-6


@every_layout
def test_bits_per_value_policy(layout):
    x = make_array((2, 256, 64))
    data = make_codec(layout, "v", bpv=4.0).encode(x)
    assert 3.7 < 8 * len(data) / x.size < 4.2


def test_configuration_round_trips_through_json():
    for codec in (
        TKV1Codec(),
        TKV1Codec("k", max_error=0.25, lane_channels=4, ar=False, sink=0),
        TKV1Codec("k", layout="stream", theta=1e4, pre_rope=False, bpv=3.0),
        KVR1Codec(),
        KVR1Codec("k", rmse=0.25, ar=False, sink=0, sink_div=512, block_tokens=77),
    ):
        config = json.loads(json.dumps(codec.get_config()))
        assert numcodecs.get_codec(config) == codec
        assert numcodecs.get_codec(config).get_config() == config
        assert repr(eval(repr(codec))) == repr(codec)
    for codec_class in (TKV1Codec, KVR1Codec):
        assert codec_class().get_config()["rel_step"] == 0.25
        assert codec_class() != codec_class("k")
    assert KVR1Codec() != TKV1Codec()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, ">f2", ">f4"])
def test_raw_comes_back_bit_for_bit(dtype):
    x = make_array(dtype=dtype)
    x[0, :3, 0] = [-0.0, 0.0, np.finfo(np.float16).smallest_subnormal]
    codec = numcodecs.get_codec({"id": "kvraw", "kind": "k", "block_tokens": 16})
    data = codec.encode(x)
    for reader in (codec, TKV1Codec()):
        y = reader.decode(data)
        assert y.dtype == x.dtype
        assert bits(y) == bits(x)
    out = np.empty_like(x)
    assert bits(codec.decode(data, out=out)) == bits(x)
    assert codec == KVRawCodec("k", block_tokens=16)
    assert repr(eval(repr(codec))) == repr(codec)
    for at in range(0, len(data), 97):
        bad = bytearray(data)
        bad[at] ^= 8
        with pytest.raises((Corrupt, Truncated, Unsupported)):
            codec.decode(bad)
    assert codec.decode(codec.encode(x[:, :0])).shape == (2, 0, 8)


def test_raw_refuses_what_it_would_change():
    with pytest.raises(InvalidArgument, match="narrowed"):
        KVRawCodec().encode(make_array(dtype=np.float64))
    x = make_array()
    x[1, 3, 2] = np.nan
    with pytest.raises(InvalidArgument, match="head 1, token 3, channel 2"):
        KVRawCodec().encode(x)


@pytest.mark.parametrize("name", ["tkv1", "kvr1"])
def test_numcodecs_finds_the_class_by_itself(name):
    program = (
        "import sys, numcodecs, numpy as np\n"
        f"codec = numcodecs.get_codec({{'id': {name!r}, 'kind': 'k', 'step': 0.5}})\n"
        "x = np.ones((1, 3, 2), 'f2')\n"
        "assert (codec.decode(codec.encode(x)) == x).all()\n"
        "assert 'kvstore' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_any_configuration_decodes_any_container():
    x = make_array((3, 20, 4))
    # Without sinks both codecs fit the same means, and so decode to the same values.
    writers = (
        TKV1Codec("k", step=0.5, sink=0, lane_channels=2),
        TKV1Codec("k", layout="stream"),
        KVR1Codec("k", step=0.5, sink=0),
    )
    for writer in writers:
        data = writer.encode(x)
        for reader in (TKV1Codec(), KVR1Codec()):
            assert bits(reader.decode(data)) == bits(writer.decode(data))
    lane, _, kvr1 = (writer.encode(x) for writer in writers)
    assert bits(TKV1Codec().decode(lane)) == bits(TKV1Codec().decode(kvr1))


@every_layout
def test_a_container_of_another_layout_is_corrupt(layout):
    """The layout is part of what the head says, and frames say their codec."""
    data = bytearray(make_codec(layout, "k", step=0.5).encode(make_array((1, 8, 2))))
    end = 20 + int.from_bytes(data[8:16], "little")
    for other in {0, 1, 2, 3} - {data[20]}:
        data[20] = other
        data[16:20] = crc32c(data[:16], data[20:end]).to_bytes(4, "little")
        with pytest.raises((Corrupt, Truncated)):
            TKV1Codec().decode(data)


def test_files_are_tkv1s_alone():
    file = (GOLDEN / "synth_v_lane2.tkv").read_bytes()
    with pytest.raises(Corrupt):
        KVR1Codec().decode(file)


@pytest.mark.parametrize("name", ["synth_v_lane2", "synth_k_stream", "synth_v_lane_n1"])
def test_bare_files_decode_to_float32(name):
    case = next(c for c in json.loads((GOLDEN / "MANIFEST.json").read_text()) if c["name"] == name)
    x = np.fromfile(GOLDEN / case["input"], "<f4").reshape(case["shape"])
    y = TKV1Codec().decode((GOLDEN / f"{name}.tkv").read_bytes())
    assert y.dtype == np.float32
    assert y.shape == x.shape
    assert distance(x, y).max() <= case["params"]["step"] / np.sqrt(2) + 1e-6
    out = np.empty_like(x)
    assert TKV1Codec().decode((GOLDEN / f"{name}.tkv").read_bytes(), out=out) is out
    assert bits(out) == bits(y)


@every_layout
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_out_is_filled_and_returned(dtype, layout):
    x = make_array(dtype=dtype)
    codec = make_codec(layout, "v", step=0.25, block_tokens=16)
    data = codec.encode(x)
    want = codec.decode(data)
    wide = np.zeros((2, 40, 16), dtype)
    for out in (
        np.zeros_like(x),
        np.asfortranarray(np.zeros_like(x)),
        wide[:, :37, 4:12],
        np.zeros(x.size, dtype),
    ):
        assert codec.decode(data, out=out) is out
        assert bits(out.reshape(x.shape)) == bits(want)
    assert (wide[:, :, :4] == 0).all()
    memory = bytearray(x.nbytes)
    codec.decode(data, out=memory)
    assert memory == bits(want)
    for size in (x.nbytes - 1, x.nbytes + 1, 0):
        with pytest.raises(InvalidArgument):
            codec.decode(data, out=bytearray(size))


@every_layout
def test_no_tokens(layout):
    for policy in ({}, {"bpv": 3.0}, {"step": 0.5}):
        codec = make_codec(layout, "k", **policy)
        data = codec.encode(np.empty((3, 0, 8), np.float16))
        y = codec.decode(data)
        assert (y.shape, y.dtype) == ((3, 0, 8), np.float16)
        out = np.empty((3, 0, 8), np.float16)
        assert codec.decode(data, out=out) is out
    for n in range(len(data)):
        with pytest.raises(Truncated):
            codec.decode(data[:n])
    with pytest.raises(Corrupt):
        codec.decode(data + b"\0")


@settings(deadline=None, max_examples=40)
@given(
    heads=st.integers(1, 3),
    n_tokens=st.integers(1, 40),
    pairs=st.integers(1, 6),
    block=st.integers(1, 50),
    kind=st.sampled_from("kv"),
    layout=st.sampled_from(["lane", "stream", "kvr1"]),
    sink=st.integers(0, 9),
    sink_div=st.sampled_from([1, 3, 16]),
    ar=st.booleans(),
    constant=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_geometry(
    heads, n_tokens, pairs, block, kind, layout, sink, sink_div, ar, constant, seed
):
    x = make_array((heads, n_tokens, 2 * pairs), seed=seed)
    if constant:
        x[...] = x[0, 0, 0]
    codec = make_codec(
        layout, kind, step=0.3, block_tokens=block, sink=sink, sink_div=sink_div, ar=ar
    )
    y = codec.decode(codec.encode(x))
    bound = 0.3 / np.sqrt(2) if layout == "stream" and kind == "k" else 0.15
    assert distance(x, y).max() <= bound + 1e-5
    assert distance(x, y)[:, :sink].max(initial=0) <= bound / sink_div + 1e-5
    assert codec.encode(x) == codec.encode(x)


@every_layout
def test_every_truncation_is_truncated(layout):
    data = make_codec(layout, "k", step=0.5, block_tokens=2).encode(make_array((1, 5, 2)))
    for n in range(len(data)):
        with pytest.raises(Truncated):
            TKV1Codec().decode(data[:n])
    with pytest.raises(KvError):
        TKV1Codec().decode(data + b"\0")


def with_head(data, offset, new):
    """Change bytes of the head of a container, its checksum too."""
    data = bytearray(data)
    end = 20 + int.from_bytes(data[8:16], "little")
    data[20 + offset : 20 + offset + len(new)] = new
    data[16:20] = crc32c(data[:16], data[20:end]).to_bytes(4, "little")
    return data


def with_frame_tokens(data, n_tokens):
    """Change how many tokens the one frame of a container claims, its checksum too."""
    data, at = bytearray(data), data.index(b"KVF1")
    data[at + 36 : at + 40] = n_tokens.to_bytes(4, "little")
    data[at + 72 : at + 76] = crc32c(data[at : at + 72], data[at + 76 :]).to_bytes(4, "little")
    return data


@pytest.mark.parametrize("name", ["tkv1", "stream", "kvr1", "kvraw", "ggml", "fibquant"])
def test_claims_that_the_bytes_cannot_hold_cost_no_memory(name):
    fields = {"id": name, "scheme": "q8_0"} if name == "ggml" else {"id": name}
    if name == "stream":
        fields = {"id": "tkv1", "layout": "stream"}
    if name == "fibquant":
        fields |= {"block_dim": 2, "codebook_size": 16}
    codec = numcodecs.get_codec(fields)
    good = codec.encode(make_array((2, 4, 128)))
    claims = [
        with_head(good, 8, (1 << 31).to_bytes(4, "little")),  # head_dim
        with_head(good, 8, (1 << 16).to_bytes(4, "little")),
        with_head(good, 4, (1 << 13).to_bytes(4, "little")),  # heads
        with_head(good, 12, (1 << 20).to_bytes(4, "little") + (1 << 20).to_bytes(8, "little")),
    ]
    if name in (
        "kvraw",
        "ggml",
        "fibquant",
    ):  # in the others a run of equal values may take no bytes at all
        claims.append(with_frame_tokens(claims[-1], 1 << 20))
    tracemalloc.start()
    try:
        for claim in claims:
            with pytest.raises((Corrupt, Truncated)):
                codec.decode(claim)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@every_layout
def test_every_flip_is_an_error(layout):
    data = make_codec(layout, "k", step=0.5, block_tokens=2).encode(make_array((1, 5, 2)))
    for at in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            with pytest.raises((Corrupt, Truncated, Unsupported)):
                TKV1Codec().decode(bad)


@pytest.mark.parametrize("layout", ["lane", "kvr1"])
def test_frames_out_of_place_are_corrupt(layout):
    codec = make_codec(layout, "k", step=0.5, block_tokens=4)
    a, b = codec.encode(make_array((1, 8, 2))), codec.encode(make_array((1, 8, 2), seed=1))
    head = 20 + int.from_bytes(a[8:16], "little")
    first = head + 76 + int.from_bytes(a[head + 24 : head + 32], "little")
    with pytest.raises(Corrupt, match="expected 4 from 0"):
        codec.decode(a[:head] + a[first:] + a[head:first])
    other = 20 + int.from_bytes(b[8:16], "little")
    with pytest.raises(Corrupt, match="another stream"):
        codec.decode(a[:head] + b[other:])
    with pytest.raises(Corrupt, match="after the last block"):
        codec.decode(a + a[first:])
    with pytest.raises(Truncated):
        codec.decode(a[:first])


@pytest.mark.parametrize(
    ("offset", "new", "kind"),
    [
        (0, b"\x06", Unsupported),  # layout
        (1, b"\x04", Unsupported),  # dtype
        (2, b"\x02", Unsupported),  # kind
        (3, b"\x04", Unsupported),  # memory
        (4, bytes(4), Corrupt),  # heads
        (4, b"\xff" * 4, Corrupt),
        (8, b"\x03\0\0\0", Corrupt),  # head_dim
        (12, bytes(4), Corrupt),  # block_tokens
        (12, b"\xff" * 4, Corrupt),
        (16, b"\xff" * 8, (Corrupt, Truncated)),  # n_tokens
        (16, bytes(8), Corrupt),
    ],
)
@every_layout
def test_head_is_checked_behind_a_right_checksum(layout, offset, new, kind):
    data = make_codec(layout, "k", step=0.5).encode(make_array((1, 8, 2)))
    with pytest.raises(kind):
        TKV1Codec().decode(with_head(data, offset, new))


@pytest.mark.parametrize("name", ["tkv1", "kvr1", "kvraw", "ggml", "fibquant"])
def test_configurations_with_other_keys_are_refused(name):
    fields = {"id": name, "scheme": "q8_0"} if name == "ggml" else {"id": name}
    assert numcodecs.get_codec(fields).get_config()["id"] == name
    with pytest.raises(InvalidArgument, match=f"^{name}: .*extra"):
        numcodecs.get_codec(fields | {"extra": 1})
    if name == "ggml":
        with pytest.raises(InvalidArgument, match="scheme"):
            numcodecs.get_codec({"id": name})
    with pytest.raises(InvalidArgument, match="not an array"):
        numcodecs.get_codec(fields).encode([[1.0], [1.0, 2.0]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@every_layout
def test_values_that_are_not_finite_are_named(layout, bad):
    x = make_array((2, 9, 4))
    x[1, 7, 2] = x[1, 8, 0] = bad
    with pytest.raises(InvalidArgument, match="head 1, token 7, channel 2"):
        make_codec(layout, "k").encode(x)
    wide = make_array((2, 9, 4), np.float64)
    wide[0, 3, 1] = 1e300
    with pytest.raises(InvalidArgument, match="head 0, token 3, channel 1"):
        make_codec(layout, "k").encode(wide)


@every_layout
def test_what_may_overflow_its_dtype_is_refused(layout):
    codec = make_codec(layout, "v", step=100.0, sink=0)
    x = np.full((1, 4, 2), 65500.0, np.float16)
    with pytest.raises(InvalidArgument, match="float16"):
        codec.encode(x)
    y = codec.decode(codec.encode(x.astype(np.float32)))
    assert distance(x, y).max() <= 50.0
    codec.decode(codec.encode((x / 2).astype(np.float16)))


@every_layout
def test_step_too_small_is_refused(layout):
    with pytest.raises(InvalidArgument):
        make_codec(layout, "v", step=1e-9).encode(make_array((1, 8, 2)) * 1e3)


@pytest.mark.parametrize("layout", ["lane", "kvr1"])
def test_a_unit_below_float32_is_refused(layout):
    with pytest.raises(InvalidArgument, match="float32"):
        make_codec(layout, "v", step=1e-44).encode(make_array((1, 8, 2)))


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "q"},
        {"layout": "file"},
        {"step": 0.0},
        {"step": float("nan")},
        {"step": 0.1, "rmse": 0.1},
        {"block_tokens": 0},
        {"block_tokens": 2**20 + 1},
        {"sink": -1},
        {"sink_div": 0},
        {"lane_channels": 3},
        {"theta": 1e4},
        {"pre_rope": True},
        {"layout": "stream", "theta": 0.0},
    ],
)
def test_configurations_that_are_refused(fields):
    with pytest.raises(InvalidArgument):
        TKV1Codec(**fields)
    if not {"layout", "lane_channels", "theta", "pre_rope"} & set(fields):
        with pytest.raises(InvalidArgument):
            KVR1Codec(**fields)


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((3, 4), np.float32),
        np.zeros((1, 2, 3, 4), np.float32),
        np.zeros((1, 4, 3), np.float32),
        np.zeros((0, 4, 2), np.float32),
        np.zeros((1, 4, 0), np.float32),
        np.zeros((1, 4, 2), np.int16),
        np.zeros((1, 4, 2), np.complex64),
        np.zeros((1, 4, 2), np.longdouble),
    ],
    ids=lambda x: f"{x.dtype.name}{x.shape}",
)
@every_layout
def test_arrays_that_are_refused(x, layout):
    with pytest.raises(InvalidArgument):
        make_codec(layout, "k", step=0.5).encode(x)


def test_lane_channels_must_divide_head_dim():
    with pytest.raises(InvalidArgument):
        TKV1Codec("k", step=0.5, lane_channels=4).encode(make_array((1, 4, 6)))


@pytest.mark.parametrize("data", [b"", b"KV", b"TKV1", b"KVC1", b"KVF1" + bytes(80), bytes(100)])
def test_other_bytes_are_refused(data):
    for codec in (TKV1Codec(), KVR1Codec()):
        with pytest.raises((Corrupt, Truncated)):
            codec.decode(data)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", ">f2", "<f8", ">f8"])
@every_layout
def test_byte_order_and_memory_layout_come_back(dtype, order, layout):
    x = np.asarray(make_array(), dtype=dtype, order=order)
    codec = make_codec(layout, "v", step=0.25)
    data = codec.encode(x)
    y = codec.decode(data)
    assert y.dtype == x.dtype
    assert y.flags.f_contiguous == x.flags.f_contiguous
    assert distance(x, y).max() <= 0.126
    plain = codec.decode(codec.encode(np.ascontiguousarray(x, x.dtype.newbyteorder("="))))
    np.testing.assert_array_equal(y, plain)
    for other in ("<f4", ">f4"):
        out = np.zeros(x.shape, other, order="F")
        if out.nbytes == x.nbytes:
            codec.decode(data, out=out)
            np.testing.assert_array_equal(out, plain)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2"])
@every_layout
def test_zarr_format_2_arrays(tmp_path, dtype, order, layout):
    import zarr

    x = make_array((2, 300, 8)).astype(dtype)
    z = zarr.create_array(
        tmp_path / "a.zarr",
        shape=x.shape,
        chunks=(2, 128, 8),  # the last chunk is padded
        dtype=dtype,
        order=order,
        zarr_format=2,
        compressors=make_codec(layout, "v", step=0.25, sink=0),
    )
    z[:] = x
    for stored in (z, zarr.open(tmp_path / "a.zarr", mode="r")):
        assert stored.dtype == x.dtype
        assert distance(x, stored[:]).max() <= 0.126
        np.testing.assert_array_equal(stored[1, 100:200, 3], stored[:][1, 100:200, 3])


@every_layout
def test_buffers_that_cannot_be_used(layout):
    codec = make_codec(layout, "v", step=0.25)
    x = make_array()
    data = codec.encode(x)
    fixed = np.zeros_like(x)
    fixed.flags.writeable = False
    for out in (fixed, bytes(x.nbytes), 5):
        with pytest.raises(InvalidArgument):
            codec.decode(data, out=out)
    for buf in (np.frombuffer(data * 2, np.uint8)[::2], object()):
        with pytest.raises(InvalidArgument):
            codec.decode(buf)
    for block_tokens in (128.5, True, "128"):
        with pytest.raises(InvalidArgument, match="block_tokens"):
            make_codec(layout, block_tokens=block_tokens)
