"""zarr arrays of one's own with our codec: whole chunks within the bound, and nothing by halves."""

import json
import struct
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, Truncated, Unsupported
from kvcodecs.frame import open_frame, open_record
from kvcodecs.zarr_codec import FrameCodec

GOLDEN = Path(__file__).parent / "golden" / "tkv1"
FUSED = "zarr.core.codec_pipeline.FusedCodecPipeline"
PIPELINES = (
    ["batched", "fused"] if hasattr(zarr.core.codec_pipeline, FUSED.split(".")[-1]) else ["batched"]
)
STEP = 0.25
SHAPE, CHUNK = (3, 200, 64), (3, 40, 64)
every_codec = pytest.mark.parametrize("codec", ["tkv1", "kvr1", "raw"])
every_dtype = pytest.mark.parametrize("dtype", ["float16", "float32"])


@pytest.fixture(params=PIPELINES)
def pipeline(request):
    """The codec pipelines of this zarr: 3.4 has a second one, without an event loop."""
    with (
        zarr.config.set({"codec_pipeline.path": FUSED})
        if request.param == "fused"
        else nullcontext()
    ):
        yield request.param


def real(kind="v", dtype="float32"):
    x = np.fromfile(GOLDEN / f"real_l3_{kind}_lane.in.f32", "<f4").reshape(SHAPE)
    return x.astype(dtype)


def frame_codec(codec="kvr1", kind="v", **step):
    return FrameCodec(
        codec=codec, kind=kind, **(step or ({} if codec == "raw" else {"step": STEP}))
    )


def create(store, codec="kvr1", kind="v", **options):
    options = {"shape": SHAPE, "chunks": CHUNK, "dtype": "float32", "fill_value": np.nan} | options
    serializer = options.pop("serializer", None) or frame_codec(codec, kind)
    return zarr.create_array(store, serializer=serializer, **{"compressors": None} | options)


def files(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def distance(x, y):
    return np.abs(x.astype(np.float64) - y.astype(np.float64)).max()


def bound(codec, dtype):
    if codec == "raw":
        return 0.0
    return STEP / 2 + (2.0**-7 if dtype == "float16" else 2.0**-18)


@every_dtype
@every_codec
@pytest.mark.parametrize("kind", ["k", "v"])
def test_whole_chunks_come_back_within_half_a_step(codec, kind, dtype, tmp_path, pipeline):
    x = real(kind, dtype)
    array = create(tmp_path / "a", codec, kind, dtype=dtype)
    array[:, 80:120] = x[:, 80:120]
    assert np.isnan(array[:, :80]).all()
    array[...] = x
    y = zarr.open_array(tmp_path / "a", mode="r")[:]
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    assert distance(x, y) <= bound(codec, dtype)
    assert codec == "raw" or distance(x, y) > STEP / 4
    if dtype == "float32":
        assert (y[:, 4:] != x[:, 4:]).any() == (codec != "raw")
    # No sinks: the first chunk is as coarse as the others.
    assert codec == "raw" or distance(x[:, :4], y[:, :4]) > STEP / 8


@every_codec
def test_bytes_of_a_chunk(codec, tmp_path):
    """A container of one block that is flagged as unplaced (codecs/FORMAT.md section 8.1)."""
    x = real(dtype="float16")
    array = create(tmp_path / "a", codec, dtype="float16")
    array[:] = x
    data = (tmp_path / "a" / "c" / "0" / "2" / "0").read_bytes()
    end = 20 + struct.unpack_from("<Q", data, 8)[0]
    head = bytes(open_record(b"KVC1", data[:end]))
    layout = {"tkv1": 0, "kvr1": 2, "raw": 3}[codec]
    assert head[:24] == struct.pack("<BBBBIIIQ", layout, 1, 1, 0, 3, 64, 40, 40)
    frame, _ = open_frame(data[end:])
    assert data[end + 7] == 1
    assert frame.unplaced
    assert (frame.owner, frame.layer, frame.first_token, frame.n_tokens) == (0, 0, 0, 40)
    # Whoever has numcodecs reads it as well.
    y = numcodecs.get_codec({"id": "kvr1"}).decode(data)
    assert (y == array[:, 80:120]).all()


def test_relative_steps_are_of_each_chunk(tmp_path):
    x = real()
    x[:, 40:80] *= 50
    array = create(tmp_path / "a", serializer=frame_codec(rel_step=0.1))
    array[:] = x
    y = array[:]
    for at in range(0, 200, 40):
        part = x[:, at : at + 40]
        step = 0.1 * np.sqrt((part.astype(np.float64) ** 2).mean())
        assert 0.9 * step / 2 < distance(part, y[:, at : at + 40]) <= 1.001 * step / 2


@every_codec
def test_order_and_byte_order_of_the_input_do_not_matter(codec, tmp_path, pipeline):
    x = real(dtype="float16")
    want = None
    wide = np.zeros((3, 400, 128), "f2")
    wide[:, ::2, 64:] = x
    forms = [x, x.astype(">f2"), np.asfortranarray(x), wide[:, ::2, 64:], x.astype("f4"), x]
    for n, form in enumerate(forms):
        array = create(tmp_path / f"{n}", codec, dtype=">f2" if n == 5 else "float16")
        array[:] = form
        stored = files(tmp_path / f"{n}")
        want = stored if want is None else want
        assert stored == want
        assert array[:, 30:50].dtype.newbyteorder("=") == np.float16
        assert (array[:] == zarr.open_array(tmp_path / "0")[:]).all()


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_named_and_change_nothing(codec, bad, tmp_path, pipeline):
    array = create(tmp_path / "a", codec)
    array[:] = x = real()
    before = files(tmp_path)
    x[2, 47, 5] = bad
    with pytest.raises(InvalidArgument, match="head 2, token 7, channel 5"):
        array[:, 40:80] = x[:, 40:80]
    assert files(tmp_path) == before


PARTS = {
    "a token": lambda a: a.__setitem__(np.s_[:, 40:41], np.ones((3, 1, 64))),
    "all but one token": lambda a: a.__setitem__(np.s_[:, 41:80], 1.0),
    "every other token": lambda a: a.__setitem__(np.s_[:, 40:80:2], 1.0),
    "a head": lambda a: a.__setitem__(np.s_[1, 40:80], np.ones((40, 64))),
    "a value": lambda a: a.__setitem__((0, 50, 0), 1.0),
    "a fill value": lambda a: a.__setitem__((0, 50, 0), np.nan),
    "coordinates": lambda a: a.vindex.__setitem__(([0, 1], [41, 42], [3, 4]), 2.0),
    "a grid": lambda a: a.oindex.__setitem__((slice(None), [41, 43], slice(None)), 2.0),
    "a mask": lambda a: a.__setitem__(np.indices(SHAPE)[1] == 45, 2.0),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "options",
    [{}, {"compressors": zarr.codecs.ZstdCodec()}, {"chunks": CHUNK, "shards": (3, 200, 64)}],
    ids=["plain", "compressed", "sharded"],
)
def test_a_partial_write_is_refused_and_leaves_the_chunk(part, options, tmp_path, pipeline):
    array = create(tmp_path / "a", **options)
    array[:] = real()
    before = files(tmp_path)
    with pytest.raises(InvalidArgument, match="whole chunks"):
        PARTS[part](array)
    assert files(tmp_path) == before


def test_a_whole_chunk_in_other_words(tmp_path, pipeline):
    x = real(dtype="float16")
    create(tmp_path / "one", dtype="float16")[:] = x
    want = (tmp_path / "one" / "c" / "0" / "1" / "0").read_bytes()
    for n, write in enumerate(
        (
            lambda a: a.__setitem__(np.s_[:, 40:80, :], x[:, 40:80]),
            lambda a: a.__setitem__(np.s_[:, 40:-120], x[:, 40:80]),
            lambda a: a.blocks.__setitem__((0, 1, 0), x[:, 40:80]),
            lambda a: a.set_basic_selection(np.s_[:, 40:80], x[:, 40:80]),
            lambda a: a.set_orthogonal_selection(np.s_[:, 40:80], x[:, 40:80]),
        )
    ):
        array = create(tmp_path / f"{n}", dtype="float16")
        write(array)
        assert (tmp_path / f"{n}" / "c" / "0" / "1" / "0").read_bytes() == want
        assert array.nchunks_initialized == 1


def test_one_head_is_written_through_its_index(tmp_path, pipeline):
    x = real()[:1]
    array = create(tmp_path / "a", shape=(1, 200, 64), chunks=(1, 40, 64))
    array[0, 40:80] = x[0, 40:80]
    assert distance(array[:, 40:80], x[:, 40:80]) <= bound("kvr1", "float32")


def test_scalars_and_empty_chunks(tmp_path, pipeline):
    array = create(tmp_path / "a")
    array[:] = 2.5
    assert (np.abs(array[:] - 2.5) <= STEP / 2).all()
    array[:, :40] = np.nan
    assert array.nchunks_initialized == 4
    assert np.isnan(array[:, :40]).all()
    zeros = create(tmp_path / "b", fill_value=0.0)
    zeros[:] = 0.0
    assert zeros.nchunks_initialized == 0
    with zarr.config.set({"array.write_empty_chunks": True}):
        kept = zarr.open_array(tmp_path / "b", mode="r+")
        kept[:] = 0.0
    assert kept.nchunks_initialized == 5
    assert (kept[:] == 0).all()


@every_codec
def test_shards(codec, tmp_path, pipeline):
    x = real(dtype="float16")
    array = create(tmp_path / "a", codec, dtype="float16", shards=(3, 80, 64), shape=(3, 240, 64))
    array[:, :80] = x[:, :80]
    array[:, 80:120] = x[:, 80:120]  # one block of a shard
    y = zarr.open_array(tmp_path / "a", mode="r")[:]
    assert distance(y[:, :120], x[:, :120]) <= bound(codec, "float16")
    assert np.isnan(y[:, 120:]).all()


def test_appending_whole_chunks(tmp_path, pipeline):
    x = real()
    array = create(tmp_path / "a", shape=(3, 0, 64))
    for at in range(0, 200, 40):
        array.append(x[:, at : at + 40], axis=1)
    assert distance(array[:], x) <= bound("kvr1", "float32")
    before = files(tmp_path)
    with pytest.raises(InvalidArgument, match="multiple"):
        array.append(x[:, :39], axis=1)
    assert files(tmp_path) == before


@every_codec
def test_every_damaged_byte_is_noticed(codec, tmp_path):
    array = create(tmp_path / "a", codec)
    array[:] = real()
    chunk = tmp_path / "a" / "c" / "0" / "1" / "0"
    good = chunk.read_bytes()
    for at in [*range(48), *range(48, len(good), 401)]:
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        chunk.write_bytes(bad)
        with pytest.raises((Corrupt, Truncated, Unsupported)):
            array[:, 40:80]
    for n in (0, 10, 20, 48, len(good) // 2, len(good) - 1):
        chunk.write_bytes(good[:n])
        with pytest.raises(Truncated):
            array[:, 40:80]


def test_chunks_of_another_array_are_refused(tmp_path):
    array = create(tmp_path / "a", "kvr1", "k")
    array[:] = real("k")
    chunk = tmp_path / "a" / "c" / "0" / "1" / "0"
    others = [
        create(tmp_path / "codec", "tkv1", "k"),
        create(tmp_path / "kind", "kvr1", "v"),
        create(tmp_path / "tokens", "kvr1", "k", chunks=(3, 50, 64)),
    ]
    for other in others:
        other[:] = real("k")
        chunk.write_bytes((tmp_path / other.store.root.name / "c" / "0" / "1" / "0").read_bytes())
        with pytest.raises(Corrupt, match="expected one of"):
            array[:, 40:80]
    cut = numcodecs.get_codec({"id": "kvr1", "kind": "k", "step": STEP, "block_tokens": 20})
    chunk.write_bytes(cut.encode(real("k")[:, :40]))
    with pytest.raises(Corrupt, match="2 blocks"):
        array[:, 40:80]


BAD = [
    ({"shape": (3, 201, 64)}, "multiple"),
    ({"chunks": (1, 40, 64)}, "span heads"),
    ({"chunks": (3, 40, 32)}, "span heads"),
    ({"shape": (200, 64), "chunks": (40, 64)}, "heads, tokens, head_dim"),
    ({"shape": (1, 3, 200, 64), "chunks": (1, 3, 40, 64)}, "heads, tokens, head_dim"),
    ({"shape": (3, 200, 63), "chunks": (3, 40, 63)}, "even"),
    ({"dtype": "float64"}, "dtype"),
    ({"dtype": "int16", "fill_value": 0}, "dtype"),
    ({"dtype": "complex64", "fill_value": 0}, "dtype"),
]


@pytest.mark.parametrize(("options", "what"), BAD)
def test_arrays_that_the_codec_cannot_hold_are_refused(options, what, tmp_path):
    with pytest.raises(InvalidArgument, match=what):
        create(tmp_path / "a", **options)
    assert not (tmp_path / "a" / "zarr.json").exists()


@pytest.mark.parametrize(
    ("fields", "kind", "what"),
    [
        ({"codec": "zip", "kind": "v", "step": 1.0}, Unsupported, "zip"),
        ({"codec": None, "kind": "v"}, InvalidArgument, "codec None"),
        ({"codec": "ggml.ggml.q8_0", "kind": "v"}, Unsupported, r"ggml\.ggml"),
        ({"codec": "kvr1", "kind": "q", "step": 1.0}, InvalidArgument, "kind"),
        ({"codec": "kvr1", "kind": "v"}, InvalidArgument, "one of step"),
        ({"codec": "kvr1", "kind": "v", "step": 1.0, "rel_step": 1.0}, InvalidArgument, "one of"),
        ({"codec": "kvr1", "kind": "v", "step": -1.0}, InvalidArgument, "step"),
        ({"codec": "kvr1", "kind": "v", "step": "1"}, InvalidArgument, "step"),
        ({"codec": "tkv1", "kind": "v", "rel_step": float("nan")}, InvalidArgument, "rel_step"),
        ({"codec": "raw", "kind": "v", "step": 1.0}, InvalidArgument, "raw"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(fields, kind, what, tmp_path):
    with pytest.raises(kind, match=what):
        FrameCodec(**fields)
    with pytest.raises(kind, match=what):
        create(tmp_path / "a", serializer={"name": "kvstore.frame", "configuration": fields})


def test_a_configuration_with_more_than_we_know_is_refused(tmp_path):
    for more, kind in (({"more": 1}, Unsupported), ({"codec": 1}, InvalidArgument)):
        configuration = {"codec": "kvr1", "kind": "v", "step": 1.0} | more
        with pytest.raises(kind):
            create(
                tmp_path / "a", serializer={"name": "kvstore.frame", "configuration": configuration}
            )
    with pytest.raises(KvError):
        create(tmp_path / "a", serializer={"name": "kvstore.frame"})


def test_only_one_serializer(tmp_path):
    array = create(tmp_path / "a")
    document = json.loads((tmp_path / "a" / "zarr.json").read_text())
    document["codecs"].insert(0, {"name": "bytes", "configuration": {"endian": "little"}})
    (tmp_path / "a" / "zarr.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"(?i)array-?(to-)?bytes"):
        zarr.open_array(tmp_path / "a")
    assert array.metadata.codecs[0].to_dict() == {
        "name": "kvstore.frame",
        "configuration": {"codec": "kvr1", "kind": "v", "step": STEP},
    }


@pytest.mark.parametrize("name", ["tkv1", "kvr1", "kvraw"])
@every_dtype
def test_format_2_with_the_numcodecs_classes(name, dtype, tmp_path):
    x = real(dtype=dtype)
    step = {} if name == "kvraw" else {"step": STEP, "sink": 0}
    array = zarr.create_array(
        tmp_path / "a",
        shape=SHAPE,
        chunks=CHUNK,
        dtype=dtype,
        fill_value=np.nan,
        zarr_format=2,
        filters=None,
        compressors=numcodecs.get_codec({"id": name, "kind": "v", **step}),
    )
    array[:] = x
    y = zarr.open_array(tmp_path / "a", mode="r")[:]
    assert distance(x, y) <= bound("raw" if name == "kvraw" else name, dtype)


@pytest.mark.parametrize("zarr_format", [2, 3])
@every_codec
def test_a_fresh_process_needs_nothing_of_ours_imported(zarr_format, codec, tmp_path):
    name = "kvraw" if codec == "raw" and zarr_format == 2 else codec
    step = {} if codec == "raw" else {"step": STEP}
    ours = (
        f"filters=None, compressors=numcodecs.get_codec({ {'id': name, 'kind': 'v', **step} })"
        if zarr_format == 2
        else "compressors=None, serializer={'name': 'kvstore.frame', 'configuration': "
        f"{ {'codec': codec, 'kind': 'v', **step} }}}"
    )
    create_it = (
        "import numcodecs, numpy as np, zarr\n"
        "x = np.linspace(-3, 3, 2 * 8 * 4, dtype='f4').reshape(2, 8, 4)\n"
        f"a = zarr.create_array('a', shape=(2, 8, 4), chunks=(2, 4, 4), dtype='f4', "
        f"zarr_format={zarr_format}, {ours})\n"
        "a[:] = x\n"
    )
    read_it = (
        "import sys, numpy as np, zarr\n"
        "x = np.linspace(-3, 3, 2 * 8 * 4, dtype='f4').reshape(2, 8, 4)\n"
        "assert np.abs(zarr.open('a', mode='r')[:, 2:7] - x[:, 2:7]).max() <= 0.13\n"
        "assert 'kvstore' not in sys.modules\n"
    )
    for program in (create_it, read_it):
        command = [sys.executable, "-W", "error", "-c", program]
        subprocess.run(command, check=True, timeout=60, cwd=tmp_path)
