"""Many processes on one archive: every read is exactly right, or a miss that says so.

Values say whose they are: which session they were made for, by which attempt, at which position,
in which stream. So whatever a reader gets it can check without asking anyone. Workers are this
file, run as a program; some are killed.
"""

import contextlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import kvstore
import kvstore.writer
from kvstore import Full, InvalidArgument, Locked, Model, NotFound, Raw, keys

MODEL = Model.uniform(name="m", n_layers=2, n_kv_heads=1, head_dim=8)
MOST_TOKENS = 400


def ids_of(origins, attempt, start):
    """Token ids that say where they come from."""
    positions = np.arange(start, start + len(origins))
    return (np.asarray(origins, np.int64) << 40) | (attempt << 20) | positions


def values_of(ids):
    """K and V of these tokens, (layers, heads, n, head_dim)."""
    k, v = (np.zeros((2, 1, len(ids), 8), np.float32) for _ in range(2))
    for layer in range(2):
        for kind, x in enumerate((k, v)):
            stream = 2 * layer + kind
            mixed = (ids.astype(np.uint64) * np.uint64(4) + np.uint64(stream)) * np.uint64(
                0x9E3779B97F4A7C15
            )
            columns = (ids >> 40, ids >> 20 & 0xFFFFF, ids & 0xFFFFF, np.full(len(ids), stream))
            for i, column in enumerate((*columns, mixed >> np.uint64(41), mixed >> np.uint64(20))):
                x[layer, 0, :, i] = column & type(column[0])(0xFFFFFF) if len(ids) else 0
    return k, v


def check_values(k, v, start):
    """Return the ids that values tell; they must be right in every bit, in every stream."""
    row = k[0, 0].astype(np.int64)
    ids = (row[:, 0] << 40) | (row[:, 1] << 20) | row[:, 2]
    wanted_k, wanted_v = values_of(ids)
    assert k.tobytes() == wanted_k.tobytes()
    assert v.tobytes() == wanted_v.tobytes()
    assert (row[:, 2] == np.arange(start, start + len(row))).all()
    return ids


def origins_of(lineage, start, stop):
    """Which session the token at each position was made for."""
    found, begin = [], 0
    for origin, end in lineage:
        end = MOST_TOKENS if end is None else end
        found += [origin] * (end - begin)
        begin = end
    return found[start:stop]


def check_session(session):
    """Read all of a session, in one snapshot, and check it; return its token ids."""
    lineage = session.metadata["lineage"]  # never changes for a session
    try:
        start = session.first_token
        k, v = session.read_all(start)
    except InvalidArgument:
        start = session.first_token  # trimmed meanwhile
        k, v = session.read_all(start)
    ids = check_values(k, v, start)
    assert (ids >> 40).tolist() == origins_of(lineage, start, start + len(ids))
    return ids


class Worker:
    """One process: changes sessions of its own, reads, matches and forks those of all.

    `known` holds the token ids of its own sessions: what a read must return to the last bit,
    unless the session was evicted.
    """

    def __init__(self, path, number, n_workers, n_names, seed, evicts):
        self.rng = random.Random(f"{seed} {number}")
        kvstore.writer.SPILL_BYTES = self.rng.choice([1, 8 << 20])
        self.archive = kvstore.open(path, "a", lock_timeout=60)
        self.number, self.n_workers, self.n_names = number, n_workers, n_names
        self.evicts = evicts
        self.known = {}
        self.attempts = self.n_evicted = 0
        for name in self.archive.names():
            if int(name[1:]) % n_workers == number:
                with contextlib.suppress(NotFound):
                    session = self.archive.session(name)
                    self.known[name] = session.first_token, check_session(session)

    def run(self, seconds):
        steps = [self.write] * 6 + [self.read] * 8 + [self.match] * 4 + [self.fork] * 3
        steps += [self.truncate] * 2 + [self.delete, self.trim, self.rename, self.collect]
        end, n = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            step = self.rng.choice(steps)
            # Only what others may delete can be gone, unless there is eviction.
            misses = [NotFound] if step in (self.read, self.match, self.fork) else []
            # Who evicts or collects garbage holds leases for a moment: then it is for later.
            misses += [Locked, NotFound, Full] if self.evicts else [Locked]
            with contextlib.suppress(*misses):
                step()
            n += 1
        for name in list(self.known):
            self.check(name)
        self.archive.close()
        return n, self.n_evicted

    def any_name(self):
        return f"s{self.rng.randrange(self.n_names):03}"

    def own_name(self):
        i = self.rng.randrange(self.n_names // self.n_workers) * self.n_workers + self.number
        return f"s{i:03}"

    def open_own(self):
        """Return one of its sessions, open, or None; forgets one that was evicted."""
        if not self.known:
            return None
        name = self.rng.choice(sorted(self.known))
        if name not in self.archive:
            self.evicted(name)
            return None
        return self.archive.session(name)

    def check(self, name):
        first, ids = self.known[name]
        try:
            session = self.archive.session(name)
            assert session.first_token == first
            assert (check_session(session) == ids).all()
            assert (session.token_ids(first) == ids).all()
        except NotFound:
            self.evicted(name)

    def evicted(self, name):
        assert self.evicts, f"{name} is lost"
        del self.known[name]
        self.n_evicted += 1

    def append(self, session, name):
        first, ids = self.known[name]
        n = first + len(ids)
        n_new = min(self.rng.choice([1, 3, 17, 60]), MOST_TOKENS - n)
        self.attempts += 1
        attempt = self.attempts * self.n_workers + self.number
        lineage = session.metadata["lineage"]
        new = ids_of(origins_of(lineage, n, n + n_new), attempt & 0xFFFFF, n)
        session.append(*values_of(new), token_ids=new, start=n)
        return first, np.concatenate([ids, new])

    def write(self):
        name = self.own_name()
        if name not in self.known:
            origin = self.rng.randrange(1, 1 << 22)
            metadata = {"lineage": [[origin, None]]}
            session = self.archive.create_session(
                name, model=MODEL, codec=Raw(), block_tokens=16, fit_tokens=8, metadata=metadata
            )
            self.known[name] = 0, np.empty(0, np.int64)
        else:
            try:
                session = self.archive.session(name)
            except NotFound:
                self.evicted(name)
                return
        with session:
            for _ in range(self.rng.randrange(1, 3)):
                known = self.append(session, name)
                if self.rng.random() < 0.9:
                    session.commit()
                    self.known[name] = known
                else:
                    break
        self.check(name)

    def truncate(self):
        session = self.open_own()
        if session is None:
            return
        with session:
            first, ids = self.known[session.name]
            n = self.rng.randrange(len(ids) + 1)
            session.truncate(first + n)
            self.known[session.name] = first if first + n else 0, ids[:n]
            if self.rng.random() < 0.7:
                known = self.append(session, session.name)
                session.commit()
                self.known[session.name] = known
        self.check(session.name)

    def trim(self):
        session = self.open_own()
        if session is None or self.rng.random() < 0.5:
            return
        first, ids = self.known[session.name]
        n = self.rng.randrange(len(ids) + 1)
        session.trim_front(first + n)
        self.known[session.name] = first + n, ids[n:]

    def delete(self):
        session = self.open_own()
        if session is not None:
            self.archive.delete_session(session.name)
            del self.known[session.name]
            assert session.name not in self.archive

    def rename(self):
        session, name = self.open_own(), self.own_name()
        if session is not None and name != session.name:
            old = session.name
            session.rename(name, replace=name in self.known)
            self.known[name] = self.known.pop(old)
            self.check(name)

    def collect(self):
        if self.rng.random() < 0.3:
            self.archive.gc()
        else:
            report = self.archive.verify()
            assert report.ok, report.problems

    def read(self):
        with contextlib.suppress(Locked):
            session = self.archive.session(self.any_name())
            for _ in range(3):
                check_session(session)

    def prompt(self):
        """A prompt that begins as a stored session, and how much of that is asked for."""
        ids = check_session(self.archive.session(self.any_name()))
        n = self.rng.randrange(len(ids) + 1)
        return np.concatenate([ids[:n], np.arange(self.rng.randrange(3))])

    def match(self):
        prompt = self.prompt()
        found = self.archive.match_prefix(prompt, MODEL)
        if found:
            for _ in range(2):
                k, v = found.session.read_all(0, found.n_tokens)
                ids = check_values(k, v, 0)
                assert (ids == prompt[: found.n_tokens]).all()
        return found, prompt

    def fork(self):
        found, prompt = self.match()
        name = self.own_name()
        if not found or found.session.name == name:
            return
        n = self.rng.randrange(found.n_tokens + 1)
        lineage, begin = [], 0
        for origin in sorted(set((prompt[:n] >> 40).tolist()), key=(prompt >> 40).tolist().index):
            begin += int((prompt[:n] >> 40 == origin).sum())
            lineage.append([origin, begin])
        lineage.append([self.rng.randrange(1, 1 << 22), None])
        metadata = {"lineage": lineage}
        replace = name in self.known and name in self.archive
        if not replace:
            self.known.pop(name, None)
        try:
            found.session.fork(name, at=n, metadata=metadata, replace=replace).close()
        except NotFound:
            self.known.pop(name, None) if self.evicts and name not in self.archive else None
            raise
        self.known[name] = 0, prompt[:n]
        self.check(name)


def start(path, number, n_workers, n_names, seed, evicts, seconds):
    arguments = map(str, (path, number, n_workers, n_names, seed, int(evicts), seconds))
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check_archive(path, *, empty=False):
    with kvstore.open(path, "a") as archive:
        report = archive.verify(decode=True)
        assert report.ok, report.problems
        read = {name: check_session(archive.session(name)).tobytes() for name in archive.names()}
        archive.gc()
        report = archive.verify(decode=True)
        assert report.ok, report.problems
        assert report.n_leftover == 0
        assert archive.gc() == 0
        for name, ids in read.items():
            assert check_session(archive.session(name)).tobytes() == ids
        if empty:
            for name in archive.names():
                archive.delete_session(name)
            archive.gc()
            with archive._read() as snapshot:
                assert [key for key, _ in snapshot.scan(b"")] == [keys.ARCHIVE]
        return len(read)


def run_workers(path, n_workers, n_names, seconds, seed, *, evicts=False, kills=False):
    """Run workers side by side, killing some; every one that ends by itself must be content."""
    rng = random.Random(seed)
    options = (n_workers, n_names, seed, evicts)
    end = time.monotonic() + seconds
    workers = [start(path, i, *options, seconds) for i in range(n_workers)]
    n_kills = 0
    try:
        while kills and time.monotonic() < end - 2:
            time.sleep(rng.uniform(0.3, 1.0))
            i = rng.randrange(n_workers)
            if workers[i].poll() is None:
                workers[i].send_signal(signal.SIGKILL)
                _, err = workers[i].communicate()
                assert err == ""
                n_kills += 1
            else:
                break
            left = max(end - time.monotonic(), 1)
            workers[i] = start(path, i, n_workers, n_names, f"{seed} {n_kills}", evicts, left)
        n_steps = n_evicted = 0
        for worker in workers:
            out, err = worker.communicate(timeout=seconds + 120)
            assert worker.returncode == 0, err[-3000:]
            n_steps, n_evicted = n_steps + int(out.split()[0]), n_evicted + int(out.split()[1])
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
                worker.communicate()
            worker.stdout.close()
            worker.stderr.close()
    return n_steps, n_kills, n_evicted


def make(path, quota=None):
    with kvstore.open(path, "a", **({"quota_bytes": quota} if quota else {})):
        pass


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "a.kv")


def test_a_few_processes(path):
    make(path)
    n_steps, *_ = run_workers(path, 4, 40, 3, seed=1)
    assert n_steps > 20
    assert check_archive(path, empty=True) > 0


def test_a_few_processes_that_are_killed(path):
    make(path)
    _, n_kills, _ = run_workers(path, 3, 30, 4.5, seed=2, kills=True)
    assert n_kills > 0
    check_archive(path, empty=True)


@pytest.mark.slow
def test_many_processes(path):
    make(path)
    n_steps, *_ = run_workers(path, 8, 200, 15, seed=0)
    assert n_steps > 200
    assert check_archive(path, empty=True) > 20


@pytest.mark.slow
def test_many_processes_that_are_killed(path):
    make(path)
    for i in range(2):
        _, n_kills, _ = run_workers(path, 8, 200, 9, seed=i, kills=True)
        assert n_kills > 2
        check_archive(path)
    check_archive(path, empty=True)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [False, True])
def test_many_processes_and_eviction(path, kills):
    """As much as 200 sessions hold does not fit: the least used go, none while it is read."""
    make(path, quota=1 << 20)  # full within seconds also where little time is left
    n_steps, _, n_evicted = run_workers(path, 8, 200, 15, seed=5, evicts=True, kills=kills)
    assert n_steps > 50
    assert n_evicted > 5
    check_archive(path, empty=True)


if __name__ == "__main__":
    worker_path, *numbers, worker_seed, worker_evicts, worker_seconds = sys.argv[1:]
    worker = Worker(worker_path, *map(int, numbers), worker_seed, evicts=bool(int(worker_evicts)))
    print(*worker.run(float(worker_seconds)))
