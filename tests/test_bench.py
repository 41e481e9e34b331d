"""`kvstore bench` runs, checks what it measures, and writes what it prints. No timings here."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from kvcodecs.blocks import SIMD_LEVELS
from kvcodecs.errors import Corrupt
from kvcodecs.fibquant import FibQuant
from kvcodecs.ggml.schemes import SCHEMES
from kvtools import bench, cli
from kvtools.bench import byte_coders, many, peers, processes, rows, speed
from kvtools.bench.codec import (
    check_bound,
    decode_all,
    empty_like,
    encode_all,
    rivals,
    sources_of,
)
from kvtools.bench.rows import Row
from kvtools.sample import load_sample
from kvtools.tensorfile import TensorWriter

import kvstore

CHEAP = ["file", "open", "append", "prefix", "codec", "rate", "peers"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    from kvtools.bench import archive, sharing

    monkeypatch.setattr(archive, "N_SESSIONS", 3)
    monkeypatch.setattr(archive, "APPEND_LAYERS", 3)
    monkeypatch.setattr(archive, "APPEND_PREFILL", 130)
    monkeypatch.setattr(archive, "APPENDS", 2)
    monkeypatch.setattr(many, "PROMPT_TOKENS", 1000)
    monkeypatch.setattr(many, "N_PROMPTS", 4)
    monkeypatch.setattr(sharing, "LENGTHS", (100, 1200))
    monkeypatch.setattr(sharing, "READ_TOKENS", 150)
    monkeypatch.setattr(sharing, "READ_LAYERS", 2)
    monkeypatch.setattr(sharing, "N_FORKS", 2)
    monkeypatch.setattr(bench, "RANGE_TOKENS", (1024, 1500))
    monkeypatch.setattr(bench, "IMPORT_REPS", 1)
    monkeypatch.setattr(speed, "ROUNDS_PER_REP", 1)
    monkeypatch.setattr(speed, "LEAST_SECONDS", 0.0)


def test_cheap_groups(capsys, tmp_path):
    path = tmp_path / "rows.csv"
    argv = ["bench", "--reps", "1", "--only", ",".join(CHEAP), "--csv", str(path), "--json"]
    argv += ["--sessions", "20"]
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
    prefix = {name for group, name, _ in found if group == "prefix"}
    for kind in ("all stored", "half stored", "miss"):
        assert {f"match, {kind}{what}" for what in ("", ", slowest prompt", ", CPU time")} <= prefix
    index, ids, everything = (
        found["prefix", name, "%"]
        for name in ("prefix index", "token ids", "index and bookkeeping")
    )
    assert 0 < index < index + ids < everything < 20
    assert found["prefix", "bytes of a fork", "kB"] >= 0
    assert report["context"]["codec"].startswith("kvr1 rel_step=0.25 ")
    names = {name for group, name, _ in found if group == "codec"}
    for name in ("tkv1 encode", "kvr1 encode from float16", "kvr1 encode / tkv1 encode"):
        assert name in names
    assert {f"kvr1 decode to float16, {level}" for level in SIMD_LEVELS} <= names
    for name in ("rel_step 0.25 K", "rel_step 1 V", "rel_step 0.125 K and V"):
        old, new = (found["rate", f"{c}, {name}", "bits per value"] for c in ("tkv1", "kvr1"))
        assert found["rate", f"kvr1 / tkv1, {name}", "%"] == pytest.approx(100 * new / old)
        assert 0.9 < new / old < 1.1
    size = found["codec", "kvr1 size", "bits per value"]
    assert found["peers", "kvr1, size", "bits per value"] == size
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
    argv = ["bench", "--codec", "raw", "--reps", "1", "--only", "codec,file,rate"]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "raw decode to float16" in out
    assert "tkv1" not in out


def test_groups_that_cannot_measure_say_so(capsys):
    assert tuple(bench.GROUPS) == cli.BENCH_GROUPS
    assert cli.main(["bench", "--codec", "raw", "--reps", "1", "--only", "open,rate"]) == 0
    out, err = capsys.readouterr()
    assert "open: archive" in out
    assert err.endswith(
        "kvstore: rate: only with --codec kvr1, which is compared with others there\n"
    )
    assert cli.main(["bench", "--codec", "raw", "--only", "rate,peers"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "rate, peers: only with --codec kvr1" in err


def test_family_of_block_quantised_codecs(capsys, monkeypatch):
    pytest.importorskip("gguf", reason="the group rows compares with it")
    from kvtools.bench import attention, flat, row_speed, schemes

    monkeypatch.setattr(schemes, "TIMED_VALUES", 1)
    monkeypatch.setattr(schemes, "SEARCHED_VALUES", 1 << 10)
    monkeypatch.setattr(row_speed, "MANY_VALUES", 1 << 14)
    monkeypatch.setattr(row_speed, "FEW_VALUES", 1 << 12)
    monkeypatch.setattr(row_speed, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(attention, "N_TOKENS", 200)
    monkeypatch.setattr(flat, "N_TOKENS", 500)
    monkeypatch.setattr(attention, "SHAPES", attention.SHAPES[1:2])
    argv = ["bench", "--reps", "1", "--family", "blockquant", "--json"]
    assert cli.main(argv) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["group"] for row in rows} == set(bench.FAMILIES["blockquant"])
    found = {row["name"]: row["value"] for row in rows}
    for scheme in SCHEMES:
        assert found[f"{scheme.name}, bits"] == scheme.bits_per_value
        assert found[f"{scheme.name}, decode"] > 0
    # More bits lose less, of one kind and of the next.
    for name in ("K cosine", "V cosine", "attention cosine"):
        better = [found[f"{x}, {name}"] for x in ("f16", "q8_0", "q6_k", "q4_k", "q2_k", "q1_0")]
        assert better == sorted(better, reverse=True)
    assert found["q8_0, attention RMSE"] < 0.05
    schemes.show_schemes([Row(**row) for row in rows if row["group"] == "schemes"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(SCHEMES) + 1
    unfit = {line.split()[0] for line in lines if line.endswith("not for 3 x 64")}  # of 192 values
    assert unfit == {x.name for x in SCHEMES if 192 % x.block_values}
    # gguf is compared with once; asked for alone, the group has every size.
    n_many = sum("16k values to float32, gguf" in name for name in found)
    n_few = sum("4k values to float32, gguf" in name for name in found)
    assert (n_few, n_many) == (0, 5)
    argv = ["bench", "--reps", "1", "--family", "blockquant", "--only", "rows"]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "codec: " not in out
    assert "dequantise 4k values to float32, gguf" in out
    with pytest.raises(SystemExit):
        cli.main(["bench", "--family", "blockquant", "--only", "codec"])
    assert "groups are schemes, rows, attention, flat" in capsys.readouterr().err


def test_rivals():
    asked = kvstore.TKV1(max_error=0.1, sink=2, sink_div=8, ar=False, lane_channels=16)
    other = kvstore.KVR1(max_error=0.1, sink=2, sink_div=8, ar=False)
    assert rivals(asked) == {"tkv1": asked, "kvr1": other}
    assert list(rivals(other)) == ["kvr1", "tkv1"]
    assert rivals(kvstore.TKV1(sink_div=1000)) == {"tkv1": kvstore.TKV1(sink_div=1000)}
    assert rivals(kvstore.Raw()) == {"raw": kvstore.Raw()}


def test_wrong_values_are_noticed():
    sample = load_sample()
    config = kvstore.TKV1()
    streams = encode_all(config, sources_of(sample), 512)
    outputs = empty_like(streams, np.float32)
    decode_all(config, streams, outputs, 1)
    for stream, out in zip(streams, outputs, strict=True):
        check_bound(stream, out, config)
        step = stream.params.step
        out[1, 2, 3] += step / 2  # a sink: its bound is finer
        with pytest.raises(Corrupt, match="sinks"):
            check_bound(stream, out, config)


def test_timed_layers_are_spread(monkeypatch):
    sample = load_sample().tiled(8, 7)
    assert speed.timed_layers(sample).model == sample.model
    monkeypatch.setattr(speed, "available_cpus", lambda: 1)
    for n_layers, layers in ((3, [0, 3, 6]), (1, [0])):
        monkeypatch.setattr(speed, "VALUES_PER_CORE", n_layers * sample.n_values // 7)
        timed = speed.timed_layers(sample)
        assert timed.model.n_layers == n_layers
        assert [id(x) for x in timed.v] == [id(sample.v[i]) for i in layers]


@pytest.mark.parametrize("way", ["encode", "decode"])
def test_differences_are_noticed(monkeypatch, way):
    sample = load_sample().tiled(64)
    coded, decoded = speed.encode_all, speed.decode_all

    def encode(config, sources, block, n_threads=1):
        sources = [replace(s, x=s.x + (n_threads > 1)) for s in sources]
        return coded(config, sources, block, n_threads)

    def decode(config, streams, outputs, n_threads, simd=None):
        decoded(config, streams, outputs, n_threads, simd)
        if n_threads > 1:
            bound = streams[0].params.step / 2
            outputs[0][0, -1, 0] += bound if config.codec == "tkv1" else 0

    monkeypatch.setattr(speed, "available_cpus", lambda: 2)
    monkeypatch.setattr(
        speed, *(("encode_all", encode) if way == "encode" else ("decode_all", decode))
    )
    monkeypatch.setattr(speed, "check_bound", lambda *_: None)
    words = {"encode": "frames", "decode": "threads: layer 0 k differs"}
    with pytest.raises(Corrupt, match=words[way]):
        speed.measure_codec(kvstore.TKV1(), sample, 1)


def test_wrong_matches_are_noticed(tmp_path):
    sessions = many.ManySessions(load_sample().token_ids, 20)
    many.store(tmp_path / "many.kv", sessions)
    whole = sessions.prompts()[0]
    with kvstore.open(tmp_path / "many.kv", mode="a") as archive:
        assert {name.partition("/")[0] for name in archive.names()} == {"shared", "user"}
        many.check(archive, whole)
        for wrong in (replace(whole, n_tokens=999), replace(whole, ids=whole.ids[:-1])):
            with pytest.raises(Corrupt, match="of a prompt match"):
                many.check(archive, wrong)
        archive.delete_session("user/7")
    with pytest.raises(Corrupt, match="sessions are missing"):
        many.measure_open(tmp_path / "many.kv", sessions, 1)


def test_times_are_compared_within_rounds(monkeypatch):
    # Start and end of each call: a round to see how long they are, then three.
    wall = iter([0, 1, 0, 2, 0, 1, 0, 7, 0, 10, 0, 50, 0, 2, 0, 12])
    monkeypatch.setattr(rows.time, "perf_counter", lambda: float(next(wall)))
    monkeypatch.setattr(rows.time, "process_time", lambda: 0.0)
    calls = []
    times = rows.interleaved([lambda: calls.append(1), lambda: calls.append(2)], 3)
    assert calls == [1, 2] * 4
    assert [times.seconds(0), times.seconds(1)] == [2, 12]
    assert times.ratio(1, 0) == 6


def test_short_actions_are_called_several_times(monkeypatch):
    monkeypatch.setattr(rows.time, "perf_counter", lambda: 4.0 * len(calls))
    monkeypatch.setattr(rows.time, "process_time", lambda: 3.0 * len(calls))
    calls = []
    times = rows.interleaved([lambda: calls.append(1)], 2, least_seconds=10)
    assert len(calls) == 1 + 2 * 3
    assert (times.seconds(0), times.seconds(0, "cpu")) == (4, 3)


@pytest.mark.parametrize("codec", peers.make(), ids=lambda codec: codec.name)
def test_peers(codec):
    sample = load_sample().tiled(1280)
    k, v = (np.stack(x) for x in (sample.k, sample.v))
    bounds = ([0.25, 0.125], [0.0625, 0.03125])
    coded = codec.encode(k, v, *bounds, [7, 9])
    out = codec.decode(coded, (np.zeros_like(k), np.zeros_like(v)))
    for x, y, layers in zip((k, v), out, bounds, strict=True):
        for layer, bound in enumerate(layers):
            error = np.abs(x[layer].astype(np.float64) - y[layer]).max()
            assert bound / 2 < error < 1.1 * bound  # float16 rounds
    size = codec.nbytes(coded)
    assert 2 < 8 * size / (k.size + v.size) < 8
    for index in (0, 5, 9):
        part = [np.zeros((2, 3, peers.UNIT_TOKENS, 64), np.float16) for _ in "kv"]
        codec.decode_block(coded, index, part)
        here = slice(index * peers.UNIT_TOKENS, (index + 1) * peers.UNIT_TOKENS)
        for x, y in zip(part, out, strict=True):
            assert np.array_equal(x, y[:, :, here])
    frames = coded["B"][1][0][1]
    frames[0] = frames[0][:-1] + bytes([frames[0][-1] ^ 1])
    with pytest.raises(Corrupt, match="crc32c"):
        codec.decode(coded, out)


@pytest.mark.parametrize("peer", byte_coders._peers(), ids=lambda peer: peer.name)
def test_byte_coders(peer):
    x = np.random.default_rng(0).standard_normal((2, 100, 6), dtype=np.float32)
    x[1, 2, 3], x[0, 99, 5], x[0, 0, 0] = 1e4, -1e5, 12.7  # beyond int8, and just within
    out = np.zeros_like(x)
    packed = peer.encode(x, 0.1)
    peer.decode(packed, 0.1, out)
    assert np.abs(out[np.abs(x) < 20] - x[np.abs(x) < 20]).max() < 0.0501
    assert out[1, 2, 3] == pytest.approx(1e4)
    assert out[0, 99, 5] == pytest.approx(-1e5)
    assert packed.n_bytes == len(packed.data) + 2 * 8 + 4


def test_byte_coders_are_checked(monkeypatch):
    monkeypatch.setattr(byte_coders._Peer, "decode", lambda *_: None)
    with pytest.raises(Corrupt, match="zstd-1 is"):
        byte_coders.measure_peers(kvstore.KVR1(), load_sample().tiled(64), 1)


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


def test_decoding_on_a_device(monkeypatch, capsys, host_library, tmp_path):
    """On the stand-in: what the times are of is right, the times mean nothing."""
    from kvgpu.device import using
    from kvgpu.host_device import HostDevice
    from kvtools.bench import device

    for name, value in {"SIZES": (1, 5, 100), "COPY_BYTES": 4096, "UPLOAD_BYTES": 4096}.items():
        monkeypatch.setattr(device, name, value)
    monkeypatch.setattr(device, "FIBQUANT", FibQuant(8, 4))  # built in no time
    path = tmp_path / "x.csv"
    with using(HostDevice(host_library)):
        assert cli.main(["bench", "--device", "cuda", "--reps", "1", "--csv", str(path)]) == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert {row["group"] for row in rows} == {"device"}
    assert all(0 < float(row["value"]) < np.inf for row in rows)
    names = {row["name"] for row in rows}
    assert {
        "kvr1, 100 blocks: decoded", "tkv1, 5 lanes: upload", "fibquant, 100 blocks: of copy"
    } < names  # fmt: skip
    table = capsys.readouterr().out
    assert "end to end GB/s" in table
    lines = [line for line in table.splitlines() if line.startswith(("kvr1,", "tkv1,", "fibq"))]
    assert len(lines) == 9


def test_a_device_that_decodes_wrong_is_found_out(monkeypatch, host_library, capsys):
    from kvgpu.device import using
    from kvgpu.host_device import HostDevice, HostStream
    from kvtools.bench import device

    launch = HostStream.launch

    def wrong(self, what, base):
        launch(self, what, base)
        memory = next(arrays)
        memory.array.reshape(-1).view(np.uint16)[-1] ^= 1

    class Wrong(HostDevice):
        def empty(self, shape, dtype):
            made.append(super().empty(shape, dtype))
            return made[-1]

    made = []
    arrays = iter(made)
    for name, value in {"SIZES": (64,), "COPY_BYTES": 4096, "UPLOAD_BYTES": 4096}.items():
        monkeypatch.setattr(device, name, value)
    monkeypatch.setattr(device, "FIBQUANT", FibQuant(8, 4))
    monkeypatch.setattr(HostStream, "launch", wrong)
    with using(Wrong(host_library)):
        assert cli.main(["bench", "--device", "cuda", "--reps", "1"]) == 1
    assert "differs from the CPU's values" in capsys.readouterr().err


def test_no_device_to_measure(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert cli.main(["bench", "--device", "cuda"]) == 1
    assert "decoding on a GPU needs CuPy" in capsys.readouterr().err
