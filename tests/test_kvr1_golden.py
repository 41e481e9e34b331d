"""The golden KVR1 streams: reference and fast path give the same bytes and the same values."""

import hashlib
import json
from importlib import resources
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from kvcodecs.kvr1 import CODEC, KVR1
from kvcodecs.kvr1 import reference as ref
from kvcodecs.plan import Plan
from kvcodecs.spec import StreamSpec

GOLDEN = Path(__file__).parent / "golden" / "kvr1"
CASES = {c["name"]: c for c in json.loads((GOLDEN / "MANIFEST.json").read_text())}
FITTED = [name for name, case in CASES.items() if case["fit_tokens"]]
TABLES_SHA256 = "24de5d1d0550b29e0d3005345e88e756f9f1f85325ae7cf02621b58869d3a60a"


def input_of(case):
    return np.fromfile(GOLDEN / f"{case['name']}.in.f32", "<f4").reshape(case["shape"])


def stream_of(case):
    """Return a stream's header and the payloads of its blocks."""
    data = (GOLDEN / f"{case['name']}.kvr1").read_bytes()
    cuts = np.cumsum([0, case["header_bytes"], *case["payload_bytes"]]).tolist()
    header, *payloads = (data[a:b] for a, b in pairwise(cuts))
    assert cuts[-1] == len(data)
    return header, payloads


def blocks_of(case):
    """Return first token and number of tokens of each block."""
    n, size = case["shape"][1], case["block_tokens"]
    return [(case["first_token"] + at, min(size, n - at)) for at in range(0, n, size)]


def block_inputs(case):
    x, size = input_of(case), case["block_tokens"]
    return [np.ascontiguousarray(x[:, at : at + size]) for at in range(0, x.shape[1], size)]


def spec_of(case):
    heads, _, head_dim = case["shape"]
    return StreamSpec("v", heads, head_dim)


def decode(params, payload, first, n, start, stop):
    out = np.full((params.spec.heads, stop - start, params.spec.head_dim), np.nan, np.float32)
    plan = Plan()
    plan.add(
        CODEC,
        params,
        payload,
        first_token=first,
        n_tokens=n,
        start=start,
        stop=stop,
        out=out,
    )
    plan.run(1)
    return out


def test_the_frequency_tables_are_the_frozen_ones():
    raw = resources.files("kvcodecs.kvr1").joinpath("frequencies.u16").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == TABLES_SHA256
    # Entries anyone can follow: class 12, a spread of one step, for residuals -5 to 5.
    assert ref.tables()[12][27:38] == (1, 2, 17, 127, 491, 771, 491, 127, 17, 2, 1)
    assert all(sum(row) == 2048 and row[0] >= 1 and max(row) <= 2047 for row in ref.tables())


def test_all_files_are_here_and_no_others():
    assert len(CASES) == 13
    named = {f"{name}.{ending}" for name in CASES for ending in ("in.f32", "kvr1")}
    assert {path.name for path in GOLDEN.iterdir() if path.is_file()} == named | {
        "MANIFEST.json",
        "README.md",
        "make.py",
    }
    for name, case in CASES.items():
        data = (GOLDEN / f"{name}.kvr1").read_bytes()
        assert hashlib.sha256(data).hexdigest() == case["stream_sha256"]


@pytest.mark.parametrize("name", FITTED)
def test_the_reference_fits_the_same_header(name):
    case = CASES[name]
    header, _ = stream_of(case)
    stored = ref.parse_header(header)
    asked = ref.Params(
        stored.heads, stored.head_dim, stored.step, stored.sink, stored.sink_div, stored.ar
    )
    assert ref.pack_header(ref.fit(asked, input_of(case)[:, : case["fit_tokens"]])) == header


@pytest.mark.parametrize("name", CASES)
def test_the_reference_gives_the_same_bytes_and_values(name):
    case = CASES[name]
    header, payloads = stream_of(case)
    params = ref.parse_header(header)
    assert ref.pack_header(params) == header
    rows = []
    for (first, n), x, payload in zip(blocks_of(case), block_inputs(case), payloads, strict=True):
        encoded, values = ref.encode_block(params, x, first)
        assert encoded == payload
        decoded = ref.decode_block(params, payload, first, n)
        assert (decoded == values).all()
        rows.append(decoded)
    values = np.concatenate(rows).astype("<i4").tobytes()
    assert hashlib.sha256(values).hexdigest() == case["values_sha256"]


@pytest.mark.parametrize("name", FITTED)
def test_the_fast_path_fits_the_same_header(name):
    case = CASES[name]
    header, _ = stream_of(case)
    stored = ref.parse_header(header)
    config = KVR1(step=stored.step, sink=stored.sink, sink_div=stored.sink_div, ar=stored.ar)
    prefill = np.ascontiguousarray(input_of(case)[:, : case["fit_tokens"]])
    assert CODEC.pack(CODEC.fit(config, spec_of(case), lambda: [prefill])) == header


@pytest.mark.parametrize("name", CASES)
def test_the_fast_path_gives_the_same_bytes_and_values(name):
    case = CASES[name]
    header, payloads = stream_of(case)
    params = CODEC.unpack(spec_of(case), header)
    assert CODEC.pack(params) == header
    slow = ref.parse_header(header)
    for (first, n), x, payload in zip(blocks_of(case), block_inputs(case), payloads, strict=True):
        encoder = CODEC.encoder(params, first)
        for t in range(0, n, 7):
            encoder.push(np.ascontiguousarray(x[:, t : t + 7]))
        assert encoder.payload() == payload
        whole = ref.floats(slow, ref.decode_block(slow, payload, first, n))
        for start, stop in ((0, n), (0, 1), (n - 1, n), (n // 3, n - n // 4)):
            part = decode(params, payload, first, n, first + start, first + stop)
            assert part.tobytes() == whole[:, start:stop].tobytes()
