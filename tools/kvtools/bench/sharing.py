"""Group `prefix`, second half: sessions of a real model that are matched, read and forked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.codec import CodecConfig
from kvcodecs.errors import Corrupt
from kvcodecs.spec import KINDS, Kind

import kvstore
from kvstore import keys
from kvstore.info import stored_bytes
from kvstore.place import open_backend
from kvtools.bench.archive import PureDecode
from kvtools.bench.rows import Row, interleaved
from kvtools.sample import Sample

#: Tokens of the sessions whose bookkeeping is counted; the last one is forked.
LENGTHS = (2048, 4096, 8192, 16_384, 32_768)
#: Of a session of twice as many tokens, and of as many layers.
READ_TOKENS, READ_LAYERS = 2048, 30
DTYPE = "float16"
N_FORKS = 10

#: Whatever is neither a frame nor what LMDB adds to it.
BOOKKEEPING = (
    keys.PREFIX, keys.USER, keys.TOKENS, keys.SESSION, keys.HEADER, keys.IDENTITY, keys.ARCHIVE,
)  # fmt: skip


class _Tiled:
    """A sample that is repeated until it has as many tokens as asked for, never whole in memory."""

    def __init__(self, sample: Sample, n_tokens: int) -> None:
        self._sample, self._n_tokens = sample, n_tokens

    def n_tokens(self, layer: int, kind: Kind) -> int:
        return self._n_tokens

    def chunks(self, layer: int, kind: Kind) -> Iterator[npt.NDArray[Any]]:
        values = (self._sample.k if kind == "k" else self._sample.v)[layer]
        for first in range(0, self._n_tokens, values.shape[1]):
            yield values[:, : self._n_tokens - first]


def measure_sharing(config: CodecConfig, sample: Sample, folder: Path, reps: int) -> list[Row]:
    """Bookkeeping of sessions of several lengths; forks of the longest one; a matched read."""
    path = folder / "sharing.kv"
    with kvstore.open(path, mode="a") as archive:
        for n in LENGTHS:
            _store(archive, sample, config, n)
        rows = _bookkeeping(path, archive.info().used_bytes)
        rows += _forks(archive, str(LENGTHS[-1]))
    with kvstore.open(folder / "read.kv", mode="a") as archive:
        return rows + _read(archive, config, sample.tiled(sample.n_tokens, READ_LAYERS), reps)


def _store(
    archive: kvstore.Archive, sample: Sample, config: CodecConfig, n_tokens: int
) -> kvstore.Session:
    # Ids are drawn, not repeated: repeated ones would take fewer bytes than a text's.
    ids = np.random.default_rng((5, n_tokens)).choice(sample.token_ids, n_tokens)
    source = _Tiled(sample, n_tokens)
    return archive.ingest(str(n_tokens), source, model=sample.model, codec=config, token_ids=ids)


def _bookkeeping(path: Path, used_bytes: int) -> list[Row]:
    backend = open_backend(str(path), "r")
    try:
        with backend.read() as snapshot:
            everything = stored_bytes(snapshot, *BOOKKEEPING, with_keys=True)
            index = stored_bytes(snapshot, keys.PREFIX, keys.USER, with_keys=True)
            ids = stored_bytes(snapshot, keys.TOKENS, with_keys=True)
    finally:
        backend.close()
    note = f"of the archive: {len(LENGTHS)} sessions of {LENGTHS[0]} to {LENGTHS[-1]} tokens"
    return [
        Row("prefix", name, 100 * n_bytes / used_bytes, "%", note)
        for name, n_bytes in (
            ("index and bookkeeping", everything),
            ("prefix index", index),
            ("token ids", ids),
        )
    ]


def _read(archive: kvstore.Archive, config: CodecConfig, sample: Sample, reps: int) -> list[Row]:
    """Match a prompt and read what matches, against the pure decode of the same lanes.

    Both decode to new arrays.
    """
    model = sample.model
    session = _store(archive, sample, config, 2 * READ_TOKENS)
    ids = session.token_ids(0, READ_TOKENS)
    prompt = np.append(np.empty(0, np.int64) if ids is None else ids, sample.token_ids.max() + 1)
    whole = sample.tiled(2 * READ_TOKENS)
    decode = PureDecode(config, whole, (0, READ_TOKENS), session)

    def pure() -> dict[tuple[int, Kind], npt.NDArray[Any]]:
        outputs = decode.outputs(DTYPE)
        decode.plan(outputs).run()
        return outputs

    def match_and_read() -> kvstore.Match:
        match = archive.match_prefix(prompt, model)
        if match.session is not None:
            match.session.read_all(0, match.n_tokens, dtype=DTYPE)
        return match

    match = match_and_read()
    if match.session is None or (match.session.name, match.n_tokens) != (session.name, READ_TOKENS):
        raise Corrupt(f"{archive.path}: a prompt of {READ_TOKENS} stored tokens does not match")
    for (layer, kind), values in pure().items():
        stored = match.session.read(layer, kind, 0, READ_TOKENS, dtype=DTYPE)
        if not np.array_equal(stored, values):
            raise Corrupt("a matched prefix differs from the pure decode of its lanes")
    times = interleaved(
        [pure, match_and_read, lambda: session.read_all(0, READ_TOKENS, dtype=DTYPE)], 4 * reps
    )
    note = f"{READ_TOKENS} tokens of {model.n_layers} layers to new {DTYPE} arrays"
    return [
        Row("prefix", "match and read", 1e3 * times.seconds(1), "ms", note),
        Row("prefix", "match and read / pure decode", times.ratio(1, 0), "ratio", note),
        Row("prefix", "the same in CPU time", times.ratio(1, 0, "cpu"), "ratio", note),
        Row("prefix", "read / pure decode", times.ratio(2, 0), "ratio", note),
    ]


def _forks(archive: kvstore.Archive, name: str) -> list[Row]:
    """Fork a session at its end and inside of blocks."""
    parent = archive.session(name)
    n_tokens = parent.n_tokens
    before = archive.info().used_bytes
    seconds, forks = [], []
    for index in range(N_FORKS):
        start = time.perf_counter()
        forks.append(parent.fork(f"fork/{index}", at=n_tokens - 100 * index))
        seconds.append(time.perf_counter() - start)
    n_bytes = (archive.info().used_bytes - before) / N_FORKS
    for fork in forks:
        n = fork.n_tokens
        for kind in KINDS:
            mine, other = (s.read(s.model.n_layers - 1, kind, n // 2, n) for s in (fork, parent))
            if not np.array_equal(mine, other):
                raise Corrupt(f"{archive.path}: a fork differs from its parent")
    note = f"{N_FORKS} forks of a session of {n_tokens} tokens"
    return [
        Row("prefix", "fork", 1e3 * statistics.median(seconds), "ms", note),
        Row("prefix", "bytes of a fork", n_bytes / 1e3, "kB", note),
    ]
