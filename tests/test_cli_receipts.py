"""Receipts on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from kvtools.tensorfile import TensorFile, TensorWriter

import kvstore
from kvstore import keys, source_digest
from kvstore.receipts import SessionReceipt


def save(path: Path, seed: int = 0, tokens: int = 300) -> Path:
    x = np.random.default_rng(seed).standard_normal((2, 2, 2, tokens, 8)).astype(np.float16)
    shapes = {"k_pre": (x.dtype, x[0].shape), "v": (x.dtype, x[1].shape)}
    with TensorWriter(path, shapes) as writer:
        writer.array("k_pre")[...], writer.array("v")[...] = x
    return path


@pytest.fixture
def source(tmp_path):
    return save(tmp_path / "chat.safetensors")


@pytest.fixture
def packed(run, source, tmp_path):
    archive = tmp_path / "a.kv"
    assert run("pack", source, archive, "--receipts", "--block-tokens", 128)[0] == 0
    return archive


def succeeds(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert (code, err) == (0, "")
    return out


def test_a_packed_session_has_a_receipt(run, packed, source):
    lines = succeeds(run("receipt", packed)).splitlines()
    assert len(lines) == 2
    assert lines[1].split()[:5] == ["0", "0:300", "append", "12", "0"]
    assert len(succeeds(run("receipt", packed, "chat", "--layers")).splitlines()) == 5
    report = json.loads(succeeds(run("receipt", packed, "chat", "--json")))
    with kvstore.open(packed) as archive:
        (receipt,) = archive.session("chat").receipts()
    (found,) = report["receipts"]
    assert report["session"] == "chat"
    assert (found["digest"], found["kept"]) == (receipt.digest(), 300)
    assert SessionReceipt.from_json(found["receipt"]) == receipt
    assert receipt.digest().removeprefix("blake3:")[:12] in lines[1]


def test_the_file_that_was_packed_is_told_from_others(run, packed, source, tmp_path):
    assert "is the source" in succeeds(run("receipt", packed, "--source", source))
    other = save(tmp_path / "other.safetensors", seed=1)
    code, out, _ = run("receipt", packed, "--source", other)
    assert (code, "layer 1 v" in out) == (1, True)
    code, out, _ = run("receipt", packed, "--source", other, "--json")
    assert (code, json.loads(out)["source"]["same"]) == (1, False)
    short = save(tmp_path / "short.safetensors", tokens=299)
    code, _, err = run("receipt", packed, "--source", short)
    assert (code, "299 tokens" in err) == (1, True)


def test_a_session_without_receipts(run, source, tmp_path):
    archive = tmp_path / "b.kv"
    succeeds_quietly = run("pack", source, archive)
    assert succeeds_quietly[0] == 0
    code, out, err = run("receipt", archive)
    assert (code, out) == (0, "")
    assert "'chat' has no receipts" in err
    assert json.loads(succeeds(run("receipt", archive, "--json")))["receipts"] == []
    out = succeeds(run("verify", archive, "--receipts"))
    assert "0 receipts checked; 1 session without" in out
    code, _, err = run("receipt", archive, "--source", source)
    assert (code, "no receipts" in err) == (1, True)
    code, _, err = run("receipt", archive, "nobody")
    assert (code, "no such session" in err) == (1, True)


def test_what_was_taken_back_is_shown(run, packed):
    succeeds(run("trim", packed, "chat", "--to", 200))
    assert "0:300, taken back from 200" in succeeds(run("receipt", packed))


def test_verify_tells_receipts_that_are_wrong(run, packed):
    assert "1 receipt checked" in succeeds(run("verify", packed, "--receipts"))
    with kvstore.open(packed, "a") as archive, archive._backend.write(1) as transaction:
        ((key, value),) = [(k, bytes(v)) for k, v in transaction.scan(keys.RECEIPT)]
        transaction.put(key, value[:-1] + bytes([value[-1] ^ 1]))
    code, out, _ = run("verify", packed, "--receipts")
    assert (code, "receipt 0" in out) == (1, True)
    code, out, _ = run("verify", packed, "--receipts", "--json")
    report = json.loads(out)
    assert code == 1
    assert (report["receipts_checked"], report["n_receipts"]) == (True, 1)
    assert report["problems"][0]["kind"] == "Corrupt"
    code, _, err = run("receipt", packed)
    assert (code, "receipt 0" in err) == (1, True)


def test_flat_layers_have_none(run, packed, tmp_path):
    flat = tmp_path / "flat"
    assert run("migrate", packed, f"flat:{flat}", "--codec", "ggml.f16")[0] == 0
    assert run("verify", flat, "--receipts")[0] == 2


def test_unpack_writes_a_decode_receipt(run, packed, tmp_path):
    out, file = tmp_path / "out.safetensors", tmp_path / "out.json"
    options = ("--range", "100:250", "--layers", "1", "--receipt", file)
    assert run("unpack", packed, out, *options)[0] == 0
    receipt = SessionReceipt.from_json(json.loads(file.read_text()))
    assert (receipt.operation, receipt.first_token, receipt.stop_token) == ("decode", 100, 250)
    with TensorFile(out) as tensors:
        for part in receipt.streams:
            assert part.layer == 1
            values = tensors.read({"k": "k_pre", "v": "v"}[part.kind])[0]
            assert part.receipt.decoded_digest == source_digest(values)
    with kvstore.open(packed) as archive:
        stored = {
            (part.layer, part.kind, page): digest
            for part in archive.session("chat").receipts()[0].streams
            for page, digest in zip(part.pages, part.receipt.page_digests, strict=True)
        }
    part = receipt.streams[0]
    digests = [stored[part.layer, part.kind, page] for page in part.pages]
    assert list(part.receipt.page_digests) == digests
    assert list(tmp_path.glob(".*")) == []
