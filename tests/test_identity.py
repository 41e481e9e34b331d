"""Model identity: what is stored comes back, and the first field that differs is named."""

import json
from dataclasses import replace

import numpy as np
import pytest

import kvstore
from kvstore import LayerSpec, Model, Rope
from kvstore.identity import canonical_json, check_identity

ROPE = Rope.from_theta(1e4, 16)
OTHER = Rope.from_theta(1e4, 8, style="interleaved", scaling=1.5)
RAGGED = Model(
    "ragged",
    (
        LayerSpec(2, 16, 16),
        LayerSpec(2, 16, 16),
        LayerSpec(1, 32, None, rope=OTHER),
        LayerSpec(4, 16, 8, window=64, rope=None),
        LayerSpec(1, 32, None, rope=OTHER),
    ),
    rope=ROPE,
    revision="r1",
    dtype="bfloat16",
    layout="x",
    shard="tp0/2",
    salt="tenant",
)


def test_json_round_trip():
    data = json.loads(canonical_json(RAGGED.to_json()))
    again = Model.from_json(data)
    assert again == RAGGED
    assert again.digest == RAGGED.digest
    assert len(data["layer_ropes"]) == 1
    assert [run[0] for run in data["layers"]] == [2, 1, 1, 1]


def test_uniform_is_small():
    model = Model.uniform(name="m", n_layers=80, n_kv_heads=8, head_dim=128, rope=ROPE)
    assert len(canonical_json(model.to_json())) < 250
    assert model.layers == (LayerSpec(8, 128, 128),) * 80
    assert Model.uniform(
        name="m", n_layers=1, n_kv_heads=1, head_dim=576, head_dim_v=None
    ).streams() == [(0, "k")]


def test_streams_and_ropes():
    assert RAGGED.stream(0, "k").rope is ROPE
    assert RAGGED.stream(0, "v").rope is None
    assert RAGGED.stream(2, "k").rope == OTHER
    assert RAGGED.stream(3, "k").rope is None
    assert RAGGED.streams()[4:6] == [(2, "k"), (3, "k")]
    with pytest.raises(kvstore.InvalidArgument, match="layer 2 has no V"):
        RAGGED.stream(2, "v")


def layers(index, **changes):
    new = list(RAGGED.layers)
    new[index] = replace(new[index], **changes)
    return {"layers": tuple(new)}


NUDGED = ROPE.inv_freq.copy()
NUDGED[3] = np.nextafter(NUDGED[3], np.float32(1))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "x"}, "name"),
        ({"revision": "x"}, "revision"),
        ({"rope": None}, "rope"),
        ({"rope": Rope(NUDGED)}, "rope.inv_freq"),
        ({"rope": Rope.from_theta(1e4, 8)}, "rope.n_pairs"),
        ({"rope": Rope(ROPE.inv_freq, style="interleaved")}, "rope.style"),
        ({"rope": Rope(ROPE.inv_freq, scaling=2.0)}, "rope.scaling"),
        ({"layers": RAGGED.layers[:4]}, "n_layers"),
        (layers(1, heads=3), "layers[1].heads"),
        (layers(3, head_dim_k=32), "layers[3].head_dim_k"),
        (layers(3, head_dim_v=None), "layers[3].head_dim_v"),
        (layers(3, window=None), "layers[3].window"),
        (layers(4, rope=ROPE), "layers[4].rope.n_pairs"),
        (layers(4, rope="model"), "layers[4].rope"),
        ({"dtype": "float16"}, "dtype"),
        ({"layout": ""}, "layout"),
        ({"shard": "tp1/2"}, "shard"),
        ({"salt": "another"}, "salt"),
    ],
)
def test_the_first_difference_is_named(change, field):
    expected = replace(RAGGED, **change)
    with pytest.raises(kvstore.IdentityMismatch) as caught:
        check_identity(RAGGED, expected, "here")
    assert caught.value.field == field
    assert str(caught.value).startswith(f"here: stored for another model: {field} is ")
    assert expected.digest != RAGGED.digest
    check_identity(RAGGED, replace(RAGGED), "here")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerSpec(1, 16, 16, window=0), "window 0"),
        (lambda: LayerSpec(1, 16, 16, rope="none"), "layer rope"),
        (lambda: Model("m", ()), "0 layers"),
        (lambda: Model("m", (LayerSpec(1, 15, 16),)), r"layers\[0\] k: head_dim 15"),
        (lambda: Model("m", (LayerSpec(1, 16, 7),)), r"layers\[0\] v: head_dim 7"),
        (lambda: Model("m", (LayerSpec(0, 16, 16),)), "heads 0"),
        (lambda: Model("m", (LayerSpec(1, 8, 8),), rope=ROPE), "rotates 16 channels"),
        (lambda: Model("m", (LayerSpec(1, 16, 16),), dtype="int8"), "dtype 'int8'"),
        (lambda: Model("m", (LayerSpec(1, 16, 16),), salt=7), "model salt 7"),
    ],
)
def test_impossible_models(make, message):
    with pytest.raises(kvstore.InvalidArgument, match=message):
        make()


@pytest.mark.parametrize(
    "change",
    [
        {"layers": None},
        {"layers": [[1, 2]]},
        {"layers": [[1 << 40, 2, 16, 16, None, "model"]]},
        {"layers": [[0, 2, 16, 16, None, "model"]]},
        {"layers": [[1, 2, 16, 16, None, 7]]},
        {"layers": [["x", 2, 16, 16, None, "model"]]},
        {"layers": [[1, 2, 15, 16, None, "model"]]},
        {"rope": {"inv_freq": "?", "style": "half", "scaling": 1}},
        {"rope": []},
        {"dtype": 7},
    ],
)
def test_damaged_identity_is_corrupt(change):
    data = {**json.loads(canonical_json(RAGGED.to_json())), **change}
    with pytest.raises(kvstore.Corrupt):
        Model.from_json(data)


def test_expect_and_one_record_per_model(tmp_path):
    with kvstore.open(tmp_path / "a.kv", "a") as archive:
        for name in ("a", "b", "c"):
            archive.create_session(name, model=RAGGED if name != "c" else replace(RAGGED, salt=""))
        with archive._read() as snapshot:
            assert len(list(snapshot.scan(b"I"))) == 2
    with kvstore.open(tmp_path / "a.kv") as archive:
        assert archive.session("a", expect=RAGGED).model == RAGGED
        with pytest.raises(kvstore.IdentityMismatch, match=r"'c'.*salt") as caught:
            archive.session("c", expect=RAGGED)
        assert (caught.value.expected, caught.value.found) == ("tenant", "")
