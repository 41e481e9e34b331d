"""Sessions of block-quantised codecs to flat layers and back: rows copied, byte for byte."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from kvcodecs.errors import InvalidArgument
from kvcodecs.frame import open_frame
from kvtools.tensorfile import TensorWriter

import kvstore
from kvstore import GGML, LayerSpec, Model, flat, keys

ROPE = kvstore.Rope.from_theta(1e4, 32)
MODEL = Model(
    name="m",
    layers=(LayerSpec(2, 32, 32), LayerSpec(4, 32, 64), LayerSpec(1, 64, None, rope=None)),
    rope=ROPE,
    dtype="float16",
    salt="tenant",
)
#: Sessions that come back with every byte: they share nothing, and lost no whole block.
ALONE = ("a/ü 1", "auto", "empty", "front", "gone", "post", "sealed", "short")


def tensors(n, seed=0, model=MODEL):
    rng = np.random.default_rng(seed)
    k = [rng.standard_normal((x.heads, n, x.head_dim_k), np.float32) for x in model.layers]
    v = [
        None if x.head_dim_v is None else rng.standard_normal((x.heads, n, x.head_dim_v))
        for x in model.layers
    ]
    return k, v


def put(archive, name, n, *, seed=0, k_state="pre", **options):
    asked = {"model": MODEL, "codec": GGML("q8_0"), "block_tokens": 16, **options}
    ids = asked.pop("ids", None)
    session = archive.create_session(name, **asked)
    if n:
        session.append(*tensors(n, seed), k_state=k_state, token_ids=ids)
        session.commit()
    return session


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """An archive with a session of every kind that flat layers can hold."""
    path = tmp_path_factory.mktemp("source") / "a.kv"
    mixed = {"k": GGML("q8_0"), "v": GGML("q4_0")}
    with kvstore.open(path, "a") as archive:
        with put(archive, "a/ü 1", 85, codec=mixed, ids=np.arange(85), metadata={"x": [1, "ü"]}):
            pass
        archive.session("a/ü 1").pin(True)
        put(archive, "auto", 300, codec=mixed, block_tokens="auto").close()
        put(archive, "empty", 0).close()
        put(archive, "post", 40, k_state="post").close()
        put(archive, "short", 7, codec=GGML("f16")).close()
        put(archive, "sealed", 48, ids=np.arange(48)).close()
        archive.seal(["sealed"])
        for name, first, n in (
            *(("front", 10, 60), ("trimmed", 45, 60), ("gone", 12, 12)),
            *(("many", 2100, 2200), ("uneven", 700, 1100)),
        ):
            # Blocks of K and V that begin at different tokens, or at the same ones.
            size = "auto" if name == "uneven" else 16
            put(archive, name, n, codec=mixed, block_tokens=size, ids=np.arange(n)).close()
            archive.session(name).trim_front(first)
        parent = archive.session("a/ü 1")
        parent.fork("cut", at=45).close()
        with parent.fork("fork", at=50) as fork:
            fork.append(*tensors(70, 5), token_ids=np.arange(70))
            fork.commit()
        with put(archive, "range", 32, codec=mixed, ids=np.arange(32)) as session:
            session.append_range(parent, 16, 80)
    return path


def stored(path):
    with kvstore.open(path) as archive, archive._read() as snapshot:
        return {key: bytes(v) for key, v in snapshot.scan(b"") if key != keys.ARCHIVE}


def names_of(path):
    with kvstore.open(path) as archive:
        return archive.names()


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
        assert word in err, err


def assert_same(path, other):
    """Sessions say the same in both archives, bit for bit what they read."""
    with kvstore.open(path) as a, kvstore.open(other) as b:
        report = b.verify(decode=True)
        assert report.ok, report.problems
        assert report.n_leftover == 0
        assert a.names() == b.names()
        for name in a.names():
            old, new = a.session(name), b.session(name)
            assert new.model == old.model
            for layer, kind in old.model.streams():
                first = old.info().first_token
                x, y = old.read(layer, kind, first), new.read(layer, kind, first)
                np.testing.assert_array_equal(x, y)
            ours, theirs = old.info(), new.info()
            for field in (
                *("n_tokens", "first_token", "pinned", "finished", "created", "updated"),
                *("metadata", "codecs", "k_state", "n_recoded"),
            ):
                assert getattr(ours, field) == getattr(theirs, field), (name, field)
            assert ours.error.max_error == theirs.error.max_error
            ids = old.token_ids(), new.token_ids()
            assert np.array_equal(*ids) if ids[0] is not None else ids[1] is None


def test_there_and_back(run, source, tmp_path):
    out, err = ok(run("migrate", source, f"flat:{tmp_path / 'f'}"))
    assert f"{len(names_of(source))} sessions moved byte for byte" in out
    assert "shared no more: " in err
    assert not list(tmp_path.glob("*.partial"))
    ok(run("migrate", tmp_path / "f", tmp_path / "b.kv"))  # a plain folder: no prefix
    assert_same(source, tmp_path / "b.kv")
    # Those that stood alone: every byte, record, owner and errors included.
    kvstore.migrate(source, tmp_path / "alone.kv", sessions=ALONE)
    ok(run("migrate", f"flat:{tmp_path / 'f'}", tmp_path / "c.kv", "--sessions", *ALONE))
    assert stored(tmp_path / "alone.kv") == stored(tmp_path / "c.kv")
    # The others stand alone now, and stay what they are.
    out, _ = ok(run("migrate", tmp_path / "b.kv", f"flat:{tmp_path / 'g'}", "--json"))
    assert json.loads(out)["flattened"] == []
    ok(run("migrate", tmp_path / "g", tmp_path / "d.kv"))
    assert stored(tmp_path / "b.kv") == stored(tmp_path / "d.kv")


def test_flat_layers_read_what_the_archive_reads(run, source, tmp_path):
    out, _ = ok(run("migrate", source, f"flat:{tmp_path / 'f'}", "--json"))
    said = json.loads(out)
    assert said["flattened"] == ["cut", "fork", "many", "range", "trimmed", "uneven"]
    assert sorted(said["moved"]) == sorted(names_of(source))
    with kvstore.open(source) as archive:
        for name in archive.names():
            session = archive.session(name)
            info = session.info()
            with flat.open(tmp_path / "f" / name.replace("/", "%2F"), expect=MODEL) as rows:
                assert (rows.start, rows.stop) == (info.first_token, info.n_tokens)
                rows.verify()
                for layer, kind in MODEL.streams():
                    for k_state in ("pre", "post"):
                        np.testing.assert_array_equal(
                            rows.read(layer, kind, k_state=k_state, dtype="float32"),
                            session.read(layer, kind, rows.start, k_state=k_state, dtype="float32"),
                        )


def test_a_session_of_the_api_becomes_one_of_an_archive(run, tmp_path):
    k, v = tensors(500)
    folder = tmp_path / "chat"
    with flat.create(folder, MODEL, scheme={"k": "q8_0", "v": "q4_1"}, max_rows=400) as session:
        session.append([x[:, :300] for x in k], [None if x is None else x[:, :300] for x in v])
        session.commit()
        session.drop_front(210)
        session.append([x[:, 300:] for x in k], [None if x is None else x[:, 300:] for x in v])
        session.commit()  # the ring has begun anew
        expected = {s: session.read(*s, dtype="float32") for s in MODEL.streams()}
    out, err = ok(run("migrate", folder, tmp_path / "b.kv"))
    assert "1 session moved byte for byte" in out
    assert err.endswith("session 'chat': max_rows=400 is left out: archives have no rings\n")
    assert re.search("max error +not known: ", ok(run("info", tmp_path / "b.kv"))[0])
    with kvstore.open(tmp_path / "b.kv") as archive:
        assert archive.names() == ["chat"]
        assert archive.verify(decode=True).ok
        session = archive.session("chat")
        info = session.info()
        assert (info.first_token, info.n_tokens) == (210, 500)
        assert session.model == MODEL
        assert {kind: dict(c)["codec"] for kind, c in info.codecs.items()} == {
            "k": "ggml.q8_0",
            "v": "ggml.q4_1",
        }
        assert not info.error.is_known
        assert session.token_ids() is None
        for stream, x in expected.items():
            np.testing.assert_array_equal(session.read(*stream, 210, dtype="float32"), x)
    with kvstore.open(tmp_path / "b.kv", "a") as archive, archive.session("chat") as session:
        session.append(*tensors(5))  # it goes on
        session.commit()
    # Again: it is known to be there.
    fails(run("migrate", folder, tmp_path / "b.kv"), "has session 'chat' already")
    ok(run("migrate", folder, tmp_path / "c.kv"))
    out, _ = ok(run("migrate", folder, tmp_path / "c.kv", "--resume"))
    assert "1 session there already" in out


def errors_of(path):
    """Return the error of each frame by stream and first token."""
    heads = [
        open_frame(value, "")[0]
        for key, value in stored(path).items()
        if key[:1] in (keys.FRAME, keys.TAIL)
    ]
    return {(head.layer, head.kind, head.first_token): head.error for head in heads}


@pytest.mark.parametrize("changed", [False, True])
def test_what_grew_since_keeps_its_name_and_metadata(run, source, tmp_path, changed):
    ok(run("migrate", source, f"flat:{tmp_path / 'f'}", "--sessions", "a/ü 1"))
    if changed:  # rows that were there are others now
        with flat.open(tmp_path / "f" / "a%2Fü 1", "a") as session:
            for layer in session.layers:
                layer.take_back(80)
            session.append(*tensors(5, 9))
            session.commit()
    with flat.open(tmp_path / "f" / "a%2Fü 1", "a") as session:
        session.append(*tensors(20, 9))
        session.commit()
        expected = {s: session.read(*s, dtype="float32") for s in MODEL.streams()}
    _, err = ok(run("migrate", tmp_path / "f", tmp_path / "b.kv"))
    what = "errors" if changed else "errors of new rows"
    assert f"token ids and {what} are left out: it was migrated" in err
    assert "with tokens [0, 85), and has [0, 105) now" in err
    kvstore.migrate(source, tmp_path / "c.kv", sessions=["a/ü 1"])
    old, new = errors_of(tmp_path / "c.kv"), errors_of(tmp_path / "b.kv")
    for at, error in new.items():
        assert error == old[at] if at[2] < 80 and not changed else not error.is_known
    with kvstore.open(tmp_path / "b.kv") as archive:
        assert archive.verify(decode=True).ok
        session = archive.session("a/ü 1")
        info = session.info()
        assert (info.n_tokens, info.pinned, info.metadata) == (105, True, {"x": [1, "ü"]})
        assert session.token_ids() is None
        assert not info.error.is_known
        for stream, x in expected.items():
            np.testing.assert_array_equal(session.read(*stream, dtype="float32"), x)


def test_a_session_grows_whose_first_block_lost_tokens(run, source, tmp_path):
    ok(run("migrate", source, f"flat:{tmp_path / 'f'}", "--sessions", "uneven"))
    with flat.open(tmp_path / "f" / "uneven", "a") as session:
        session.append(*tensors(20, 9))
        session.commit()
        expected = {s: session.read(*s, dtype="float32") for s in MODEL.streams()}
    ok(run("migrate", tmp_path / "f", tmp_path / "b.kv"))
    assert any(error.is_known for error in errors_of(tmp_path / "b.kv").values())
    with kvstore.open(tmp_path / "b.kv") as archive:
        assert archive.verify(decode=True).ok
        session = archive.session("uneven")
        for stream, x in expected.items():
            np.testing.assert_array_equal(session.read(*stream, 700, dtype="float32"), x)


@pytest.mark.parametrize("codec", ["kvr1", "ggml.q8_0", "raw"])
def test_k_that_is_kept_after_rope_is_coded_anew(run, tmp_path, codec):
    with flat.create(tmp_path / "post", MODEL, store_k="post") as session:
        session.append(*tensors(150), start=30)
        session.commit()
        expected = session.read(0, "k", k_state="post", dtype="float32")
    out, _ = ok(run("migrate", tmp_path / "post", tmp_path / "b.kv", "--codec", codec))
    assert f"1 session coded anew with {codec};" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.kv", "post"]
    with kvstore.open(tmp_path / "b.kv") as archive:
        assert archive.verify(decode=True).ok
        session = archive.session("post")
        found = session.read(0, "k", 30, k_state="post", dtype="float32")
        np.testing.assert_allclose(found, expected, atol={"raw": 1e-5}.get(codec, 0.3))
        info = session.info()
        assert (info.k_state, info.n_recoded) == ("post", 1)
        assert not info.error.is_known


def test_sessions_of_one_name(run, source, tmp_path):
    ok(run("migrate", source, f"flat:{tmp_path / 'f'}", "--sessions", "auto"))
    shutil.copytree(tmp_path / "f" / "auto", tmp_path / "f" / "copy")
    words = "'auto' and 'copy' are both session 'auto'", "one by one"
    fails(run("migrate", tmp_path / "f", tmp_path / "b.kv"), *words)
    ok(run("migrate", tmp_path / "f" / "copy", tmp_path / "b.kv"))
    assert names_of(tmp_path / "b.kv") == ["auto"]
    head, *lines = ok(run("ls", tmp_path / "f"))[0].splitlines()
    assert head.split()[:2] == ["session", "folder"]
    assert [line.split()[:2] for line in lines] == [["auto", "auto"], ["auto", "copy"]]


def test_what_was_changed_is_noticed(run, source, tmp_path):
    ok(run("migrate", source, f"flat:{tmp_path / 'f'}", "--sessions", "a/ü 1", "front"))
    at = tmp_path / "f" / "a%2Fü 1"
    kept = shutil.copytree(at, tmp_path / "kept")
    with flat.open(at, "a") as session:
        for layer in session.layers:
            layer.take_back(80)
        session.append(*tensors(5, 9))
        session.commit()
    there = tmp_path / "b.kv"
    fails(run("migrate", tmp_path / "f", there), "not those that were written", "session.json")
    assert not there.exists()
    os.remove(at / "session.json")
    ok(run("migrate", tmp_path / "f", there))
    assert names_of(there) == ["a%2Fü 1", "front"]
    shutil.rmtree(at)
    shutil.copytree(kept, at)
    data = json.loads((at / "session.json").read_text())
    for change, words in (
        ({"format": "x"}, "format 'x'"),
        ({"version": 9}, "upgrade to read it"),
        ({"model": Model("x", MODEL.layers, rope=ROPE).to_json()}, "not of this model"),
    ):
        (at / "session.json").write_text(json.dumps({**data, **change}))
        fails(run("migrate", tmp_path / "f", tmp_path / "c.kv"), "session.json", words)
    (at / "session.json").write_text(json.dumps(data))
    os.remove(at / "token_ids.i64")
    fails(run("migrate", tmp_path / "f", tmp_path / "c.kv"), "token_ids.i64: not there")
    shutil.rmtree(at)
    front = tmp_path / "f" / "front" / "k_001.front"
    whole = front.read_bytes()
    front.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    fails(run("migrate", tmp_path / "f", tmp_path / "c.kv"), "k_001.front")
    os.remove(front)
    fails(run("migrate", tmp_path / "f", tmp_path / "c.kv"), "k_001.front: not there")
    front.write_bytes(whole)
    with open(tmp_path / "f" / "front" / "layer-00001.kvf", "r+b") as file:
        file.seek(65536 + 7)
        file.write(b"\xff\xff")
    fails(run("migrate", tmp_path / "f", tmp_path / "c.kv"), "wrong checksum")
    assert not (tmp_path / "c.kv").exists()


def test_what_flat_layers_cannot_hold_is_refused(run, tmp_path):
    path, there = tmp_path / "a.kv", f"flat:{tmp_path / 'f'}"
    windowed = Model("w", (LayerSpec(1, 32, 32), LayerSpec(1, 32, None, window=20)))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 200, 32), np.float32)
    with kvstore.open(path, "a") as archive:
        put(archive, "kvr1", 300, codec=kvstore.KVR1()).close()
        with archive.create_session(
            "windowed", model=windowed, codec=GGML("q8_0"), block_tokens=16
        ) as session:
            session.append([x, x[:, 170:]], [x, None])
            session.commit()
    fails(
        run("migrate", path, there, "--sessions", "kvr1"),
        *("layer 0 k", "coded with kvr1", "--codec ggml.q8_0"),
    )
    fails(run("migrate", path, there, "--sessions", "windowed"), "begins at token 170", "--front")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.kv"]
    # With the advice that is given they fit.
    ok(run("trim", path, "windowed", "--front", "170"))
    ok(run("migrate", path, there, "--codec", "ggml.q8_0", "--v-codec", "ggml.q4_0"))
    with flat.open(tmp_path / "f" / "windowed") as session:
        assert (session.start, session.stop) == (170, 200)
    with flat.open(tmp_path / "f" / "kvr1") as session:
        assert session.layer(0).scheme("v").name == "q4_0"
    fails(run("migrate", path, there), "exists already")
    fails(run("migrate", tmp_path / "f", f"zarr2:{tmp_path / 'z'}"), "go by one")
    fails(run("migrate", "flat:nothing", tmp_path / "b.kv"), "no sessions of flat layers")
    with flat.create(tmp_path / "post", MODEL, store_k="post") as session:
        session.append(*tensors(5))
        session.commit()
    fails(run("migrate", tmp_path / "post", tmp_path / "b.kv"), "keeps K after RoPE", "--codec")
    assert not (tmp_path / "b.kv").exists()
    # From Python as well.
    for one, other in ((path, there), (tmp_path / "f", tmp_path / "b.kv"), (path, tmp_path / "f")):
        with pytest.raises(InvalidArgument, match="flat layers"):
            kvstore.migrate(one, other)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.kv", "f", "post"]


def test_a_failure_keeps_what_is_whole_and_says_so(run, source, tmp_path):
    there = tmp_path / "f"
    sessions = ("--sessions", "a/ü 1", "auto", "front")
    ok(run("migrate", source, f"flat:{there}", *sessions))
    layer = there / "front" / "layer-00000.kvf"
    whole = layer.read_bytes()
    layer.write_bytes(whole[:70_000])
    fails(run("migrate", there, tmp_path / "b.kv"), "b.kv.partial keeps", "--resume")
    fails(run("migrate", there, tmp_path / "b.kv", "--resume"), "layer-00000.kvf", "keeps")
    layer.write_bytes(whole)
    out, _ = ok(run("migrate", there, tmp_path / "b.kv", "--resume"))
    assert "1 session moved byte for byte, 2 sessions there already" in out
    # The other way: a try that goes on and fails at once takes nothing away.
    shutil.copytree(there, tmp_path / "g.partial")
    shutil.rmtree(tmp_path / "g.partial" / "front")
    with kvstore.open(tmp_path / "c.kv", "a") as archive:
        kvstore.migrate(source, tmp_path / "c.kv", sessions=("a/ü 1", "auto"))
        put(archive, "kvr1", 200, codec=kvstore.KVR1()).close()
    fails(run("migrate", tmp_path / "c.kv", f"flat:{tmp_path / 'g'}", "--resume"), "kvr1", "keeps")
    assert (tmp_path / "g.partial" / "auto" / "session.json").exists()


def test_coded_anew_on_the_way(run, source, tmp_path):
    ok(run("migrate", source, f"flat:{tmp_path / 'f'}", "--sessions", "auto"))
    out, _ = ok(run("migrate", tmp_path / "f", tmp_path / "b.kv", "--codec", "kvr1"))
    assert "coded anew" in out
    with kvstore.open(tmp_path / "b.kv") as archive:
        assert archive.session("auto").info().codecs["k"]["codec"] == "kvr1"
        assert archive.verify(decode=True).ok


def test_safetensors_there_and_back(run, tmp_path):
    values = np.random.default_rng(0).standard_normal((2, 2, 90, 32), dtype=np.float32)
    shapes = {"k_pre": (values.dtype, values.shape), "v": (values.dtype, values.shape)}
    with TensorWriter(tmp_path / "chat.safetensors", shapes) as writer:
        for name in shapes:
            writer.array(name)[...] = values
    file, there = tmp_path / "chat.safetensors", f"flat:{tmp_path / 'f'}"
    out, _ = ok(run("migrate", file, there, "--json"))
    assert json.loads(out)["recoded"] == ["chat"]
    with flat.open(tmp_path / "f" / "chat") as session:
        assert session.layer(0).scheme("k").name == "q8_0"
        expected = session.read(1, "v")
    assert "1 session coded anew with ggml.q8_0;" in ok(run("migrate", file, f"{there}2"))[0]
    ok(run("migrate", there, tmp_path / "out.safetensors"))
    ok(run("pack", tmp_path / "out.safetensors", tmp_path / "b.kv", "--codec", "raw"))
    with kvstore.open(tmp_path / "b.kv") as archive:
        (name,) = archive.names()
        np.testing.assert_array_equal(archive.session(name).read(1, "v"), expected)
    fails(run("migrate", file, there), "exists already")
    fails(
        run("migrate", file, f"flat:{tmp_path / 'g'}", "--codec", "kvr1"),
        *(f"{file}: session 'chat'", "coded with kvr1", "--codec ggml.q8_0"),
    )
    names = ["b.kv", "chat.safetensors", "f", "f2", "out.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


CHILD = """
import os, sys
from kvtools import cli
from kvtools.formats import flat_export

left = int(sys.argv[1])
create, write_json = flat_export.flat.create, flat_export.write_json

def count(what):
    def counted(*args, **options):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), 9)
        return what(*args, **options)
    return counted

flat_export.write_json = count(write_json)
flat_export.flat.folder.sync_folder = count(flat_export.flat.folder.sync_folder)
flat_export.flat.FlatSession.commit = count(flat_export.flat.FlatSession.commit)
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("at", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 6, 9))])
def test_killed_in_the_middle(run, source, tmp_path, at):
    there, names = tmp_path / "f", ("a/ü 1", "auto", "front")
    command = ["migrate", source, f"flat:{there}", "--sessions", *names]
    done = subprocess.run([sys.executable, "-P", "-c", CHILD, str(at), *command], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not there.exists()
    fails(run(*command), "--resume")
    ok(run(*command, "--resume"))
    assert len(list(there.iterdir())) == 3
    ok(run("migrate", there, tmp_path / "b.kv"))
    kvstore.migrate(source, tmp_path / "c.kv", sessions=names)
    assert stored(tmp_path / "b.kv") == stored(tmp_path / "c.kv")


@pytest.mark.parametrize("way", ["out", "in"])
def test_killed_on_the_way_to_another_codec(run, source, tmp_path, way):
    sessions = ("--sessions", "auto", "front")
    command = ["migrate", source, f"flat:{tmp_path / 'g'}", *sessions, "--codec", "ggml.q4_0"]
    child = CHILD
    if way == "in":
        ok(run("migrate", source, f"flat:{tmp_path / 'f'}", *sessions))
        command = ["migrate", tmp_path / "f", tmp_path / "g", "--codec", "kvr1"]
        child = KILLED_MIGRATE
    done = subprocess.run([sys.executable, "-P", "-c", child, "4", *command], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "g.passing" / "passed.kv").exists()
    fails(run(*command), "g.passing", "--resume")
    if way == "in":  # less is wanted now
        command += ["--sessions", "auto"]
    out, _ = ok(run(*command, "--resume"))
    assert "coded anew" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == (["f", "g"] if way == "in" else ["g"])
    if way == "in":
        assert names_of(tmp_path / "g") == ["auto"]
    ok(run("verify", tmp_path / "g"))


KILLED_MIGRATE = """
import os, sys
import kvstore
from kvtools import cli

kvstore.migrate = lambda *args, **options: os.kill(os.getpid(), 9)
sys.exit(cli.main(sys.argv[2:]))
"""
