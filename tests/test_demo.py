"""`kvstore demo` and the packaged sample."""

from __future__ import annotations

import json
import os
from importlib import resources

import numpy as np
import pytest
from kvtools import cli, demo
from kvtools.sample import SAMPLE_NAME, load_sample

import kvstore


def test_the_sample_ships_and_is_what_its_note_says():
    data = resources.files("kvtools") / "data"
    assert len((data / SAMPLE_NAME).read_bytes()) < 1_000_000
    note = (data / "README.md").read_text()
    for word in ("Apache-2.0", "public domain", "Austen", "[2][3][645][64]"):
        assert word in note
    sample = load_sample()
    assert sample.n_tokens == 645
    assert [x.shape for x in (*sample.k, *sample.v)] == [(3, 645, 64)] * 4
    assert {x.dtype for x in (*sample.k, *sample.v)} == {np.dtype(np.float16)}
    assert sample.token_ids.shape == (645,)
    assert sample.model.rope is not None
    assert sample.model.rope.n_pairs == 32


def test_tiling_repeats_tokens_and_layers():
    sample = load_sample()
    tiled = sample.tiled(1000, 5)
    assert tiled.model.n_layers == 5
    assert tiled.n_tokens == 1000
    assert np.array_equal(tiled.k[3][:, 645:], sample.k[1][:, : 1000 - 645])


def test_demo(capsys):
    assert cli.main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for word in ("bits per value", "max error / bound", "8 of 24", "times smaller than float16"):
        assert word in out
    assert (
        "survives kill -9: the 645 committed tokens are there, the 100 appended after the commit "
        "are not\n"
    ) in out
    assert "FAILED" not in out


def test_demo_json_and_keep(capsys, tmp_path):
    folder = tmp_path / "kept"
    assert cli.main(["demo", "--json", "--keep", str(folder)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert all(check["ok"] for check in report["checks"])
    assert 2 < report["bits_per_value"] < 5
    assert report["blocks_read"] < report["blocks_stored"]
    assert os.listdir(folder) == ["demo.kv"]
    with kvstore.open(folder / "demo.kv") as archive:
        assert archive.session(demo.SESSION).n_committed == 645
    assert cli.main(["demo", "--keep", str(folder)]) == 1
    assert "exists" in capsys.readouterr().err


def test_demo_fails_if_values_are_wrong(capsys, monkeypatch):
    sample = load_sample()
    sample.v[1][2, 300, 5] += np.float16(4.0)
    monkeypatch.setattr(demo, "load_sample", lambda: sample)
    assert cli.main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "FAILED error within step/2" in out


def test_demo_notices_what_was_not_committed(capsys, monkeypatch):
    real = kvstore.Session.n_committed
    monkeypatch.setattr(
        kvstore.Session, "n_committed", property(lambda self: real.fget(self) + 100)
    )
    assert cli.main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "FAILED survives kill -9: 745 tokens are there, with their ids; 645 were comm" in out


@pytest.mark.parametrize("code", ["pass", "raise SystemExit(3)"])
def test_demo_reports_a_writer_that_dies(capsys, monkeypatch, code):
    monkeypatch.setattr(demo, "WRITER", ["-c", code])
    assert cli.main(["demo"]) == 1
    assert "writing process" in capsys.readouterr().err
