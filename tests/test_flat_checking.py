"""Checking folders of flat layers: every damage is named, and layers that disagree."""

from __future__ import annotations

import numpy as np
import pytest
from kvcodecs.errors import InvalidArgument, NotFound

import kvstore
from kvstore import flat

MODEL = kvstore.Model.uniform(name="m", n_layers=3, n_kv_heads=2, head_dim=32, head_dim_v=64)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    k = rng.standard_normal((3, 2, 300, 32), np.float32)
    v = rng.standard_normal((3, 2, 300, 64), np.float32)
    with flat.create(tmp_path / "chat", MODEL, scheme={"k": "q8_0", "v": "q4_0"}) as session:
        session.append(k, v)
        session.commit()
    return tmp_path / "chat"


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_sound(folder):
    told = []
    report = flat.verify(folder, progress=lambda *done: told.append(done))
    assert report.ok
    assert report.n_layers == 3
    assert report.n_bytes == 3 * 300 * (68 + 72)
    with flat.open(folder) as session:
        assert report.n_blocks == session.verify()
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_every_damage_is_named(folder):
    flip(folder / "layer-00000.kvf", 65536 + 5)  # rows of K
    flip(folder / "layer-00000.kvf", 65536 + 299 * 68)
    flip(folder / "layer-00000.kvf", 12288 + 100)  # the second commit record
    with open(folder / "layer-00001.kvf", "r+b") as file:
        file.truncate(65536)
    (folder / "layer-00002.kvf").unlink()
    report = flat.verify(folder)
    found = [str(problem) for problem in report.problems]
    assert not report.ok
    assert len(found) == 5
    assert "copy of the commit record" in found[0]
    assert "k rows [0, " in found[1]
    assert "300): wrong checksum" in found[2]
    assert "layer-00001.kvf" in found[3]
    assert "layer-00002.kvf: missing" in found[4]


def test_layers_are_checked_without_the_record_of_the_session(folder):
    flip(folder / "session", 30)
    flip(folder / "layer-00001.kvf", 65536 + 5)
    flip(folder / "layer-00002.kvf", 100)  # the header
    found = [str(problem) for problem in flat.verify(folder).problems]
    assert len(found) == 3
    assert "session" in found[0]
    assert "layer-00001.kvf: k rows" in found[1]
    assert "layer-00002.kvf" in found[2]


def test_layers_that_disagree(folder):
    with flat.FlatLayer.open(folder / "layer-00001.kvf", "a") as layer:
        layer.take_back(290)
    (problem,) = flat.verify(folder).problems
    assert "layer 1 has [0, 290), others [0, 300)" in str(problem)
    flat.open(folder, "a").close()
    assert flat.verify(folder).ok


def test_a_folder_of_flat_layers_is_no_archive(folder, tmp_path):
    for path in (folder, folder.parent, f"flat:{folder}"):
        for mode in "ra":
            with pytest.raises(InvalidArgument, match=r"kvstore\.flat\.open"):
                kvstore.open(path, mode)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["chat"]
    with pytest.raises(NotFound):
        flat.verify(tmp_path)
