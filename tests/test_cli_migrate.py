"""`kvstore migrate` at the shell: usage, output, signals, full disks, and what is left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from kvtools import cli, terminal

import kvstore
from kvstore import Raw, keys


@pytest.fixture
def source(sessions_of_every_kind, tmp_path):
    shutil.copytree(sessions_of_every_kind, tmp_path / "a.kv")
    return tmp_path / "a.kv"


def stored(path):
    with kvstore.open(path) as archive, archive._read() as snapshot:
        return {key: bytes(v) for key, v in snapshot.scan(b"") if key != keys.ARCHIVE}


def fails(result, *words):
    code, _, err = result
    assert code == 1
    assert err.startswith("kvstore: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    "argv",
    [
        ["a"],
        ["a", ""],
        ["a", "b", "--codec", "zip"],
        ["a", "b", "--rel-step", "0.5"],
        ["a", "b", "--sink", "3"],
        ["a", "b", "--codec", "raw", "--step", "1"],
        ["a", "b", "--codec", "kvr1", "--step", "1", "--bpv", "2"],
        ["a", "b", "--workers", "0"],
        ["a", "b", "--workers", "9999999"],
        ["a", "b", "--sessions"],
    ],
)
def test_wrong_usage(run, argv):
    code, out, err = run("migrate", *argv)
    assert (code, out) == (2, "")
    assert "usage: kvstore migrate" in err


def test_what_it_says(run, source, tmp_path):
    code, out, err = run("migrate", source, tmp_path / "b.kv", "--sessions", "fork*", "raw")
    assert (code, err) == (0, "")
    assert "3 sessions moved byte for byte" in out
    assert "all read again" in out
    code, out, err = run("migrate", source, tmp_path / "b.kv", "--resume", "--no-verify")
    assert (code, err) == (0, "")
    assert "8 sessions moved byte for byte, 3 sessions there already" in out
    assert "read again" not in out
    assert stored(tmp_path / "b.kv") == stored(source)
    code, out, err = run(
        "migrate", source, tmp_path / "c.kv", "--codec", "tkv1", "--step", "0.5", "--workers", "2"
    )
    assert code == 0
    assert "11 sessions coded anew" in out
    assert "shared no more: " in err
    args = ("--codec", "raw", "--json", "--sessions", "bare", "raw")
    code, out, err = run("migrate", source, tmp_path / "d.kv", *args)
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert said["moved"] == ["raw"]
    assert said["recoded"] == said["flattened"] == ["bare"]
    assert said["skipped"] == []
    assert said["verified"] is True
    assert said["n_bytes"] > 0 < said["seconds"]
    assert run("migrate", source, tmp_path / "e.kv", "--quiet") == (0, "", "")


def test_info_says_that_errors_are_bounds(run, source, tmp_path):
    run("migrate", source, tmp_path / "b.kv", "--codec", "tkv1", "--step", "0.5")
    _, out, _ = run("info", tmp_path / "b.kv", "--session", "parent", "--layers")
    assert "a bound, of 2 codings together" in out
    _, out, _ = run("info", tmp_path / "b.kv", "--json", "--session", "parent", "--layers")
    said = json.loads(out)["sessions"][0]
    assert said["n_recoded"] == 1
    assert said["largest_error_over_bound"] is None
    assert said["layers"][0]["bound"] is None
    assert said["layers"][0]["max_error"] > 0.25
    _, out, _ = run("info", source, "--session", "parent")
    assert "a bound, of" not in out


def test_refusals(run, source, tmp_path):
    fails(run("migrate", source, source), "the same archive")
    fails(run("migrate", source, f"{source}/x.kv"), "inside")
    fails(run("migrate", source, "memory:x"), "would end with this command")
    fails(run("migrate", "memory:x", tmp_path / "b.kv"), "would end with this command")
    fails(run("migrate", source, tmp_path / "no" / "b.kv"), "parent directory")
    fails(run("migrate", tmp_path / "none.kv", tmp_path / "b.kv"), "no such archive")
    fails(run("migrate", source, tmp_path / "b.kv", "--sessions", "x"), "no session 'x'; there are")
    assert sorted(os.listdir(tmp_path)) == ["a.kv"]
    assert run("migrate", source, tmp_path / "b.kv", "--quiet")[0] == 0
    fails(run("migrate", source, tmp_path / "b.kv"), "there already; --resume passes over it")
    (tmp_path / "c.kv.partial").mkdir()
    fails(run("migrate", source, tmp_path / "c.kv"), "go on with --resume, or remove it")
    assert run("migrate", source, tmp_path / "c.kv", "--resume", "--quiet")[0] == 0
    assert stored(tmp_path / "c.kv") == stored(source)


@pytest.mark.parametrize("prefix", ["", "zarr:"])
def test_the_rest_of_a_migration_says_what_it_may_be(run, source, tmp_path, prefix):
    at = f"{prefix}{tmp_path / 'b.kv'}"
    assert run("migrate", source, at, "--quiet")[0] == 0
    with kvstore.open(at, "a") as archive, archive._backend.write(1) as transaction:
        transaction.delete(keys.ARCHIVE)
    os.rename(tmp_path / "b.kv", tmp_path / "b.kv.partial")
    fails(run("ls", f"{at}.partial"), "its record is lost", "kvstore migrate --resume goes on with")
    assert run("migrate", source, at, "--resume", "--quiet")[0] == 0
    assert stored(at) == stored(source)


def test_the_bar_has_a_rate_and_the_time_left(run, source, tmp_path, monkeypatch):
    """On a terminal."""
    master, slave = os.openpty()
    command = [sys.executable, "-P", "-m", "kvtools", "migrate", source, tmp_path / "b.kv"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        command, stderr=slave, stdout=subprocess.DEVNULL, env=environment, close_fds=True
    )
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 4096):
            shown += part
    except OSError:
        pass  # the other end has closed
    os.close(master)
    assert process.wait(60) == 0
    assert b"migrate" in shown
    assert b"/s" in shown or b"?" in shown  # nothing to tell a rate by, in so short a time
    assert b":" in shown
    assert terminal.rate_text(3e6, 2) == "1.50 MB/s"
    assert terminal.rate_text(3e6, 0) == "0 B/s"


CHILD = """
import sys, time
import kvstore.migration.moving
from kvtools import cli

kvstore.migration.moving.BATCH_BYTES = 20_000
flush = kvstore.migration.moving.Mover.flush

def slow(self, *args):
    flush(self, *args)
    print("stored", flush=True)
    time.sleep(0.2)

kvstore.migration.moving.Mover.flush = slow
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_keeps_what_was_moved_and_says_so(run, source, tmp_path, number, code):
    there = tmp_path / "b.kv"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", CHILD, "migrate", source, there],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"stored\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert b"b.kv.partial keeps what was moved: --resume goes on, or remove it" in err
    assert err.count(b"\n") == 1
    assert not there.exists()
    assert run("migrate", source, there, "--resume", "--quiet")[0] == 0
    assert stored(there) == stored(source)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_whole_sessions_in_an_archive_that_was_there(source, tmp_path, number):
    there = tmp_path / "b.kv"
    kvstore.open(there, "a").close()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", CHILD, "migrate", source, there],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    for _ in range(5):
        process.stdout.readline()
    process.send_signal(number)
    process.communicate(timeout=30)
    with kvstore.open(there) as archive:
        report = archive.verify()
        assert report.ok
        assert report.n_leftover == 0
    kvstore.migrate(source, there, resume=True)
    assert stored(there) == stored(source)


FULL = """
import resource, sys
from kvtools import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("codec", [(), ("--codec", "raw")])
def test_a_full_disk(run, tmp_path, codec):
    """A limit on file size stands in for it."""
    source, there = tmp_path / "a.kv", tmp_path / "b.kv"
    model = kvstore.Model.uniform(name="m", n_layers=2, n_kv_heads=2, head_dim=64)
    x = np.random.default_rng(0).standard_normal((2, 2, 20_000, 64), dtype=np.float32)
    with kvstore.open(source, "a") as archive:
        for name, coded in (("s", Raw()), ("t", kvstore.KVR1())):
            with archive.create_session(name, model=model, codec=coded) as session:
                session.append(x, x)
                session.commit()
    limit = source.joinpath("data.mdb").stat().st_size // 2
    command = [sys.executable, "-P", "-c", FULL, str(limit), "migrate", source, there, *codec]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert failed.returncode == 1
    assert "no space on the disk" in failed.stderr
    assert "--resume" in failed.stderr
    assert not there.exists()
    assert run("migrate", source, there, "--resume", "--quiet", *codec)[0] == 0
    with kvstore.open(there) as archive:
        assert archive.verify(decode=True).ok
    if not codec:
        assert stored(there) == stored(source)


def test_help_names_the_formats(run):
    code, out, _ = run("migrate", "-h")
    assert code == 0
    for word in ("zarr:FOLDER", "s3://", "zarr2:", ".tkvdir", "safetensors", "--dask"):
        assert word in out
    assert "migrate" in cli.COMMANDS
