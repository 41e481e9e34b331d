"""What `unpack` writes, `pack` takes back: the model stays what it was, and so do positions."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from kvtools import cli
from kvtools.tensorfile import TensorFile, TensorWriter

import kvstore

HALF = kvstore.Rope.from_theta(10_000.0, 8)
TURNED = kvstore.Rope.from_theta(99.0, 4, style="interleaved", scaling=1.25)
TOKENS = 300

MODELS = {
    "uniform": kvstore.Model.uniform(
        name="m", n_layers=2, n_kv_heads=2, head_dim=8, rope=HALF, dtype="bfloat16"
    ),
    "no dtype": kvstore.Model.uniform(name="m", n_layers=2, n_kv_heads=2, head_dim=8),
    "no V": kvstore.Model.uniform(
        name="m", n_layers=2, n_kv_heads=2, head_dim=8, head_dim_v=None, rope=HALF
    ),
    "V in some layers": kvstore.Model(
        "m", (kvstore.LayerSpec(2, 8, 8), kvstore.LayerSpec(2, 8, None)), rope=HALF
    ),
    "windows": kvstore.Model(
        "m",
        (
            kvstore.LayerSpec(2, 8, 8),
            kvstore.LayerSpec(2, 8, 8, window=64),
            kvstore.LayerSpec(2, 8, 8, window=1000),
        ),
        rope=HALF,
        dtype="float16",
    ),
    "everything": kvstore.Model(
        name="odd",
        revision="r7",
        layout="l",
        shard="1/2",
        salt="s",
        dtype="float16",
        rope=HALF,
        layers=(
            kvstore.LayerSpec(2, 8, 4, window=64),
            kvstore.LayerSpec(1, 8, 8, rope=TURNED),
            kvstore.LayerSpec(2, 8, None, rope=None),
        ),
    ),
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Run a command line that has to succeed; return what it says on stderr."""

    def run_main(*argv: object) -> str:
        capsys.readouterr()
        code = cli.main([str(arg) for arg in argv])
        err = capsys.readouterr().err
        assert code == 0, err
        return err

    return run_main


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]):
    """Run a command line that has to fail with these words."""

    def run_main(argv: list[object], *words: str) -> None:
        capsys.readouterr()
        assert cli.main([str(arg) for arg in argv]) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        for word in words:
            assert word in err

    return run_main


def values(model: kvstore.Model) -> dict[tuple[int, str], np.ndarray]:
    """Values that every dtype holds; layers with a window have the last 64 tokens, if not all."""
    rng = np.random.default_rng(1)
    found = {}
    for layer, kind in model.streams():
        spec = model.stream(layer, kind)
        n = min(TOKENS, model.layers[layer].window or TOKENS)
        x = rng.standard_normal((spec.heads, n, spec.head_dim))
        found[layer, kind] = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    return found


def store(path: Path, model: kvstore.Model, **options) -> dict[tuple[int, str], np.ndarray]:
    given = values(model)
    k, v = ([given.get((i, kind)) for i in range(model.n_layers)] for kind in ("k", "v"))
    with kvstore.open(path, mode="a") as archive:
        session = archive.create_session("one", model=model, codec=kvstore.Raw(), **options)
        session.append(k, v, token_ids=np.arange(TOKENS) + 7)
        session.commit()
    return given


def read_back(session: kvstore.Session) -> dict[tuple[int, str], np.ndarray]:
    return {
        stream: session.read(*stream, session.start_token(*stream), dtype="float32")
        for stream in session.model.streams()
    }


CASES = [(case, k) for case in MODELS for k in ("pre", "post") if (case, k) != ("no dtype", "post")]


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize(("case", "k_state"), CASES)
def test_pack_takes_back_what_unpack_wrote(run, tmp_path, case, dtype, k_state):
    model = MODELS[case]
    archive, out = tmp_path / "a.kv", tmp_path / "two.safetensors"
    given = store(archive, model)
    options = [] if dtype is None else ["--dtype", dtype]
    run("unpack", archive, out, "--session", "one", "--k-state", k_state, *options)
    err = run("pack", out, archive, "--codec", "raw")
    assert err == (
        "kvstore: " + "no RoPE frequencies known" + err[34:] if case == "no dtype" else ""
    )
    with kvstore.open(archive) as opened:
        again = opened.session("two", expect=model)
        assert again.model == model
        assert again.token_ids().tolist() == list(range(7, 7 + TOKENS))
        found = read_back(again)
        for stream, x in given.items():
            assert again.start_token(*stream) == TOKENS - x.shape[1]
            if k_state == "pre" or stream[1] == "v":
                assert np.array_equal(found[stream], x), stream
            else:
                tolerance = 0.05 if dtype == "bfloat16" or model.dtype == "bfloat16" else 0.01
                assert np.abs(found[stream] - x).max() < tolerance, stream


def test_layers_with_a_window_have_tensors_of_their_own(run, refuse, tmp_path):
    archive, out = tmp_path / "a.kv", tmp_path / "out.safetensors"
    store(archive, MODELS["windows"])
    run("unpack", archive, out)
    with TensorFile(out) as file:
        assert {name: info.shape[1] for name, info in file.tensors.items() if "k_pre" in name} == {
            "layers.0.k_pre": 300,
            "layers.1.k_pre": 64,
            "layers.2.k_pre": 300,
        }
        assert "first_token" not in file.metadata
    # A range is what was asked for, of every layer, or nothing.
    again = ["unpack", archive, out, "--force"]
    refuse([*again, "--range", "100:250"], "layer 1 starts at token 236, by its window")
    run(*again, "--range", "240:250")
    with TensorFile(out) as file:
        assert file.info("k_pre").shape == (3, 2, 10, 8)
    run(*again, "--layers", "0,2")
    with TensorFile(out) as file:
        assert file.info("k_pre").shape == (2, 2, 300, 8)
    run(*again, "--layers", "1")
    with TensorFile(out) as file:
        assert file.info("k_pre").shape == (1, 2, 64, 8)
        assert file.metadata["first_token"] == "236"
        assert file.read("token_ids").tolist() == list(range(243, 307))
    refuse(["pack", out, archive], "starts at token 236", "--renumber")


def test_layers_in_another_order(run, tmp_path):
    archive, out = tmp_path / "a.kv", tmp_path / "out.safetensors"
    model = MODELS["everything"]
    given = store(archive, model, metadata={"layers": [4, 8, 15]})
    run("unpack", archive, out, "--layers", "2,0,1")
    run("pack", out, archive, "--codec", "raw")
    with kvstore.open(archive) as opened:
        again = opened.session("out")
        assert again.model.layers == tuple(model.layers[i] for i in (2, 0, 1))
        assert again.metadata == {"layers": [15, 4, 8]}
        assert np.array_equal(again.read(0, "k", dtype="float32"), given[2, "k"])
        assert np.array_equal(again.read(2, "v", dtype="float32"), given[1, "v"])


def test_renumber(run, refuse, tmp_path):
    archive, part = tmp_path / "a.kv", tmp_path / "part.safetensors"
    model = MODELS["uniform"]
    given = store(archive, model)
    run("unpack", archive, part, "--range", "100:300")
    refuse(["pack", part, archive], "starts at token 100", "--renumber packs it as tokens 0:200")
    with kvstore.open(archive) as opened:
        assert opened.names() == ["one"]
    run("pack", part, archive, "--codec", "raw", "--renumber")
    with kvstore.open(archive) as opened:
        session = opened.session("part", expect=model)
        assert session.n_committed == 200
        assert session.token_ids().tolist() == list(range(107, 307))
        k = session.read(1, "k", dtype="float32")
        assert np.array_equal(k, given[1, "k"][:, 100:])
    run(
        "unpack",
        archive,
        part,
        "--session",
        "one",
        "--range",
        "100:",
        "--k-state",
        "post",
        "--force",
    )
    for options in ([], ["--renumber"]):
        refuse(["pack", part, archive, *options], "starts at token 100", "--k-state pre")


def test_after_rope_where_some_layers_have_it(run, refuse, tmp_path):
    archive, out = tmp_path / "a.kv", tmp_path / "out.safetensors"
    given = store(archive, MODELS["everything"])
    options = ["--dtype", "float32", "--k-state", "post"]
    run("unpack", archive, out, *options)
    with TensorFile(out) as file, kvstore.open(archive) as opened:
        assert np.array_equal(file.read("layers.2.k"), given[2, "k"])
        turned = opened.session("one").read(1, "k", k_state="post", dtype="float32")
        assert np.array_equal(file.read("layers.1.k"), turned)
        assert not np.array_equal(turned, given[1, "k"])
    refuse(
        ["unpack", archive, out, "--force", "--layers", "2", *options],
        "no RoPE is known for these layers",
        "--k-state pre",
    )


def test_layers_with_their_own_rope_are_no_unknown_rope(run, tmp_path):
    layers = (kvstore.LayerSpec(2, 8, 8, rope=TURNED), kvstore.LayerSpec(2, 8, 8))
    model = kvstore.Model("m", layers)
    archive, out = tmp_path / "a.kv", tmp_path / "two.safetensors"
    store(archive, model)
    run("unpack", archive, out)
    assert run("pack", out, archive) == ""
    with kvstore.open(archive) as opened:
        assert opened.session("two").model == model
    err = run("pack", out, archive, "--session", "three", "--rope-theta", "99", "--rotary-dim", "4")
    assert "--rope-theta wins" in err
    assert "(half, not interleaved)" in err


def test_no_v_of_a_stored_model(run, tmp_path):
    archive, out = tmp_path / "a.kv", tmp_path / "two.safetensors"
    store(archive, MODELS["everything"])
    run("unpack", archive, out)
    run("pack", out, archive, "--no-v", "--quiet")
    with kvstore.open(archive) as opened:
        model = opened.session("two").model
        assert [layer.head_dim_v for layer in model.layers] == [None] * 3
        assert [layer.window for layer in model.layers] == [64, None, None]


def test_dtype_of_the_model_is_an_option(run, tmp_path):
    archive, out = tmp_path / "a.kv", tmp_path / "two.safetensors"
    store(archive, MODELS["uniform"])
    run("unpack", archive, out, "--dtype", "float16")
    run("pack", out, archive, "--dtype", "float32")
    with kvstore.open(archive) as opened:
        assert opened.session("two").model.dtype == "float32"


def test_short_windows_are_named(run, tmp_path):
    archive, out = tmp_path / "a.kv", tmp_path / "two.safetensors"
    store(archive, MODELS["windows"])
    run("unpack", archive, out)
    err = run("pack", out, archive)
    assert err == "kvstore: layer 1 has fewer tokens than --fit-tokens 128: kept uncompressed\n"


def test_other_metadata_than_tensors(refuse, tmp_path):
    k = np.zeros((2, 2, 5, 8), np.float16)
    about = {"kvstore": json.dumps({"model": MODELS["V in some layers"].to_json()})}
    path = tmp_path / "x.safetensors"
    with TensorWriter(path, {"k_pre": (k.dtype, k.shape), "v": (k.dtype, k.shape)}, about):
        pass
    refuse(["pack", path, tmp_path / "a.kv"], "describes other layers than the tensors")
