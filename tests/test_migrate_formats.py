"""Formats that are no archives: `.tkv` stream files, zarr format 2, safetensors; there and back."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kvcodecs.rope import from_coded, to_coded
from kvcodecs.tkv1 import TkvFile, encode_stream
from kvtools.formats.session_folder import folder_name

import kvstore
from kvstore import KVR1, TKV1, Raw, keys

GOLDEN = Path(__file__).parent / "golden" / "tkv1"


@pytest.fixture
def source(sessions_of_every_kind):
    return sessions_of_every_kind


def stored(path):
    with kvstore.open(path) as archive, archive._read() as snapshot:
        return {key: bytes(v) for key, v in snapshot.scan(b"") if key != keys.ARCHIVE}


def ok(result):
    code, out, err = result
    assert code == 0, err
    return out, err


def fails(result, *words):
    code, _, err = result
    assert code == 1
    assert err.startswith("kvstore: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def assert_same(path, other, names=None):
    """Sessions say the same in both archives, byte for byte what they read."""
    with kvstore.open(path) as a, kvstore.open(other) as b:
        report = b.verify(decode=True)
        assert report.ok, report.problems
        assert report.n_leftover == 0
        for name in a.names() if names is None else names:
            old, new = a.session(name), b.session(name)
            assert new.model == old.model
            for layer, kind in old.model.streams():
                x, y = old.read(layer, kind), new.read(layer, kind)
                np.testing.assert_array_equal(x, y)
            ours, theirs = old.info(), new.info()
            for field in (
                *("n_tokens", "first_token", "pinned", "created", "updated", "metadata"),
                *("codecs", "k_state", "n_recoded"),
            ):
                assert getattr(ours, field) == getattr(theirs, field), field
            assert ours.error.max_error == theirs.error.max_error
            ids = old.token_ids(), new.token_ids()
            assert np.array_equal(*ids) if ids[0] is not None else ids[1] is None


# -- .tkv


@pytest.fixture
def tkv1(source, tmp_path):
    """Every session, coded with TKV1: those without ranges keep forks and heads of their own."""
    path = tmp_path / "tkv1.kv"
    kvstore.migrate(source, path, sessions="tkv1/ü 1")
    model = kvstore.Model.uniform(
        name="m", n_layers=2, n_kv_heads=2, head_dim=8, rope=kvstore.Rope.from_theta(1e4, 8)
    )
    rng = np.random.default_rng(3)
    with kvstore.open(path, "a") as archive:
        parent = archive.session("tkv1/ü 1")
        parent.fork("cut", at=45).close()
        with parent.fork("fork", at=50) as fork:
            fork.append(*rng.standard_normal((2, 2, 2, 70, 8)), token_ids=np.arange(70))
            fork.commit()
        fork.trim_front(40)
        options = {"model": model, "block_tokens": 16}
        archive.create_session("empty", codec=TKV1(), **options).close()
        archive.create_session("empty 2", stats_from="fork", model=model).close()
        with archive.create_session("short", codec=TKV1(), **options) as session:
            session.append(*rng.standard_normal((2, 2, 2, 7, 8)).astype(np.float16))
            session.commit()
        narrow = TKV1(step=0.1, lane_channels=4, ar=False, sink=3, sink_div=4)
        with archive.create_session("narrow", codec=narrow, **options) as session:
            session.append(*rng.standard_normal((2, 2, 2, 200, 8)))
            session.commit()
        windowed = kvstore.Model(
            "w", (kvstore.LayerSpec(1, 4, 4), kvstore.LayerSpec(1, 4, None, window=20))
        )
        with archive.create_session(
            "windowed", model=windowed, codec=TKV1(sink=180), block_tokens=16, fit_tokens=8
        ) as session:
            x = rng.standard_normal((1, 200, 4), dtype=np.float32)
            session.append([x, x[:, 170:]], [x, None], token_ids=np.arange(200))
            session.commit()
    return path


ALONE = ("tkv1/ü 1", "empty", "empty 2", "short", "narrow", "windowed")


def test_tkv_files_come_back_as_they_were(run, tkv1, tmp_path):
    out, err = ok(run("migrate", tkv1, tmp_path / "a.tkvdir"))
    assert "8 sessions moved byte for byte" in out
    assert "shared no more: " in err
    out, _ = ok(run("migrate", tkv1, tmp_path / "json.tkvdir", "--json"))
    said = json.loads(out)
    assert said["flattened"] == ["cut", "fork"]
    assert set(said["moved"]) == set(names_of(tkv1)) > set(said["flattened"])
    assert not list(tmp_path.glob("*.partial"))
    ok(run("migrate", tmp_path / "a.tkvdir", tmp_path / "b.kv"))
    assert_same(tkv1, tmp_path / "b.kv")
    # Those that stood alone: every byte, record, owner and errors included.
    kvstore.migrate(tkv1, tmp_path / "alone.kv", sessions=ALONE)
    ok(run("migrate", tmp_path / "a.tkvdir", tmp_path / "c.kv", "--sessions", *ALONE))
    assert stored(tmp_path / "alone.kv") == stored(tmp_path / "c.kv")


def test_payloads_are_copied_and_any_reader_of_tkv_files_takes_them(run, tkv1, tmp_path):
    ok(run("migrate", tkv1, tmp_path / "a.tkvdir"))
    frames = [value[76:] for key, value in stored(tkv1).items() if key[:1] == keys.FRAME]
    for name in ("fork", "narrow"):
        with kvstore.open(tkv1) as archive:
            session = archive.session(name)
            for layer, kind in session.model.streams():
                data = (tmp_path / "a.tkvdir" / name / f"{kind}_{layer:03d}.tkv").read_bytes()
                file = TkvFile.parse(data)
                for block in range(file.n_blocks - 1):
                    assert bytes(file.block_entries(block)) in frames
                spec = session.model.stream(layer, kind)
                first = session.start_token(layer, kind) // 16 * 16
                read = session.read(layer, kind)
                lo = session.start_token(layer, kind) - first
                np.testing.assert_array_equal(
                    from_coded(file.decode(), spec)[:, lo:], read.astype(np.float32)
                )
                assert to_coded(read, spec).shape == read.shape


@pytest.mark.parametrize("name", ["gqa3_64_k_lane", "lane"])
def test_bare_files_are_a_session_with_unknown_error(run, tmp_path, name):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 300, 8)).astype(np.float32)
    folder = tmp_path / "bare"
    folder.mkdir()
    files = {
        f"{kind}_{layer:03d}": encode_stream(x + layer, kind=kind, step=0.2, block_tokens=64)
        for layer in range(2)
        for kind in "kv"
    }
    for stem, data in files.items():
        (folder / f"{stem}.tkv").write_bytes(data)
    ok(run("migrate", folder, tmp_path / "b.kv"))
    with kvstore.open(tmp_path / "b.kv") as archive:
        assert archive.names() == ["bare"]
        session = archive.session("bare")
        assert not session.info().error.is_known
        assert session.token_ids() is None
        for stem, data in files.items():
            got = session.read(int(stem[2:]), stem[0])
            np.testing.assert_array_equal(got, TkvFile.parse(data).decode())
        assert archive.verify(decode=True).ok
    # And out again: the same files.
    ok(run("migrate", tmp_path / "b.kv", tmp_path / "c.tkvdir"))
    for stem, data in files.items():
        again = TkvFile.parse((tmp_path / "c.tkvdir" / "bare" / f"{stem}.tkv").read_bytes())
        assert again.params == TkvFile.parse(data).params
        assert [bytes(again.block_entries(i)) for i in range(again.n_blocks)] == [
            bytes(TkvFile.parse(data).block_entries(i)) for i in range(again.n_blocks)
        ]


def test_golden_files_of_the_lane_layout(run, tmp_path):
    cases = [c for c in json.loads((GOLDEN / "MANIFEST.json").read_text()) if c["params"]["gpu"]]
    folder = tmp_path / "golden"
    folder.mkdir()
    names = []
    for case in cases:
        if case["params"]["kind"] == "k" and case["shape"][1] > 0:
            names.append(case["name"])
            (folder / case["name"]).mkdir()
            shutil.copy(GOLDEN / f"{case['name']}.tkv", folder / case["name"] / "k_000.tkv")
    ok(run("migrate", folder, tmp_path / "b.kv"))
    with kvstore.open(tmp_path / "b.kv") as archive:
        assert archive.names() == sorted(names)
        assert archive.verify(decode=True).ok
        for name in names:
            file = TkvFile.parse((GOLDEN / f"{name}.tkv").read_bytes())
            np.testing.assert_array_equal(archive.session(name).read(0, "k"), file.decode())


def test_what_tkv_files_cannot_hold_is_refused_and_coded_anew_when_asked(run, source, tmp_path):
    there = tmp_path / "a.tkvdir"
    fails(run("migrate", source, there), "coded with", "hold TKV1", "--codec")
    assert not list(tmp_path.iterdir())
    fails(run("migrate", source, there, "--sessions", "raw"), "coded with raw")
    out, _ = ok(run("migrate", source, there, "--codec", "tkv1", "--step", "0.25"))
    assert "coded anew" in out
    ok(run("migrate", there, tmp_path / "b.kv"))
    kvstore.migrate(source, tmp_path / "c.kv", codec=TKV1(step=0.25), with_ranges=True)
    assert_same(tmp_path / "c.kv", tmp_path / "b.kv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tkvdir", "b.kv", "c.kv"]
    # A range of another session, in a session of the right codec.
    rng = np.random.default_rng(0)
    with kvstore.open(tmp_path / "d.kv", "a") as archive:
        model = kvstore.Model.uniform(name="m", n_layers=1, n_kv_heads=1, head_dim=8)
        for seed in range(2):
            with archive.create_session(
                f"{seed}", model=model, codec=TKV1(step=0.25), block_tokens=16
            ) as session:
                session.append(*(rng.standard_normal((2, 1, 1, 128, 8)) * (1 + seed)))
                session.commit()
        with archive.session("0") as session:
            session.append_range(archive.session("1"), 0, 64)
    fails(run("migrate", tmp_path / "d.kv", tmp_path / "d.tkvdir"), "of a range of another")
    ok(run("migrate", tmp_path / "d.kv", tmp_path / "e.tkvdir", "--codec", "tkv1", "--step", ".25"))
    fails(run("migrate", tmp_path / "d.kv", f"zarr2:{tmp_path / 'd2'}"), "of a range of another")


def test_changed_files_are_noticed(run, tkv1, tmp_path):
    folder = tmp_path / "a.tkvdir"
    ok(run("migrate", tkv1, folder, "--sessions", "narrow", "tkv1/*"))
    path = folder / "narrow" / "k_000.tkv"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    fails(run("migrate", folder, tmp_path / "b.kv"), "k_000.tkv: is not what was written")
    assert not (tmp_path / "b.kv").exists()
    (folder / "narrow" / "session.json").unlink()
    for bad in ("k_001.tkv", "v_000.tkv"):
        kept = (folder / "narrow" / bad).read_bytes()
        (folder / "narrow" / bad).write_bytes(kept[:40])
        fails(run("migrate", folder, tmp_path / "b.kv", "--resume"), "TKV1")
        (folder / "narrow" / bad).write_bytes(kept)
    path.unlink()
    fails(run("migrate", folder, tmp_path / "b.kv", "--resume"), "k_000.tkv: not there")
    head = folder / "tkv1%2Fü 1" / "k_000.head"
    head.write_bytes(head.read_bytes()[:-1])
    result = run("migrate", folder, tmp_path / "b.kv", "--resume", "--sessions", "tkv1/ü 1")
    fails(result, "not there")  # the other folder is still looked at
    shutil.rmtree(folder / "narrow")
    fails(run("migrate", folder, tmp_path / "b.kv", "--resume"), "k_000.head")


def test_the_stream_layout_is_refused(run, tmp_path):
    (tmp_path / "x").mkdir()
    data = encode_stream(np.ones((1, 9, 4), np.float32), kind="k", step=0.1, layout="stream")
    (tmp_path / "x" / "k_000.tkv").write_bytes(data)
    fails(run("migrate", tmp_path / "x", tmp_path / "b.kv"), "the stream layout")
    assert not (tmp_path / "b.kv").exists()


@pytest.mark.parametrize(
    "name",
    ["a", "../x", ".", "..", "a/b", "ü", "日本", "a" * 255, "é" * 127, "%2F", ".hidden", " "],
)
def test_folder_names(name):
    text = folder_name(name)
    assert "/" not in text
    assert text not in ("", ".", "..")
    assert not text.startswith(".")
    assert len(text.encode()) <= 200
    assert text != folder_name(name + "x"[: 255 - len(name)]) or len(name) == 255


# -- zarr format 2


def test_zarr2_comes_back_as_it_was(run, source, tmp_path):
    # Without a range of another session, which has two headers.
    names = [n for n in names_of(source) if n != "ranges"]
    out, _ = ok(run("migrate", source, f"zarr2:{tmp_path / 'z'}", "--sessions", *names))
    assert f"{len(names)} sessions moved byte for byte" in out
    ok(run("migrate", f"zarr2:{tmp_path / 'z'}", tmp_path / "b.kv"))
    assert_same(source, tmp_path / "b.kv", names)
    alone = ("tkv1/ü 1", "raw", "windowed", "without ids", "empty")
    kvstore.migrate(source, tmp_path / "c.kv", sessions=alone)
    ok(run("migrate", f"zarr2:{tmp_path / 'z'}", tmp_path / "d.kv", "--sessions", *alone))
    assert stored(tmp_path / "c.kv") == stored(tmp_path / "d.kv")


def names_of(path):
    with kvstore.open(path) as archive:
        return archive.names()


READ = """
import sys
import numpy as np
import zarr
group = zarr.open(sys.argv[1], mode="r")
assert group.metadata.zarr_format == 2
for name, session in group.groups():
    for key, array in session.arrays():
        np.save(f"{sys.argv[2]}/{session.attrs['session'].replace('/', '_')}.{key}.npy", array[...])
"""


def test_plain_zarr_reads_the_values(run, source, tmp_path):
    names = ["fork", "parent", "raw", "tkv1/ü 1", "windowed"]
    ok(run("migrate", source, f"zarr2:{tmp_path / 'z'}", "--sessions", *names))
    (tmp_path / "out").mkdir()
    code = [sys.executable, "-P", "-W", "error", "-c", READ, tmp_path / "z", tmp_path / "out"]
    subprocess.run(code, check=True, timeout=60)
    with kvstore.open(source) as archive, archive._read() as snapshot:
        for name in names:
            session = archive.session(name)
            record = archive._catalog.record(snapshot, name)
            for layer, kind in session.model.streams():
                state = record.streams[layer, kind]
                stem = f"{name.replace('/', '_')}.{kind}_{layer:03d}"
                stem += "" if (tmp_path / "out" / f"{stem}.npy").exists() else "_head"
                array = np.load(tmp_path / "out" / f"{stem}.npy")
                first = session.start_token(layer, kind)
                base = (
                    state.start + (first - state.start) // state.block_tokens * state.block_tokens
                )
                x = session.read(layer, kind)
                coded = to_coded(x, session.model.stream(layer, kind))
                assert array.shape[1] == session.n_tokens - base
                # Readers of the archive take the first tokens from the raw head, as they came in.
                head = max(state.n_head, 8)
                np.testing.assert_array_equal(array[:, head:], coded[:, head - (first - base) :])


def test_a_stream_shorter_than_a_block_is_not_padded(run, tmp_path):
    model = kvstore.Model.uniform(name="m", n_layers=1, n_kv_heads=2, head_dim=8)
    x = np.random.default_rng(0).standard_normal((1, 2, 300, 8), dtype=np.float32)
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        for name, codec in {"kvr1": KVR1(), "tkv1": TKV1(step=0.1), "raw": Raw()}.items():
            with archive.create_session(
                name, model=model, codec=codec, block_tokens=1024, fit_tokens=8
            ) as session:
                session.append(x, x)
                session.commit()
    ok(run("migrate", tmp_path / "a.kv", f"zarr2:{tmp_path / 'z'}"))
    before = stored(tmp_path / "a.kv")
    payloads = [bytes(v[76:]) for k, v in before.items() if k[:1] == keys.TAIL]
    for name in ("kvr1", "tkv1", "raw"):
        for stream in ("k_000", "v_000"):
            array = json.loads((tmp_path / "z" / name / stream / ".zarray").read_text())
            assert array["chunks"] == [2, 300, 8]
            data = (tmp_path / "z" / name / stream / "0.0.0").read_bytes()
            assert any(payload in data for payload in payloads)
    ok(run("migrate", f"zarr2:{tmp_path / 'z'}", tmp_path / "b.kv"))
    assert stored(tmp_path / "b.kv") == before
    (tmp_path / "out").mkdir()
    code = [sys.executable, "-P", "-W", "error", "-c", READ, tmp_path / "z", tmp_path / "out"]
    subprocess.run(code, check=True, timeout=60)
    with kvstore.open(tmp_path / "a.kv") as archive:
        read = archive.session("kvr1").read(0, "v")
    array = np.load(tmp_path / "out" / "kvr1.v_000.npy")
    np.testing.assert_array_equal(array[:, 8:], read[:, 8:])


def test_a_folder_of_zarr2_without_its_prefix(run, source, tmp_path):
    folder = tmp_path / "z"
    ok(run("migrate", source, f"zarr2:{folder}", "--sessions", "raw"))
    for command in (("ls", folder), ("migrate", folder, tmp_path / "b.kv")):
        fails(run(*command), "no archive", f"kvstore migrate zarr2:{folder} DST")


def test_zarr2_damage(run, source, tmp_path):
    ok(run("migrate", source, f"zarr2:{tmp_path / 'z'}", "--sessions", "raw", "tkv1*"))
    folder = tmp_path / "z" / "tkv1%2Fü 1"
    chunk = folder / "k_001" / "0.2.0"
    kept = chunk.read_bytes()
    target = tmp_path / "b.kv"
    for bad, word in ((kept[:-1], "bytes"), (kept[:-2] + b"xx", "crc32c"), (b"", "0 bytes")):
        chunk.write_bytes(bad)
        fails(run("migrate", f"zarr2:{tmp_path / 'z'}", target), word, "0.2.0")
        assert not target.exists()
        shutil.rmtree(tmp_path / "b.kv.partial", ignore_errors=True)
    chunk.write_bytes((folder / "v_001" / "0.2.0").read_bytes())
    fails(run("migrate", f"zarr2:{tmp_path / 'z'}", target), "not a block of this stream")
    chunk.write_bytes((folder / "k_000" / "0.2.0").read_bytes())
    fails(run("migrate", f"zarr2:{tmp_path / 'z'}", target, "--resume"), "other statistics")
    chunk.unlink()
    fails(run("migrate", f"zarr2:{tmp_path / 'z'}", target, "--resume"), "0.2.0: not there")
    (folder / ".zattrs").write_text("{}")
    fails(run("migrate", f"zarr2:{tmp_path / 'z'}", target, "--resume"), "no session that kvstore")


# -- what both have in common


@pytest.mark.parametrize("target", ["{}/a.tkvdir", "zarr2:{}/a.z"])
def test_exports_are_whole_or_not_there(run, tkv1, tmp_path, target, monkeypatch):
    from kvtools.formats import session_folder

    text = target.format(tmp_path)
    folder = Path(text.removeprefix("zarr2:"))
    write, count = session_folder.write_file, [0]

    def failing(path, parts):
        count[0] += 1
        if count[0] == (60 if "zarr2" in text else 20):
            raise kvstore.Full("no room")
        return write(path, parts)

    for module in ("session_folder", "tkv_export", "zarr2_export"):
        monkeypatch.setattr(f"kvtools.formats.{module}.write_file", failing)
    fails(run("migrate", tkv1, text), "no room", "keeps what was written", "--resume")
    assert not folder.exists()
    fails(run("migrate", tkv1, text), "left by a migration that did not end", "--resume")
    out, _ = ok(run("migrate", tkv1, text, "--resume"))
    assert "there already" in out
    ok(run("migrate", text, tmp_path / "b.kv"))
    assert_same(tkv1, tmp_path / "b.kv")
    fails(run("migrate", tkv1, text, "--resume"), "exists already")


def test_sessions_come_into_an_archive_that_is_there(run, tkv1, tmp_path):
    ok(run("migrate", tkv1, tmp_path / "a.tkvdir"))
    with kvstore.open(tmp_path / "b.kv", "a") as archive:
        model = kvstore.Model.uniform(name="m", n_layers=1, n_kv_heads=1, head_dim=2)
        archive.create_session("here", model=model, codec=Raw()).close()
    ok(run("migrate", tmp_path / "a.tkvdir", tmp_path / "b.kv", "--sessions", "n*"))
    fails(run("migrate", tmp_path / "a.tkvdir", tmp_path / "b.kv"), "already")
    out, _ = ok(run("migrate", tmp_path / "a.tkvdir", tmp_path / "b.kv", "--resume"))
    assert "there already" in out
    assert "here" in names_of(tmp_path / "b.kv")
    assert_same(tkv1, tmp_path / "b.kv")


def test_folders_come_in_with_another_codec(run, tkv1, tmp_path):
    ok(run("migrate", tkv1, tmp_path / "a.tkvdir", "--sessions", "narrow"))
    out, _ = ok(run("migrate", tmp_path / "a.tkvdir", tmp_path / "b.kv", "--codec", "raw"))
    assert "1 session coded anew" in out
    with kvstore.open(tmp_path / "b.kv") as b, kvstore.open(tkv1) as a:
        np.testing.assert_array_equal(
            a.session("narrow").read_all()[0], b.session("narrow").read_all()[0]
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tkvdir", "b.kv", "tkv1.kv"]


def test_safetensors_both_ways(run, source, tmp_path):
    ok(run("migrate", source, tmp_path / "a.safetensors", "--sessions", "raw"))
    ok(run("migrate", tmp_path / "a.safetensors", tmp_path / "b.kv", "--codec", "raw"))
    with kvstore.open(tmp_path / "b.kv") as b, kvstore.open(source) as a:
        np.testing.assert_array_equal(a.session("raw").read_all()[0], b.session("a").read_all()[0])
    ok(run("migrate", tmp_path / "a.safetensors", tmp_path / "b.kv", "--sessions", "raw"))
    with kvstore.open(tmp_path / "b.kv") as b:
        assert b.names() == ["a", "raw"]
        assert b.session("raw").info().codecs["k"] == KVR1().to_json()
    fails(run("migrate", source, tmp_path / "c.safetensors"), "choose one with --session")
    fails(run("migrate", source, tmp_path / "c.safetensors", "--sessions", "f*"), "one session")
