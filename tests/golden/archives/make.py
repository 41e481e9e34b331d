"""Write the fixture of an archive format, once: files that are there are never replaced.

Run as ``python make.py FOLDER [zarr]`` with the release whose format it is installed, and nothing
newer: it writes FOLDER/formatN.kv and what its sessions hold, FOLDER/formatN.json; for the zarr
backend FOLDER/formatN-zarr.kv and .json. Sessions that a release cannot make are left out.
"""

import dataclasses
import hashlib
import itertools
import json
import shutil
import sys
import tempfile
from pathlib import Path

import lmdb
import numpy as np
from kvtools.sample import load_sample

import kvstore
from kvstore import KVR1, TKV1, LayerSpec, Model, Raw
from kvstore.records import FORMAT_VERSION

BLOCK = 32


def sessions(archive):
    sample = load_sample()
    k, v, ids = np.stack(sample.k)[:, :2], np.stack(sample.v)[:, :2], sample.token_ids
    rope = sample.model.rope
    layers = (LayerSpec(2, 64, 64),) * 2
    model = Model(name="SmolLM2-135M-Instruct", layers=layers, rope=rope, dtype="float16")

    def store(name, codec, tokens, cuts=(), *, start=0, k_state="pre", with_ids=True, **more):
        session = archive.create_session(
            name, model=model, codec=codec, block_tokens=BLOCK, fit_tokens=BLOCK, **more
        )
        edges = [start, *(start + cut for cut in cuts), start + tokens]
        for lo, hi in itertools.pairwise(edges):
            rows = {"token_ids": ids[lo:hi]} if with_ids else {}
            session.append(k[:, :, lo:hi], v[:, :, lo:hi], k_state=k_state, **rows)
            session.commit()
        return session

    # A raw head, sealed blocks and a tail; both lossy codecs; K from both sides of RoPE.
    metadata = {"from": "fixture", "n": 1, "é": [None, 1.5, {"deep": True}]}
    tkv1 = store("tkv1", TKV1(rel_step=0.25), 75, (5, 40), metadata=metadata)
    kvr1 = store("kvr1 post", KVR1(rel_step=0.25), 75, (64,), start=200, k_state="post")
    mixed = {"k": KVR1(step=0.5), "v": TKV1(step=0.25)}
    store("mixed/no ids", mixed, BLOCK, start=400, with_ids=False)
    # Too short for statistics: a raw head is all there is. And one without a token.
    store("head", KVR1(), 7, (3,), start=500)
    store("raw ☃", Raw(), 9, start=520)
    store("empty", KVR1(), 0)
    store("statistics of tkv1", None, 12, start=600, stats_from="tkv1")
    tkv1.close()
    kvr1.close()

    # Layers that differ: a window whose session begins with its last tokens, and no V.
    layers = (LayerSpec(2, 64, 64), LayerSpec(2, 64, None, window=16, rope=None))
    other = Model(name="odd layers", layers=layers, rope=rope, dtype="float16", salt="s")
    odd = archive.create_session("odd", model=other, codec=KVR1(), block_tokens=16, fit_tokens=16)
    odd.append([k[0, :, :40], k[1, :, 24:40]], [v[0, :, :40], None], token_ids=ids[:40])
    odd.commit()
    odd.close()

    if FORMAT_VERSION < 2:
        return
    fork = archive.session("tkv1").fork("fork", at=50, metadata={"forked": 1})
    fork.append(k[:, :, 300:330], v[:, :, 300:330], token_ids=ids[300:330])
    fork.commit()
    archive.session("kvr1 post").fork("fork in place").close()
    cut = store("truncated", TKV1(rel_step=0.25), 50, start=100)
    cut.truncate(39)
    trimmed = store("trimmed", KVR1(rel_step=0.25), 40, start=150)
    trimmed.trim_front(33)
    trimmed.pin()
    ranged = store("range", KVR1(rel_step=0.25), 3, start=450)
    ranged.append_range(archive.session("kvr1 post"), 10, 60)
    ranged.append(k[:, :, 340:350], v[:, :, 340:350], token_ids=ids[340:350])
    ranged.commit()
    shard = dataclasses.replace(
        model, weights="w", tokenizer="t", adapter="a", shard=kvstore.Shard(0, 2, (4, 6))
    )
    part = archive.create_session("shard", model=shard, codec=Raw())
    part.append(k[:, :, :3], v[:, :, :3])
    part.commit()
    for session in (fork, cut, trimmed, ranged, part):
        session.close()


def sha256(array, dtype):
    return hashlib.sha256(np.ascontiguousarray(array, dtype).tobytes()).hexdigest()


def contents(path):
    """Return what the sessions of an archive hold, as this release reads it."""
    found = {}
    with kvstore.open(path) as archive:
        assert archive.verify(decode=True).ok
        for name in archive.names():
            session, streams = archive.session(name), {}
            info = session.info()
            for layer, kind in session.model.streams():
                start = max(session.start_token(layer, kind), getattr(info, "first_token", 0))
                for k_state in ("pre", "post") if kind == "k" else ("pre",):
                    values = session.read(layer, kind, start, k_state=k_state, dtype="float16")
                    label = f"{layer} k {k_state}" if kind == "k" else f"{layer} v"
                    streams[label] = f"{values.shape} {sha256(values, '<f2')}"
            ids = session.token_ids(getattr(info, "first_token", 0))
            found[name] = {
                "model": session.model.digest.hex(),
                "n_tokens": info.n_tokens,
                "first_token": getattr(info, "first_token", 0),
                "pinned": getattr(info, "pinned", False),
                "codecs": info.codecs,
                "created": info.created,
                "metadata": session.metadata,
                "token_ids": None if ids is None else sha256(ids, "<i8"),
                "streams": streams,
            }
    return found


def copy_lmdb(path, made):
    made.mkdir()
    env = lmdb.open(path, readonly=True, lock=False, lib_version=0)
    env.copy(str(made), compact=True)
    env.close()


def main():
    folder, backend = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "lmdb"
    name = f"format{FORMAT_VERSION}" + ("" if backend == "lmdb" else f"-{backend}")
    place, table = folder / f"{name}.kv", folder / f"{name}.json"
    assert not place.exists()
    assert not table.exists()
    with tempfile.TemporaryDirectory() as directory:
        path, made = str(Path(directory) / "a.kv"), Path(directory) / name
        with kvstore.open(path if backend == "lmdb" else f"{backend}:{path}", "a") as archive:
            sessions(archive)
        if backend == "lmdb":
            copy_lmdb(path, made)
        else:
            shutil.copytree(path, made, ignore=shutil.ignore_patterns("writer", "uses", "leases"))
        shutil.copytree(made, place)
        about = {"format": FORMAT_VERSION, "backend": backend, "sessions": contents(str(made))}
    table.write_text(json.dumps(about, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
