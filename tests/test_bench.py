"""`kvstore bench` runs, checks what it measures, and writes what it prints. No timings here."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from kvcodecs.errors import Corrupt
from kvtools import bench, cli
from kvtools.bench import processes, rows
from kvtools.bench.codec import check_bound, decode_all, encode_all
from kvtools.sample import load_sample
from kvtools.tensorfile import TensorWriter

import kvstore

CHEAP = ["file", "open", "append", "codec"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    from kvtools.bench import archive

    monkeypatch.setattr(archive, "N_SESSIONS", 3)
    monkeypatch.setattr(archive, "APPEND_LAYERS", 3)
    monkeypatch.setattr(archive, "APPEND_PREFILL", 130)
    monkeypatch.setattr(archive, "APPENDS", 2)
    monkeypatch.setattr(bench, "RANGE_TOKENS", (1024, 1500))
    monkeypatch.setattr(bench, "IMPORT_REPS", 1)


def test_cheap_groups(capsys, tmp_path):
    path = tmp_path / "rows.csv"
    argv = ["bench", "--reps", "1", "--only", ",".join(CHEAP), "--csv", str(path), "--json"]
    assert cli.main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["group"] for row in report["rows"]} == set(CHEAP)
    assert set(report["context"]) == {
        "data", "codec", "reps", "version", "commit", "cpu", "cores", "python",
    }  # fmt: skip
    found = {(row["group"], row["name"], row["unit"]): row["value"] for row in report["rows"]}
    payload = found["file", "payloads", "bits per value"]
    everything = found["file", "everything", "bits per value"]
    assert 2 < payload < everything < found["file", "file", "bits per value"]
    assert found["append", "bytes written", "kB per commit"] > 0
    assert report["context"]["codec"].startswith("tkv1 rel_step=0.25 ")
    with path.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(report["rows"])
    assert [float(row["value"]) for row in written] == [row["value"] for row in report["rows"]]
    assert {row["commit"] for row in written} == {report["context"]["commit"]}


def test_range_import_and_memory(capsys):
    argv = ["bench", "--reps", "1", "--only", "range,import,memory", "--memory-mb", "4"]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    for word in ("range: long / short", "import: kvstore", "memory: pack", "beyond output"):
        assert word in out


def test_raw_codec(capsys):
    assert cli.main(["bench", "--codec", "raw", "--reps", "1", "--only", "codec,file"]) == 0
    assert "bits per value" in capsys.readouterr().out


def test_wrong_values_are_noticed():
    sample = load_sample()
    config = kvstore.TKV1()
    streams = encode_all(config, sample, 512)
    outputs = [np.empty_like(stream.x) for stream in streams]
    decode_all(config, streams, outputs, 1)
    for stream, out in zip(streams, outputs, strict=True):
        check_bound(stream, out, config)
        step = stream.params.step
        out[1, 2, 3] += step / 2  # a sink: its bound is finer
        with pytest.raises(Corrupt, match="sinks"):
            check_bound(stream, out, config)


def test_medians(monkeypatch):
    times = iter([0, 1, 10, 15, 20, 21, 30, 39])
    monkeypatch.setattr(rows.time, "perf_counter", lambda: float(next(times)))
    calls = []
    assert rows.interleaved_seconds([lambda: calls.append(1), lambda: calls.append(2)], 2) == [1, 7]
    assert calls == [1, 2] * 3


def test_growth_is_never_negative():
    assert processes._growth(1000, 3000, 48_000) == 2.0
    assert processes._growth(1000, 1001, 1_000_000) == 0
    assert processes._growth(2000, 1000) == 0


def test_input_that_does_not_fit(capsys, tmp_path):
    values = np.zeros((2, 2, 7, 4), np.float16)
    layers = (kvstore.LayerSpec(2, 4, 4), kvstore.LayerSpec(2, 4, 4, window=3))
    model = kvstore.Model("m", layers)
    windowed = {f"layers.{i}.{name}": values[i] for i in range(2) for name in ("k_pre", "v")}
    windowed["layers.1.v"] = values[1][:, 4:]
    for name, arrays, words in (
        ("no_v", {"k_pre": values}, ["no V for layers [0, 1]", "benchmark"]),
        ("window", windowed, ["layer 1 has 3 tokens", "others have 7"]),
    ):
        path = tmp_path / f"{name}.safetensors"
        shapes = {key: (a.dtype, a.shape) for key, a in arrays.items()}
        with TensorWriter(path, shapes, {"kvstore": json.dumps({"model": model.to_json()})}) as w:
            for key, a in arrays.items():
                w.array(key)[...] = a
        assert cli.main(["bench", "--data", str(path), "--only", "codec"]) == 1
        err = capsys.readouterr().err
        assert "--no-v" not in err
        for word in words:
            assert word in err


def test_csv_takes_any_name(tmp_path):
    path = tmp_path / "rows.csv"
    rows.write_csv(str(path), [rows.Row("g", "n", 1.0, "u")], {"data": "caf\xe9 \udcff"})
    assert "caf\xe9 \\udcff" in path.read_text(encoding="utf-8")


def test_csv_needs_its_folder(capsys, tmp_path):
    path = tmp_path / "no" / "rows.csv"
    assert cli.main(["bench", "--only", "import", "--csv", str(path)]) == 1
    assert "no such folder" in capsys.readouterr().err
