"""Sessions of flat layers: commits of all layers together, identity, kills in the middle."""

from __future__ import annotations

import os

import numpy as np
import pytest
from kvcodecs.errors import Corrupt, IdentityMismatch, InvalidArgument, Locked, NotFound

import kvstore
from kvstore import LayerSpec, Model, flat

MODEL = Model(
    name="m",
    layers=(LayerSpec(2, 32, 32), LayerSpec(4, 16, 32), LayerSpec(2, 64, None)),
    rope=kvstore.Rope.from_theta(1e4, 16),
)


def tensors(n, seed=0):
    rng = np.random.default_rng(seed)
    k = [rng.standard_normal((s.heads, n, s.head_dim_k), np.float32) for s in MODEL.layers]
    v = [
        None if s.head_dim_v is None else rng.standard_normal((s.heads, n, s.head_dim_v))
        for s in MODEL.layers
    ]
    return k, v


def cut(tensors, start, stop):
    return [None if x is None else x[:, start:stop] for x in tensors]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "chat")


@pytest.mark.parametrize("pread", [False, True])
def test_written_and_read_again(path, pread):
    k, v = tensors(500)
    with flat.create(path, MODEL, scheme={"k": "q8_0", "v": "f16"}, pread=pread) as session:
        session.append(cut(k, 0, 300), cut(v, 0, 300), start=0)
        session.commit()
        session.append(cut(k, 300, 500), cut(v, 300, 500))
        assert (session.start, session.stop, len(session)) == (0, 500, 500)
        session.drop_front(20)
        session.commit()
        with pytest.raises(Locked):
            flat.open(path, "a")
    with flat.open(path, expect=MODEL, pread=pread) as session:
        assert (session.start, session.stop) == (20, 500)
        assert session.verify() > 0
        for layer in range(3):
            x = session.read(layer, "k", 100, 200)
            assert np.abs(x - k[layer][:, 100:200]).max() < 0.05
        x = session.read(1, "v", 490, dtype="float16")
        assert np.array_equal(x, v[1][:, 490:].astype(np.float16))
        ks, vs = session.read_all()
        assert [x.shape[1] for x in ks] == [480] * 3
        assert vs[2] is None
        q = np.ones((8, 16), np.float32)
        assert np.array_equal(
            kvstore.attend(q, session, 1, n_threads=1),
            kvstore.attend(q, session.layer(1), n_threads=1),
        )
        with pytest.raises(InvalidArgument, match="no V"):
            session.read(2, "v")
    with pytest.raises(IdentityMismatch, match="name"):
        flat.open(path, expect=Model(name="other", layers=MODEL.layers, rope=MODEL.rope))


def test_an_append_that_fails_appends_to_no_layer(path):
    k, v = tensors(10)
    with flat.anonymous(MODEL) as session:
        session.append(k, v)
        wrong = [*k[:2], k[2] * np.nan]
        with pytest.raises(InvalidArgument, match="not finite"):
            session.append(wrong, v)
        assert [layer.stop for layer in session.layers] == [10] * 3
        session.append(k, v)
        session.commit()
        assert session.verify() > 0
        with pytest.raises(InvalidArgument, match="layers"):
            session.append(k[:2], v)


def test_what_is_not_a_session(path, tmp_path):
    with pytest.raises(NotFound):
        flat.open(path)
    with pytest.raises(InvalidArgument, match="whole blocks"):
        flat.create(path, MODEL, scheme="q4_k")
    assert os.listdir(tmp_path) == []
    flat.create(path, MODEL).close()
    with pytest.raises(InvalidArgument, match="exists"):
        flat.create(path, MODEL)
    other = str(tmp_path / "other")
    flat.create(other, MODEL).close()
    name = "layer-00001.kvf"
    os.replace(os.path.join(other, name), os.path.join(path, name))
    with pytest.raises(Corrupt, match="another session"):
        flat.open(path)
    with pytest.raises(Corrupt, match="missing"):
        flat.open(other)


def test_sessions_of_a_folder(tmp_path):
    with pytest.raises(NotFound, match="no session"):
        flat.open(tmp_path)
    assert flat.sessions(tmp_path) == []
    for name in "dcba":
        flat.create(f"flat:{tmp_path}/{name}", MODEL).close()
    assert flat.sessions(tmp_path) == [tmp_path / name for name in "abcd"]
    assert flat.sessions(f"flat:{tmp_path}/b") == [tmp_path / "b"]
    with flat.open(f"flat:{tmp_path}/c", "a") as session:
        assert session.where == str(tmp_path / "c")
    assert flat.verify(f"flat:{tmp_path}/d").ok
    for wrong in (tmp_path, f"flat:{tmp_path}"):
        with pytest.raises(NotFound, match=r"a folder of sessions: open '.*/a', '.*/b', .*\(4\)"):
            flat.open(wrong)
    with pytest.raises(NotFound, match="not there"):
        flat.sessions(tmp_path / "none")


@pytest.mark.parametrize("store_k", ["pre", "post"])
@pytest.mark.parametrize("k_state", ["pre", "post"])
def test_layers_without_rope_beside_those_with_one(store_k, k_state):
    layers = (LayerSpec(1, 32, 32), LayerSpec(1, 32, 32, rope=None))
    model = Model(name="m", layers=layers, rope=kvstore.Rope.from_theta(1e4, 32))
    k = np.random.default_rng(0).standard_normal((2, 1, 40, 32), np.float32)
    with flat.anonymous(model, scheme="f16", store_k=store_k) as session:
        session.append(k, k, k_state=k_state)
        for layer in range(2):
            assert np.abs(session.read(layer, "k", k_state=k_state) - k[layer]).max() < 0.01
        assert np.array_equal(session.read(1, "k", k_state="pre"), session.read(1, "v"))


def grown(path, n_commits):
    """Return a session of 10 tokens for each commit, and its layer files after each one."""
    k, v = tensors(10 * n_commits)
    session, files = flat.create(path, MODEL), []
    for i in range(n_commits):
        session.append(cut(k, 10 * i, 10 * i + 10), cut(v, 10 * i, 10 * i + 10))
        session.commit()
        files.append(bytes_of(path))
    return session, files


def bytes_of(path):
    return [read_bytes(os.path.join(path, f"layer-0000{layer}.kvf")) for layer in range(3)]


def read_bytes(path):
    with open(path, "rb") as file:
        return file.read()


def restore(path, layer, data):
    with open(os.path.join(path, f"layer-0000{layer}.kvf"), "wb") as file:
        file.write(data)


def refused(path):
    """Return what every way to open it says, which leaves every byte as it is."""
    before, said = bytes_of(path), set()
    for mode in "ra":
        with pytest.raises(Corrupt, match="restore a copy of that file") as caught:
            flat.open(path, mode)
        said.add(str(caught.value))
    (problem,) = flat.verify(path).problems
    assert said == {str(problem)}
    assert bytes_of(path) == before
    return said.pop()


def test_an_older_copy_of_one_layer(path):
    """It takes nothing from the others, but for what an interrupted commit can have left."""
    session, files = grown(path, 4)
    session.close()
    for copy in (0, 1):
        restore(path, 1, files[copy][1])
        assert f"layer 1 is behind: layer-00001.kvf is of commit {copy + 1}," in refused(path)
    restore(path, 1, files[2][1])
    assert not flat.verify(path).ok  # as after a crash
    with flat.open(path, "a") as session:
        assert [layer.stop for layer in session.layers] == [30] * 3
        assert flat.verify(path).ok
    for layer in (0, 2):
        restore(path, layer, files[0][layer])
    assert "layers 0, 2 are behind" in refused(path)
    for layer, data in enumerate(files[1]):
        restore(path, layer, data)
    with flat.open(path, "a") as session:
        assert (session.stop, session.verify() > 0) == (20, True)


def test_an_older_copy_of_as_many_rows(path):
    session, files = grown(path, 2)
    k, v = tensors(10, seed=1)
    session.take_back(10)
    session.append(k, v)
    session.commit()
    session.close()
    restore(path, 2, files[1][2])
    assert "layer 2 is behind" in refused(path)


def test_tokens_taken_back(path):
    session, _ = grown(path, 3)
    k, v = tensors(30)
    with session, flat.open(path) as reader:
        for wrong in (-1, 31, 5.0):
            with pytest.raises(InvalidArgument, match="take_back"):
                session.take_back(wrong)
        session.append(cut(k, 0, 10), cut(v, 0, 10))
        session.take_back(40)
        assert reader.stop == 40
        session.take_back(12)
        assert [layer.stop for layer in reader.layers] == [12] * 3
        session.append(cut(k, 12, 20), cut(v, 12, 20))
        session.drop_front(5)
        session.take_back(15)
        assert (reader.start, reader.stop) == (5, 15)
        with pytest.raises(InvalidArgument, match="take_back"):
            session.take_back(0)
        session.append(cut(k, 15, 20), cut(v, 15, 20))
        session.commit()
        assert np.abs(reader.read(1, "k") - k[1][:, 5:20]).max() < 0.05
    with flat.create(path + "2", MODEL) as session:
        session.append(k, v, start=7)
        session.take_back(0)
        session.append(k, v, start=3)
        assert (session.start, session.stop) == (3, 33)


def test_a_commit_that_failed_in_one_layer_is_the_one_that_is_tried_again(path):
    """However often: after the next opening, none is two commits behind."""
    session, _ = grown(path, 1)
    k, v = tensors(10)

    def fail():
        raise OSError("no disk")

    session.layers[1]._file.sync = fail
    for _ in range(3):
        session.append(k, v)
        with pytest.raises(OSError, match="no disk"):
            session.commit()
    session.close()
    with flat.open(path, "a") as session:
        assert [layer.stop for layer in session.layers] == [10] * 3
        sync = session.layers[2]._file.sync
        session.layers[2]._file.sync = fail
        session.append(k, v)
        with pytest.raises(OSError, match="no disk"):
            session.commit()
        session.layers[2]._file.sync = sync
        session.append(k, v)
        session.commit()
    with flat.open(path) as session:
        assert [layer.stop for layer in session.layers] == [30] * 3


def test_what_one_layer_commits_alone_is_not_counted(path):
    session, _ = grown(path, 1)
    k, v = tensors(10)
    with session:
        for _ in range(5):
            session.layers[0].append(k[0], v[0])
            session.layers[0].commit()
    with flat.open(path) as session:
        assert session.stop == 10
    with flat.open(path, "a") as session:
        assert [layer.stop for layer in session.layers] == [10] * 3
