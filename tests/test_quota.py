"""A quota holds whatever is written; what was not used for longest goes, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zlib

import numpy as np
import pytest
from kvcodecs.errors import Full, InvalidArgument, NotFound

import kvstore
from kvstore.backends import memory
from kvstore.reader import Request

MODEL = kvstore.Model.uniform(
    name="m", n_layers=2, n_kv_heads=2, head_dim=64, dtype="float32", rope=None
)
QUOTA = 4 << 20
N = 1000  # tokens: about 250 KB a session


@pytest.fixture(params=["memory", "lmdb", "zarr"])
def place(request, tmp_path):
    if request.param == "lmdb":
        yield str(tmp_path / "a.kv")
    elif request.param == "zarr":
        yield f"zarr:{tmp_path / 'a.kv'}"
    else:
        yield "memory:quota"
        memory.discard("quota")


def tensors(name, n=N):
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return rng.standard_normal((2, 2, 2, n, 64), dtype=np.float32)


def add(archive, name, n=N):
    k, v = tensors(name, n)
    with archive.create_session(name, model=MODEL) as session:
        session.append(k, v, token_ids=np.arange(n) + zlib.crc32(name.encode()) % 1000)
        session.commit()


def add_many(archive, n, *, pinned=False):
    for i in range(n):
        add(archive, f"t{i}")
        archive.session(f"t{i}").pin(pinned)


def check(archive):
    """Every session is whole and holds its own values, and nothing is left over."""
    for name in archive.names():
        session = archive.session(name)
        k, v = session.read_all()
        n = session.n_committed
        for x, y in zip((k, v), tensors(name, n), strict=True):
            assert np.abs(x - y).max() < 0.2
    report = archive.verify()
    assert report.ok, report.problems
    assert report.n_leftover == 0


def used(archive):
    return archive.info().used_bytes


def test_filled_reopened_and_more_written(place, tmp_path):
    def fits():
        # Of zarr archives the quota is of what is stored, not of what waits for its deletion.
        return ":" in place or (tmp_path / "a.kv/data.mdb").stat().st_size <= QUOTA

    with kvstore.open(place, "a", quota_bytes=QUOTA) as archive:
        n = 0
        while used(archive) < 0.9 * QUOTA - 300_000:
            add(archive, f"s{n}")
            n += 1
        before = used(archive)
        assert len(archive.names()) == n  # nobody had to go yet
    with kvstore.open(place, "a") as archive:
        assert archive.quota_bytes == QUOTA
        assert used(archive) == before
        archive.session("s1").read(0, "k", 0, 10)
        more = 0
        while more * 250_000 < 0.4 * QUOTA:
            add(archive, f"t{more}")
            more += 1
            assert fits()
            assert used(archive) <= QUOTA
        names = archive.names()
        assert "s0" not in names
        assert "s1" in names
        assert {f"t{i}" for i in range(more)} <= set(names)
        # Of those that were there before, the ones used last.
        kept = sorted(int(name[1:]) for name in names if name[0] == "s" and name != "s1")
        assert kept == list(range(n - len(kept), n))
        check(archive)


def test_what_may_not_go_stays_and_nothing_is_lost(place):
    with kvstore.open(place, "a", quota_bytes=QUOTA, lock_timeout=0.5) as archive:
        for i in range(10):
            add(archive, f"s{i}")
            archive.session(f"s{i}").pin()
        appender = archive.create_session("appender", model=MODEL)
        with pytest.raises(Full, match="quota"):
            add_many(archive, 10, pinned=True)
        names = archive.names()
        assert {f"s{i}" for i in range(10)} | {"appender"} <= set(names)
        k, v = tensors("appender")
        appender.append(k, v, token_ids=np.arange(N))
        with pytest.raises(Full, match="quota"):
            appender.commit()
        assert (appender.n_committed, appender.n_tokens) == (0, N)
        archive.session("s3").pin(False)
        archive.session("s4").pin(False)
        appender.commit()
        assert appender.n_committed == N
        assert "s3" not in archive
        appender.close()
        for name in archive.names():
            if archive.session(name).n_committed == 0:
                archive.delete_session(name)
        check(archive)


def test_one_write_that_could_never_fit_evicts_nobody(place):
    with kvstore.open(place, "a", quota_bytes=QUOTA) as archive:
        for i in range(5):
            add(archive, f"s{i}")
        with pytest.raises(Full, match="quota"):
            add(archive, "big", 25_000)
        assert {f"s{i}" for i in range(5)} < set(archive.names())


def test_a_read_goes_on_while_its_session_is_evicted(place):
    with kvstore.open(place, "a", quota_bytes=QUOTA) as archive:
        add(archive, "s")
        session = archive.session("s")
        expected = session.read(1, "v")
        with archive._read() as snapshot:
            record = session._record(snapshot)
            archive._room._evict(1, (), QUOTA)
            assert "s" not in archive
            add(archive, "t")
            out = np.empty_like(expected)
            session._reader.read(snapshot, record, [Request(1, "v", 0, N, out)], "pre", 1)
            assert (out == expected).all()
        with pytest.raises(NotFound):
            session.read(1, "v")


def test_an_old_snapshot_is_named_when_it_keeps_the_room(tmp_path):
    place = str(tmp_path / "a.kv")
    with kvstore.open(place, "a", quota_bytes=QUOTA, lock_timeout=0.3) as archive:
        for i in range(8):
            add(archive, f"s{i}")
        with archive._read() as snapshot:
            assert snapshot.get(b"A") is not None
            with pytest.raises(Full, match=f"process {os.getpid()} reads an old snapshot"):
                add_many(archive, 60)
            (reader, *_) = archive.info().readers
            assert reader.n_behind > 3
            # What could not be used anyway was not evicted, time after time.
            names = archive.names()
            for i in range(5):
                with pytest.raises(Full, match="old snapshot"):
                    add(archive, f"u{i}")
            assert set(names) <= set(archive.names())
        add(archive, "after")
        for name in archive.names():
            if archive.session(name).n_committed == 0:
                archive.delete_session(name)
        check(archive)


READS = """
import sys
import threading
import kvstore
with kvstore.open(sys.argv[1]) as archive:
    archive.session("s0").read(0, "k", 0, 5)
"""


def test_a_read_only_reader_elsewhere_counts_as_use(tmp_path):
    place = str(tmp_path / "a.kv")
    with kvstore.open(place, "a", quota_bytes=QUOTA) as archive:
        for i in range(5):
            add(archive, f"s{i}")
        subprocess.run([sys.executable, "-c", READS, place], check=True)
        while "s1" in archive:
            add(archive, f"t{len(archive.names())}")
        assert "s0" in archive


def test_forks_of_an_evicted_session_stay_whole(place):
    with kvstore.open(place, "a", quota_bytes=QUOTA) as archive:
        add(archive, "parent")
        fork = archive.session("parent").fork("fork", at=900)
        fork.pin()
        expected = fork.read_all()
        i = 0
        while "parent" in archive:
            add(archive, f"t{i}")
            i += 1
        for x, y in zip(fork.read_all(), expected, strict=True):
            assert (x == y).all()
        assert archive.match_prefix(fork.token_ids(), MODEL).n_tokens == 900


def test_lower_and_no_quota(place):
    with kvstore.open(place, "a") as archive:
        assert archive.quota_bytes is None
        for i in range(12):
            add(archive, f"s{i}")
        archive.set_quota(2 << 20)
        assert used(archive) <= 2 << 20
        assert sorted(archive.names()) == sorted(
            f"s{i}" for i in range(12 - len(archive.names()), 12)
        )
        archive.set_quota(None)
        for i in range(12):
            add(archive, f"t{i}")
        assert len(archive.names()) > 12
        check(archive)


@pytest.mark.parametrize("bad", [0, -1, 1000, True, 1.5, "1G", 1 << 63])
def test_quotas_that_are_none(place, bad):
    with pytest.raises(InvalidArgument, match="quota_bytes"):
        kvstore.open(place, "a", quota_bytes=bad)
    with kvstore.open(place, "a") as archive, pytest.raises(InvalidArgument, match="quota_bytes"):
        archive.set_quota(bad)


def test_readers_set_no_quota(place):
    with (
        kvstore.open(place, "a"),
        pytest.raises(InvalidArgument, match="mode='r'"),
    ):
        kvstore.open(place, quota_bytes=QUOTA)


def test_a_quota_that_pins_keep_from_being_met_is_undone_by_unpinning(place):
    with kvstore.open(place, "a") as archive:
        for i in range(12):
            add(archive, f"s{i}")
            archive.session(f"s{i}").pin()
        with pytest.raises(Full, match="quota"):
            archive.set_quota(1 << 20)
        assert archive.quota_bytes == 1 << 20
        with pytest.raises(Full, match="quota"):
            add(archive, "more")
        for name in archive.names():
            session = archive.session(name)
            session.set_metadata({"kept": False})
            session.pin(False)
        archive.session("s11").rename("last")
        archive.set_quota(1 << 20)
        assert used(archive) <= 1 << 20
        report = archive.verify()
        assert report.ok
        assert "s0" not in archive


def test_a_new_quota_gets_its_turn_among_reads_that_overlap(tmp_path):
    place = str(tmp_path / "a.kv")
    with kvstore.open(place, "a") as archive:
        add(archive, "s")
        session, stop = archive.session("s"), threading.Event()

        def reads():
            while not stop.is_set():
                session.read_all(n_threads=1)

        readers = [threading.Thread(target=reads) for _ in range(3)]
        for reader in readers:
            reader.start()
        try:
            archive.set_quota(QUOTA)
            add(archive, "t")
        finally:
            stop.set()
            for reader in readers:
                reader.join()
        assert archive.quota_bytes == QUOTA
