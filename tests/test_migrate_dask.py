"""Migrations that a Dask cluster does: two worker processes, and a scheduler, of its own."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import kvstore
from kvstore import KVR1, TKV1, Raw, keys
from kvstore.migration import ends, spreading

distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def cluster():
    with distributed.LocalCluster(
        n_workers=2,
        processes=True,
        threads_per_worker=1,
        dashboard_address="127.0.0.1:0",
        memory_limit=None,
        silence_logs=50,
    ) as running:
        yield running


@pytest.fixture
def scheduler(cluster):
    return cluster.scheduler_address


@pytest.fixture
def source(sessions_of_every_kind):
    return sessions_of_every_kind


def stored(path):
    with kvstore.open(path) as archive, archive._read() as snapshot:
        return {key: bytes(v) for key, v in snapshot.scan(b"") if key != keys.ARCHIVE}


def assert_sound(path):
    with kvstore.open(path) as archive:
        report = archive.verify(decode=True)
        assert report.ok, report.problems
        assert report.n_leftover == 0


@pytest.mark.parametrize("kind", ["", "zarr:"])
def test_workers_move_and_code_streams(source, tmp_path, scheduler, kind):
    there, coded = f"{kind}{tmp_path / 'b'}", f"{kind}{tmp_path / 'c'}"
    seen = []
    done = kvstore.migrate(source, there, dask=scheduler, progress=lambda *n: seen.append(n))
    assert len(done.moved) == 11
    assert done.verified
    assert stored(there) == stored(source)
    assert seen[-1][0] == seen[-1][1] > 0
    assert_sound(there)
    done = kvstore.migrate(source, coded, dask=scheduler, codec=TKV1(step=0.5))
    assert len(done.recoded) == 11
    kvstore.migrate(source, tmp_path / "here", codec=TKV1(step=0.5))
    assert stored(coded) == stored(tmp_path / "here")
    assert not list(tmp_path.glob("*.partial"))


def test_into_an_archive_that_is_there(source, tmp_path, scheduler, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kvstore.migrate(source, "b.kv", sessions=["fork", "raw"])
    kvstore.migrate(source, "b.kv", dask=scheduler, resume=True)  # a path of this process alone
    assert stored("b.kv") == stored(source)
    assert_sound("b.kv")
    done = kvstore.migrate(source, "b.kv", dask=scheduler, resume=True)
    assert len(done.skipped) == 11


def test_errors_of_workers_are_ours(source, tmp_path, scheduler, run, monkeypatch):
    monkeypatch.setattr(spreading, "_CONNECT_SECONDS", 1)
    kvstore.migrate(source, tmp_path / "a.kv")
    with kvstore.open(tmp_path / "a.kv", "a") as archive, archive._backend.write(1) as transaction:
        record = archive._catalog.record(transaction, "raw")
        transaction.delete(keys.frame_key(record.owner, 1, "v", 3))
    with pytest.raises(kvstore.Corrupt, match="session 'raw' layer 1 v block 3: missing"):
        kvstore.migrate(tmp_path / "a.kv", tmp_path / "b.kv", dask=scheduler)
    assert not (tmp_path / "b.kv").exists()
    for src, dst in (("memory:x", tmp_path / "c.kv"), (source, "memory:x")):
        if src == "memory:x":
            kvstore.open(src, "a").close()
        with pytest.raises(kvstore.InvalidArgument, match="that workers can open"):
            kvstore.migrate(src, dst, dask=scheduler)
    with pytest.raises(kvstore.InvalidArgument, match="no Dask scheduler answers"):
        kvstore.migrate(source, tmp_path / "c.kv", dask="tcp://127.0.0.1:1")
    code, _, err = run("migrate", source, tmp_path / "d.kv", "--dask", scheduler, "--json")
    assert (code, err) == (0, "")
    assert stored(tmp_path / "d.kv") == stored(source)


@pytest.mark.parametrize("address", ["foo", "tcp://h:po", "bar://x:1", "tcp://nowhere.invalid:1"])
def test_an_address_that_cannot_be_used(source, tmp_path, address):
    code = [sys.executable, "-P", "-m", "kvtools", "migrate", source, tmp_path / "b.kv", "--dask"]
    done = subprocess.run([*code, address], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvstore: error: {address}: no Dask scheduler answers: ")
    assert done.stderr.count("\n") == 1


def test_a_worker_that_writes_elsewhere_is_noticed(source, tmp_path):
    """As on a machine that does not share the folder."""
    here = ends.Ends(str(source), str(tmp_path / "b"), {}, {}, None, 1.0)
    with kvstore.open(source) as archive, archive._read() as snapshot:
        value = bytes(snapshot.get(keys.session_key("raw")))
    with pytest.raises(kvstore.NotFound, match="not there on"):
        spreading.move_streams(here, "raw", value, [(0, "k")], True, True, frozenset())
    (tmp_path / "b").mkdir()
    with pytest.raises(kvstore.NotFound, match="another one than the client's"):
        spreading.move_streams(here, "raw", value, [(0, "k")], True, True, frozenset())
    with pytest.raises(kvstore.Locked, match="has changed since the migration began"):
        spreading.move_streams(here, "raw", value + b"x", [(0, "k")], True, True, frozenset())


FREEZE = """
import faulthandler, gc, os, sys, threading, time, _thread
from kvstore.migration.interpreter import keep_from_freezing
faulthandler.dump_traceback_later(30, exit=True)
keep_from_freezing()
keep_from_freezing()

def start_a_thread(phase, info):  # what a finalizer does that lets go of the GIL at a bad moment
    if inside and threading.get_ident() == main:
        _thread.start_new_thread(int, ())

def work():
    while True:
        (lambda: time.sleep(0.0003))()

inside, main = False, threading.get_ident()
for _ in range(10):
    threading.Thread(target=work, daemon=True).start()
gc.callbacks.append(start_a_thread)
gc.set_threshold(7)
for _ in range(500):
    inside = True
    assert main in sys._current_frames()
    inside = False
    assert gc.isenabled()
    time.sleep(0.0005)
os._exit(0)
"""


def test_a_profiler_does_not_freeze_the_process():
    """As python/cpython#106883, which has not been mended in CPython 3.11.0 to 3.11.8."""
    subprocess.run([sys.executable, "-c", FREEZE], check=True, timeout=60, capture_output=True)


def test_workers_are_kept_from_freezing(source, tmp_path, cluster, scheduler):
    kvstore.migrate(source, tmp_path / "b.kv", dask=scheduler)
    with distributed.Client(scheduler, set_as_default=False) as client:
        done = client.run(lambda: getattr(sys._current_frames, "collects_nothing", False))
    assert set(done.values()) == {sys.version_info < (3, 11, 9)}


def test_a_worker_that_is_silent_is_named(source, tmp_path, cluster, scheduler, monkeypatch):
    """Nobody waits for ever for tasks that it has."""
    monkeypatch.setattr(spreading, "_LOOK_SECONDS", 0.3)
    monkeypatch.setattr(spreading, "_SILENT_SECONDS", 3.0)
    monkeypatch.setattr(spreading, "_CLOSE_SECONDS", 0.5)
    worker = cluster.workers[0]
    os.kill(worker.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(kvstore.Locked, match=f"worker {worker.worker_address} has .* tasks"):
            kvstore.migrate(source, tmp_path / "b.kv", dask=scheduler)
    finally:
        os.kill(worker.process.pid, signal.SIGCONT)
    kvstore.migrate(source, tmp_path / "b.kv", dask=scheduler, resume=True)
    assert stored(tmp_path / "b.kv") == stored(source)


def test_a_cluster_without_workers(source, tmp_path, monkeypatch):
    monkeypatch.setattr(spreading, "_LOOK_SECONDS", 0.2)
    monkeypatch.setattr(spreading, "_NOBODY_SECONDS", 1.0)
    with (
        distributed.LocalCluster(
            n_workers=0, dashboard_address="127.0.0.1:0", silence_logs=50
        ) as empty,
        pytest.raises(kvstore.Locked, match="has had no workers"),
    ):
        kvstore.migrate(source, tmp_path / "b.kv", dask=empty.scheduler_address)


def test_workers_keep_archives_open(source, tmp_path, cluster, scheduler):
    """Between the tasks of a migration, not longer."""

    def opened(dask_worker):
        from kvstore.migration import ends

        if not hasattr(ends, "n_opened"):
            ends.n_opened, before = 0, ends.open_archive

            def counted(*args, **options):
                ends.n_opened += 1
                return before(*args, **options)

            ends.open_archive = counted
        return ends.n_opened, len(ends._idle), dask_worker.address

    with distributed.Client(scheduler, set_as_default=False) as client:
        before = client.run(opened)
        done = kvstore.migrate(source, tmp_path / "b.kv", codec=TKV1(step=0.5), dask=scheduler)
        after = client.run(opened)
    assert len(done.recoded) == 11
    assert all(after[worker][0] - before[worker][0] <= 1 for worker in after)
    assert all(n_idle == 0 for _, n_idle, _ in after.values())
    kvstore.compact(tmp_path / "b.kv")


def test_archives_that_nobody_closed_are_closed(source, tmp_path, monkeypatch):
    monkeypatch.setattr(ends, "_IDLE_SECONDS", 0.4)
    kvstore.migrate(source, tmp_path / "b.kv", sessions="raw")
    both = ends.Ends(str(source), str(tmp_path / "b.kv"), {}, {}, {}, 1.0, "run")
    with kvstore.open(source) as archive, archive._read() as snapshot:
        value = bytes(snapshot.get(keys.session_key("raw")))
    with both.open("raw", value):
        pass
    (kept,) = ends._idle
    with both.open("raw", value) as (mover, _):
        assert mover.target is kept.target
    with pytest.raises(kvstore.Locked):
        kvstore.compact(tmp_path / "b.kv")
    for _ in range(100):
        if ends._closer is None:
            break
        time.sleep(0.05)
    assert not ends._idle
    kvstore.compact(tmp_path / "b.kv")


def test_without_dask(source, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    with pytest.raises(kvstore.Unsupported, match=r"pip install 'kvstore\[dask\]'"):
        kvstore.migrate(source, tmp_path / "b.kv", dask="tcp://127.0.0.1:1")


def test_a_worker_that_is_killed(tmp_path, cluster, scheduler):
    """Another one does its work, or it is resumed; the archive is whole then."""
    model = kvstore.Model.uniform(name="m", n_layers=8, n_kv_heads=2, head_dim=64)
    x = np.random.default_rng(0).standard_normal((8, 2, 8000, 64), dtype=np.float32)
    with (
        kvstore.open(tmp_path / "a.kv", "a") as archive,
        archive.create_session("s", model=model, codec=Raw(), block_tokens=128) as session,
    ):
        session.append(x, x)
        session.commit()
    workers = list(cluster.workers.values())
    killed = []

    def kill(n_bytes, total):
        if not killed:
            killed.append(workers[0].process.pid)
            os.kill(killed[0], signal.SIGKILL)

    try:
        kvstore.migrate(
            tmp_path / "a.kv", tmp_path / "b.kv", dask=scheduler, codec=KVR1(), progress=kill
        )
    except kvstore.Locked:
        time.sleep(1)
        kvstore.migrate(tmp_path / "a.kv", tmp_path / "b.kv", codec=KVR1(), resume=True)
    assert killed
    assert_sound(tmp_path / "b.kv")
    kvstore.migrate(tmp_path / "a.kv", tmp_path / "c.kv", codec=KVR1())
    assert stored(tmp_path / "b.kv") == stored(tmp_path / "c.kv")
