"""The `kvstore` command: every subcommand, how it fails, and what it leaves behind."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import kvcodecs
import kvcodecs.fibquant.book as fib_book
import ml_dtypes
import numpy as np
import pytest
from kvtools import cli, terminal, values
from kvtools.kvfile import KvFile
from kvtools.tensorfile import TensorFile, TensorWriter

import kvstore

ROPE = kvstore.Rope.from_theta(10_000.0, 8)
INV_FREQ = json.dumps([float(x) for x in ROPE.inv_freq])
COMMANDS = (
    *("pack", "unpack", "ls", "info", "verify", "receipt", "rm", "gc", "seal", "reindex"),
    *("compact", "upgrade", "quota", "match", "fork", "trim", "rename", "append-range", "pin"),
    *("migrate", "demo", "bench"),
)


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
    assert tuple(cli.COMMANDS) == COMMANDS
    for command in COMMANDS:
        assert command in out
        code, text, _ = run(command, "-h")
        assert code == 0
        assert f"example:\n  kvstore {command}" in text


def test_examples_in_help_parse():
    for command, about in cli.COMMANDS.items():
        args = cli.build_parser().parse_args(about.example.split()[1:])
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
    ["pack", "a", "b", "--fit-tokens", "0"],
    ["pack", "a", "b", "--fit-tokens", "65537"],
    ["unpack", "a", "b", "--range", "5"],
    ["unpack", "a", "b", "--range", "9:5"],
    ["unpack", "a", "b", "--range", "-3:5"],
    ["unpack", "a", "b", "--range", "x:y"],
    ["unpack", "a", "b", "--layers", "5-3"],
    ["unpack", "a", "b", "--layers", "1,1"],
    ["unpack", "a", "b", "--layers", "1,,2"],
    ["unpack", "a", "b", "--dtype", "float64"],
    ["unpack", "a", "b", "--position-offset", "1"],
    ["unpack", "a", "b", "--position-offset", "1", "--k-state", "pre"],
    ["unpack", "a", "b", "--position-offset", "x", "--k-state", "post"],
    ["unpack", "a", "b", "--position-offset", "--5", "--k-state", "post"],
    ["rm", "a"],
    ["match", "a", "[1]"],
    ["match", "a", "--like", "b"],
    ["match", "a", "", "--like", "b"],
    ["fork", "a", "b"],
    ["fork", "a", "b", "c", "--at", "-1"],
    ["fork", "a", "b", "c", "--metadata", "[1]"],
    ["fork", "a", "b", "c", "--metadata", "{"],
    ["trim", "a", "b"],
    ["trim", "a", "b", "--front", "5", "--to", "4"],
    ["trim", "a", "b", "--to", "1.5"],
    ["rename", "a", "b"],
    ["append-range", "a", "b", "c"],
    ["append-range", "a", "b", "c", "5"],
    ["append-range", "a", "b", "c", "9:5"],
    ["pin", "a"],
    ["quota", "a", "lots"],
    ["quota", "a", "-1"],
    ["quota", "a", "1.5"],
    ["quota", "a", "1i"],
    ["quota", "a", "1e9"],
    ["quota", "a", "9999999T"],
    ["reindex"],
    ["compact"],
    ["ls", "a", "--prefix"],
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
    assert values.token_range("3:7") == (3, 7)
    assert values.token_range(":7") == (0, 7)
    assert values.token_range("3:") == (3, None)
    assert values.layer_list("0,3,5-7") == [range(1), range(3, 4), range(5, 8)]


# -- pack and unpack


def test_pack_then_everything_else(run, tmp_path, source):
    archive = tmp_path / "chats.kv"
    out = succeeds(run("pack", source, archive))
    assert "packed 'chat': 300 tokens, 3 layers" in out
    assert "chat" in succeeds(run("ls", archive))
    listed = json.loads(succeeds(run("ls", archive, "--long", "--json")))
    assert [(s["name"], s["n_tokens"], s["n_layers"]) for s in listed] == [("chat", 300, 3)]
    assert listed[0]["bits_per_value"] == pytest.approx(16 / listed[0]["ratio_fp16"])

    text = succeeds(run("info", archive, "--layers"))
    for word in ("toy", "2 heads x 8", "bits/value", "each stream's bound (in float32)\n", "2 v"):
        assert word in text
    about = dict(re.split(" {2,}", line, maxsplit=1) for line in text.splitlines() if "  " in line)
    assert about["K given"] == "before RoPE (pre)"
    assert about["codec"].startswith("kvr1 rel_step=0.25 sink=4")
    assert about["ratio"].endswith(" times smaller than float16")
    assert about["metadata"] == '{"layers": [1, 5, 9]}'
    assert about["rope"] == "4 pairs, half, scaling 1"
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
    listed = json.loads(succeeds(run("ls", archive, "--long", "--json")))
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


def test_info_of_k_given_after_rope(run, tmp_path):
    path = save(tmp_path / "x.safetensors", {"k": kv(), "v": kv()})
    archive = tmp_path / "a.kv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 1_700_000_000.0)
        succeeds(run("pack", path, archive, "--rope-theta", "10000"))
    text = succeeds(run("info", archive, "--layers"))
    assert "K given     after RoPE (post)\n" in text
    assert "of each stream's bound (in float32, in the coded domain, K before RoPE)\n" in text
    assert "errors and bounds: in the coded domain, K before RoPE\n" in text
    assert "created     2023-11-14 22:13:20 UTC\n" in text


def test_info_of_metadata_and_ropes(run, tmp_path):
    other = kvstore.Rope.from_theta(99.0, 4)
    specs = [kvstore.LayerSpec(2, 8, 8, rope=rope) for rope in ("model", other, None)]
    texts = {
        "rope        2 different ones; 1 layer without\n": specs,
        "rope        2 pairs, half, scaling 1; 1 layer without\n": specs[1:],
        "rope        unknown\n": specs[2:],
    }
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        for i, layers in enumerate(texts.values()):
            model = kvstore.Model("m", tuple(layers), rope=ROPE)
            metadata = {"note": "caf\xe9\n" + i * 1000 * "x"}
            archive.create_session(str(i), model=model, metadata=metadata).close()
    for i, text in enumerate(texts):
        out = succeeds(run("info", tmp_path / "a.kv", "--session", i))
        assert text in out
        assert 'metadata    {"note": "caf\xe9\\n' in out
        assert ("x... (--json shows all)" in out) == (i > 0)
        assert max(map(len, out.splitlines())) < 600
        assert "ratio       no values\n" in out
        assert "in 0 frames\n" in out
    assert "metadata  " not in succeeds(run("info", tmp_path / "a.kv")).split("session")[0]


def test_sizes_are_said_sensibly(run, tmp_path):
    assert terminal.ratio_text(4.736) == "4.74 times smaller than float16"
    assert terminal.ratio_text(0.499) == "2 times larger than float16"
    assert terminal.ratio_text(1.0001) == "as large as float16"
    assert terminal.ratio_text(math.nan) == "no values"
    archive = tmp_path / "a.kv"
    arrays = {"k_pre": kv().astype(np.float32), "v": kv().astype(np.float32)}
    path = save(tmp_path / "wide.safetensors", arrays, {"rope_inv_freq_f32": INV_FREQ})
    out = succeeds(run("pack", path, archive, "--codec", "raw"))
    assert re.search(r" 300 tokens, 3 layers, 3.* \(2\.\d+ times larger than float16\)", out)
    assert "times larger than float16\n" in succeeds(run("info", archive))
    arrays = {"k_pre": kv(1, tokens=0), "v": kv(1, tokens=0)}
    path = save(tmp_path / "none.safetensors", arrays, {"rope_inv_freq_f32": INV_FREQ})
    out = succeeds(run("pack", path, archive))
    assert re.match(r"packed 'none': 0 tokens, 1 layer, \S+ \w+ \(no values\) in ", out)


def test_short_input_is_kept_uncompressed_and_says_so(run, tmp_path):
    archive = tmp_path / "a.kv"
    arrays = {"k_pre": kv(tokens=100), "v": kv(tokens=100)}
    path = save(tmp_path / "x.safetensors", arrays, {"rope_inv_freq_f32": INV_FREQ})
    code, _, err = run("pack", path, archive)
    assert code == 0
    assert err == ("kvstore: 'x' has 100 tokens, fewer than --fit-tokens 128: kept uncompressed\n")
    succeeds(run("pack", path, archive, "--session", "y", "--fit-tokens", "100"))
    for options in (["--quiet"], ["--codec", "raw"]):
        succeeds(run("pack", path, archive, "--replace", *options))
    assert run("pack", path, archive, "--replace")[0] == 0
    with kvstore.open(archive) as opened:
        assert opened.session("x").info().bits_per_value > 16
        assert opened.session("y").info().bits_per_value < 8


def test_help_says_where_frequencies_come_from(run):
    text = " ".join(run("pack", "-h")[1].split())
    for words in (
        "the options below, else from the key rope_inv_freq_f32 of the input header's metadata",
        "STEM.json beside the input",
        "fewest tokens that statistics are fitted to; shorter inputs are stored uncompressed",
        "K only: V of the input is left out",
    ):
        assert words in text


def test_options_win_over_what_the_file_states_and_say_so(run, tmp_path, source):
    archive = tmp_path / "a.kv"
    number = iter(range(100))

    def pack(path, *options):
        code, _, err = run("pack", path, archive, "--session", next(number), *options)
        assert code == 0
        return err

    assert pack(source, "--rope-theta", "10000") == ""
    for options, words in (
        (["--rope-theta", "500"], "--rope-theta wins over the RoPE that"),
        (["--inv-freq", "[1, 0.5]"], "(2 pairs, not 4)"),
        (
            ["--rope-theta", "1e4", "--rope-scaling", "2"],
            "--rope-theta and --rope-scaling win over",
        ),
        (["--rope-style", "interleaved"], "(interleaved, not half)"),
        (["--inv-freq", "[1, 0.5, 0.25, 0.125]"], "(frequency 1 is 0.5, not 0.100000001)"),
    ):
        err = pack(source, *options)
        assert err.count("\n") == 1
        assert words in err
        assert str(source) in err
        assert pack(source, *options, "--quiet") == ""
    bare = save(tmp_path / "bare.safetensors", {"k": kv(), "v": kv()})
    assert pack(bare, "--rope-theta", "500") == ""
    bare.with_suffix(".json").write_text('{"rope_inv_freq_f32": [1, 1, 1, 1, 1]}')
    assert "(it cannot be used)" in pack(bare, "--rope-theta", "500")


def test_tensors_that_are_not_packed_are_listed(run, tmp_path):
    extra = {"q_pre_last": kv(1), **{f"layers.{i}.q": kv(1) for i in range(9)}}
    arrays = {"k_pre": kv(), "v": kv()}
    metadata = {"rope_inv_freq_f32": INV_FREQ}
    one = save(tmp_path / "one.safetensors", {**arrays, "q_pre_last": kv(1)}, metadata)
    many = save(tmp_path / "many.safetensors", {**arrays, **extra}, metadata)
    assert run("pack", one, tmp_path / "a.kv")[2] == "kvstore: not packed: q_pre_last\n"
    err = run("pack", many, tmp_path / "a.kv")[2]
    assert err.endswith("layers.6.q, layers.7.q and 2 more\n")
    succeeds(run("pack", many, tmp_path / "b.kv", "--quiet"))


def test_no_v_leaves_v_out(run, tmp_path, source):
    archive = tmp_path / "a.kv"
    succeeds(run("pack", source, archive, "--no-v", "--codec", "raw"))
    with kvstore.open(archive) as opened:
        session = opened.session("chat")
        assert [layer.head_dim_v for layer in session.model.layers] == [None] * 3
        assert np.array_equal(session.read(1, "k"), kv()[1])
    bare = save(tmp_path / "bare.safetensors", {"k_pre": kv()})
    fails(run("pack", bare, archive), "no V for layers [0, 1, 2]", "--no-v packs K alone")


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
        for info in opened.survey().sessions:
            config = info.codecs["k"]
            assert config[info.name.replace("-", "_")] is not None
            assert (config["sink"], config["sink_div"]) == (2, 8)


@pytest.mark.parametrize("codec", ["kvr1", "tkv1", "raw"])
def test_every_codec_packs_and_unpacks(run, tmp_path, source, codec):
    archive, out = tmp_path / "a.kv", tmp_path / "o.safetensors"
    succeeds(run("pack", source, archive, "--codec", codec))
    succeeds(run("unpack", archive, out))
    assert codec in succeeds(run("info", archive, "--layers"))
    with kvstore.open(archive) as opened:
        (info,) = opened.survey().sessions
        assert {config["codec"] for config in info.codecs.values()} == {codec}
        assert {stream.codec for stream in info.streams} == {codec}
        step = max(stream.step or 0.0 for stream in info.streams)
    error = np.abs(load(out)[0]["k_pre"].astype(np.float32) - kv().astype(np.float32)).max()
    assert error == 0 if codec == "raw" else 0 < error <= step / 2 + 2**-9


def test_fibquant(run, source, tmp_path):
    archive = tmp_path / "a.kv"
    options = ["--block-dim", 2, "--codebook-size", 16, "--rotation", "haar", "--axis", "per_token"]
    options += ["--raw-first", 2, "--raw-last", 3, "--raw-layers", "1", "--raw-heads", "0"]
    run("pack", source, archive, "--codec", "fibquant", *options, "--quiet")
    (session,) = json.loads(succeeds(run("info", archive, "--json", "--layers")))["sessions"]
    wanted = kvstore.FibQuant(
        *(2, 16),
        rotation="haar",
        axis="per_token",
        first_tokens=2,
        last_tokens=3,
        raw_layers=(1,),
        raw_heads=(0,),
    )
    assert session["codecs"]["k"] == wanted.to_json()
    found = {layer["codec"] for layer in session["layers"]}
    assert found == {"fibquant.2x16", "fibquant.raw"}
    (digest,) = {digest for layer in session["layers"] for digest in layer["codebooks"]}
    out = succeeds(run("info", archive))
    assert "fibquant.2x16 rotation=haar seed=42 axis=per_token" in out
    assert digest[:12] in out
    assert "kept raw" in out
    two = ("--k-codec", "fibquant.2x16", "--v-codec", "fibquant.4x16", "--raw-first", 0)
    succeeds(run("migrate", archive, tmp_path / "b.kv", *two, "--quiet"))
    (session,) = json.loads(succeeds(run("info", tmp_path / "b.kv", "--json")))["sessions"]
    assert [session["codecs"][kind]["block_dim"] for kind in "kv"] == [2, 4]
    for wrong in (["kvr1", "--axis", "raw"], ["fibquant.2x16", "--block-dim", "2"]):
        code, _, err = run("pack", source, archive, "--codec", *wrong)
        assert code == 2
        assert f"{wrong[1]} does not go with --codec {wrong[0]}; it goes with fibquant" in err
    for wrong, message in (
        (["--raw-layers", "0,3"], "raw layer 3: the model has layers 0 to 2"),
        (["--raw-heads", "9"], "raw head 9"),
        (["--block-dim", "3"], "use one of 2, 4"),
    ):
        code, _, err = run("pack", source, tmp_path / "c.kv", "--codec", "fibquant", *wrong)
        assert code == 1
        assert message in err


def test_building_many_codewords_is_told(run, tmp_path, source, monkeypatch):
    monkeypatch.setenv("KVSTORE_CACHE", str(tmp_path / "books"))
    monkeypatch.setattr(fib_book, "_MANY_CODEWORDS", 4)
    options = ("--codec", "fibquant.2x4", "--raw-first", 0, "--seed")
    code, _, err = run("pack", source, tmp_path / "a.kv", *options, 7)
    assert code == 0
    assert "building a FibQuant codebook of 4 points; " in err
    assert f"it is kept in {tmp_path / 'books'}\n" in err
    succeeds(run("pack", source, tmp_path / "b.kv", *options, 7))
    code, _, err = run("pack", source, tmp_path / "c.kv", *options, 8, "--quiet")
    assert (code, err) == (0, "")


def test_a_sink_that_is_too_fine_for_the_codec(run, tmp_path, source):
    archive = tmp_path / "a.kv"
    fails(run("pack", source, archive, "--sink-div", "600"), "sink_div 600 is not 1 to 512")
    succeeds(run("pack", source, archive, "--sink-div", "600", "--codec", "tkv1"))


# -- failures


def test_missing_things(run, tmp_path, source):
    archive = tmp_path / "a.kv"
    for argv in (
        ["ls", archive],
        ["info", archive],
        ["verify", archive],
        ["rm", archive, "x"],
        ["gc", archive],
        ["reindex", archive],
        ["compact", archive],
        ["quota", archive],
        ["quota", archive, "1G"],
        ["match", archive, "[1]", "--like", "x"],
        ["fork", archive, "x", "y"],
        ["trim", archive, "x", "--to", "1"],
        ["rename", archive, "x", "y"],
        ["append-range", archive, "x", "y", "0:1"],
        ["pin", archive, "x"],
        ["unpack", archive, tmp_path / "o"],
        ["pack", tmp_path / "none.safetensors", archive],
        ["bench", "--data", tmp_path / "none.safetensors"],
    ):
        fails(run(*argv))
    assert sorted(os.listdir(tmp_path)) == ["chat.safetensors"]
    succeeds(run("pack", source, archive))
    fails(run("unpack", archive, tmp_path / "o", "--session", "nope"), "'nope'")
    fails(run("info", archive, "--session", "nope"), "'nope'")
    fails(run("unpack", archive, tmp_path / "no" / "o"), f"{tmp_path}/no/o: its folder does not")
    fails(run("unpack", archive, tmp_path / "o", "--session", ""), "session name ''")


def test_rm_removes_all_or_nothing(run, tmp_path, source):
    archive = tmp_path / "a.kv"
    for name in ("one", "two", "three"):
        succeeds(run("pack", source, archive, "--session", name))
    for options in ([], ["--json"]):
        result = run("rm", archive, "one", "nope", "two", "neither", *options)
        fails(result, "no session 'nope', 'neither'", "removed; there are 'one', 'three', 'two'")
        assert result[1] == ""
    with kvstore.open(archive) as opened:
        assert opened.names() == ["one", "three", "two"]
    assert succeeds(run("rm", archive, "two", "one", "two")) == "removed 'two'\nremoved 'one'\n"
    with kvstore.open(archive, "a") as opened:
        with opened.create_session("held", model=opened.session("three").model) as held:
            held.append(kv(), kv())
            code, out, err = run("rm", archive, "three", "held")
            assert (code, out) == (1, "removed 'three'\n")
            assert "'held'" in err
        assert opened.names() == ["held"]


def test_places_where_no_archive_can_be(run, tmp_path, source):
    fails(run("pack", source, tmp_path), "no archive")
    fails(run("pack", source, source), str(source))
    fails(run("pack", source, "memory:x"), "memory")
    fails(run("pack", source, tmp_path / "no" / "a.kv"), "no/a.kv: its folder")
    assert os.listdir(tmp_path) == ["chat.safetensors"]
    (tmp_path / "empty").mkdir()
    succeeds(run("pack", source, tmp_path / "empty"))


def test_advice_is_for_a_shell(run, tmp_path, source, monkeypatch):
    archive = tmp_path / "a.kv"
    succeeds(run("pack", source, archive))
    # The super-user may write anywhere, so that permissions alone would not do here.
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    for argv in (
        ["pack", source, archive, "--replace"],
        ["rm", archive, "chat"],
        ["gc", archive],
        ["quota", archive, "1G"],
        ["fork", archive, "chat", "new"],
        ["pin", archive, "chat"],
    ):
        result = run(*argv)
        fails(result, f"{archive}: not writable here; get write access to it")
        assert "mode=" not in result[2]
    monkeypatch.undo()
    packages = [Path(package.__file__).parent for package in (kvstore, kvcodecs)]
    library = "".join(path.read_text() for p in packages for path in p.rglob("*.py"))
    library = re.sub(r'"\s*\n\s*f?"', "", library)  # as Python joins them
    for advice in cli.ADVICE:
        assert advice in library, "the library words it differently now"


def test_no_folder_for_a_new_archive(run, tmp_path, source, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "rename", refuse)
    fails(run("pack", source, tmp_path / "a.kv"), f"error: {tmp_path}/a.kv: Permission denied")
    assert os.listdir(tmp_path) == ["chat.safetensors"]


def test_an_empty_session_name_is_no_default(run, tmp_path, source):
    fails(run("pack", source, tmp_path / "a.kv", "--session", ""), "session name ''")
    assert os.listdir(tmp_path) == ["chat.safetensors"]
    options = ["--model-name", "m", "--revision", ""]
    path = save(tmp_path / "r.safetensors", {"k_pre": kv(), "v": kv()}, {"revision": "r1"})
    run("pack", path, tmp_path / "a.kv", *options)
    with kvstore.open(tmp_path / "a.kv") as opened:
        assert opened.session("r").model.revision == ""


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
        (["match", archive, "-", "--like", "chat"], 1),
        (["match", archive, "[0, 1, 2]", "--like", "chat"], 0),
        (["ls", archive, "--json"], 0),
    ):
        process = start(*argv)
        out, err = process.communicate(timeout=60)
        assert process.returncode == expected
        assert b"Traceback" not in err
        assert expected != 1 or err.startswith(b"kvstore: error: ")
    assert json.loads(out)[0]["name"] == "chat"


def test_names_that_stdout_cannot_encode(tmp_path, source, run):
    archive = tmp_path / "a.kv"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    name = "caf\xe9/\u732b"
    for argv, expected in (
        (["pack", source, archive, "--session", name], rb"packed 'caf\xe9/\u732b'"),
        (["ls", archive], rb"caf\xe9/\u732b   toy"),
        (["info", archive], rb"caf\xe9/\u732b"),
        (["rm", archive, name], rb"removed 'caf\xe9/\u732b'"),
    ):
        process = start(*argv, env=environment)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, b"")
        assert expected in out


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
    text = succeeds(run("verify", archive))
    assert "sound; 1 session, 6 frames, " in text
    assert "1 entry left over" in text
    assert json.loads(succeeds(run("gc", archive, "--json")))["freed_bytes"] == 50_000
    assert "left over" not in succeeds(run("verify", archive))
    assert "0 B freed" in succeeds(run("gc", archive))
    fails(run("gc", tmp_path / "none.kv"), "no such archive")
    assert not (tmp_path / "none.kv").exists()


def test_a_damaged_session_is_named_and_can_be_removed(run, tmp_path, source):
    from kvstore import keys

    archive = tmp_path / "a.kv"
    for name in ("good", "bad"):
        succeeds(run("pack", source, archive, "--session", name))
    with kvstore.open(archive, "a") as opened, opened._backend.write(1.0) as transaction:
        value = bytearray(transaction.get(keys.session_key("bad")))
        value[-5] ^= 1
        transaction.put(keys.session_key("bad"), bytes(value))
    for command in ("ls", "info"):
        code, out, err = run(command, archive)
        assert code == 1
        assert "good" in out
        assert err.startswith("kvstore: damaged session 'bad': ")
        assert err.count("\n") == 1
        code, out, err = run(command, archive, "--json")
        assert code == 1
        found = json.loads(out)
        assert "crc32c" in (found[1]["error"] if command == "ls" else found["damaged"]["bad"])
        assert err == ""
    assert run("verify", archive)[0] == 1
    succeeds(run("rm", archive, "bad"))
    assert "good" in succeeds(run("ls", archive))
    succeeds(run("gc", archive))
    assert json.loads(succeeds(run("verify", archive, "--json")))["n_leftover"] == 0
