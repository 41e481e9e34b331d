"""The `kvstore` command: every subcommand, how it fails, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from kvtools import cli
from kvtools.kvfile import KvFile
from kvtools.tensorfile import TensorFile, TensorWriter

import kvstore

ROPE = kvstore.Rope.from_theta(10_000.0, 8)
INV_FREQ = json.dumps([float(x) for x in ROPE.inv_freq])
COMMANDS = ("pack", "unpack", "ls", "info", "verify", "rm", "gc", "demo", "bench")


def save(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> Path:
    shapes = {name: (a.dtype, a.shape) for name, a in arrays.items()}
    with TensorWriter(path, shapes, metadata) as writer:
        for name, a in arrays.items():
            writer.array(name)[...] = a
    return path


def load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with TensorFile(path) as file:
        return {name: file.read(name) for name in file.tensors}, file.metadata


def kv(layers: int = 3, heads: int = 2, tokens: int = 300, dim: int = 8) -> np.ndarray:
    rng = np.random.default_rng([layers, tokens, dim])
    return rng.standard_normal((layers, heads, tokens, dim)).astype(np.float16)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    ids = np.arange(300, dtype=np.int32)
    metadata = {"rope_inv_freq_f32": INV_FREQ, "model": "toy", "layers": "[1, 5, 9]"}
    arrays = {"k_pre": kv(), "v": kv()[::-1], "token_ids": ids}
    return save(tmp_path / "chat.safetensors", arrays, metadata)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Run a command line; return (exit code, stdout, stderr)."""

    def run_main(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = cli.main([str(arg) for arg in argv])
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run_main


def fails(result: tuple[int, str, str], *words: str) -> None:
    """Assert an error: exit code 1, one line on stderr that says these words."""
    code, _, err = result
    assert code == 1, err
    assert err.startswith("kvstore: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def succeeds(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert code == 0, err
    assert err == ""
    return out


# -- usage


def test_help_everywhere(run):
    code, out, _ = run("-h")
    assert code == 0
    for command in COMMANDS:
        assert command in out
        code, text, _ = run(command, "-h")
        assert code == 0
        assert f"example:\n  kvstore {command}" in text


def test_examples_in_help_parse():
    for command, (_, _, _, example) in cli.COMMANDS.items():
        args = cli.build_parser().parse_args(example.split()[1:])
        assert args.command == command


def test_version(run):
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("kvstore 0.")


USAGE = [
    [],
    ["fly"],
    ["pack"],
    ["pack", "a"],
    ["pack", "a", "b", "--codec", "zip"],
    ["pack", "a", "b", "--step", "0"],
    ["pack", "a", "b", "--step", "nan"],
    ["pack", "a", "b", "--step", "inf"],
    ["pack", "a", "b", "--bpv", "many"],
    ["pack", "a", "b", "--step", "1", "--rmse", "1"],
    ["pack", "a", "b", "--codec", "raw", "--step", "1"],
    ["pack", "a", "b", "--sink", "-1"],
    ["pack", "a", "b", "--sink-div", "0"],
    ["pack", "a", "b", "--block-tokens", "0"],
    ["pack", "a", "b", "--k-state", "raw"],
    ["pack", "a", "b", "--rope-theta", "1e4", "--inv-freq", "[1]"],
    ["pack", "a", "b", "--rotary-dim", "4"],
    ["unpack", "a", "b", "--range", "5"],
    ["unpack", "a", "b", "--range", "9:5"],
    ["unpack", "a", "b", "--range", "-3:5"],
    ["unpack", "a", "b", "--range", "x:y"],
    ["unpack", "a", "b", "--layers", "5-3"],
    ["unpack", "a", "b", "--layers", "1,1"],
    ["unpack", "a", "b", "--layers", "1,,2"],
    ["unpack", "a", "b", "--dtype", "float64"],
    ["rm", "a"],
    ["bench", "--only", "nothing"],
    ["bench", "--reps", "0"],
]


@pytest.mark.parametrize("argv", USAGE, ids=" ".join)
def test_wrong_usage_is_exit_code_2(run, argv):
    code, out, err = run(*argv)
    assert code == 2
    assert out == ""
    assert "usage: kvstore" in err


def test_ranges_and_layers():
    assert cli.token_range("3:7") == (3, 7)
    assert cli.token_range(":7") == (0, 7)
    assert cli.token_range("3:") == (3, None)
    assert cli.layer_list("0,3,5-7") == [0, 3, 5, 6, 7]


# -- pack and unpack


def test_pack_then_everything_else(run, tmp_path, source):
    archive = tmp_path / "chats.kv"
    out = succeeds(run("pack", source, archive))
    assert "packed 'chat': 300 tokens, 3 layers" in out
    assert "chat" in succeeds(run("ls", archive))
    listed = json.loads(succeeds(run("ls", archive, "--json")))
    assert [(s["name"], s["n_tokens"], s["n_layers"]) for s in listed] == [("chat", 300, 3)]
    assert listed[0]["bits_per_value"] == pytest.approx(16 / listed[0]["ratio_fp16"])

    text = succeeds(run("info", archive, "--layers"))
    for word in ("toy", "2 heads x 8", "bits/value", "of each stream's bound", "2 v"):
        assert word in text
    info = json.loads(succeeds(run("info", archive, "--session", "chat", "--layers", "--json")))
    assert info["n_sessions"] == 1
    assert info["file_bytes_over_frame_bytes"] > 1
    (session,) = info["sessions"]
    assert session["metadata"] == {"layers": [1, 5, 9]}
    assert session["identity"]["name"] == "toy"
    assert len(session["layers"]) == 6
    assert 0 < session["largest_error_over_bound"] <= 1
    for stream in session["layers"]:
        assert 0 < stream["max_error"] <= stream["bound"] == stream["step"] / 2

    for options in ([], ["--decode"]):
        assert "sound" in succeeds(run("verify", archive, *options))
    report = json.loads(succeeds(run("verify", archive, "--decode", "--json")))
    assert report["ok"]
    assert report["decoded"]
    assert report["problems"] == []

    assert "removed 'chat'" in succeeds(run("rm", archive, "chat"))
    assert json.loads(succeeds(run("ls", archive, "--json"))) == []


def test_values_are_within_the_bound(run, tmp_path, source):
    archive = tmp_path / "a.kv"
    succeeds(run("pack", source, archive, "--max-error", "0.05", "--sink", "0", "--quiet"))
    out = tmp_path / "out.safetensors"
    succeeds(run("unpack", archive, out, "--dtype", "float32", "--quiet"))
    given, _ = load(source)
    found, _ = load(out)
    assert set(found) == set(given)
    assert np.array_equal(found["token_ids"], given["token_ids"])
    for name in ("k_pre", "v"):
        assert np.abs(found[name] - given[name].astype(np.float32)).max() <= 0.05


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("form", ["4-D", "per layer", "ragged"])
def test_raw_round_trip_is_bit_exact_twice(run, tmp_path, dtype, form):
    if form == "4-D":
        arrays = {"k_pre": kv().astype(dtype), "v": kv().astype(dtype)}
    else:
        sizes = (8, 8, 8) if form == "per layer" else (8, 4, 6)
        arrays = {}
        for number, dim in zip((0, 2, 40), sizes, strict=True):
            arrays[f"layers.{number}.k_pre"] = kv(1, dim=dim)[0].astype(dtype)
            arrays[f"layers.{number}.v"] = kv(1, dim=2 * dim)[0].astype(dtype)
    first = save(tmp_path / "first.safetensors", arrays)
    archive = tmp_path / "a.kv"
    raw = ("--codec", "raw", "--quiet")
    succeeds(run("pack", first, archive, *raw))
    second = tmp_path / "second.safetensors"
    succeeds(run("unpack", archive, second, "--session", "first"))
    succeeds(run("pack", second, archive, *raw))
    third = tmp_path / "third.safetensors"
    succeeds(run("unpack", archive, third, "--session", "second"))
    listed = json.loads(succeeds(run("ls", archive, "--json")))
    width = 8 * np.dtype(dtype).itemsize
    assert all(width <= session["bits_per_value"] < 1.2 * width for session in listed)
    (two, about_two), (three, about_three) = load(second), load(third)
    if form == "per layer":  # alike after all, so that they come back as one tensor
        for name in ("k_pre", "v"):
            stacked = np.stack([arrays[f"layers.{n}.{name}"] for n in (0, 2, 40)])
            assert two[name].tobytes() == stacked.tobytes()
        assert json.loads(about_two["layers"]) == [0, 2, 40]
    else:
        assert set(two) == set(arrays)
        for name, values in arrays.items():
            assert two[name].dtype == values.dtype
            assert two[name].tobytes() == values.tobytes()
    assert {k: v.tobytes() for k, v in two.items()} == {k: v.tobytes() for k, v in three.items()}
    del about_two["kvstore"], about_three["kvstore"]  # holds the session's name
    assert about_two == about_three


def test_identity_survives_a_round_trip(run, tmp_path):
    model = kvstore.Model(
        name="odd",
        revision="r7",
        salt="s",
        rope=ROPE,
        layers=(
            kvstore.LayerSpec(2, 8, 4, window=1000),
            kvstore.LayerSpec(2, 8, 4, rope=kvstore.Rope.from_theta(99.0, 4, style="interleaved")),
            kvstore.LayerSpec(2, 8, None, rope=None),
        ),
    )
    path = tmp_path / "a.kv"
    k, v = list(kv()), [kv()[0][:, :, :4], kv()[1][:, :, :4], None]
    with kvstore.open(path, mode="a") as archive:
        session = archive.create_session("one", model=model, codec=kvstore.Raw())
        session.append(k, v)
        session.commit()
    out = tmp_path / "out.safetensors"
    succeeds(run("unpack", path, out, "--session", "one", "--quiet"))
    assert run("pack", out, path, "--session", "two", "--codec", "raw", "--no-v")[0] == 0
    with kvstore.open(path) as archive:
        again = archive.session("two")
        assert again.model.layers == model.layers
        assert (again.model.revision, again.model.salt) == ("r7", "s")
        k_found, v_found = again.read_all()
        assert v_found[2] is None
        assert all(np.array_equal(a, b) for a, b in zip(k_found, k, strict=True))


def test_parts(run, tmp_path, source):
    archive = tmp_path / "a.kv"
    succeeds(run("pack", source, archive, "--codec", "raw", "--quiet", "--block-tokens", "64"))
    out = tmp_path / "out.safetensors"
    options = ("--range", "100:140", "--layers", "2,0", "--dtype", "float32", "--json")
    report = json.loads(succeeds(run("unpack", archive, out, *options)))
    assert report["tensors"] == {
        "k_pre": [2, 2, 40, 8],
        "v": [2, 2, 40, 8],
        "token_ids": [40],
    }
    given, _ = load(source)
    found, about = load(out)
    assert np.array_equal(found["k_pre"], given["k_pre"][[2, 0], :, 100:140])
    assert found["token_ids"].tolist() == list(range(100, 140))
    assert json.loads(about["layers"]) == [9, 1]
    assert about["first_token"] == "100"
    succeeds(run("unpack", archive, out, "--range", "250:", "--force", "--quiet"))
    assert load(out)[0]["v"].shape == (3, 2, 50, 8)
    succeeds(run("unpack", archive, out, "--range", "7:7", "--force", "--quiet"))
    assert load(out)[0]["v"].shape == (3, 2, 0, 8)
    fails(run("unpack", archive, out, "--range", "0:301", "--force"), "0:300")
    fails(run("unpack", archive, out, "--layers", "3", "--force"), "layers 0 to 2")
    assert load(out)[0]["v"].shape == (3, 2, 0, 8)


def test_k_after_rope(run, tmp_path, source):
    archive = tmp_path / "a.kv"
    succeeds(run("pack", source, archive, "--codec", "raw", "--quiet"))
    post = tmp_path / "post.safetensors"
    succeeds(run("unpack", archive, post, "--k-state", "post", "--dtype", "float32", "--quiet"))
    tensors, _ = load(post)
    assert set(tensors) == {"k", "v", "token_ids"}
    succeeds(run("pack", post, archive, "--codec", "raw", "--quiet"))
    back = tmp_path / "back.safetensors"
    succeeds(run("unpack", archive, back, "--session", "post", "--dtype", "float32", "--quiet"))
    assert np.abs(load(back)[0]["k_pre"] - load(source)[0]["k_pre"]).max() < 1e-5
    part = tmp_path / "part.safetensors"
    options = ("--session", "post", "--range", "9:", "--k-state", "post")
    succeeds(run("unpack", archive, part, *options))
    fails(run("pack", part, archive), "starts at token 9", "--k-state pre")


def test_rope_options(run, tmp_path):
    bare = save(tmp_path / "bare.safetensors", {"k": kv(), "v": kv()})
    archive = tmp_path / "a.kv"
    fails(run("pack", bare, archive), "--inv-freq", "--rope-theta", "--k-state pre")
    fails(run("pack", bare, archive, "--rope-style", "half"), "--inv-freq")
    fails(run("pack", bare, archive, "--inv-freq", "[1, oops]"), "not valid JSON")
    fails(run("pack", bare, archive, "--inv-freq", "[1, [2]]"), "list of numbers")
    fails(run("pack", bare, archive, "--inv-freq", tmp_path / "none.json"), "No such file")
    fails(run("pack", bare, archive, "--inv-freq", "[1,1,1,1,1]"), "10", "8")
    assert not archive.exists()
    code, _, err = run("pack", bare, archive, "--k-state", "pre", "--session", "unknown")
    assert code == 0
    assert err.count("\n") == 1
    assert "no RoPE" in err
    frequencies = tmp_path / "f.json"
    frequencies.write_text(json.dumps({"inv_freq": json.loads(INV_FREQ)}))
    for name, options in {
        "theta": ["--rope-theta", "10000"],
        "list": ["--inv-freq", INV_FREQ],
        "file": ["--inv-freq", str(frequencies)],
    }.items():
        succeeds(run("pack", bare, archive, "--session", name, *options))
    options = ["--rope-theta", "5", "--rotary-dim", "4", "--rope-style", "interleaved"]
    options += [
        "--rope-scaling",
        "1.5",
        "--model-name",
        "m",
        "--revision",
        "r",
        "--dtype",
        "bfloat16",
    ]
    succeeds(run("pack", bare, archive, "--session", "other", *options))
    with kvstore.open(archive) as opened:
        for name in ("theta", "list", "file"):
            assert opened.session(name).model.rope == ROPE
        model = opened.session("other").model
        assert model.rope == kvstore.Rope.from_theta(5.0, 4, style="interleaved", scaling=1.5)
        assert (model.name, model.revision, model.dtype) == ("m", "r", "bfloat16")
        assert opened.session("unknown").model.rope is None
    out = tmp_path / "out.safetensors"
    fails(run("unpack", archive, out, "--session", "unknown", "--k-state", "post"), "no RoPE")
    assert not out.exists()


def test_codec_options(run, tmp_path, source):
    archive = tmp_path / "a.kv"
    for policy, value in {
        "rel-step": "0.5",
        "step": "0.125",
        "max-error": "0.05",
        "rmse": "0.02",
        "bpv": "3",
    }.items():
        options = ["--session", policy, "--" + policy, value, "--sink", "2", "--sink-div", "8"]
        succeeds(run("pack", source, archive, *options))
    with kvstore.open(archive) as opened:
        for info in opened.sessions():
            config = info.codecs["k"]
            assert config[info.name.replace("-", "_")] is not None
            assert (config["sink"], config["sink_div"]) == (2, 8)


# -- failures


def test_missing_things(run, tmp_path, source):
    archive = tmp_path / "a.kv"
    for argv in (
        ["ls", archive],
        ["info", archive],
        ["verify", archive],
        ["rm", archive, "x"],
        ["unpack", archive, tmp_path / "o"],
        ["pack", tmp_path / "none.safetensors", archive],
        ["bench", "--data", tmp_path / "none.safetensors"],
    ):
        fails(run(*argv))
    assert sorted(os.listdir(tmp_path)) == ["chat.safetensors"]
    succeeds(run("pack", source, archive))
    fails(run("unpack", archive, tmp_path / "o", "--session", "nope"), "'nope'")
    fails(run("info", archive, "--session", "nope"), "'nope'")
    fails(run("unpack", archive, tmp_path / "no" / "o"), "No such file")
    code, out, err = run("rm", archive, "nope", "chat")
    assert code == 1
    assert "removed 'chat'" in out
    assert "'nope'" in err


def test_places_where_no_archive_can_be(run, tmp_path, source):
    fails(run("pack", source, tmp_path), "no archive")
    fails(run("pack", source, source), str(source))
    fails(run("pack", source, "memory:x"), "memory")
    fails(run("pack", source, tmp_path / "no" / "a.kv"), "no/a.kv: its folder")
    assert os.listdir(tmp_path) == ["chat.safetensors"]
    (tmp_path / "empty").mkdir()
    succeeds(run("pack", source, tmp_path / "empty"))


def test_a_session_must_be_chosen_if_there_are_several(run, tmp_path, source):
    archive = tmp_path / "a.kv"
    for name in ("one", "two"):
        succeeds(run("pack", source, archive, "--session", name))
    fails(run("unpack", archive, tmp_path / "o"), "'one', 'two'", "--session")
    succeeds(run("rm", archive, "one", "two"))
    fails(run("unpack", archive, tmp_path / "o"), "no sessions")


def test_existing_sessions_and_files_are_kept_unless_asked(run, tmp_path, source):
    archive, out = tmp_path / "a.kv", tmp_path / "out.safetensors"
    succeeds(run("pack", source, archive))
    fails(run("pack", source, archive), "'chat' exists", "--replace")
    with kvstore.open(archive) as opened:
        before = opened.session("chat").info().created, opened.session("chat").read(0, "v")
    succeeds(run("pack", source, archive, "--replace", "--codec", "raw"))
    with kvstore.open(archive) as opened:
        assert opened.names() == ["chat"]
        assert not np.array_equal(opened.session("chat").read(0, "v"), before[1])
    out.write_bytes(b"mine")
    fails(run("unpack", archive, out), "exists", "--force")
    assert out.read_bytes() == b"mine"
    succeeds(run("unpack", archive, out, "--force"))
    assert set(load(out)[0]) == {"k_pre", "v", "token_ids"}


def test_a_failed_pack_leaves_nothing(run, tmp_path, source):
    bad = kv()
    bad[2, 1, 299, 7] = np.inf
    path = save(tmp_path / "bad.safetensors", {"k_pre": kv(), "v": bad})
    archive = tmp_path / "a.kv"
    fails(run("pack", path, archive, "--quiet"), f"{archive}: ", "layer 2 v", "not finite")
    assert sorted(os.listdir(tmp_path)) == ["bad.safetensors", "chat.safetensors"]
    succeeds(run("pack", source, archive, "--quiet"))
    for options in (["--session", "new"], ["--session", "chat", "--replace"]):
        fails(run("pack", path, archive, "--quiet", *options), "not finite")
        report = json.loads(succeeds(run("verify", archive, "--decode", "--json")))
        assert report["ok"]
        assert report["n_leftover"] == 0
        with kvstore.open(archive) as opened:
            assert opened.names() == ["chat"]


def test_an_interrupted_pack_leaves_nothing(run, tmp_path, source, monkeypatch):
    archive = tmp_path / "a.kv"
    read = KvFile.read
    calls = []

    def interrupted(self, *args):
        calls.append(args)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return read(self, *args)

    monkeypatch.setattr(KvFile, "read", interrupted)
    code, out, err = run("pack", source, archive)
    assert (code, out, err) == (130, "", "")
    assert os.listdir(tmp_path) == ["chat.safetensors"]


def test_a_failed_unpack_leaves_nothing(run, tmp_path):
    big = np.full((1, 1, 200, 8), 1e6, np.float32)
    path = save(tmp_path / "big.safetensors", {"k_pre": big, "v": big})
    archive = tmp_path / "a.kv"
    run("pack", path, archive, "--codec", "raw")
    fails(run("unpack", archive, tmp_path / "o", "--dtype", "float16"), "overflows float16")
    assert sorted(os.listdir(tmp_path)) == ["a.kv", "big.safetensors"]


def test_every_truncated_input_is_refused(run, tmp_path):
    values = kv(1, 1, 2, 4)
    whole = save(tmp_path / "x.safetensors", {"k_pre": values, "v": values}).read_bytes()
    cut = tmp_path / "cut.safetensors"
    for n in range(0, len(whole), 3):
        cut.write_bytes(whole[:n])
        fails(run("pack", cut, tmp_path / "a.kv"), "cut.safetensors")
    assert not (tmp_path / "a.kv").exists()


def test_damage_is_found_and_named(run, tmp_path, source):
    archive = tmp_path / "a.kv"
    succeeds(run("pack", source, archive))
    data = archive / "data.mdb"
    content = bytearray(data.read_bytes())
    at = content.find(b"KVF1")
    assert at > 0
    content[at + 100] ^= 1
    data.write_bytes(content)
    code, out, _ = run("verify", archive)
    assert code == 1
    assert out.startswith("Corrupt: ")
    assert "session 'chat' layer" in out
    report = json.loads(run("verify", archive, "--json")[1])
    assert not report["ok"]
    assert set(report["problems"][0]) == {"where", "kind", "message"}
    fails(run("unpack", archive, tmp_path / "o"), "crc32c")
    assert not (tmp_path / "o").exists()
    data.write_bytes(content[: len(content) // 2])
    fails(run("ls", archive))


# -- as a process


def start(*argv: object, **kwargs) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "kvtools", *map(str, argv)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs)


def test_as_a_process(tmp_path, source):
    archive = tmp_path / "a.kv"
    for argv, expected in (
        (["pack", source, archive], 0),
        (["pack", source, archive], 1),
        (["pack"], 2),
        (["ls", archive, "--json"], 0),
    ):
        process = start(*argv)
        out, err = process.communicate(timeout=60)
        assert process.returncode == expected
        assert b"Traceback" not in err
    assert json.loads(out)[0]["name"] == "chat"


def test_a_reader_that_leaves_early_is_no_error(tmp_path, source, run):
    archive = tmp_path / "a.kv"
    succeeds(run("pack", source, archive))
    process = start("info", archive, "--layers", "--json")
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_terminated_pack_leaves_nothing(tmp_path):
    values = kv(1, 4, 400_000, 16)
    big = save(tmp_path / "big.safetensors", {"k_pre": values, "v": values})
    process = start("pack", big, tmp_path / "a.kv", "--quiet")
    while process.poll() is None and not any(".tmp" in name for name in os.listdir(tmp_path)):
        pass
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert b"Traceback" not in err
    assert os.listdir(tmp_path) == ["big.safetensors"]


def test_gc_frees_what_a_killed_writer_left(run, tmp_path, source):
    archive = tmp_path / "a.kv"
    succeeds(run("pack", source, archive))
    with kvstore.open(archive, "a") as opened, opened._backend.write(1.0) as transaction:
        from kvstore import keys

        transaction.put(keys.frame_key(12345, 0, "k", 0), bytes(50_000))
    assert "1 values left over" in succeeds(run("verify", archive))
    assert json.loads(succeeds(run("gc", archive, "--json")))["freed_bytes"] == 50_000
    assert "left over" not in succeeds(run("verify", archive))
    assert "0 B freed" in succeeds(run("gc", archive))
    fails(run("gc", tmp_path / "none.kv"), "no such archive")
    assert not (tmp_path / "none.kv").exists()
