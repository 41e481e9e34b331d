"""Migration to and from object storage: nothing is renamed there, and no half archive opens."""

import pytest

import kvstore
import kvstore.migration.moving
from kvstore import TKV1, keys


@pytest.fixture
def bucket(s3_server, monkeypatch):
    for name, value in s3_server.options.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    return s3_server.bucket()


@pytest.fixture
def source(sessions_of_every_kind):
    return sessions_of_every_kind


def stored(path):
    with kvstore.open(path) as archive, archive._read() as snapshot:
        return {key: bytes(v) for key, v in snapshot.scan(b"") if key != keys.ARCHIVE}


class _End(Exception):
    pass


def test_there_and_back(source, bucket, tmp_path, s3_server):
    there = f"{bucket}/a/b"
    done = kvstore.migrate(source, there, dst_options={"storage_options": s3_server.options})
    assert len(done.moved) == 11
    assert stored(there) == stored(source)
    kvstore.migrate(there, tmp_path / "back.kv")
    assert stored(tmp_path / "back.kv") == stored(source)
    kvstore.migrate(source, there, resume=True)
    with pytest.raises(kvstore.InvalidArgument, match="inside"):
        kvstore.migrate(there, f"{there}/c")
    with pytest.raises(kvstore.InvalidArgument, match="the same archive"):
        kvstore.migrate(there, f"{there}/")


@pytest.mark.parametrize(
    ("part", "codec"), [(0.4, None), (0.95, TKV1(step=0.5))], ids=["move", "recode"]
)
def test_what_was_broken_off_does_not_open_and_is_resumed(
    source, bucket, tmp_path, codec, part, monkeypatch
):
    monkeypatch.setattr(kvstore.migration.moving, "BATCH_BYTES", 4000)
    there = f"{bucket}/a"

    def end(n_bytes, total):
        if n_bytes > part * total:
            raise _End

    with pytest.raises(_End):
        kvstore.migrate(source, there, codec=codec, progress=end)
    for mode in ("r", "a"):
        with pytest.raises(kvstore.KvError):
            kvstore.open(there, mode)
    with pytest.raises(kvstore.InvalidArgument, match="the rest of a migration"):
        kvstore.migrate(source, there, codec=codec)
    kvstore.migrate(source, there, codec=codec, resume=True)
    kvstore.migrate(source, tmp_path / "whole.kv", codec=codec)
    assert stored(there) == stored(tmp_path / "whole.kv")
    with kvstore.open(there) as archive:
        report = archive.verify(decode=True)
        assert report.ok
        assert report.n_leftover == 0


def test_icechunk(source, tmp_path):
    pytest.importorskip("icechunk")
    there = f"icechunk:{tmp_path / 'repository'}"
    kvstore.migrate(source, there, sessions=["parent", "fork"])
    kvstore.migrate(there, tmp_path / "back.kv")
    kvstore.migrate(source, tmp_path / "whole.kv", sessions=["parent", "fork"])
    assert stored(tmp_path / "back.kv") == stored(tmp_path / "whole.kv")
