"""Files of flat layers that say what no writer says, under checksums that are right."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, Truncated
from kvcodecs.frame import crc32c, open_record, seal_record

from kvstore import Model, flat
from kvstore.flat import FlatLayer
from kvstore.flat.commit_record import COMMIT_OFFSETS, MAX_SEGMENTS, pack_commit
from kvstore.flat.folder import SESSION_MAGIC
from kvstore.flat.header import HEADER_BYTES, HEADER_MAGIC


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "a.kvf")
    x = np.ones((2, 300, 32), np.float32)
    with FlatLayer.create(path, heads=2, head_dim=32, scheme="f16", capacity=64) as layer:
        layer.append(x, x)
        layer.commit()
    return path


def forge(path, header=None, sequence=9, **state):
    """Write another header, and a commit record that belongs to it."""
    with FlatLayer.open(path) as layer:
        old = layer._state
    with open(path, "r+b") as file:
        packed = file.read(HEADER_BYTES)
        body = bytes(open_record(HEADER_MAGIC, packed))
        changed = json.dumps({**json.loads(body), **(header or {})}).encode()
        packed = seal_record(HEADER_MAGIC, changed.ljust(len(body)))
        file.seek(0)
        file.write(packed)
        for offset in COMMIT_OFFSETS:
            file.seek(offset)
            file.write(pack_commit(old._replace(**state), sequence, crc32c(packed)))


@pytest.mark.parametrize("pread", [False, True])
def test_more_segments_than_the_file_has(path, pread):
    """What there is can be read; nothing is made of the rest."""
    forge(path, n_segments=MAX_SEGMENTS)
    tracemalloc.start()
    with FlatLayer.open(path, pread=pread) as layer:
        assert tracemalloc.get_traced_memory()[1] < 2e6
        tracemalloc.stop()
        assert layer.read_all()[0].min() == 1
        with pytest.raises(Truncated, match="it was cut"):
            layer.verify()
    with pytest.raises(Truncated, match="it was cut"):
        FlatLayer.open(path, "a", pread=pread)


@pytest.mark.parametrize("pread", [False, True])
def test_rows_that_the_file_does_not_have(path, pread):
    forge(path, {"capacity": 1 << 48}, end=1 << 47, n_segments=1)
    with FlatLayer.open(path, pread=pread) as layer:
        for read in (
            layer.read_all,
            lambda: layer.gather([1 << 46]),
            lambda: layer.read_rows(1 << 46, 1 << 47),
            layer.verify,
        ):
            with pytest.raises(Truncated):
                read()
    forge(path, {"capacity": 64}, end=1 << 47, n_segments=MAX_SEGMENTS)
    with FlatLayer.open(path, pread=pread) as layer:
        for read in (layer.read_all, lambda: layer.gather([1 << 46]), layer.verify):
            with pytest.raises(Truncated):
                read()


@pytest.mark.parametrize("sequence", [(1 << 62) + 1, (1 << 64) - 1])
def test_a_sequence_that_has_no_next(path, sequence):
    forge(path, sequence=sequence)
    for mode in "ra":
        with pytest.raises(Corrupt, match="impossible commit record"):
            FlatLayer.open(path, mode)


FIELDS = (
    "heads", "head_dim_k", "head_dim_v", "rope", "k_scheme", "v_scheme", "k_state", "capacity",
    "block_rows", "max_rows", "session", "layer", "format",
)  # fmt: skip
WRONG = (5, "x", [], {}, True, -1, 0, 1.5, 1 << 62, 1 << 70, [5], {"style": 5})


@pytest.mark.parametrize("field", FIELDS)
def test_headers_with_wrong_fields(path, field):
    with open(path, "rb") as file:
        whole = file.read()
    for wrong in WRONG:
        with open(path, "wb") as file:
            file.write(whole)
        forge(path, {field: wrong})
        try:
            with FlatLayer.open(path) as layer:
                layer.read_all()
        except KvError as error:
            assert path in str(error)  # noqa: PT017
        else:
            assert (field, wrong) in FINE


#: What a writer may say too; `heads` and others of a layer are a matter of its session.
FINE = [("session", 5), ("session", 1 << 62), ("layer", 5), ("layer", 1 << 62)]
FINE += [("session", 0), ("layer", 0)]


@pytest.mark.parametrize("field", ["model", "session", "rope", "layers", "name"])
def test_sessions_with_wrong_fields(tmp_path, field):
    path, model = tmp_path / "chat", Model.uniform(name="m", n_layers=2, n_kv_heads=1, head_dim=32)
    flat.create(path, model).close()
    whole = json.loads(bytes(open_record(SESSION_MAGIC, (path / "session").read_bytes())))
    for wrong in WRONG:
        if (field, wrong) == ("name", "x"):
            continue
        data = {**whole, "model": {**whole["model"]}}
        (data if field in data else data["model"])[field] = wrong
        (path / "session").write_bytes(seal_record(SESSION_MAGIC, json.dumps(data).encode()))
        with pytest.raises(KvError, match="chat/"):
            flat.open(path)


def test_a_ring_of_no_rows(path):
    forge(path, {"max_rows": 0})
    with pytest.raises((Corrupt, InvalidArgument), match="max_rows"):
        FlatLayer.open(path)
