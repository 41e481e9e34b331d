"""Plain zarr reads the arrays of an archive, notices damage, and cannot write them."""

import base64
import json
import pickle
import struct
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcodecs import KVR1, TKV1, Raw, Rope, StreamSpec, zarr_codec
from kvcodecs.codec import codec_for
from kvcodecs.errors import Corrupt, InvalidArgument, Truncated, Unsupported
from kvcodecs.frame import crc32c, header_tag, open_frame, pack_frame
from kvcodecs.plan import Plan
from kvcodecs.rope import to_coded
from kvcodecs.zarr_codec import FrameCodec
from kvcodecs.zarr_configuration import NAME, archive_configuration
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

GOLDEN = Path(__file__).parent / "golden" / "tkv1"
HEADS, TOKENS, HEAD_DIM, BLOCK = 3, 200, 64, 40
CODECS = {
    "tkv1": TKV1(step=0.25),
    "kvr1": KVR1(step=0.25, sink=6),
    "raw": Raw("float32"),
}
FUSED = "zarr.core.codec_pipeline.FusedCodecPipeline"
PIPELINES = (
    ["batched", "fused"] if hasattr(zarr.core.codec_pipeline, FUSED.split(".")[-1]) else ["batched"]
)
ROPES = {
    "no": None,
    "half": Rope.from_theta(1e4, HEAD_DIM),
    "half, partial": Rope.from_theta(1e4, 40),
    "interleaved": Rope.from_theta(1e4, HEAD_DIM, style="interleaved"),
    "interleaved, partial": Rope.from_theta(1e4, 24, style="interleaved"),
}
every_codec = pytest.mark.parametrize("codec", CODECS)


@pytest.fixture(autouse=True)
def _no_headers_remembered():
    zarr_codec._fetched.clear()


@pytest.fixture(params=PIPELINES)
def pipeline(request):
    """The codec pipelines of this zarr: 3.4 has a second one, without an event loop."""
    with (
        zarr.config.set({"codec_pipeline.path": FUSED})
        if request.param == "fused"
        else nullcontext()
    ):
        yield request.param


def real(kind="v", layer=0):
    """K before RoPE or V of a real model."""
    x = np.fromfile(GOLDEN / f"real_l{layer}_{kind}_lane.in.f32", "<f4")
    return x.reshape(HEADS, TOKENS, HEAD_DIM)


class Archived:
    """A stream as an archive stores it: stream header and frames, and what they decode to."""

    def __init__(self, codec="kvr1", kind="v", layer=3, rope=None, first=0, dtype="float32"):
        self.x = real(kind, 3)
        self.kind, self.layer, self.dtype, self.tokens = kind, layer, dtype, TOKENS
        if CODECS[codec].codec == "raw" and dtype == "float16":
            self.x = self.x.astype(np.float16).astype(np.float32)
        self.spec = StreamSpec(kind, HEADS, HEAD_DIM, rope)
        y = to_coded(self.x, self.spec)
        self.codec = codec_for(CODECS[codec])
        self.params = self.codec.fit(CODECS[codec], self.spec, lambda: [y])
        self.header = self.codec.pack(self.params)
        self.frames = [self.frame(b, y, first) for b in range(TOKENS // BLOCK)]
        self.step = self.codec.step(self.params)

    def frame(self, block, y, first=0):
        at = block * BLOCK
        encoder = self.codec.encoder(self.params, first + at)
        encoder.push(np.ascontiguousarray(y[:, at : at + BLOCK]))
        return pack_frame(
            codec=self.codec.number,
            kind=self.kind,
            owner=77,
            layer=self.layer,
            first_token=first + at,
            n_tokens=BLOCK,
            header_tag=header_tag(self.header),
            error=encoder.error,
            payload=encoder.payload(),
        )

    def configuration(self, **more):
        options = {"tokens": self.tokens} | more
        return archive_configuration(self.spec, self.codec.name, self.layer, self.header, **options)

    def document(self, configuration=None, codecs=None, chunk=BLOCK):
        entry = {"name": NAME, "configuration": configuration or self.configuration()}
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [HEADS, self.tokens, HEAD_DIM],
            "data_type": self.dtype,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [HEADS, chunk, HEAD_DIM]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": "NaN",
            "codecs": codecs or [entry],
            "attributes": {},
            "dimension_names": ["head", "token", "channel"],
        }

    def files(self, path="", configuration=None):
        """Return the objects of the array."""
        files = {f"{path}c/0/{b}/0": frame for b, frame in enumerate(self.frames)}
        files[f"{path}zarr.json"] = dump(self.document(configuration))
        return files

    def sharded(self, per_shard=2, location="end", lost=()):
        """Return the objects of the array with shards of `per_shard` blocks, laid out by hand."""
        inner = {"name": NAME, "configuration": self.configuration(tokens=None)}
        checked = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        sharding = {
            "chunk_shape": [HEADS, BLOCK, HEAD_DIM],
            "codecs": [inner],
            "index_codecs": checked,
            "index_location": location,
        }
        codecs = [{"name": "sharding_indexed", "configuration": sharding}]
        files = {"zarr.json": dump(self.document(codecs=codecs, chunk=BLOCK * per_shard))}
        for shard in range(-(-len(self.frames) // per_shard)):
            at = 16 * per_shard + 4 if location == "start" else 0
            index, body = [], b""
            for block in range(shard * per_shard, (shard + 1) * per_shard):
                if block in lost or block >= len(self.frames):
                    index += [2**64 - 1] * 2
                else:
                    index += [at + len(body), len(self.frames[block])]
                    body += self.frames[block]
            entries = struct.pack(f"<{len(index)}Q", *index)
            entries += crc32c(entries).to_bytes(4, "little")
            files[f"c/0/{shard}/0"] = body + entries if location == "end" else entries + body
        return files

    def decoded(self):
        """Return what the frames hold, decoded without zarr, in the order of the tensor."""
        out = np.empty((HEADS, TOKENS, HEAD_DIM), self.dtype)
        for block, data in enumerate(self.frames):
            header, payload = open_frame(data)
            at = block * BLOCK
            plan = Plan()
            plan.add(
                self.codec,
                self.params,
                payload,
                first_token=header.first_token,
                n_tokens=BLOCK,
                start=header.first_token,
                stop=header.first_token + BLOCK,
                out=out[:, at : at + BLOCK],
            )
            plan.run()
        return out


def dump(document):
    return json.dumps(document).encode()


class Store(MemoryStore):
    """Objects in memory that remembers what was read."""

    def __init__(self, files=None, *, store_dict=None, read_only=False, reads=None):
        if store_dict is None:
            store_dict = {key: cpu.Buffer.from_bytes(data) for key, data in files.items()}
        super().__init__(store_dict, read_only=read_only)
        self.reads = [] if reads is None else reads

    def with_read_only(self, read_only=False):
        return Store(store_dict=self._store_dict, read_only=read_only, reads=self.reads)

    async def get(self, key, prototype=None, byte_range=None):
        self.reads.append(key)
        return await super().get(key, prototype, byte_range)

    def get_sync(self, key, *, prototype=None, byte_range=None):
        self.reads.append(key)
        return super().get_sync(key, prototype=prototype, byte_range=byte_range)

    def files(self):
        return {key: value.to_bytes() for key, value in self._store_dict.items()}


def open_array(files, mode="r"):
    return zarr.open_array(Store(files), mode=mode)


# Reading


@every_codec
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("kind", ["k", "v"])
def test_plain_zarr_reads_what_the_frames_hold(codec, kind, dtype, pipeline):
    stream = Archived(codec, kind, dtype=dtype)
    array = open_array(stream.files())
    x = array[:]
    assert x.dtype == dtype
    assert (x == stream.decoded()).all()
    if stream.step is None:
        assert (x == stream.x).all()
    else:
        assert np.abs(x - stream.x).max() <= stream.step / 2 + 2.0**-8


@every_codec
@pytest.mark.parametrize("rope", ROPES)
def test_k_is_in_the_order_of_the_tensor_whatever_the_rope(codec, rope):
    stream = Archived(codec, "k", rope=ROPES[rope])
    needs_order = "rope" in stream.configuration()
    assert needs_order == (rope not in ("no", "half"))
    x = open_array(stream.files())[:]
    assert (x == stream.decoded()).all()
    assert np.abs(x - stream.x).max() <= (stream.step or 0) / 2 + 1e-6


@every_codec
def test_positions_are_those_of_the_frames(codec):
    """Blocks of a fork or a moved range say where they were coded; sinks are there, or not."""
    stream = Archived(codec, first=4)
    moved = stream.files()
    moved["c/0/2/0"] = Archived(codec).frame(0, stream.x)
    x = open_array(moved)[:]
    assert (x[:, :80] == stream.decoded()[:, :80]).all()
    assert (x[:, 80:120] == Archived(codec).decoded()[:, :40]).all()


def test_a_fresh_process_needs_nothing_of_ours_imported(tmp_path):
    stream = Archived()
    group = {"zarr.json": dump({"zarr_format": 3, "node_type": "group", "attributes": {}})}
    for name, data in (group | stream.files("k_003/")).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    np.save(tmp_path / "want.npy", stream.decoded())
    program = (
        "import sys, numpy as np, zarr\n"
        f"group = zarr.open({str(tmp_path)!r}, mode='r')\n"
        f"want = np.load({str(tmp_path / 'want.npy')!r})\n"
        "assert (group['k_003'][1, 50:90] == want[1, 50:90]).all()\n"
        f"assert (zarr.open({str(tmp_path / 'k_003')!r})[:, -1] == want[:, -1]).all()\n"
        "assert 'kvstore' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


def test_one_read_fetches_the_chunks_that_it_touches(pipeline):
    stream = Archived()
    store = Store(stream.files())
    array = zarr.open_array(store, mode="r")
    want = stream.decoded()
    for selection, chunks in (
        (np.s_[:, 80:120], [2]),
        (np.s_[1, 81:90, 5], [2]),
        (np.s_[:, 119:121], [2, 3]),
        (np.s_[:, -1], [4]),
    ):
        store.reads.clear()
        assert (array[selection] == want[selection]).all()
        assert sorted(store.reads) == [f"c/0/{chunk}/0" for chunk in chunks]


@pytest.mark.parametrize("location", ["end", "start"])
def test_blocks_inside_shards(location, pipeline):
    stream = Archived()
    store = Store(stream.sharded(2, location))
    array = zarr.open_array(store, mode="r")
    assert (array.chunks, array.shards) == ((3, 40, 64), (3, 80, 64))
    want = stream.decoded()
    assert (array[:] == want).all()
    store.reads.clear()
    assert (array[:, 90:100] == want[:, 90:100]).all()
    assert store.reads == ["c/0/1/0", "c/0/1/0"]  # the index, and the block
    lost = open_array(stream.sharded(2, location, lost={1}))
    assert np.isnan(lost[:, 40:80]).all()
    assert (lost[:, :40] == want[:, :40]).all()


def test_a_missing_chunk_reads_as_nan(pipeline):
    stream = Archived()
    files = stream.files()
    del files["c/0/1/0"]
    x = open_array(files)[:]
    assert np.isnan(x[:, 40:80]).all()
    assert not np.isnan(x[:, :40]).any()
    assert not np.isnan(x[:, 80:]).any()


def test_a_missing_chunk_is_an_error_where_zarr_can_be_told_so(pipeline):
    files = Archived().files()
    del files["c/0/1/0"]
    if not hasattr(zarr.errors, "ChunkNotFoundError"):
        pytest.skip("zarr 3.4 has the option")
    array = zarr.open_array(Store(files), mode="r", config={"read_missing_chunks": False})
    with pytest.raises(zarr.errors.ChunkNotFoundError):
        array[:, 40:41]


slices = st.builds(
    slice,
    st.none() | st.integers(-TOKENS, TOKENS),
    st.none() | st.integers(-TOKENS, TOKENS),
    st.none() | st.integers(1, 60),
)


def indices(n):
    return st.lists(st.integers(-n, n - 1), min_size=1, max_size=6).map(np.array)


def masks(n):
    return st.integers(0, 2**32 - 1).map(lambda s: np.random.default_rng(s).random(n) < 0.1)


ARRAY = {}


@settings(deadline=None, max_examples=120)
@given(data=st.data(), fused=st.booleans())
def test_any_selection_is_numpys(data, fused):
    fused = fused and "fused" in PIPELINES
    with zarr.config.set({"codec_pipeline.path": FUSED}) if fused else nullcontext():
        if fused not in ARRAY:
            stream = Archived(codec="raw")
            ARRAY[fused] = open_array(stream.files()), stream.decoded()
        array, want = ARRAY[fused]
        sizes = want.shape
        way = data.draw(st.sampled_from(["basic", "orthogonal", "coordinates", "mask"]))
        if way == "basic":
            parts = [slices | st.integers(-n, n - 1) for n in sizes]
            selection = data.draw(st.tuples(*parts))
            got, expected = array[selection], want[selection]
        elif way == "orthogonal":
            parts = [slices | st.integers(0, n - 1) | indices(n) | masks(n) for n in sizes]
            selection = data.draw(st.tuples(*parts))
            got, expected = array.oindex[selection], want
            for axis in (2, 1, 0):
                expected = (
                    expected[(slice(None),) * axis + (selection[axis],)]
                    if not isinstance(selection[axis], int)
                    else expected.take(selection[axis], axis)
                )
        elif way == "coordinates":
            n = data.draw(st.integers(1, 8))
            parts = [
                st.lists(st.integers(0, size - 1), min_size=n, max_size=n).map(np.array)
                for size in sizes
            ]
            selection = data.draw(st.tuples(*parts))
            got, expected = array.vindex[selection], want[selection]
        else:
            seed = data.draw(st.integers(0, 2**32 - 1))
            mask = np.random.default_rng(seed).random(sizes) < 0.001
            got, expected = array.vindex[mask], want[mask]
    assert np.shape(got) == expected.shape
    assert (np.asarray(got) == expected).all()


# Damage


def test_every_damaged_byte_is_noticed(pipeline):
    stream = Archived()
    files = stream.files()
    good = files["c/0/2/0"]
    array = zarr.open_array(store := Store(files), mode="r")

    def read(data):
        store._store_dict["c/0/2/0"] = cpu.Buffer.from_bytes(data)
        return array[:, 80:82]

    for at in [*range(76), *range(76, len(good), 101), len(good) - 1]:
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        with pytest.raises((Corrupt, Truncated, Unsupported), match="layer 3 v"):
            read(bytes(bad))
    for n in (0, 3, 75, 76, len(good) // 2, len(good) - 1):
        with pytest.raises(Truncated):
            read(good[:n])
    with pytest.raises(Corrupt):
        read(good + b"\0")
    read(good)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"layer": 4}, "layer 4, expected 3"),
        ({"kind": "k"}, "kind k, expected v"),
        ({"codec": 1}, "codec 1, expected 2"),
        ({"header_tag": 5}, "stream header tag"),
        ({"n_tokens": 39}, "number of tokens 39, expected 40"),
        ({"unplaced": True, "layer": 0, "owner": 0, "first_token": 0}, "unplaced"),
    ],
)
def test_a_frame_of_another_array_is_refused(other, what, pipeline):
    stream = Archived()
    files = stream.files()
    header, payload = open_frame(files["c/0/1/0"])
    fields = header._asdict() | other
    del fields["payload_bytes"]
    files["c/0/1/0"] = pack_frame(payload=payload, **fields)
    array = open_array(files)
    with pytest.raises(Corrupt, match=what):
        array[:]
    array[:, :40]


def test_a_frame_of_another_stream_is_refused():
    stream, other = Archived(), Archived("tkv1")
    files = stream.files()
    files["c/0/1/0"] = other.frames[1]
    with pytest.raises(Corrupt, match="codec 1, expected 2"):
        open_array(files)[:]


def test_blocks_that_were_coded_for_other_streams():
    """A session that took tokens from others has their stream headers as well."""
    stream, first, second = Archived(), Archived("tkv1"), Archived("raw")
    more = [(other.codec.name, other.header) for other in (first, second)]
    files = stream.files(configuration=stream.configuration(more_headers=more))
    files["c/0/1/0"], files["c/0/3/0"] = first.frames[1], second.frames[3]
    x = open_array(files)[:]
    for other, block in ((first, 1), (second, 3), (stream, 0), (stream, 2), (stream, 4)):
        at = slice(block * BLOCK, (block + 1) * BLOCK)
        assert (x[:, at] == other.decoded()[:, at]).all()
    header, payload = open_frame(first.frames[1])
    fields = header._asdict() | {"codec": 2}
    del fields["payload_bytes"]
    files["c/0/1/0"] = pack_frame(payload=payload, **fields)
    with pytest.raises(Corrupt, match="codec 2, expected 1"):
        open_array(files)[:]


BAD = [
    ({"more_headers": {}}, Corrupt, "more_headers"),
    ({"more_headers": [["kvr1", "0" * 16]]}, Corrupt, "more_headers"),
    ({"more_headers": [["kvr1", "0" * 16, 5]]}, Corrupt, "more_headers"),
    ({"more_headers": [["kvr1", "0" * 16, ""]]}, Corrupt, "tag"),
    ({"more_headers": [["zip", "0" * 16, ""]]}, Unsupported, "zip"),
    ({"more": 1}, Unsupported, "more"),
    ({"codec": "zip"}, Unsupported, "zip"),
    ({"codec": 7}, Corrupt, "codec"),
    ({"kind": "q"}, Corrupt, "kind"),
    ({"kind": None}, Corrupt, "kind"),
    ({"layer": -1}, Corrupt, "layer"),
    ({"layer": True}, Corrupt, "layer"),
    ({"layer": 1.0}, Corrupt, "layer"),
    ({"archive": False}, Corrupt, "archive"),
    ({"header_tag": "12"}, Corrupt, "header_tag"),
    ({"header_tag": "g" * 16}, Corrupt, "header_tag"),
    ({"header_tag": "0" * 15 + "1"}, Corrupt, "tag"),
    ({"header": "&"}, Corrupt, "header"),
    ({"header": 5}, Corrupt, "header"),
    ({"header": base64.b64encode(b"other").decode()}, Corrupt, "tag"),
    ({"header": None}, Corrupt, "header"),
    ({"header_array": "also"}, Corrupt, "header_array"),
    ({"header": None, "header_array": "../up"}, Corrupt, "header_array"),
    ({"header": None, "header_array": ""}, Corrupt, "header_array"),
    ({"header": None, "header_array": 3}, Corrupt, "header_array"),
    ({"rope": {"n_pairs": 0, "style": "half"}}, Corrupt, "rope"),
    ({"rope": {"n_pairs": 4, "style": "other"}}, Corrupt, "rope"),
    ({"rope": {"n_pairs": 4}}, Corrupt, "rope"),
    ({"rope": []}, Corrupt, "rope"),
    ({"tokens": -1}, Corrupt, "tokens"),
    ({"tokens": "200"}, Corrupt, "tokens"),
    ({"tokens": 160}, InvalidArgument, "session.append"),
]


@pytest.mark.parametrize(("change", "kind", "what"), BAD)
def test_a_configuration_that_no_archive_writes_is_refused(change, kind, what):
    stream = Archived()
    configuration = {**stream.configuration(), **change}
    configuration = {key: value for key, value in configuration.items() if value is not None}
    with pytest.raises(kind, match=what):
        open_array(stream.files(configuration=configuration))


def test_chunks_and_configurations_of_a_damaged_document_are_refused():
    stream = Archived()
    for chunk in ([3, 40], [3, 40, 32], [3, 41, 64], [1, 40, 64]):
        document = stream.document()
        document["chunk_grid"]["configuration"]["chunk_shape"] = chunk
        with pytest.raises(ValueError, match="chunk"):
            open_array(stream.files() | {"zarr.json": dump(document)})
    for configuration in ([1], "x", 7):
        document = stream.document(codecs=[{"name": NAME, "configuration": configuration}])
        with pytest.raises((Corrupt, TypeError, ValueError)):
            open_array(stream.files() | {"zarr.json": dump(document)})


def test_a_stream_header_of_another_shape_is_refused():
    stream = Archived("raw")
    stream.header = b"\x07"
    files = stream.files()
    files["c/0/0/0"] = stream.frame(0, stream.x)
    with pytest.raises(Unsupported):
        open_array(files)[:, :1]
    narrow = Archived(kind="k")
    files = narrow.files()
    document = json.loads(files["zarr.json"])
    document["shape"][2] = document["chunk_grid"]["configuration"]["chunk_shape"][2] = 32
    with pytest.raises(Corrupt, match="3 heads of 64, expected 3 of 32"):
        open_array(files | {"zarr.json": dump(document)})[:]
    document["shape"][2] = document["chunk_grid"]["configuration"]["chunk_shape"][2] = 10
    document["codecs"][0]["configuration"]["rope"] = {"n_pairs": 12, "style": "half"}
    with pytest.raises(Corrupt, match="rotates 24"):
        open_array(files | {"zarr.json": dump(document)})[:]


def test_a_value_beyond_float16_asks_for_float32():
    stream = Archived()
    stream.params = codec_for(KVR1(step=8e3)).fit(
        KVR1(step=8e3), stream.spec, lambda: [stream.x * 1e4]
    )
    stream.header = stream.codec.pack(stream.params)
    stream.frames = [stream.frame(0, stream.x * 1e5)]
    stream.dtype = "float16"
    with pytest.raises(InvalidArgument, match="float32"):
        open_array(stream.files())[:, :40]


# Stream headers in an array of their own


def with_header_array(stream, name="v_003_header", header=None):
    """Return the objects of a group whose array `v_003` has its stream header in another."""
    header = stream.header if header is None else header
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [len(header)],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [len(header)]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}],
        "attributes": {},
    }
    return {
        "zarr.json": dump({"zarr_format": 3, "node_type": "group", "attributes": {}}),
        "chat/zarr.json": dump({"zarr_format": 3, "node_type": "group", "attributes": {}}),
        f"chat/{name}/zarr.json": dump(document),
        f"chat/{name}/c/0": header,
        **stream.files("chat/v_003/", stream.configuration(header_array="v_003_header")),
    }


def test_a_stream_header_in_another_array_is_read_once(pipeline):
    stream = Archived()
    store = Store(with_header_array(stream))
    array = zarr.open_group(store, mode="r")["chat/v_003"]
    store.reads.clear()
    want = stream.decoded()
    assert (array[:, 80:120] == want[:, 80:120]).all()
    assert sorted(store.reads) == ["chat/v_003/c/0/2/0", "chat/v_003_header/c/0"]
    store.reads.clear()
    again = zarr.open_array(store, path="chat/v_003", mode="r")
    store.reads.clear()
    assert (again[:, :40] == want[:, :40]).all()
    assert store.reads == ["chat/v_003/c/0/0/0"]


def test_a_wrong_or_missing_stream_header_is_refused(pipeline):
    stream = Archived()
    files = with_header_array(stream, header=stream.header[:-1] + b"\x01")
    with pytest.raises(Corrupt, match="chat/v_003_header/c/0: the stream header has tag"):
        zarr.open_array(Store(files), path="chat/v_003", mode="r")[:]
    del files["chat/v_003_header/c/0"]
    with pytest.raises(Corrupt, match="chat/v_003_header/c/0: missing"):
        zarr.open_array(Store(files), path="chat/v_003", mode="r")[:]


def test_a_stream_header_out_of_reach_says_how_to_reach_it(pipeline):
    stream = Archived()
    alone = stream.files(configuration=stream.configuration(header_array="v_003_header"))
    with pytest.raises(Unsupported, match="open the whole group"):
        open_array(alone)[:]
    files = stream.sharded()
    document = json.loads(files["zarr.json"])
    inner = document["codecs"][0]["configuration"]["codecs"][0]
    inner["configuration"] = stream.configuration(tokens=None, header_array="v_003_header")
    sharded = open_array(files | {"zarr.json": dump(document)})
    with pytest.raises(Unsupported, match="v_003_header"):
        sharded[:, :40]
    # Once it was read, anything can be.
    zarr.open_array(Store(with_header_array(stream)), path="chat/v_003", mode="r")[0, 0]
    assert (sharded[:] == stream.decoded()).all()


# Writing

WRITES = {
    "a chunk": lambda a: a.__setitem__(np.s_[:, 40:80], 1.0),
    "two chunks": lambda a: a.__setitem__(np.s_[:, :80], np.ones((3, 80, 64))),
    "a part of a chunk": lambda a: a.__setitem__(np.s_[:, 41:42], np.ones((3, 1, 64))),
    "a value": lambda a: a.__setitem__((0, 0, 0), 1.0),
    "a chunk of fill values": lambda a: a.__setitem__(np.s_[:, 40:80], np.nan),
    "everything": lambda a: a.__setitem__(Ellipsis, np.nan),
    "coordinates": lambda a: a.vindex.__setitem__(([0], [1], [2]), 1.0),
    "a grid": lambda a: a.oindex.__setitem__(([0], [1, 5], slice(None)), 1.0),
    "a block": lambda a: a.blocks.__setitem__((0, 1, 0), 1.0),
    "more tokens": lambda a: a.append(np.ones((3, 40, 64), "f4"), axis=1),
    "a longer array": lambda a: a.resize((3, 240, 64)),
    "a shorter array": lambda a: a.resize((3, 40, 64)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("empty", [False, True])
def test_an_archives_array_cannot_be_written(write, empty, pipeline):
    store = Store(Archived().files())
    before = store.files()
    with zarr.config.set({"array.write_empty_chunks": empty}):
        array = zarr.open_array(store, mode="r+")
    with pytest.raises(InvalidArgument, match=r"session\.append"):
        WRITES[write](array)
    assert store.files() == before


@pytest.mark.parametrize(
    "write", sorted(set(WRITES) - {"a block", "a longer array", "a shorter array"})
)
def test_an_archives_shards_cannot_be_written(write, pipeline):
    """All but what zarr does without asking any codec: see the next two tests."""
    store = Store(Archived().sharded())
    before = store.files()
    with zarr.config.set({"array.write_empty_chunks": True}):
        array = zarr.open_array(store, mode="r+")
    with pytest.raises(InvalidArgument, match=r"session\.append"):
        WRITES[write](array)
    if write == "more tokens":  # the shape is changed first
        del before["zarr.json"]
        assert before.items() <= store.files().items()
    else:
        assert store.files() == before


def test_zarr_drops_a_block_of_fill_values_from_a_shard_unasked(pipeline):
    """The fused pipeline decides by itself. Readers of the archive miss the block."""
    stream = Archived()
    store = Store(stream.sharded())
    array = zarr.open_array(store, mode="r+")
    if pipeline == "batched":
        with pytest.raises(InvalidArgument, match=r"session\.append"):
            array[:, 40:80] = np.nan
    else:
        array[:, 40:80] = np.nan
        assert np.isnan(array[:, 40:80]).all()
        assert (array[:, :40] == stream.decoded()[:, :40]).all()


def test_zarr_resizes_an_array_of_shards_unasked():
    stream = Archived()
    store = Store(stream.sharded())
    zarr.open_array(store, mode="r+").resize((3, 80, 64))
    assert sorted(store.files()) == ["c/0/0/0", "zarr.json"]


def test_attributes_can_be_written_and_change_nothing_else():
    stream = Archived()
    store = Store(stream.files())
    before = store.files()
    zarr.open_array(store, mode="r+").attrs["note"] = "mine"
    after = store.files()
    was, now = json.loads(before.pop("zarr.json")), json.loads(after.pop("zarr.json"))
    assert after == before
    assert now["codecs"] == was["codecs"]
    assert (now["shape"], now["attributes"]) == (was["shape"], {"note": "mine"})


def test_the_codec_survives_a_pickle():
    stream = Archived("tkv1", "k", rope=ROPES["interleaved"])
    array = pickle.loads(pickle.dumps(open_array(stream.files())))
    assert array.metadata.codecs == open_array(stream.files()).metadata.codecs
    codec = FrameCodec(codec="kvr1", kind="v", step=0.5)
    assert pickle.loads(pickle.dumps(codec)) == codec
    assert FrameCodec.from_dict(codec.to_dict()) == codec
    assert hash(codec) == hash(FrameCodec.from_dict(codec.to_dict()))
