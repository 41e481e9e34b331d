"""No room: `Full`, everything committed before stays readable, and the commit can be repeated."""

import subprocess
import sys

import numpy as np
import pytest

import kvstore
from kvstore import Model, Raw

MODEL = Model.uniform(name="m", n_layers=2, n_kv_heads=2, head_dim=64)


def tensors(start, stop):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((stop, 2, 2, 64)).astype(np.float32).transpose(1, 2, 0, 3)
    return x[:, :, start:], x[:, :, start:]


def test_full_map(tmp_path):
    path = tmp_path / "a.kv"
    with kvstore.open(path, "a", map_size=1 << 20) as archive:
        session = archive.create_session("s", model=MODEL, codec=Raw(), block_tokens=64)
        k, v = tensors(0, 200)
        session.append(k, v)
        session.commit()
        k, v = tensors(200, 1200)
        session.append(k, v)
        for _ in range(2):
            with pytest.raises(kvstore.Full, match=r"a\.kv: the map is used up.*map_size"):
                session.commit()
            assert (session.n_tokens, session.n_committed) == (1200, 200)
            np.testing.assert_array_equal(session.read_all()[0], tensors(0, 200)[0])
            assert archive.verify().ok
        with pytest.raises(kvstore.Full):
            archive.ingest("big", Source(2000), model=MODEL, codec=Raw())
        assert archive.names() == ["s"]
        # Opening again with more room grows the map for all; nothing appended was lost.
        with kvstore.open(path, "a", map_size=1 << 26):
            session.commit()
        np.testing.assert_array_equal(session.read_all()[1], tensors(0, 1200)[1])
    with kvstore.open(path) as archive:
        np.testing.assert_array_equal(archive.session("s").read_all()[0], tensors(0, 1200)[0])


class Source:
    def __init__(self, n):
        self.n = n

    def n_tokens(self, layer, kind):
        return self.n

    def chunks(self, layer, kind):
        yield tensors(0, self.n)[0][layer]


def test_space_of_deleted_sessions_is_used_again(tmp_path):
    with kvstore.open(tmp_path / "a.kv", "a", map_size=3 << 20) as archive:
        for i in range(10):
            archive.ingest(f"s{i}", Source(400), model=MODEL, codec=Raw())
            archive.delete_session(f"s{i}")
        assert archive.info().file_bytes <= 3 << 20


CHILD = """
import resource, sys
import numpy as np
import kvstore
from kvstore import Model, Raw
sys.path.insert(0, sys.argv[2])
from test_full import MODEL, Source, tensors

path = sys.argv[1]
archive = kvstore.open(path, "a")
session = archive.create_session("s", model=MODEL, codec=Raw(), block_tokens=64)
session.append(*tensors(0, 200))
session.commit()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (archive.info().file_bytes + 100_000, hard))
session.append(*tensors(200, 1200))
for _ in range(2):
    try:
        session.commit()
        sys.exit("no error")
    except kvstore.Full as error:
        assert "no space on the disk" in str(error), error
try:
    archive.ingest("big", Source(3000), model=MODEL, codec=Raw())
    sys.exit("no error")
except kvstore.Full:
    pass
assert archive.names() == ["s"]
assert session.n_committed == 200
assert (session.read_all()[0] == tensors(0, 200)[0]).all()
assert archive.verify(decode=True).ok
with kvstore.open(path) as other:
    assert (other.session("s").read_all()[1] == tensors(0, 200)[1]).all()
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
session.commit()
assert (session.read_all()[0] == tensors(0, 1200)[0]).all()
archive.close()
"""


def test_full_disk(tmp_path):
    """A limit on file size stands in for a full disk: the system refuses to extend the file."""
    path = str(tmp_path / "a.kv")
    here = __file__.rpartition("/")[0]
    subprocess.run([sys.executable, "-c", CHILD, path, here], check=True, timeout=60)
    with kvstore.open(path) as archive:
        assert archive.verify(decode=True).ok
        np.testing.assert_array_equal(archive.session("s").read_all()[0], tensors(0, 1200)[0])


def test_less_address_space(tmp_path):
    """Where 1 TiB cannot be mapped, a smaller map is taken."""
    path = str(tmp_path / "a.kv")
    code = """
import resource, sys, kvstore
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
from kvstore import Model
with kvstore.open(sys.argv[1], "a") as archive:
    archive.create_session("s", model=Model.uniform(name="m", n_layers=1, n_kv_heads=1, head_dim=2))
    assert archive._backend._environment.env.info()["map_size"] == 1 << 30
"""
    env = {**__import__("os").environ, "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=60, env=env)
    with kvstore.open(path) as archive:
        assert archive.names() == ["s"]


def test_no_room_for_the_lock_file(tmp_path, monkeypatch):
    """LMDB would die of SIGBUS: its lock file is sparse, and written through a map."""
    import errno
    import os
    import shutil

    path = tmp_path / "a.kv"
    with kvstore.open(path, "a") as archive:
        archive.create_session("s", model=MODEL, codec=Raw())
    copy = tmp_path / "copy.kv"
    copy.mkdir()
    shutil.copy(path / "data.mdb", copy)

    def no_space(fd, offset, n_bytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    for place, mode in ((copy, "r"), (copy, "a"), (tmp_path / "new.kv", "a")):
        with pytest.raises(kvstore.Full, match=r"no space for lock\.mdb"):
            kvstore.open(place, mode)
    with kvstore.open(path) as archive:  # has its lock file
        assert archive.names() == ["s"]
    monkeypatch.undo()
    for place in (copy, tmp_path / "new.kv"):
        kvstore.open(place, "a").close()
        stat = os.stat(place / "lock.mdb")
        assert stat.st_blocks * 512 >= stat.st_size == 65536
    with kvstore.open(copy) as archive:
        assert archive.names() == ["s"]
