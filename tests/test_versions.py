"""Archives of every format that ever was open, hold what they held, and become new ones."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from kvcodecs.frame import seal_record

import kvstore
from kvstore import keys, versions
from kvstore.backends import _backup, memory
from kvstore.place import open_backend
from kvstore.records import check_archive

FIXTURES = Path(__file__).parent / "golden" / "archives"
FORMAT_MD = Path(kvstore.__file__).parent / "FORMAT.md"
TABLES = sorted(FIXTURES.glob("*.json"))
NEWEST = versions.FORMAT_VERSION


def table_of(path):
    return json.loads(path.read_text())


def copy_of(table, tmp_path):
    """Return an archive that the test may change."""
    return shutil.copytree(table.with_suffix(".kv"), tmp_path / "a.kv")


def sha256(array, dtype):
    return hashlib.sha256(np.ascontiguousarray(array, dtype).tobytes()).hexdigest()


def held(archive):
    """Return what the sessions of an archive hold, as the tables of the fixtures have it."""
    found = {}
    for name in archive.names():
        session, streams = archive.session(name), {}
        info = session.info()
        for layer, kind in session.model.streams():
            start = max(session.start_token(layer, kind), info.first_token)
            for k_state in ("pre", "post") if kind == "k" else ("pre",):
                values = session.read(layer, kind, start, k_state=k_state, dtype="float16")
                label = f"{layer} k {k_state}" if kind == "k" else f"{layer} v"
                streams[label] = f"{values.shape} {sha256(values, '<f2')}"
        ids = session.token_ids(info.first_token)
        found[name] = {
            "model": session.model.digest.hex(),
            "n_tokens": info.n_tokens,
            "first_token": info.first_token,
            "pinned": info.pinned,
            "codecs": info.codecs,
            "created": info.created,
            "metadata": session.metadata,
            "token_ids": None if ids is None else sha256(ids, "<i8"),
            "streams": streams,
        }
    return found


def assert_holds(path, table, *, number, mode="r"):
    with kvstore.open(path, mode) as archive:
        assert held(archive) == table["sessions"]
        assert archive.info().format == number
        assert archive.info().backend == table["backend"]
        report = archive.verify(decode=True)
        assert report.problems == []
        assert report.n_leftover == 0


# The table, the document and the fixtures say the same.


def test_versions_count_from_one_and_each_but_the_first_has_a_step():
    assert [version.number for version in versions.VERSIONS] == list(range(1, NEWEST + 1))
    assert [version.number for version in versions.VERSIONS if version.step is None] == [1]


def test_the_document_lists_the_versions():
    section = FORMAT_MD.read_text().split("\n## 8. Versions\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", section, re.MULTILINE)
    assert rows == [(str(v.number), v.first_release) for v in versions.VERSIONS]


def test_every_version_and_backend_has_a_fixture():
    wanted = {(v.number, backend) for v in versions.VERSIONS for backend in v.backends}
    tables = [table_of(path) for path in TABLES]
    assert {(table["format"], table["backend"]) for table in tables} == wanted
    assert all(path.with_suffix(".kv").is_dir() for path in TABLES)
    assert len(list(FIXTURES.glob("*.kv"))) == len(TABLES)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
class TestFixture:
    def test_read_as_it_is(self, path, tmp_path):
        table = table_of(path)
        copy = copy_of(path, tmp_path)
        before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
        assert_holds(copy, table, number=table["format"])
        assert {p: p.read_bytes() for p in before} == before

    def test_opened_for_writing_it_is_upgraded(self, path, tmp_path):
        table = table_of(path)
        copy = copy_of(path, tmp_path)
        assert_holds(copy, table, number=NEWEST, mode="a")
        assert_holds(copy, table, number=NEWEST)

    def test_upgraded_it_goes_on(self, path, tmp_path):
        copy = copy_of(path, tmp_path)
        kvstore.upgrade(copy, backup=False)
        with kvstore.open(copy, "a") as archive:
            source = archive.session("tkv1")
            ids = source.token_ids()
            match = archive.match_prefix(ids[:60], source.model)
            assert match.n_tokens == 60
            fork = match.session.fork("new", at=60)
            rows = np.ones((2, 2, 5, 64), np.float16)
            fork.append(rows, rows, token_ids=range(5))
            fork.commit()
            assert np.abs(fork.read(0, "v", 60) - 1).max() < 0.2
            assert archive.verify(decode=True).ok
            for name in archive.names():
                archive.delete_session(name)
            archive.gc()
            assert archive.verify().ok

    def test_upgraded_with_a_backup(self, path, tmp_path):
        table = table_of(path)
        copy = copy_of(path, tmp_path)
        done = kvstore.upgrade(copy)
        assert (done.before, done.after) == (table["format"], NEWEST)
        assert_holds(copy, table, number=NEWEST)
        if table["format"] == NEWEST:
            assert done.backup is None
            assert os.listdir(tmp_path) == ["a.kv"]
            return
        assert done.n_sessions == len(table["sessions"])
        assert done.problems == []
        assert done.backup == f"{copy}.backup-format{table['format']}"
        assert sorted(os.listdir(tmp_path)) == ["a.kv", Path(done.backup).name]
        assert_holds(done.backup, table, number=table["format"])
        assert kvstore.upgrade(copy) == kvstore.Upgraded(NEWEST, NEWEST)
        assert_holds(done.backup, table, number=table["format"])


# Upgrades.


@pytest.fixture
def old(tmp_path):
    return copy_of(FIXTURES / "format1.json", tmp_path)


@pytest.fixture
def table():
    return table_of(FIXTURES / "format1.json")


def entries(path):
    backend = open_backend(path, "r")
    with backend.read() as snapshot:
        found = {key: bytes(value) for key, value in snapshot.scan(b"")}
    backend.close()
    return found


def format_of(path):
    return check_archive(entries(path)[keys.ARCHIVE], "here")["format"]


def in_child(body):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_the_backup_is_the_archive_before_byte_for_byte(old, tmp_path):
    before = entries(old)
    os.chmod(old, 0o750)
    os.chmod(old / "data.mdb", 0o640)
    place = tmp_path / "kept" / "old.kv"
    place.parent.mkdir()
    steps = []
    done = kvstore.upgrade(old, backup=place, progress=lambda *step: steps.append(step))
    assert done.backup == str(place)
    assert entries(place) == before
    assert place.stat().st_mode & 0o777 == 0o750
    assert (place / "data.mdb").stat().st_mode & 0o777 == 0o640
    assert steps[-1][0] == steps[-1][1] == (place / "data.mdb").stat().st_size
    kvstore.upgrade(place, backup=False)  # a backup is an archive like any other
    assert format_of(place) == NEWEST


def test_backups_are_never_overwritten(old, tmp_path, run):
    taken = tmp_path / "a.kv.backup-format1"
    taken.mkdir()
    with pytest.raises(kvstore.InvalidArgument, match="exists already; name another"):
        kvstore.upgrade(old, backup=taken)
    assert format_of(old) == 1
    assert sorted(os.listdir(tmp_path)) == ["a.kv", taken.name]
    assert kvstore.upgrade(old).backup == f"{taken}-2"
    assert list(taken.iterdir()) == []


def test_a_backup_that_cannot_be_made_leaves_the_archive(old, tmp_path):
    with pytest.raises(kvstore.InvalidArgument, match="no backup there"):
        kvstore.upgrade(old, backup=tmp_path / "no" / "b.kv")
    other = tmp_path / "b.kv.new"
    other.mkdir()
    (other / "mine").touch()
    with pytest.raises(kvstore.InvalidArgument, match="not left by a backup"):
        kvstore.upgrade(old, backup=tmp_path / "b.kv")
    assert (other / "mine").exists()
    assert format_of(old) == 1


def test_a_full_disk_leaves_the_archive(old, tmp_path):
    def child():
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with pytest.raises(kvstore.Full, match="no space for the backup"):
            kvstore.upgrade(old)

    assert in_child(child) == 0
    assert os.listdir(tmp_path) == ["a.kv"]
    assert format_of(old) == 1


def test_what_progress_raises_ends_it(old, tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvstore.upgrade(old, progress=stop)
    assert os.listdir(tmp_path) == ["a.kv"]
    assert format_of(old) == 1


def test_nobody_else_may_have_it_open(old, table):
    with (
        kvstore.open(old),
        pytest.raises(kvstore.Locked, match="close it everywhere"),
    ):
        kvstore.upgrade(old)
    code = "import kvstore, sys; a = kvstore.open(sys.argv[1]); print(flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(old)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        other.stdout.readline()
        with pytest.raises(kvstore.Locked, match="close it everywhere"):
            kvstore.upgrade(old)
    finally:
        other.communicate(b"\n")
    assert_holds(old, table, number=1)
    assert kvstore.upgrade(old).before == 1


def test_nobody_can_open_it_meanwhile(old, monkeypatch):
    from kvstore.backends import _environment

    seen = []

    def opening(done, total):
        def child():
            _environment._COMPACTION_TIMEOUT = 0.05
            with pytest.raises(kvstore.Locked, match="compacted or upgraded"):
                kvstore.open(old)

        if not seen:
            seen.append(in_child(child))

    kvstore.upgrade(old, progress=opening)
    assert seen == [0]
    kvstore.open(old).close()


def test_a_session_that_would_be_lost_stops_it(old, table, monkeypatch):
    def lossy(archive, transaction):
        transaction.delete(keys.session_key("head"))
        return []

    step = versions.VERSIONS[1]
    monkeypatch.setattr("kvstore.upgrading.VERSIONS", [_with_step(step, lossy)])
    with pytest.raises(kvstore.Corrupt, match="as it was"):
        kvstore.upgrade(old, backup=False)
    monkeypatch.undo()
    assert_holds(old, table, number=1)


def _with_step(version, step):
    import dataclasses

    return dataclasses.replace(version, step=step)


def test_damage_is_reported_and_the_rest_upgraded(old, run):
    backend = open_backend(old, "a")
    with backend.write(1) as transaction:
        chunk = next(transaction.scan(keys.TOKENS))[0]
        transaction.put(chunk, b"damaged")
    backend.close()
    code, out, _ = run("upgrade", old)
    assert code == 1
    assert out.startswith(("Corrupt: session ", "Truncated: session "))
    assert "format 1 before, 2 now" in out
    assert format_of(old) == NEWEST


KILLED = ("mkdir", "open", "write", "fchmod", "chmod", "fsync", "close", "rename", "unlink")


def test_killed_between_any_two_steps(old, table, tmp_path):
    """Before each call that changes anything on the disk: old or new, and a whole backup or none.

    A backup has its name before the archive is changed.
    """
    master = tmp_path / "master.kv"
    os.rename(old, master)
    seen = set()
    for step in range(1000):
        shutil.copytree(master, old)

        def child(kill_at=step):
            n_calls = 0

            def killing(call):
                def wrapped(*args, **kwargs):
                    nonlocal n_calls
                    n_calls += 1
                    if n_calls > kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return call(*args, **kwargs)

                return wrapped

            for name in KILLED:
                setattr(os, name, killing(getattr(os, name)))
            kvstore.upgrade(old)

        status = in_child(child)
        backup = tmp_path / "a.kv.backup-format1"
        number = format_of(old)
        seen.add((number, backup.exists()))
        if backup.exists():
            assert entries(backup) == entries(master)
        if number == 1:
            assert entries(old) == entries(master)
            kvstore.upgrade(old)  # and what was left behind is in nobody's way
        assert_holds(old, table, number=NEWEST)
        assert not list(tmp_path.glob("*.new"))
        for path in (old, *tmp_path.glob("a.kv.*")):
            shutil.rmtree(path)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    else:
        pytest.fail("never ends")
    assert {(1, False), (1, True), (2, True)} <= seen
    assert (2, False) not in seen


def test_a_copy_that_differs_is_no_backup(old, tmp_path, monkeypatch):
    def differs(*args):
        raise kvstore.Corrupt("differs")

    monkeypatch.setattr(_backup, "check_copy", differs)
    with pytest.raises(kvstore.Corrupt):
        kvstore.upgrade(old)
    assert os.listdir(tmp_path) == ["a.kv"]
    assert format_of(old) == 1


def test_from_the_command_line(old, tmp_path, run):
    assert "`kvstore upgrade` makes it that" in run("info", old)[1]
    assert run("match", "-h")[0] == run("upgrade", "-h")[0] == 0
    code, out, err = run("upgrade", "--backup", tmp_path / "b.kv", old)
    assert (code, err) == (0, "")
    assert "format 1 before, 2 now; 8 sessions" in out
    assert f"{tmp_path}/b.kv: the archive as it was" in out
    code, out, _ = run("upgrade", old)
    assert (code, "nothing to do" in out) == (0, True)
    code, out, _ = run("upgrade", tmp_path / "b.kv", "--no-backup", "--json")
    assert code == 0
    assert json.loads(out) == {
        "archive": f"{tmp_path}/b.kv",
        "format_before": 1,
        "format_after": 2,
        "backup": None,
        "n_sessions": 8,
        "errors": [],
    }
    assert json.loads(run("info", old, "--json")[1])["format"] == 2
    assert run("upgrade", old, "--backup", "x", "--no-backup")[0] == 2
    code, _, err = run("upgrade", tmp_path / "none.kv")
    assert code == 1
    assert "no such archive" in err
    assert not (tmp_path / "none.kv").exists()


# Newer formats than this release knows.


@pytest.fixture(params=["", "zarr:", "icechunk:", "memory:"])
def newer(request, tmp_path):
    if request.param == "icechunk:":
        pytest.importorskip("icechunk")
    place = request.param + ("newer" if request.param == "memory:" else str(tmp_path / "a.kv"))
    kvstore.open(place, "a").close()
    backend = open_backend(place, "a")
    with backend.write(1) as transaction:
        transaction.put(keys.ARCHIVE, seal_record(b"KVA1", b'{"format":%d}' % (NEWEST + 1)))
    backend.close()
    yield place
    memory.discard("newer")


def test_an_archive_of_a_newer_release_is_refused_with_advice(newer, run):
    message = (
        f"archive format {NEWEST + 1}, this release reads up to {NEWEST}; "
        "install a newer kvstore to read it"
    )
    before = entries(newer)
    for mode in ("r", "a"):
        with pytest.raises(kvstore.Unsupported, match=message):
            kvstore.open(newer, mode)
    for backup in (True, False):
        with pytest.raises(kvstore.Unsupported, match=message):
            kvstore.upgrade(newer, backup=backup)
    code, _, err = run("upgrade", newer)
    assert code == 1
    assert message in err
    assert entries(newer) == before


def test_an_old_archive_in_memory_is_upgraded_without_a_backup():
    kvstore.open("memory:old", "a").close()
    backend = open_backend("memory:old", "a")
    with backend.write(1) as transaction:
        transaction.put(keys.ARCHIVE, seal_record(b"KVA1", b'{"created":5,"format":1}'))
    try:
        with pytest.raises(kvstore.InvalidArgument, match="backup=False"):
            kvstore.upgrade("memory:old")
        assert format_of("memory:old") == 1
        assert kvstore.upgrade("memory:old", backup=False) == kvstore.Upgraded(1, NEWEST)
        assert format_of("memory:old") == NEWEST
    finally:
        backend.close()
        memory.discard("old")
