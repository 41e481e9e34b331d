"""The 33 golden TKV1 files: our streams are the same bytes, our decodings the same values."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from kvcodecs.tkv1 import StreamEncoder, TkvFile, TkvParams, encode_stream

GOLDEN = Path(__file__).parent / "golden" / "tkv1"
CASES = {c["name"]: c for c in json.loads((GOLDEN / "MANIFEST.json").read_text())}
LANE_CASES = [name for name, c in CASES.items() if c["params"]["gpu"]]


def fields_of(case):
    p = case["params"]
    return {
        "kind": p["kind"],
        "step": p["step"],
        "layout": "lane" if p["gpu"] else "stream",
        "theta": p["theta"],
        "pre_rope": bool(p["prerope"]),
        "sink": p["sink"],
        "sink_div": p["sinkdiv"],
        "block_tokens": p["block"],
        "ar": bool(p["ar"]),
        "lane_channels": p["lanech"],
    }


def input_of(case):
    return np.fromfile(GOLDEN / case["input"], "<f4").reshape(case["shape"])


def stream_of(name):
    return (GOLDEN / f"{name}.tkv").read_bytes()


def ulps(a, b):
    """Distance of float32 values in representable steps."""
    ordered = [np.where(x < 0, -(x & 0x7FFFFFFF), x) for x in (a.view("<i4"), b.view("<i4"))]
    return np.abs(ordered[0].astype(np.int64) - ordered[1])


def test_all_cases_are_here():
    assert len(CASES) == 33
    for name, case in CASES.items():
        assert hashlib.sha256(stream_of(name)).hexdigest() == case["stream_sha256"]
        assert len(stream_of(name)) == case["stream_bytes"]


@pytest.mark.parametrize("name", CASES)
def test_stream_is_byte_identical(name):
    case = CASES[name]
    p = case["params"]
    prefill = {"prefill": p["prefill"], "chunk": p["chunk"]} if p["prefill"] else {}
    assert encode_stream(input_of(case), **fields_of(case), **prefill) == stream_of(name)


@pytest.mark.parametrize("name", CASES)
def test_decoding_is_identical(name):
    case = CASES[name]
    decoded = TkvFile.parse(stream_of(name)).decode()
    assert decoded.dtype == np.float32
    assert decoded.shape == tuple(case["shape"])
    if case["decoded"] is None:
        assert hashlib.sha256(decoded.tobytes()).hexdigest() == case["decoded_sha256"]
        return
    golden = np.fromfile(GOLDEN / case["decoded"], "<f4").reshape(case["shape"])
    assert hashlib.sha256(golden.tobytes()).hexdigest() == case["decoded_sha256"]
    # Sines come from the platform where K is rotated; nowhere else.
    rotated = case["params"]["kind"] == "k" and case["params"]["prerope"]
    assert ulps(decoded, golden).max() <= (1 if rotated else 0)


@pytest.mark.parametrize("name", CASES)
def test_header_is_read_back(name):
    case = CASES[name]
    file = TkvFile.parse(stream_of(name))
    heads, n_tokens, head_dim = case["shape"]
    assert file.n_tokens == n_tokens
    width = case["params"]["lanech"] if case["params"]["lanech"] != head_dim else 0
    fields = {**fields_of(case), "heads": heads, "head_dim": head_dim, "lane_channels": width}
    assert file.params == TkvParams(**fields)


@pytest.mark.parametrize("name", CASES)
def test_a_range_is_a_slice_of_the_whole(name):
    file = TkvFile.parse(stream_of(name))
    whole = file.decode()
    n = file.n_tokens
    for start, stop in {
        (0, 1),
        (n - 1, n),
        (n // 2, n // 2),
        (n // 3, n),
        (min(31, n), min(33, n)),
    }:
        part = file.decode(start, stop)
        assert part.tobytes() == whole[:, start:stop].tobytes()


@pytest.mark.parametrize("name", LANE_CASES)
def test_gpu_tables_say_where_every_lane_is(name):
    case = CASES[name]
    stream = stream_of(name)
    file = TkvFile.parse(stream)
    heads, n_tokens, head_dim = case["shape"]
    groups = head_dim // (case["params"]["lanech"] or head_dim)
    block = case["params"]["block"]
    tables = file.gpu_tables()
    n_blocks = -(-n_tokens // block)
    assert tables.lanes.shape == (n_blocks * heads * groups, 6)
    assert tables.mean.shape == tables.rho.shape == tables.cls.shape == (heads * head_dim,)
    end = None
    for i, (offset, size, first, tokens, head, group) in enumerate(tables.lanes.tolist()):
        b, rest = divmod(i, heads * groups)
        assert (first, tokens) == (b * block, min(block, n_tokens - b * block))
        assert (head, group) == divmod(rest, groups)
        assert end is None or end < offset <= end + 3  # a length of one to three bytes between
        end = offset + size
    assert end == len(stream)
    # The entries of the blocks, put together, are the rest of the file.
    entries = b"".join(bytes(file.block_entries(b)) for b in range(n_blocks))
    assert stream.endswith(entries)
    assert int(tables.lanes[0, 0]) - len(stream) + len(entries) in (1, 2, 3)


@pytest.mark.parametrize("name", ["synth_v_lane_prefill33_chunks_of_17", "synth_k_stream_n64"])
def test_sealed_blocks_never_change(name):
    case = CASES[name]
    x = input_of(case)
    fields = fields_of(case)
    heads, n_tokens, head_dim = case["shape"]
    params = TkvParams(heads=heads, head_dim=head_dim, **fields)
    encoder = StreamEncoder(params, x[:, :20])
    sealed = []
    for t in range(20, n_tokens):
        encoder.append(x[:, t : t + 1])
        assert encoder.n_tokens == t + 1
        assert encoder.n_sealed_blocks == (t + 1) // fields["block_tokens"]
        if encoder.n_sealed_blocks > len(sealed):
            file = TkvFile.parse(encoder.to_bytes())
            blocks = [bytes(file.block_entries(b)) for b in range(encoder.n_sealed_blocks)]
            assert blocks[: len(sealed)] == sealed
            sealed = blocks
    one_shot = StreamEncoder(params, x[:, :20])
    one_shot.append(x[:, 20:])
    assert one_shot.to_bytes() == encoder.to_bytes()
