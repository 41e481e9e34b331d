"""Write the golden FibQuant files, once: existing files are never replaced.

Run as ``python tests/golden/fibquant/make.py``. A stream whose bytes would differ from what is here
means that the format changed; that needs a new version and a new folder. Books are kept as they
were built, and never built again: another libm may build others.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from kvcodecs import FibQuant, StreamSpec
from kvcodecs.fibquant import CODEC, Book, book_for
from kvcodecs.fibquant.reference import coding

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """An input, and how it is coded."""

    name: str
    config: FibQuant
    kind: str
    x: np.ndarray
    block_tokens: int
    n_kept: int = 0


def values(seed, heads, n, head_dim, zeros=()):
    """Return channels of different mean and spread, with some vectors of zeros and large ones."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 2, (heads, 1, head_dim)) + rng.standard_normal((heads, n, head_dim))
    x *= np.exp(rng.normal(0, 0.5, (heads, 1, head_dim)))
    for token in zeros:
        x[0, token] = 0
        x[-1, token + 1] = 1e30
    return x.astype(np.float32)


def cases():
    yield Case("hadamard_2x16", FibQuant(2, 16, axis="role_aware"), "v", values(1, 3, 40, 16), 16)
    yield Case(
        "hadamard_3x33", FibQuant(3, 33, axis="role_aware"), "v", values(2, 2, 20, 24, (6, 9)), 20
    )
    config = FibQuant(4, 32, rotation="haar", axis="role_aware", raw_heads=(1,), seed=7)
    yield Case("haar_4x32_k", config, "k", values(3, 3, 24, 24, (7,)), 10, 2)
    config = FibQuant(8, 40, rotation="haar", axis="per_channel", first_tokens=0)
    yield Case("haar_8x40", config, "v", values(4, 1, 12, 16), 12)
    config = FibQuant(5, 9, axis="role_aware", on_failure="fail_closed", first_tokens=1)
    yield Case("hadamard_5x9_k", config, "k", values(5, 2, 9, 20), 4)
    yield Case("raw", FibQuant(axis="raw"), "k", values(6, 2, 5, 6, (1,)), 5)


def write_new(path, data):
    if path.exists():
        if path.read_bytes() != data:
            raise SystemExit(f"{path}: would change")
        return
    path.write_bytes(data)


def book_of(case):
    """Return the book that is here, else a new one; None for a stream without one."""
    if case.config.axis == "raw":
        return None
    path = HERE / f"{case.name}.book"
    if not path.exists():
        path.write_bytes(book_for(case.config.profile(case.x.shape[2])).pack())
    return Book.unpack(path.read_bytes())


def entry(case):
    heads, n, head_dim = case.x.shape
    spec = StreamSpec(case.kind, heads, head_dim)
    params = CODEC.fit(case.config, spec, lambda: [case.x], book=book_of(case))
    header = CODEC.pack(params)
    payloads, decoded = [], []
    for at in range(0, n, case.block_tokens):
        stop = min(at + case.block_tokens, n)
        coded = min(max(n - case.n_kept, at), stop)
        encoder = CODEC.encoder(params, at)
        encoder.push(np.ascontiguousarray(case.x[:, at:coded]))
        if coded < stop:
            encoder.keep(np.ascontiguousarray(case.x[:, coded:stop]))
        payloads.append(encoder.payload())
        decoded.append(coding.decode_block(params, payloads[-1], stop - at))
    stream = header + b"".join(payloads)
    out = np.concatenate(decoded, axis=1)
    write_new(HERE / f"{case.name}.in.f32", case.x.astype("<f4").tobytes())
    write_new(HERE / f"{case.name}.fib", stream)
    write_new(HERE / f"{case.name}.out.f32", out.astype("<f4").tobytes())
    return {
        "name": case.name,
        "kind": case.kind,
        "shape": case.x.shape,
        "config": case.config.to_json(),
        "block_tokens": case.block_tokens,
        "n_kept": case.n_kept,
        "header_bytes": len(header),
        "payload_bytes": [len(payload) for payload in payloads],
        "stream_sha256": hashlib.sha256(stream).hexdigest(),
    }


if __name__ == "__main__":
    entries = [json.dumps(entry(case)) for case in cases()]
    write_new(HERE / "MANIFEST.json", ("[\n " + ",\n ".join(entries) + "\n]\n").encode())
