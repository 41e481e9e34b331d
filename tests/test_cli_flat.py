"""`kvstore info`, `ls` and `verify` of flat layers, and what the other commands say to them."""

import errno
import json
import os

import numpy as np
import pytest
from kvtools import cli, flat_sessions

import kvstore
from kvstore import GGML, LayerSpec, Model, flat

MODEL = Model(
    name="my-model",
    revision="r1",
    layers=(LayerSpec(2, 32, 64), LayerSpec(2, 32, None)),
    rope=kvstore.Rope.from_theta(1e4, 32),
    salt="tenant",
)
ROW_BYTES = 68 + 72 + 68  # q8_0 of 64 values twice, q4_0 of 128


def fill(path, n, *, model=MODEL, drop=0, **options):
    rng = np.random.default_rng(0)
    with flat.create(path, model, scheme={"k": "q8_0", "v": "q4_0"}, **options) as session:
        k = [rng.standard_normal((2, n, 32), np.float32) for _ in model.layers]
        session.append(k, [rng.standard_normal((2, n, 64), np.float32), None])
        session.drop_front(drop)
        session.commit()


@pytest.fixture
def folder(tmp_path):
    """Two sessions, one of them a ring, and what is none."""
    root = tmp_path / "rows"
    root.mkdir()
    fill(root / "grows", 300, capacity=512)
    fill(root / "ring", 90, drop=30, max_rows=100, store_k="post")
    (root / "notes.txt").write_text("x")
    (root / "empty").mkdir()
    return root


def fails(result, *words):
    code, out, err = result
    assert (code, out) == (1, "")
    assert err.startswith("kvstore: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err, err


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("prefix", ["", "flat:"])
def test_ls(run, folder, prefix):
    code, out, err = run("ls", f"{prefix}{folder}")
    assert (code, err) == (0, "")
    head, grows, ring = (line.split() for line in out.splitlines())
    assert head == ["session", "model", "layers", "positions", "scheme", "disk"]
    assert grows[:5] == ["grows", "my-model", "2", "[0,", "300)"]
    assert ring[:5] == ["ring", "my-model", "2", "[30,", "90)"]
    assert "k: q8_0; v: q4_0" in out
    code, out, _ = run("ls", f"{prefix}{folder}", "--long")
    assert code == 0
    for words in ("60 in a ring of 100", "300, room for 512", "after RoPE (post)", "bits/value"):
        assert words in out
    code, out, _ = run("ls", f"{prefix}{folder}", "--json", "--prefix", "gr")
    (said,) = json.loads(out)
    assert (said["name"], said["n_tokens"], said["n_layers"]) == ("grows", 300, 2)
    code, out, _ = run("ls", f"{prefix}{folder / 'ring'}")
    assert code == 0
    assert len(out.splitlines()) == 2


def test_info(run, folder):
    code, out, err = run("info", f"flat:{folder}", "--json", "--layers")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert (said["backend"], said["n_sessions"], said["damaged"]) == ("flat", 2, {})
    grows, ring = said["sessions"]
    assert Model.from_json(grows["identity"]) == MODEL
    assert grows["schemes"] == {"k": "q8_0", "v": "q4_0"}
    assert (grows["first_token"], grows["n_tokens"], grows["store_k"]) == (0, 300, "pre")
    assert (ring["first_token"], ring["n_tokens"], ring["store_k"]) == (30, 90, "post")
    assert (grows["capacity"], grows["max_rows"]) == (512, None)
    assert ring["max_rows"] == 100
    assert grows["row_bytes"] == ROW_BYTES
    assert grows["n_bytes"] == 300 * ROW_BYTES
    assert grows["bits_per_value"] == pytest.approx(8 * ROW_BYTES / (64 + 128 + 64))
    files = [path.stat() for path in (folder / "grows").iterdir()]
    assert grows["file_bytes"] == sum(stat.st_size for stat in files)
    assert grows["disk_bytes"] == sum(stat.st_blocks for stat in files) * 512
    assert [(x["layer"], x["kind"], x["scheme"]) for x in ring["layers"]] == [
        (0, "k", "q8_0"),
        (0, "v", "q4_0"),
        (1, "k", "q8_0"),
    ]
    code, out, _ = run("info", folder, "--session", "ring", "--layers")
    assert code == 0
    assert "grows" not in out
    pairs = dict(line.split("  ", 1) for line in out.splitlines() if "  " in line)
    assert pairs["model"].strip() == "my-model r1"
    assert pairs["salt"].strip() == "tenant"
    assert pairs["positions"].strip() == "[30, 90)"
    assert pairs["max error"].strip().startswith("not known")
    assert said["sessions"][0]["max_error"] is None
    assert pairs["K kept"].strip() == "after RoPE (post)"
    assert pairs["rows"].strip() == "60 in a ring of 100"
    assert "1 k" in out
    fails(run("info", folder, "--session", "x"), "no session 'x'")
    fails(run("info", "flat:nothing"), "flat:nothing: no sessions of flat layers")


def test_a_migrated_session_is_called_what_it_was(run, tmp_path):
    model = Model.uniform(name="m", n_layers=1, n_kv_heads=1, head_dim=32)
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        options = {"model": model, "codec": GGML("q8_0"), "metadata": {"x": 1}}
        with archive.create_session("alice/42", **options) as session:
            session.append(*np.ones((2, 1, 1, 9, 32), np.float32), token_ids=np.arange(9))
            session.commit()
    assert run("migrate", tmp_path / "a.kv", f"flat:{tmp_path / 'f'}", "--quiet")[0] == 0
    _, out, _ = run("info", tmp_path / "f", "--session", "alice/42")
    assert "[0, 9), with ids" in out
    assert "measured when the rows were coded" in out
    assert '{"x": 1}' in out
    (tmp_path / "f" / "alice%2F42" / "session.json").write_text("{")
    code, out, _ = run("ls", tmp_path / "f", "--json")
    assert code == 1
    assert "not JSON" in json.loads(out)[0]["error"]
    code, out, _ = run("verify", tmp_path / "f")
    assert code == 1
    assert "not JSON" in out


def test_verify(run, folder):
    code, out, err = run("verify", folder)
    assert (code, err) == (0, "")
    assert "sound; 2 sessions, 4 layers" in out
    flip(folder / "grows" / "layer-00000.kvf", 65536 + 5)
    flip(folder / "ring" / "layer-00000.kvf", 65536 + 40 * 68)
    with open(folder / "ring" / "layer-00001.kvf", "r+b") as file:
        file.truncate(65540)
    code, out, _ = run("verify", folder)
    assert code == 1
    lines = out.splitlines()
    assert len(lines) == 4
    assert "grows/layer-00000.kvf: k rows [0, " in lines[0]
    assert "ring/layer-00000.kvf: k rows [" in lines[1]
    assert "ring/layer-00001.kvf" in lines[2]
    assert "3 problems; 2 sessions" in lines[3]
    code, out, _ = run("verify", f"flat:{folder}", "--json")
    said = json.loads(out)
    assert code == 1
    assert not said["ok"]
    assert [problem["kind"] for problem in said["problems"]] == ["Corrupt", "Corrupt", "Truncated"]
    assert said["n_sessions"] == 2


def test_what_may_not_be_read_is_not_called_damaged(run, folder, monkeypatch):
    def refuse(path, *more):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    fails(run("ls", folder / "ring" / "layer-00000.kvf"), "one layer's file", "folder of its")
    fails(run("migrate", folder / "ring" / "layer-00000.kvf", folder / "x.kv"), "one layer's file")
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        fails(run("ls", f"flat:{folder}"), "Permission denied")
    monkeypatch.setattr(flat_sessions, "describe", refuse)
    code, _, err = run("ls", folder)
    assert code == 1
    assert err.startswith("kvstore: unreadable session 'grows': ")


def test_verify_names_layers_that_disagree(run, folder):
    with flat.FlatLayer.open(folder / "grows" / "layer-00001.kvf", "a") as layer:
        layer.take_back(290)
    code, out, _ = run("verify", folder / "grows")
    assert code == 1
    assert "layers disagree: " in out
    assert "[0, 290)" in out


def test_what_cannot_be_read_is_named(run, folder):
    os.remove(folder / "grows" / "layer-00001.kvf")
    for command in ("ls", "info"):
        code, out, err = run(command, folder)
        assert code == 1
        assert "ring" in out
        assert err.startswith("kvstore: damaged session 'grows': ")
        assert "layer-00001.kvf: missing" in err
        code, out, _ = run(command, folder, "--json")
        assert code == 1
        assert "missing" in out
    code, out, _ = run("verify", folder)
    assert code == 1
    assert "layer-00001.kvf: missing" in out


OTHERS = {
    "unpack": ("out.safetensors",),
    "match": ("prompt.json", "--like", "x"),
    "receipt": ("a",),
    "fork": ("a", "b"),
    "trim": ("a", "--front", "1"),
    "append-range": ("a", "b", "0:1"),
    "rename": ("a", "b"),
    "pin": ("a",),
    "quota": ("10G",),
    "rm": ("a",),
    "gc": (),
    "seal": (),
    "reindex": (),
    "compact": (),
    "upgrade": (),
}


@pytest.mark.parametrize("prefix", ["", "flat:"])
def test_other_commands_say_which_ones_take_flat_layers(run, folder, tmp_path, prefix):
    assert set(cli.COMMANDS) - set(OTHERS) == {
        *("ls", "info", "verify", "migrate", "pack", "demo", "bench")
    }
    (tmp_path / "prompt.json").write_text("[1, 2]")
    before = sorted(path for path in tmp_path.rglob("*"))
    for command, more in OTHERS.items():
        more = [str(tmp_path / x) if "." in x else x for x in more]
        for path in (folder, folder / "ring"):
            result = run(command, f"{prefix}{path}", *more)
            fails(result, "flat layers", "kvstore ls, info, verify and migrate take them")
    fails(run("pack", tmp_path / "prompt.json", f"{prefix}{folder}"), "")
    fails(run("migrate", folder, folder), "kvstore ls, info, verify and migrate take them")
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_options_of_archives_are_refused(run, folder):
    for argv in (("ls", "--pinned"), ("verify", "--decode")):
        code, _, err = run(argv[0], folder, argv[1])
        assert code == 2
        assert f"{argv[1]} goes with archives" in err


def test_help_names_flat_layers(run):
    for command in ("ls", "info", "verify", "migrate"):
        assert "flat:FOLDER" in run(command, "-h")[1]
    assert "flat:FOLDER" not in run("gc", "-h")[1]
