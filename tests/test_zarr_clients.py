"""Ordinary tools open an archive, and fetch the blocks that they touch and no others."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
import zarr
from kvcodecs.errors import InvalidArgument
from kvcodecs.kvr1 import KVR1
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

import kvstore

BLOCK, TOKENS = 128, 4 * 128 + 30
SEALED = 4 * BLOCK
GROUP = "chat=2F42"
MODEL = kvstore.Model.uniform(name="m", n_layers=2, n_kv_heads=2, head_dim=16, dtype="float16")


def tensors():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(2, 2, 2, TOKENS, 16)).cumsum(axis=3) * 0.1
    return x.astype(np.float16)


@pytest.fixture(scope="module", params=["blocks", "shards"])
def archived(request, tmp_path_factory):
    """An archive with one session, and what the engine reads of it."""
    place = tmp_path_factory.mktemp(request.param) / "archive.kv"
    with kvstore.open(f"zarr:{place}", "a") as archive:
        session = archive.create_session(
            "chat/42", model=MODEL, codec=KVR1(rel_step=0.1), block_tokens=BLOCK, fit_tokens=64
        )
        k, v = tensors()
        session.append(k, v)
        session.commit()
        session.close()
        if request.param == "shards":
            archive.seal(shard_bytes=1 << 14)
        session = archive.session("chat/42")
        n_shown = session.n_committed if session.finished else SEALED
        want = {
            f"{kind}_{layer:03d}": session.read(layer, kind, 0, n_shown, k_state="pre")
            for kind in "kv"
            for layer in range(2)
        }
    return place, want


class Store(MemoryStore):
    """The objects of a directory in memory; remembers which chunks were read."""

    def __init__(self, path=None, *, store_dict=None, read_only=False, reads=None):
        if store_dict is None:
            found = [file for file in path.rglob("*") if file.is_file()]
            store_dict = {
                str(file.relative_to(path)): cpu.Buffer.from_bytes(file.read_bytes())
                for file in found
            }
        super().__init__(store_dict, read_only=read_only)
        self.reads = [] if reads is None else reads

    def with_read_only(self, read_only=False):
        return Store(store_dict=self._store_dict, read_only=read_only, reads=self.reads)

    def note(self, key):
        if not key.endswith(("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")):
            self.reads.append(key)

    async def get(self, key, prototype=None, byte_range=None):
        self.note(key)
        return await super().get(key, prototype, byte_range)

    def get_sync(self, key, *, prototype=None, byte_range=None):
        self.note(key)
        return super().get_sync(key, prototype=prototype, byte_range=byte_range)


@pytest.fixture
def store(archived):
    return Store(archived[0], read_only=True)


def chunk(store, array, block):
    """Return what is read for one block: a chunk, or the index of a shard and a range of it."""
    sharded = array.shards is not None
    per_shard = (array.shards or array.chunks)[1] // BLOCK
    separator = "." if sharded else "/"
    parts = ["c", "0", str(block // per_shard), "0"]
    return [f"{array.path}/{separator.join(parts)}"] * (1 + sharded)


def test_a_slice_of_zarr(archived, store):
    want = archived[1]
    root = zarr.open_group(store, mode="r")
    assert not store.reads
    array = root[f"{GROUP}/k_001"]
    assert (array.shape, array.dtype) == (want["k_001"].shape, np.float16)
    x = array[:, BLOCK : 2 * BLOCK]
    assert (x == want["k_001"][:, BLOCK : 2 * BLOCK]).all()
    assert store.reads == chunk(store, array, 1)
    store.reads.clear()
    assert (array[1, 300] == want["k_001"][1, 300]).all()
    assert store.reads == chunk(store, array, 2)


def test_listing_reads_no_chunk(archived, store):
    root = zarr.open_group(store, mode="r")
    (group,) = (group for _, group in root.groups())
    assert group.attrs["kvstore"]["session"] == "chat/42"
    assert sorted(name for name, _ in group.arrays()) == ["k_000", "k_001", "v_000", "v_001"]
    text = str(root.tree())
    for name in (GROUP, "k_000", "v_001", str(archived[1]["k_000"].shape)):
        assert name in text
    assert "kvstore.frame" in str(group["k_000"].metadata.to_dict()["codecs"])
    assert "_kvstore" not in dict(root.groups())
    assert not store.reads


def test_a_fresh_process_lists_and_reads(archived):
    place = archived[0]
    program = (
        "import sys, zarr\n"
        f"root = zarr.open({str(place)!r}, mode='r')\n"
        "print(root.tree())\n"
        f"print(float(abs(root['{GROUP}/v_000'][:, 130:140]).max()) > 0)\n"
        "assert 'kvstore' not in sys.modules\n"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    out = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout
    assert "v_001" in out
    assert out.endswith("True\n")


def test_dask_from_zarr(archived, store):
    dask = pytest.importorskip("dask.array")
    array = zarr.open_array(store, path=f"{GROUP}/v_001", mode="r")
    lazy = dask.from_zarr(array)
    assert not store.reads
    block = array.chunks if array.shards is None else array.shards
    assert lazy.shape == array.shape
    assert lazy.chunksize in (array.chunks, tuple(map(min, block, array.shape)))
    lazy = dask.from_zarr(array, chunks=array.chunks)
    part = lazy[:, 2 * BLOCK : 3 * BLOCK]
    assert (part.compute() == archived[1]["v_001"][:, 2 * BLOCK : 3 * BLOCK]).all()
    assert store.reads == chunk(store, array, 2)
    store.reads.clear()
    mean = lazy.astype("float32").mean(axis=1).compute()
    assert np.allclose(mean, archived[1]["v_001"].astype("float32").mean(axis=1), atol=1e-5)
    assert {key.rsplit("/c", 1)[0] for key in store.reads} == {array.path}
    assert len(store.reads) == sum(
        len(chunk(store, array, b))
        for b in range(array.shape[1] // BLOCK + (array.shape[1] % BLOCK > 0))
    )


def test_xarray_open_zarr(archived, store):
    xarray = pytest.importorskip("xarray")
    want = archived[1]
    with xarray.open_zarr(store, group=GROUP, consolidated=False, chunks=None) as data:
        assert not store.reads
        assert dict(data.sizes) == {"head": 2, "token": want["k_000"].shape[1], "channel": 16}
        assert data.attrs["kvstore"]["session"] == "chat/42"
        x = data["k_000"].isel(token=slice(BLOCK, 2 * BLOCK)).values
        assert x.dtype == np.float16
        assert (x == want["k_000"][:, BLOCK : 2 * BLOCK]).all()
        array = zarr.open_array(store, path=f"{GROUP}/k_000", mode="r")
        assert store.reads == chunk(store, array, 1)
        norm = np.sqrt((data["v_000"].astype("float32") ** 2).sum("channel"))
        assert norm.dims == ("head", "token")


def test_xarray_opens_all_sessions_as_a_tree(archived, store):
    xarray = pytest.importorskip("xarray")
    with xarray.open_datatree(store, engine="zarr", consolidated=False) as tree:
        assert tree.groups == ("/", f"/{GROUP}")
        assert not store.reads
        x = tree[GROUP]["v_001"].isel(token=slice(0, BLOCK)).values
    assert (x == archived[1]["v_001"][:, :BLOCK]).all()


def test_xarray_lists_as_ncdump_does(archived, store):
    xarray = pytest.importorskip("xarray")
    with xarray.open_zarr(store, group=GROUP, consolidated=False, chunks=None) as data:
        data.info(out := io.StringIO())
    text = out.getvalue()
    assert "xarray.Dataset {" in text
    assert f"token = {archived[1]['k_000'].shape[1]} ;" in text
    for name in ("k_000", "k_001", "v_000", "v_001"):
        assert f"float16 {name}(head, token, channel) ;" in text
    assert not store.reads


def test_xarray_with_dask(archived, store):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("dask.array")
    with xarray.open_zarr(store, group=GROUP, consolidated=False) as data:
        assert not store.reads
        part = data["v_000"].isel(token=slice(0, BLOCK)).load()
        assert (part.values == archived[1]["v_000"][:, :BLOCK]).all()
        array = zarr.open_array(store, path=f"{GROUP}/v_000", mode="r")
        if array.shards is None:
            assert store.reads == chunk(store, array, 0)


def test_xarray_cannot_write_into_an_archive(archived):
    xarray = pytest.importorskip("xarray")
    store = Store(archived[0])
    before = {key: value.to_bytes() for key, value in store._store_dict.items()}
    with xarray.open_zarr(store, group=GROUP, consolidated=False, chunks=None) as data:
        part = data[["k_000"]].isel(token=slice(0, BLOCK)).load()
    region = {"token": slice(0, BLOCK)}
    with pytest.raises(InvalidArgument, match=r"session\.append"):
        part.to_zarr(store, group=GROUP, region=region, consolidated=False)
    with pytest.raises((InvalidArgument, ValueError)):
        part.to_zarr(store, group=GROUP, append_dim="token", mode="a", consolidated=False)
    after = {key: value.to_bytes() for key, value in store._store_dict.items()}
    for key, value in before.items():
        if not key.endswith("zarr.json"):
            assert after[key] == value
        elif "sharding" not in value.decode():  # attributes may be written, shapes may not
            assert json.loads(after[key]).get("shape") == json.loads(value).get("shape")
