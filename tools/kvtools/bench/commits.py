"""Group `prefix`, last part: what the index and a quota cost each commit, and rolling back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcodecs.codec import CodecConfig
from kvcodecs.errors import Corrupt
from kvcodecs.spec import KINDS

import kvstore
from kvtools.bench import archive as archives
from kvtools.bench.rows import Row, interleaved
from kvtools.sample import Sample

#: Tokens that are rolled back and appended anew.
SPECULATED = 4
QUOTA_BYTES = 1 << 32


class _Decoding:
    """A session that single tokens are appended to.

    Parameters
    ----------
    whole
        What is appended, as a whole; the first tokens at once.
    """

    def __init__(
        self, path: Path, whole: Sample, config: CodecConfig, *, ids: bool, quota: int | None = None
    ) -> None:
        self._whole, self._ids = whole, ids
        self.archive = kvstore.open(path, mode="a", quota_bytes=quota)
        self.session = self.archive.create_session("bench", model=whole.model, codec=config)
        self.append(archives.APPEND_PREFILL)

    def append(self, n: int = 1) -> None:
        """Append and commit the next `n` tokens."""
        start = self.session.n_tokens
        k, v = ([x[:, start : start + n] for x in xs] for xs in (self._whole.k, self._whole.v))
        ids = self._whole.token_ids[start : start + n] if self._ids else None
        self.session.append(k, v, token_ids=ids, start=start)
        self.session.commit()

    def speculate(self) -> None:
        """Take the last few tokens back, and append and commit as many."""
        self.session.truncate(self.session.n_tokens - SPECULATED)
        self.append(SPECULATED)


def measure_commits(config: CodecConfig, sample: Sample, folder: Path) -> list[Row]:
    """Commit single tokens with and without ids and quota, in turns; then roll back and go on."""
    n_rounds = archives.APPENDS
    whole = sample.tiled(archives.APPEND_PREFILL + n_rounds + 1, archives.APPEND_LAYERS)
    plain = _Decoding(folder / "plain.kv", whole, config, ids=False)
    with_ids = _Decoding(folder / "ids.kv", whole, config, ids=True)
    with_quota = _Decoding(folder / "quota.kv", whole, config, ids=True, quota=QUOTA_BYTES)
    with plain.archive, with_ids.archive, with_quota.archive:
        times = interleaved([plain.append, with_ids.append, with_quota.append], n_rounds)
        expected = _values(plain.session)
        _check(with_ids, expected)
        _check(with_quota, expected)
        back = interleaved([with_ids.speculate], n_rounds)
        _check(with_ids, expected)
    note = f"one token, {archives.APPEND_LAYERS} layers, from token {archives.APPEND_PREFILL} on"
    name = f"roll back, append and commit {SPECULATED} tokens"
    return [
        Row("prefix", "commit without ids", 1e3 * times.seconds(0), "ms", note),
        Row("prefix", "commit with ids", 1e3 * times.seconds(1), "ms", note),
        Row("prefix", "commit with ids and quota", 1e3 * times.seconds(2), "ms", note),
        Row("prefix", "commit with / without ids", times.ratio(1, 0), "ratio"),
        Row("prefix", "commit with / without quota", times.ratio(2, 1), "ratio"),
        Row("prefix", name, 1e3 * back.seconds(0), "ms", f"{archives.APPEND_LAYERS} layers"),
    ]


def _values(session: kvstore.Session) -> list[npt.NDArray[Any]]:
    layers = range(session.model.n_layers)
    return [session.read(layer, kind) for layer in layers for kind in KINDS]


def _check(decoding: _Decoding, expected: list[npt.NDArray[Any]]) -> None:
    if not all(map(np.array_equal, _values(decoding.session), expected)):
        raise Corrupt(f"{decoding.archive.path}: appended tokens differ")
