"""What `pack` makes of an input: layouts, metadata, sidecars, RoPE."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from kvcodecs.errors import Corrupt, InvalidArgument, NotFound
from kvcodecs.rope import Rope
from kvtools.kvfile import KvFile
from kvtools.source import FileSource, build_model
from kvtools.tensorfile import TensorFile, TensorWriter

from kvstore import LayerSpec, Model


def save(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> Path:
    shapes = {name: (a.dtype, a.shape) for name, a in arrays.items()}
    with TensorWriter(path, shapes, metadata) as writer:
        for name, a in arrays.items():
            writer.array(name)[...] = a
    return path


def kv(layers: int = 2, heads: int = 2, tokens: int = 7, dim: int = 4) -> np.ndarray:
    rng = np.random.default_rng(layers * tokens)
    return rng.standard_normal((layers, heads, tokens, dim)).astype(np.float16)


def test_4d_and_per_layer_files_are_the_same_to_us(tmp_path):
    k, v = kv(), kv()
    stacked = save(tmp_path / "a.safetensors", {"k_pre": k, "v": v})
    split = {f"layers.{n}.k_pre": k[i] for i, n in enumerate((3, 11))}
    split |= {f"layers.{n}.v": v[i] for i, n in enumerate((3, 11))}
    separate = save(tmp_path / "b.safetensors", split)
    for path, numbers in ((stacked, [0, 1]), (separate, [3, 11])):
        with TensorFile(path) as file:
            found = KvFile(file)
            assert found.k_state == "pre"
            assert found.n_tokens == 7
            assert found.dtype("k", "v") == "float16"
            assert [layer.number for layer in found.layers] == numbers
            source = FileSource(found)
            for i in range(2):
                chunks = source.chunks(i, "k")
                for _ in range(2):
                    whole = np.concatenate(list(chunks), axis=1)
                    assert whole.tobytes() == k[i].tobytes()
                assert found.read(found.layers[i].v, 2, 5).tobytes() == v[i, :, 2:5].tobytes()
                assert source.n_tokens(i, "v") == 7


def test_chunks_are_small(tmp_path):
    k = kv(1, 2, 100, 4)
    with TensorFile(save(tmp_path / "a.safetensors", {"k": k, "v": k})) as file:
        found = KvFile(file)
        sizes = [c.shape[1] for c in found.chunks(found.layers[0].k, chunk_bytes=160)]
        assert sizes == [10] * 10
        assert [c.shape[1] for c in found.chunks(found.layers[0].k, 1)] == [1] * 100


def test_k_state(tmp_path):
    k = kv()
    post = save(tmp_path / "post.safetensors", {"k": k, "v": k})
    both = save(tmp_path / "both.safetensors", {"k": k, "k_pre": k, "v": k})
    pre = save(tmp_path / "pre.safetensors", {"k_pre": k, "v": k})
    with TensorFile(post) as file:
        assert KvFile(file).k_state == "post"
        assert KvFile(file, k_state="pre").k_state == "pre"
    with TensorFile(both) as file:
        with pytest.raises(InvalidArgument, match="--k-state"):
            KvFile(file)
        assert KvFile(file, k_state="pre").layers[0].k.name == "k_pre"
        assert KvFile(file, k_state="post").layers[0].k.name == "k"
    with TensorFile(pre) as file, pytest.raises(InvalidArgument, match="k_pre only"):
        KvFile(file, k_state="post")


RAGGED = {
    "no k": ({"v": kv()}, NotFound, "no K"),
    "v without k": (
        {"layers.0.k": kv()[0], "layers.0.v": kv()[0], "layers.1.v": kv()[1]},
        NotFound,
        r"layers \[1\]",
    ),
    "3-D": ({"k": kv()[0], "v": kv()[0]}, InvalidArgument, "expected .layers"),
    "4-D per layer": ({"layers.0.k": kv(), "layers.0.v": kv()}, InvalidArgument, "expected .heads"),
    "layers": ({"k": kv(2), "v": kv(3)}, InvalidArgument, "2 layers of K, 3 of V"),
    "no layers": ({"k": kv(0), "v": kv(0)}, InvalidArgument, "no layers"),
    "tokens": (
        {"k": kv(tokens=7), "v": kv(tokens=8)},
        InvalidArgument,
        "'k' has 7 tokens, others have 8",
    ),
    "dtype": ({"k": kv(), "v": kv().astype(np.float64)}, InvalidArgument, "F64"),
}


@pytest.mark.parametrize("case", RAGGED)
def test_tensors_that_do_not_fit(tmp_path, case):
    arrays, kind, match = RAGGED[case]
    with (
        TensorFile(save(tmp_path / "a.safetensors", arrays)) as file,
        pytest.raises(kind, match=match),
    ):
        KvFile(file)


def test_heads_of_k_and_v_differ(tmp_path):
    with TensorFile(save(tmp_path / "a.safetensors", {"k": kv(heads=2), "v": kv(heads=3)})) as file:
        found = KvFile(file)
        with pytest.raises(InvalidArgument, match="2 heads of K and 3 of V"):
            build_model(found)


def test_v_must_be_there_unless_the_stored_model_has_none(tmp_path):
    without = {
        "none": ({"k": kv()}, r"layers \[0, 1\]; so there"),
        "one": (
            {"layers.3.k": kv()[0], "layers.3.v": kv()[0], "layers.4.k": kv()[1]},
            r"layers \[4\]; so there",
        ),
    }
    for name, (arrays, match) in without.items():
        with TensorFile(save(tmp_path / f"{name}.safetensors", arrays)) as file:
            KvFile(file, no_v=True).require_v("so there")
            with pytest.raises(NotFound, match=match):
                KvFile(file).require_v("so there")
    model = Model("m", (LayerSpec(2, 4, 4), LayerSpec(2, 4, None)))
    stored = {"kvstore": json.dumps({"model": model.to_json()})}
    with TensorFile(save(tmp_path / "own.safetensors", without["one"][0], stored)) as file:
        KvFile(file).require_v("not reached")
        assert build_model(KvFile(file)) == model


def test_no_v_is_k_only(tmp_path):
    arrays = {
        "layers.0.k": kv()[0].astype(ml_dtypes.bfloat16),
        "layers.1.k": kv()[1].astype(np.float32),
        "layers.1.v": kv()[1].astype(np.float32),
    }
    with TensorFile(save(tmp_path / "a.safetensors", arrays)) as file:
        found = KvFile(file, no_v=True)
        model = build_model(found)
        assert model.dtype == "float32"
        assert [layer.head_dim_v for layer in model.layers] == [None, None]
        assert found.unused() == []  # it was asked to be left out
    model = Model("m", (LayerSpec(2, 4, 4),) * 2, revision="r")
    stored = {"kvstore": json.dumps({"model": model.to_json()})}
    with TensorFile(save(tmp_path / "b.safetensors", {"k": kv(), "v": kv()}, stored)) as file:
        assert build_model(KvFile(file)) == model
        found = build_model(KvFile(file, no_v=True))
        assert (found.revision, found.layers) == ("r", (LayerSpec(2, 4, None),) * 2)


def test_unused_tensors(tmp_path):
    arrays = {"k": kv(), "k_pre": kv(), "v": kv(), "token_ids": np.arange(7), "q": kv()}
    arrays["layers.0.v"] = kv()[0]
    with TensorFile(save(tmp_path / "a.safetensors", arrays)) as file:
        assert KvFile(file, k_state="pre").unused() == ["layers.0.v", "q"]
        assert KvFile(file, k_state="pre", no_v=True).unused() == ["q"]


def test_only_layers_with_a_window_may_have_fewer_tokens(tmp_path):
    arrays = {f"layers.{i}.{name}": kv()[i] for i in range(2) for name in ("k", "v")}
    short = {**arrays, "layers.1.k": kv()[1][:, 4:], "layers.1.v": kv()[1][:, 4:]}
    for window in (None, 3):
        model = Model("m", (LayerSpec(2, 4, 4), LayerSpec(2, 4, 4, window=window)))
        stored = {"kvstore": json.dumps({"model": model.to_json()})}
        with TensorFile(save(tmp_path / f"{window}.safetensors", short, stored)) as file:
            if window is None:
                with pytest.raises(InvalidArgument, match="has 3 tokens, others have 7"):
                    KvFile(file)
                continue
            found = KvFile(file)
            source = FileSource(found)
            assert found.n_tokens == 7
            assert [source.n_tokens(i, "v") for i in range(2)] == [7, 3]


def test_layers_keep_the_stored_order(tmp_path):
    arrays = {f"layers.{n}.{name}": kv()[i] for i, n in enumerate((9, 1)) for name in ("k", "v")}
    model = Model("m", (LayerSpec(2, 4, 4, window=3), LayerSpec(2, 4, 4)))
    metadata = {"layers": "[9, 1]"}
    with TensorFile(save(tmp_path / "foreign.safetensors", arrays, metadata)) as file:
        assert [layer.number for layer in KvFile(file).layers] == [1, 9]
    metadata["kvstore"] = json.dumps({"model": model.to_json()})
    with TensorFile(save(tmp_path / "own.safetensors", arrays, metadata)) as file:
        found = KvFile(file)
        assert [layer.number for layer in found.layers] == [9, 1]
        assert found.read(found.layers[0].k, 0, 7).tobytes() == kv()[0].tobytes()


def test_sidecar_and_metadata(tmp_path):
    path = save(tmp_path / "a.safetensors", {"k": kv(), "v": kv()})
    with TensorFile(path) as file:
        assert KvFile(file).hints.rope() is None
        assert build_model(KvFile(file)).name == "unknown"
    sidecar = tmp_path / "a.json"
    sidecar.write_text(
        json.dumps({"rope_inv_freq_f32": [1.0, 0.1], "model": "side", "layers": [4, 9], "n": {}})
    )
    with TensorFile(path) as file:
        found = KvFile(file)
        assert found.hints.rope() == Rope(np.array([1.0, 0.1], np.float32))
        assert [layer.number for layer in found.layers] == [4, 9]
        assert build_model(found).name == "side"
        own = Rope.from_theta(100.0, 4)
        model = build_model(found, name="given", revision="r2", rope=own)
        assert (model.name, model.revision, model.rope) == ("given", "r2", own)
    path = save(
        tmp_path / "b.safetensors",
        {"k": kv(), "v": kv()},
        {
            "rope_inv_freq_f32": "[0.5]",
            "model": "meta",
            "rope_style": "interleaved",
            "rope_scaling": "2",
        },
    )
    sidecar.rename(tmp_path / "b.json")
    with TensorFile(path) as file:
        found = KvFile(file)
        assert found.hints.rope() == Rope(np.array([0.5]), style="interleaved", scaling=2.0)
        assert build_model(found).name == "meta"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("{]", Corrupt),
        ("[]", Corrupt),
        ('{"rope_inv_freq_f32": "x"}', InvalidArgument),
        ('{"rope_inv_freq_f32": {}}', InvalidArgument),
        ('{"rope_inv_freq_f32": []}', InvalidArgument),
        ('{"rope_inv_freq_f32": [1, true]}', InvalidArgument),
        ('{"rope_inv_freq_f32": [NaN]}', InvalidArgument),
        ('{"rope_inv_freq_f32": [1%s]}' % ("0" * 400), InvalidArgument),
        ('{"rope_inv_freq_f32": [1], "rope_style": "twisted"}', InvalidArgument),
        ('{"rope_inv_freq_f32": [1], "rope_scaling": "much"}', InvalidArgument),
        ('{"layers": [1]}', InvalidArgument),
        ('{"layers": [1, -2]}', InvalidArgument),
        ('{"layers": 7}', InvalidArgument),
        ('{"first_token": -1}', InvalidArgument),
    ],
)
def test_bad_sidecar(tmp_path, text, kind):
    path = save(tmp_path / "a.safetensors", {"k": kv(), "v": kv()})
    (tmp_path / "a.json").write_text(text)

    def use(file):
        found = KvFile(file)
        found.hints.first_token()
        build_model(found)

    with TensorFile(path) as file, pytest.raises(kind, match=r"a\.|rope"):
        use(file)


def test_token_ids(tmp_path):
    arrays = {"k": kv(), "v": kv(), "token_ids": np.arange(7, dtype=np.uint16)}
    with TensorFile(save(tmp_path / "a.safetensors", arrays)) as file:
        assert KvFile(file).token_ids().tolist() == list(range(7))
    for wrong in (np.arange(6), np.arange(7.0), np.arange(7).reshape(1, 7)):
        path = save(tmp_path / "b.safetensors", {**arrays, "token_ids": wrong})
        with (
            TensorFile(path) as file,
            pytest.raises(InvalidArgument, match="token_ids"),
        ):
            KvFile(file).token_ids()
        path.unlink()


@pytest.mark.parametrize(
    ("text", "kind"),
    [("{]", Corrupt), ("[]", Corrupt), ("{}", Corrupt), ('{"model": {"layers": 3}}', Corrupt)],
)
def test_bad_metadata_of_ours(tmp_path, text, kind):
    path = save(tmp_path / "a.safetensors", {"k": kv(), "v": kv()}, {"kvstore": text})
    with TensorFile(path) as file, pytest.raises(kind):
        build_model(KvFile(file))
