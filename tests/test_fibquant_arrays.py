"""FibQuant arrays: containers of numcodecs with their book, zarr arrays with one for all chunks."""

import base64
import json
from contextlib import nullcontext

import ml_dtypes
import numcodecs
import numpy as np
import pytest
import zarr
from fibquant_books import random_book
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, NotFound, Truncated, Unsupported
from kvcodecs.fibquant import QualityBudget
from kvcodecs.fibquant import book as books
from kvcodecs.numcodecs_codecs import FibQuantCodec, TKV1Codec
from kvcodecs.shared import pack_shared
from kvcodecs.zarr_codec import FrameCodec
from zarr.core.buffer import cpu

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
SMALL = {"block_dim": 2, "codebook_size": 16}
FUSED = "zarr.core.codec_pipeline.FusedCodecPipeline"
PIPELINES = (
    ["batched", "fused"] if hasattr(zarr.core.codec_pipeline, FUSED.split(".")[-1]) else ["batched"]
)


@pytest.fixture(params=PIPELINES)
def pipeline(request):
    """The codec pipelines of this zarr: 3.4 has a second one, without an event loop."""
    with (
        zarr.config.set({"codec_pipeline.path": FUSED})
        if request.param == "fused"
        else nullcontext()
    ):
        yield request.param


def values(shape=(2, 100, 16), dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) + 3 * rng.standard_normal((1, 1, shape[2]))).astype(dtype)


def record_at(data, at):
    """Return the bytes of the record that starts at a place."""
    return data[at : at + 20 + int.from_bytes(data[at + 8 : at + 16], "little")]


# -- numcodecs


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_arrays_come_back_near_and_what_is_kept_exactly(dtype, kind):
    x = values(dtype=dtype)
    codec = FibQuantCodec(kind, **SMALL, last_tokens=7, raw_heads=[1], block_tokens=40)
    data = codec.encode(x)
    y = codec.decode(data)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    narrow = x.astype(np.float32)  # what float64 becomes
    for part in (np.s_[1], np.s_[:, :4], np.s_[:, 93:]):
        np.testing.assert_array_equal(y[part].astype(np.float32), narrow[part])
    moved = y[0, 4:93].astype(np.float32) != narrow[0, 4:93]
    assert moved.mean() > 0.9
    again = numcodecs.get_codec(json.loads(json.dumps(codec.get_config())))
    assert again == codec
    assert again.encode(x) == data
    assert np.array_equal(TKV1Codec().decode(data), y)  # containers say what they are
    more = FibQuantCodec(kind, **SMALL, last_tokens=1000).encode(x)
    np.testing.assert_array_equal(codec.decode(more).astype(np.float32), narrow)


def test_every_byte_of_a_container_is_checked():
    codec = FibQuantCodec("k", block_dim=2, codebook_size=2, rotation="haar", block_tokens=4)
    data = codec.encode(values((1, 7, 4)))
    for at in range(0, len(data), 5):
        with pytest.raises(Truncated):
            codec.decode(data[:at])
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        with pytest.raises((Corrupt, Truncated, Unsupported)):
            codec.decode(bad)
    with pytest.raises(Corrupt, match="after the last block"):
        codec.decode(data + b"\0")


def test_a_container_has_its_own_book(monkeypatch):
    x = values()
    codec = FibQuantCodec(**SMALL)
    data = codec.encode(x)
    head = record_at(data, 0)
    book = record_at(data, len(head))
    other = pack_shared(random_book(16, 2, 16, seed=31).pack())
    rest = data[len(head) + len(book) :]
    # Another reader, who has seen no book: what is read once is not read again.
    monkeypatch.setattr(books, "_of_digests", books._Remembered())
    with pytest.raises(Corrupt, match="digest"):
        codec.decode(head + other + rest)
    with pytest.raises(Corrupt, match="magic"):
        codec.decode(head + rest)
    assert np.array_equal(codec.decode(head + book + rest), codec.decode(data))
    raw = FibQuantCodec(axis="raw").encode(x)
    assert raw[len(record_at(raw, 0)) :][:4] == b"KVF1"  # and no book
    np.testing.assert_array_equal(codec.decode(raw), x)


def test_configurations_of_numcodecs():
    budget = QualityBudget(max_value_aggregation_mse=1e-9)
    codec = FibQuantCodec("v", **SMALL, budget=budget)
    again = numcodecs.get_codec(json.loads(json.dumps(codec.get_config())))
    assert again == codec
    np.testing.assert_array_equal(again.decode(again.encode(values())), values())
    assert FibQuantCodec("v", **SMALL, budget={"max_value_aggregation_mse": 1e-9}) == codec
    for fields, message in (
        ({"raw_layers": [1]}, "raw_layers"),
        ({"block_dim": 1}, "block_dim 1"),
        ({"kind": "q"}, "kind 'q'"),
        ({"budget": {"most": 1}}, "most"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            numcodecs.get_codec({"id": "fibquant", **fields})
    with pytest.raises(InvalidArgument, match="does not divide"):
        FibQuantCodec("v", block_dim=3).encode(values())
    with pytest.raises(InvalidArgument, match="raw head 2: there are 2 heads"):
        FibQuantCodec("v", **SMALL, raw_heads=[2]).encode(values())


def test_vectors_that_cannot_be_coded():
    x, asked = values(), SMALL | {"axis": "per_token"}
    x[1, 20] = 0
    kept = FibQuantCodec(**asked)
    assert not kept.decode(kept.encode(x))[1, 20].any()
    closed = FibQuantCodec(**asked, on_failure="fail_closed")
    with pytest.raises(InvalidArgument, match="head 1, token 20 cannot be coded: zero norm"):
        closed.encode(x)
    assert FibQuantCodec(**asked, on_failure="fail_closed", last_tokens=80).encode(x)
    x[1, 20] = np.nan
    with pytest.raises(InvalidArgument, match="head 1, token 20, channel 0 is not finite"):
        closed.encode(x)
    assert FibQuantCodec().decode(FibQuantCodec().encode(x[:, :0])).shape == (2, 0, 16)


def test_values_that_may_overflow_are_refused():
    x = np.full((1, 40, 16), 60000, np.float16)
    x[0, ::2, ::3] = -60000
    with pytest.raises(InvalidArgument, match="may decode beyond float16"):
        FibQuantCodec("k", **SMALL).encode(x)


# -- zarr


def create(store, serializer, dtype="float16", **options):
    options = {"shape": (2, 120, 16), "chunks": (2, 40, 16), "fill_value": np.nan} | options
    return zarr.create_array(store, serializer=serializer, dtype=dtype, compressors=None, **options)


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("layout", [{}, {"shards": (2, 120, 16)}], ids=["chunks", "shards"])
def test_zarr_arrays_have_one_book(kind, layout, pipeline):
    store, x = {}, values((2, 120, 16), np.float16)
    array = create(store, FrameCodec(codec="fibquant", kind=kind, **SMALL, raw_heads=[1]), **layout)
    array[...] = x
    found = zarr.open_array(store, mode="r")
    y = found[...]
    np.testing.assert_array_equal(y[1], x[1])
    assert 0 < np.abs(y[0].astype(np.float32) - x[0]).mean() < 1.5
    for part in (np.s_[0, 33:81, 5], np.s_[:, 79], np.s_[1, :, ::3]):
        np.testing.assert_array_equal(found[part], y[part])
    document = json.loads(store["zarr.json"].to_bytes())
    assert json.dumps(document).count('"book"') == 1
    chunks = b"".join(value.to_bytes() for key, value in store.items() if key != "zarr.json")
    assert b"KVSO" not in chunks
    assert len(chunks) < 1.2 * x.nbytes  # half of it is raw
    zarr.open_array(store, mode="a")[:, 40:80] = x[:, :40]
    if not layout:
        np.testing.assert_array_equal(found[:, 40:80], y[:, :40])


def configuration(store):
    return json.loads(store["zarr.json"].to_bytes())["codecs"][0]["configuration"]


def with_configuration(store, change):
    document = json.loads(store["zarr.json"].to_bytes())
    document["codecs"][0]["configuration"] |= change
    return store | {"zarr.json": cpu.Buffer.from_bytes(json.dumps(document).encode())}


def test_the_book_of_an_array_is_the_one_that_is_stored():
    """Whoever writes more uses it as well, even if he would build another one."""
    store, x = {}, values((2, 120, 16), np.float16)
    create(store, FrameCodec(codec="fibquant", kind="v", **SMALL))
    other = random_book(16, 2, 16)
    packed = other.pack()
    assert configuration(store)["book"] != base64.b64encode(packed).decode()
    profile = json.loads(json.dumps(configuration(store)))
    assert "first_tokens" not in profile
    changed = with_configuration(store, {"book": base64.b64encode(packed).decode(), "seed": 0})
    array = zarr.open_array(changed, mode="a")
    array[...] = x
    y = zarr.open_array(changed, mode="r")[...]
    assert 0 < np.abs(y.astype(np.float32) - x).mean() < 3
    # Chunks of another book are told.
    mixed = with_configuration(changed, {"seed": 42, "book": configuration(store)["book"]})
    with pytest.raises(Corrupt, match="another book"):
        zarr.open_array(mixed, mode="r")[...]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"book": "?"}, Corrupt, "book"),
        ({"book": ""}, Truncated, "book"),
        ({"book": base64.b64encode(random_book(24, 2, 16).pack()).decode()}, Corrupt, "book"),
        ({"seed": 43}, Corrupt, "book"),
        ({"block_dim": "2"}, InvalidArgument, "block_dim"),
        ({"block_dim": 1}, InvalidArgument, "block_dim"),
        ({"pages": 2}, Unsupported, "pages"),
        ({"first_tokens": 4}, Unsupported, "first_tokens"),
        ({"step": 0.5}, InvalidArgument, "fixed rate"),
        ({"codec": "raw"}, Unsupported, "upgrade"),
        ({"kind": "w"}, InvalidArgument, "kind"),
    ],
)
def test_configurations_of_zarr_that_are_damaged_or_newer(change, kind, message):
    store = {}
    create(store, FrameCodec(codec="fibquant", kind="v", **SMALL))
    with pytest.raises(kind, match=message):
        zarr.open_array(with_configuration(store, change), mode="r")[...]


def test_arrays_that_cannot_be_are_refused():
    for options, message in (
        ({"step": 0.5}, "fixed rate"),
        ({"first_tokens": 4}, "no option first_tokens"),
        ({"raw_layers": (1,)}, "no option raw_layers"),
        ({"block_dim": 1}, "block_dim 1"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            FrameCodec(codec="fibquant", kind="v", **options)
    with pytest.raises(InvalidArgument, match="raw has no option block_dim"):
        FrameCodec(codec="raw", kind="v", block_dim=2)
    for options, message in (
        ({"block_dim": 3}, "does not divide"),
        ({"raw_heads": (5,)}, "raw head 5"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            create({}, FrameCodec(codec="fibquant", kind="v", **SMALL | options))
    named = FrameCodec(codec="fibquant.2x16", kind="v")
    assert named.to_dict() == FrameCodec(codec="fibquant", kind="v", **SMALL).to_dict()


def test_a_raw_array_needs_no_book():
    store, x = {}, values((2, 120, 16), np.float16)
    create(store, FrameCodec(codec="fibquant", kind="v", axis="raw"))[...] = x
    assert "book" not in configuration(store)
    np.testing.assert_array_equal(zarr.open_array(store, mode="r")[...], x)


def test_chunks_that_are_damaged_are_errors():
    store, x = {}, values((2, 40, 16), np.float16)
    create(store, FrameCodec(codec="fibquant", kind="v", **SMALL), shape=(2, 40, 16))[...] = x
    (key,) = set(store) - {"zarr.json"}
    good = store[key].to_bytes()
    rng = np.random.default_rng(0)
    for at in [*range(0, 150, 3), *rng.integers(0, len(good), 30)]:
        bad = bytearray(good)
        bad[at] ^= 1 << rng.integers(8)
        for data in (bytes(bad), good[:at]):
            with pytest.raises(KvError) as found:
                zarr.open_array(store | {key: cpu.Buffer.from_bytes(data)}, mode="r")[...]
            assert found.type in (Corrupt, Truncated, Unsupported)
            assert not isinstance(found.value, NotFound)


@pytest.mark.parametrize(
    "options", [{"raw_heads": 1}, {"raw_heads": None}, {"budget": {"max_mse": 1.0}}, {"budget": 1}]
)
def test_options_that_are_none_are_refused(options):
    with pytest.raises(InvalidArgument, match=r"FibQuant: (raw_heads|budget)"):
        FibQuantCodec(**options)
