"""Group `prefix`, first half: an archive of many sessions, asked for the prefix of a prompt."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import Corrupt
from kvcodecs.spec import Kind

import kvstore
from kvtools.bench.processes import run_python
from kvtools.bench.rows import Row, interleaved

Ids = npt.NDArray[np.int64]

#: Length of the prompts; the sessions that share something share the first half.
PROMPT_TOKENS = 32_768
N_PROMPTS = 16
#: One session in so many shares the first half.
SHARERS = 10
#: Those that share it go on alike for fewer tokens than this, each for another number of them.
BRANCH_TOKENS = 64
MOST_TOKENS = 2048

#: As little KV as can be: what is measured here is all in the ids.
MODEL = kvstore.Model.uniform(
    name="many", n_layers=1, n_kv_heads=1, head_dim=2, dtype="float16", revision="bench"
)

# Prints the seconds of opening an archive in a process that has imported this package, and CPU
# seconds of it; the seconds of its lists of sessions, and how many sessions are in them.
_OPEN = """
import sys, time
import kvstore
kvstore.Archive
def seconds(action):
    start = time.perf_counter()
    found = action()
    return time.perf_counter() - start, found
cpu = time.process_time()
opening, archive = seconds(lambda: kvstore.open(sys.argv[1]))
cpu = time.process_time() - cpu
naming, names = seconds(archive.names)
listing, sessions = seconds(archive.sessions)
print(opening, cpu, naming, listing, len(names), len(sessions))
"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and how many of its tokens some session has."""

    kind: str
    ids: Ids
    n_tokens: int


class ManySessions:
    """Token ids of many sessions, and prompts that are like some of them.

    Parameters
    ----------
    vocabulary
        What ids are drawn from, as often as they are in it.
    n_sessions
        One in ten shares the first half of the prompts, and then up to 63 tokens with some of
        them: they part within one hash block. The first one has all of a prompt.
    """

    def __init__(self, vocabulary: Ids, n_sessions: int) -> None:
        self.n_sessions, self.n_sharers = n_sessions, max(1, n_sessions // SHARERS)
        self._vocabulary = vocabulary
        rng = np.random.default_rng(1)
        self._half = self._draw(rng, PROMPT_TOKENS // 2)
        self._branch = self._draw(rng, BRANCH_TOKENS)

    def sessions(self) -> Iterator[tuple[str, Ids]]:
        """Yield name and ids of every session, the same each time."""
        every = self.n_sessions // self.n_sharers
        for index in range(self.n_sessions):
            if index % every == 0 and index // every < self.n_sharers:
                yield f"shared/{index}", np.concatenate([self._half, self._tail(index)])
            else:
                rng = np.random.default_rng((2, index))
                ids = self._draw(rng, int(rng.integers(1, MOST_TOKENS)))
                ids[0] = self._vocabulary.max() + 1
                yield f"user/{index}", ids

    def prompts(self) -> list[Prompt]:
        """Return prompts of which half is stored, of which nothing is, and one that is stored."""
        every = self.n_sessions // self.n_sharers
        tails = [self._tail(index * every) for index in range(self.n_sharers)]
        whole = np.concatenate([self._half, tails[0]])
        found = [Prompt("all stored", whole, len(whole))]
        for index in range(N_PROMPTS):
            rng = np.random.default_rng((3, index))
            parts = self._branch[: rng.integers(BRANCH_TOKENS)]
            rest = self._draw(rng, PROMPT_TOKENS - len(self._half) - len(parts))
            tail = np.concatenate([parts, rest])
            n_most = len(self._half) + max(_n_common(tail, other) for other in tails)
            found.append(Prompt("half stored", np.concatenate([self._half, tail]), n_most))
            ids = np.concatenate([self._half, tail])
            ids[0] = self._vocabulary.max() + 2
            found.append(Prompt("miss", ids, 0))
        return found

    def _tail(self, index: int) -> Ids:
        """Return how a session that shares the first half goes on."""
        rng = np.random.default_rng((4, index))
        n_tail = int(rng.integers(BRANCH_TOKENS, 2 * MOST_TOKENS)) if index else len(self._half)
        alike = self._branch[: rng.integers(BRANCH_TOKENS)]
        return np.concatenate([alike, self._draw(rng, n_tail - len(alike))])

    def _draw(self, rng: np.random.Generator, n: int) -> Ids:
        return rng.choice(self._vocabulary, n).astype(np.int64)


class _Zeros:
    """The KV of the sessions."""

    def __init__(self, n_tokens: int) -> None:
        self._n_tokens = n_tokens

    def n_tokens(self, layer: int, kind: Kind) -> int:
        return self._n_tokens

    def chunks(self, layer: int, kind: Kind) -> Iterator[npt.NDArray[np.float16]]:
        yield np.zeros((1, self._n_tokens, 2), np.float16)


def _n_common(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def measure_many(vocabulary: Ids, folder: Path, n_sessions: int, reps: int) -> list[Row]:
    """Store many sessions; match prompts, open and list the archive."""
    many = ManySessions(vocabulary, n_sessions)
    store(folder / "many.kv", many)
    return measure_match(folder / "many.kv", many, reps) + measure_open(
        folder / "many.kv", many, reps
    )


def store(path: Path, many: ManySessions) -> None:
    """Store all sessions, one transaction each."""
    with kvstore.open(path, mode="a") as archive:
        for name, ids in many.sessions():
            archive.ingest(name, _Zeros(len(ids)), model=MODEL, codec=kvstore.Raw(), token_ids=ids)


def measure_match(path: Path, many: ManySessions, reps: int) -> list[Row]:
    """Ask for the longest stored prefix of long prompts."""
    prompts = many.prompts()
    with kvstore.open(path) as archive:
        for prompt in prompts:
            check(archive, prompt)
        matches = [partial(archive.match_prefix, prompt.ids, MODEL) for prompt in prompts]
        times = interleaved(matches, reps)
    note = f"{PROMPT_TOKENS} tokens; {many.n_sessions} sessions, {many.n_sharers} share half"
    rows = []
    for kind in dict.fromkeys(prompt.kind for prompt in prompts):
        chosen = [prompt.kind == kind for prompt in prompts]
        of_prompts = np.median(times.wall[chosen], axis=1)
        for name, seconds in (
            (f"match, {kind}", np.median(of_prompts)),
            (f"match, {kind}, slowest prompt", of_prompts.max()),
            (f"match, {kind}, CPU time", np.median(times.cpu[chosen])),
        ):
            rows.append(Row("prefix", name, 1e3 * float(seconds), "ms", note))
    return rows


def check(archive: kvstore.Archive, prompt: Prompt) -> None:
    """Raise `Corrupt` unless a prompt matches as it should."""
    match = archive.match_prefix(prompt.ids, MODEL)
    ids = None if match.session is None else match.session.token_ids(0, match.n_tokens)
    same = np.array_equal(prompt.ids[: match.n_tokens], [] if ids is None else ids)
    if match.n_tokens != prompt.n_tokens or not same:
        raise Corrupt(
            f"{archive.path}: {match.n_tokens} tokens of a prompt match, {prompt.n_tokens} are "
            "stored"
        )


def measure_open(path: Path, many: ManySessions, reps: int) -> list[Row]:
    """Open an archive of many sessions in fresh processes, and list its sessions."""
    found = [run_python(_OPEN, str(path)).split() for _ in range(reps)]
    if any(words[4:] != [str(many.n_sessions)] * 2 for words in found):
        raise Corrupt(f"{path}: sessions are missing")
    note = f"{many.n_sessions} sessions, in a fresh process"
    return [
        Row("prefix", name, 1e3 * statistics.median(float(words[i]) for words in found), "ms", note)
        for i, name in enumerate(("open", "open, CPU time", "names", "list of sessions"))
    ]
