"""The golden FibQuant streams: reference and core give the same bytes and the same values."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from kvcodecs import StreamSpec
from kvcodecs.blocks import SIMD_LEVELS
from kvcodecs.codec import config_from_json
from kvcodecs.fibquant import CODEC, Book
from kvcodecs.fibquant.reference import coding
from kvcodecs.plan import Plan

GOLDEN = Path(__file__).parent / "golden" / "fibquant"
CASES = {c["name"]: c for c in json.loads((GOLDEN / "MANIFEST.json").read_text())}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def array_of(case, what):
    return np.fromfile(GOLDEN / f"{case['name']}.{what}.f32", "<f4").reshape(case["shape"])


def stream_of(case):
    """Return a stream's parameters and header, and the payloads of its blocks."""
    data = (GOLDEN / f"{case['name']}.fib").read_bytes()
    assert hashlib.sha256(data).hexdigest() == case["stream_sha256"]
    cuts = np.cumsum([0, case["header_bytes"], *case["payload_bytes"]]).tolist()
    header, *payloads = (data[a:b] for a, b in pairwise(cuts))
    assert cuts[-1] == len(data)
    heads, _, head_dim = case["shape"]
    spec = StreamSpec(case["kind"], heads, head_dim)
    book = GOLDEN / f"{case['name']}.book"
    return CODEC.unpack(spec, header, lambda digest: book.read_bytes()), header, payloads


def blocks_of(case):
    """Return first and last token of each block."""
    n, size = case["shape"][1], case["block_tokens"]
    return [(at, min(at + size, n)) for at in range(0, n, size)]


@every_case
def test_streams_decode_to_the_values_of_old(case):
    params, _, payloads = stream_of(case)
    expected = array_of(case, "out")
    for (first, stop), payload in zip(blocks_of(case), payloads, strict=True):
        want = expected[:, first:stop].view(np.uint32)
        found = coding.decode_block(params, payload, stop - first)
        np.testing.assert_array_equal(found.view(np.uint32), want)
        for simd in SIMD_LEVELS:
            out = np.empty(want.shape, np.float32)
            plan = Plan()
            plan.add(
                CODEC, params, payload,
                first_token=first, n_tokens=stop - first, start=first, stop=stop, out=out,
            )  # fmt: skip
            plan.run(simd=simd)
            np.testing.assert_array_equal(out.view(np.uint32), want)


@every_case
def test_encoders_write_the_bytes_of_old(case):
    params, header, payloads = stream_of(case)
    x, n = array_of(case, "in"), case["shape"][1]
    config = config_from_json(case["config"])
    fitted = CODEC.fit(config, params.spec, lambda: [x], book=params.book)
    assert CODEC.pack(fitted) == header
    for (first, stop), payload in zip(blocks_of(case), payloads, strict=True):
        coded = min(max(n - case["n_kept"], first), stop)
        encoder = CODEC.encoder(params, first)
        encoder.push(np.ascontiguousarray(x[:, first:coded]))
        if coded < stop:
            encoder.keep(np.ascontiguousarray(x[:, coded:stop]))
        assert encoder.payload() == payload


def test_books_are_read_and_packed_as_they_were():
    names = [path.name for path in sorted(GOLDEN.glob("*.book"))]
    assert names == sorted(f"{name}.book" for name in CASES if name != "raw")
    for name in names:
        data = (GOLDEN / name).read_bytes()
        assert Book.unpack(data).pack() == data
