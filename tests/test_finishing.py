"""Finished sessions: what cannot be done to them any more, and what can."""

import numpy as np
import pytest
from kvcodecs.errors import InvalidArgument, Locked

import kvstore


@pytest.fixture(params=["lmdb", "memory", "zarr"])
def archive(request, tmp_path):
    places = {"memory": "memory:", "lmdb": tmp_path / "a.kv", "zarr": f"zarr:{tmp_path / 'a.kv'}"}
    with kvstore.open(places[request.param], "a") as archive:
        yield archive


def fill(archive, name, n_tokens=300, seed=0):
    rng = np.random.default_rng(seed)
    model = kvstore.Model.uniform(name="m", n_layers=2, n_kv_heads=2, head_dim=8, dtype="float16")
    x = rng.normal(size=(2, 2, n_tokens, 8)).astype(np.float32)
    with archive.create_session(name, model=model, block_tokens=128) as session:
        session.append(x, x)
        session.commit()
    return archive.session(name), x


def test_a_finished_session_is_not_changed_any_more(archive):
    session, x = fill(archive, "a")
    before = session.read(1, "v")
    assert archive.seal() == ["a"]
    assert session.finished
    assert archive.seal() == []
    other, _ = fill(archive, "b", seed=1)
    changes = [
        lambda: session.append(x[:, :, :1], x[:, :, :1]),
        lambda: session.truncate(10),
        lambda: session.trim_front(200),
        lambda: session.append_range(other, 0, 10),
    ]
    for change in changes:
        with pytest.raises(InvalidArgument, match=r"finished.*fork it"):
            change()
    np.testing.assert_array_equal(session.read(1, "v"), before)


def test_a_fork_of_a_finished_session_goes_on(archive):
    session, x = fill(archive, "a")
    archive.seal(["a"])
    with session.fork("b", 200) as fork:
        assert not fork.finished
        fork.append(x[:, :, :50], x[:, :, :50])
        fork.commit()
        assert fork.n_committed == 250
    session.rename("c")
    session.pin()
    session.set_metadata({"x": 1})
    assert archive.session("c").finished
    archive.delete_session("c")
    assert archive.session("b").read(0, "k", 0, 200).shape == (2, 200, 8)


def test_a_session_with_an_appender_is_not_finished(archive):
    session, x = fill(archive, "a")
    session.append(x[:, :, :1], x[:, :, :1])
    with pytest.raises(Locked):
        archive.seal(["a"])
    assert not session.finished
    session.commit()
    session.close()
    assert archive.seal(["a"]) == ["a"]


def test_only_zarr_archives_have_shards(archive):
    fill(archive, "a")
    if archive.info().backend == "zarr":
        assert archive.seal(shard_bytes=1 << 20) == ["a"]
        assert archive.seal(shard_bytes=1 << 20) == []
        return
    with pytest.raises(InvalidArgument, match="zarr"):
        archive.seal(shard_bytes=1 << 20)
    assert not archive.session("a").finished


@pytest.mark.parametrize("shard_bytes", [0, -1, 1.5, True, "1"])
def test_sizes_of_shards_are_checked(archive, shard_bytes):
    with pytest.raises(InvalidArgument, match="shard_bytes"):
        archive.seal(shard_bytes=shard_bytes)


def test_sealing_a_session_that_is_missing_says_so(archive):
    with pytest.raises(kvstore.NotFound):
        archive.seal(["nope"])
