"""`kvstore bench --family fibquant` measures what it says, and finds what is wrong. No timings."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from kvcodecs.errors import Corrupt, InvalidArgument
from kvcodecs.fibquant import FibQuant, book_for
from kvtools import bench, cli
from kvtools.bench import normal_values, quality, vector_speed
from kvtools.bench.heads import attention_weights, heads_of
from kvtools.bench.rows import Row
from kvtools.sample import load_sample


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(vector_speed, "CASES", ((2, 16, "hadamard"), (4, 32, "haar")))
    monkeypatch.setattr(vector_speed, "N_TOKENS", 128)
    monkeypatch.setattr(vector_speed, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(vector_speed, "_PLAIN_SCORES", 1 << 16)
    monkeypatch.setattr(normal_values, "CODEBOOKS", ((2, 16), (4, 32)))
    monkeypatch.setattr(normal_values, "N_VECTORS", 1 << 12)
    monkeypatch.setattr(quality, "CODEBOOKS", ((2, 16), (4, 32)))
    monkeypatch.setattr(quality, "SCHEMES", ("q4_0", "q2_k"))
    monkeypatch.setattr(quality, "_TRIES", 2)
    monkeypatch.setattr(bench, "load_sample", lambda _: load_sample().tiled(256))


def test_family_of_fibquant(capsys):
    assert cli.main(["bench", "--reps", "1", "--family", "fibquant", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "codec" not in report["context"]  # none that --codec names
    rows = [Row(**row) for row in report["rows"]]
    assert {row.group for row in rows} == set(bench.FAMILIES["fibquant"])
    found = {(row.group, row.name): row.value for row in rows}
    for name in ("2x16 hadamard", "4x32 haar"):
        assert found["vectors", f"{name}, encode"] > 0
        assert found["vectors", f"{name}, decode to float16 / memcpy"] > 0
    for name, bits in (("2x16", 2), ("4x32", 1.25)):
        assert found["normal", f"{name}, indices"] == bits
        assert found["normal", f"{name}, with norms"] == bits + 16 / 64
        mse = found["normal", f"{name}, MSE"]
        assert mse == pytest.approx(found["normal", f"{name}, MSE, NumPy"], rel=0.01)
        assert found["normal", f"{name}, MSE, scalars with norms' bits"] < mse
        assert mse < found["normal", f"{name}, MSE, scalars"]
        # Everything counts: indices, norms, headers, four raw tokens, the codebook.
        rate = found["quality", f"fibquant.{name} per_channel, bits"]
        assert bits + 0.25 < rate < bits + 0.9
        assert found["quality", f"kvr1 beside {name}, bits"] == pytest.approx(rate, rel=0.05)
        assert found["quality", f"tkv1 beside {name}, bits"] == pytest.approx(rate, rel=0.05)
    for what in ("K cosine", "V cosine", "attention cosine"):
        more, less = (
            found["quality", f"fibquant.{x} per_channel, {what}"] for x in ("2x16", "4x32")
        )
        assert 0.5 < less < more < 1
    # K has channels that are always large; V has not, and is coded alike.
    aware, alike = (f"fibquant.2x16 {axis}" for axis in ("role_aware", "per_token"))
    assert found["quality", f"{aware}, K cosine"] > found["quality", f"{alike}, K cosine"]
    assert found["quality", f"{aware}, V cosine"] == found["quality", f"{alike}, V cosine"]
    assert 0 < found["quality", f"{aware}, KL"] < found["quality", f"{alike}, KL"]
    # What little V has of means helps as well.
    channels = "fibquant.2x16 per_channel"
    assert found["quality", f"{channels}, V cosine"] > found["quality", f"{alike}, V cosine"]
    assert found["quality", f"{channels}, K cosine"] == found["quality", f"{aware}, K cosine"]
    notes = {row.name.partition(", ")[0]: row.note for row in rows}
    assert notes["ggml.q4_0"] == ""
    assert notes["ggml.q2_k"] == "4 heads of all layers side by side"  # a layer has 3
    bench._show(rows)
    out = capsys.readouterr().out
    assert (
        sum(line.lstrip().startswith(("2x16", "fibquant.2x16")) for line in out.splitlines()) == 5
    )


def test_scalar_quantisers():
    # The errors of 2, 3, 4 and 8 levels are in every textbook.
    levels = {2: 0.3634, 3: 0.1902, 4: 0.1175, 8: 0.03454}
    for n, mse in levels.items():
        assert normal_values.scalar_mse(np.log2(n)) == pytest.approx(mse, abs=6e-5)
    half_way = (1 + np.log2(3)) / 2
    assert normal_values.scalar_mse(half_way) == pytest.approx((0.3634 + 0.1902) / 2, abs=6e-5)


def test_other_bits_are_noticed(monkeypatch):
    book, x = book_for(FibQuant(2, 16).profile(64)), load_sample().v[0][0].astype(np.float32)
    vector_speed.check_bits(book, x)
    for name in ("encode", "decode"):
        with monkeypatch.context() as patched:
            plain = getattr(vector_speed.coding, name)
            patched.setattr(vector_speed.coding, name, lambda *x, plain=plain: _changed(plain(*x)))
            with pytest.raises(Corrupt, match="other bits than NumPy"):
                vector_speed.check_bits(book, x)


def _changed(found):
    *_, last = found if isinstance(found, tuple) else (found,)
    last[-1, -1] += 1
    return found


def test_other_values_are_noticed(monkeypatch):
    decode_all = vector_speed.decode_all

    def decode(config, streams, outputs, n_threads, simd=None):
        decode_all(config, streams, outputs, n_threads, simd)
        outputs[0][0, 0, 0] += simd is not None

    monkeypatch.setattr(vector_speed, "decode_all", decode)
    with pytest.raises(Corrupt, match="decodes other values"):
        vector_speed.measure_vectors(load_sample(), 1)
    monkeypatch.setattr(normal_values, "plain_mse", lambda *_: 0.1)
    with pytest.raises(Corrupt, match=r"2x16: a mean squared error of 0\.11"):
        normal_values.measure_normal()


def test_heads_that_no_codebook_divides(monkeypatch):
    monkeypatch.setattr(vector_speed, "CASES", ((3, 16, "hadamard"), (64, 16, "hadamard")))
    with pytest.raises(InvalidArgument, match="no codebook is for heads"):
        vector_speed.measure_vectors(load_sample(), 1)


def test_models_without_rope():
    sample = load_sample().tiled(32)
    sample = replace(sample, model=replace(sample.model, rope=None))
    heads = heads_of(sample, 1)
    assert np.array_equal(heads.q, heads.k)  # K asks where there are no queries
    weights = attention_weights(heads, heads.k)
    assert weights.sum(axis=2) == pytest.approx(1)
    assert not np.triu(weights[0], 1).any()  # nothing that comes later is read
