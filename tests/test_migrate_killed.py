"""Migrations that are killed: no half archive under the final name, and the rest is done later.

Deterministic: a child kills itself at the n-th write, step of a commit, or rename, for every n.
Random: a process is killed from outside, again and again, until one comes through.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import kvstore
import kvstore.migration.moving
import kvstore.migration.needed
import kvstore.migration.recoding
from kvstore import KVR1, TKV1, Raw, keys
from kvstore.backends import lmdb
from kvstore.backends._transactions import LmdbTransaction
from kvstore.migration import destination

MODEL = kvstore.Model.uniform(name="m", n_layers=1, n_kv_heads=1, head_dim=4)
CODEC = TKV1(step=0.5)


def add(session, n, seed):
    rng = np.random.default_rng(seed)
    session.append(
        *rng.standard_normal((2, 1, 1, n, 4), dtype=np.float32), token_ids=rng.integers(0, 50, n)
    )
    session.commit()


def make(path):
    with kvstore.open(path, "a") as archive:
        options = {"model": MODEL, "codec": KVR1(step=0.25), "block_tokens": 16, "fit_tokens": 8}
        for seed, name in enumerate(("parent", "other")):
            with archive.create_session(name, **options) as session:
                add(session, 5, seed)
                add(session, 80, seed)
        with archive.session("parent").fork("fork", at=52) as fork:
            add(fork, 20, 5)


def stored(path):
    with kvstore.open(path) as archive, archive._read() as snapshot:
        return {key: bytes(v) for key, v in snapshot.scan(b"") if key != keys.ARCHIVE}


def assert_sound(path):
    with kvstore.open(path, "a") as archive:
        report = archive.verify(decode=True)
        assert report.ok, report.problems


def killing_at(n):
    """Make the n-th write, step of a commit, or rename of this process its last."""
    count = [0]

    def step():
        if count[0] == n:
            os.kill(os.getpid(), signal.SIGKILL)
        count[0] += 1

    def before(call):
        def wrapped(*args, **kwargs):
            step()
            return call(*args, **kwargs)

        return wrapped

    def around(call):
        def wrapped(*args, **kwargs):
            step()
            call(*args, **kwargs)
            step()

        return wrapped

    LmdbTransaction.put = before(LmdbTransaction.put)
    LmdbTransaction.delete = before(LmdbTransaction.delete)
    lmdb._Writer.end = around(lmdb._Writer.end)
    destination.os.rename = around(os.rename)
    # Many small transactions.
    kvstore.migration.moving.BATCH_BYTES = kvstore.migration.needed.BATCH_BYTES = 600
    kvstore.migration.recoding._FLUSH_BYTES = 600


def run(n, *args, **options):
    """Migrate in a child that is killed at step n; return whether it got to its end."""
    pid = os.fork()
    if pid == 0:
        try:
            killing_at(n)
            kvstore.migrate(*args, **options)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


@pytest.mark.parametrize(
    "n_steps", [pytest.param(2, marks=pytest.mark.slow), 7], ids=["every step", "some steps"]
)
@pytest.mark.parametrize("codec", [None, CODEC], ids=["move", "recode"])
@pytest.mark.parametrize("kind", ["new", "there"])
def test_killed_at_any_step_and_resumed(tmp_path, n_steps, codec, kind):
    """Of every two steps, moving is killed at the first and coding anew at the second."""
    source, there = tmp_path / "a.kv", tmp_path / "b.kv"
    partial = tmp_path / "b.kv.partial"
    make(source)
    kvstore.migrate(source, tmp_path / "whole.kv", codec=codec)
    wanted = stored(tmp_path / "whole.kv")
    options = {"codec": codec, "workers": 1, "resume": True}
    n, ended = int(codec is not None), False
    while not ended:
        if kind == "there":
            kvstore.open(there, "a").close()
        ended = run(n, source, there, **options)
        if kind == "there":
            assert_sound(there)
            assert {"bare", *stored_names(there)} <= {"bare", "parent", "other", "fork"}
        elif there.exists():
            assert stored(there) == wanted
            assert not partial.exists()
        # Killed once more on the way, then left alone.
        if n % 3 == 0 and not ended:
            run(n // 2, source, there, **options)
        kvstore.migrate(source, there, **options)
        assert stored(there) == wanted, f"killed at step {n}"
        assert not partial.exists()
        assert_sound(there)
        shutil.rmtree(there)
        n += n_steps
    assert n > 60


def stored_names(path):
    with kvstore.open(path) as archive:
        return archive.names()


def test_what_is_there_is_not_copied_again(tmp_path):
    source, there = tmp_path / "a.kv", tmp_path / "b.kv"
    make(source)
    whole = kvstore.migrate(source, tmp_path / "whole.kv").n_bytes
    sizes = []
    for n in (15, 30, 45):
        assert not run(n, source, there)
        sizes.append(kvstore.migrate(source, there, resume=True).n_bytes)
        shutil.rmtree(there)
    assert whole > sizes[0] > sizes[1] > sizes[2] > 0


def test_the_rest_of_other_work_does_not_stay(tmp_path):
    source, there = tmp_path / "a.kv", tmp_path / "b.kv"
    make(source)
    assert not run(60, source, there)
    kvstore.migrate(source, there, sessions="other", resume=True)
    kvstore.migrate(source, tmp_path / "whole.kv", sessions="other")
    assert stored(there) == stored(tmp_path / "whole.kv")


def test_the_source_goes_on_between_two_tries(tmp_path):
    """Tails, ids and records of the first try are out of date, frames are not."""
    source, there = tmp_path / "a.kv", tmp_path / "b.kv"
    make(source)
    for n in (20, 40, 55, 65):
        assert not run(n, source, there)
        with kvstore.open(source, "a") as archive:
            with archive.session("parent") as session:
                add(session, 11, n)
            with archive.session("fork") as session:
                session.truncate(60)
                add(session, 3, n)
        kvstore.migrate(source, there, resume=True)
        assert stored(there) == stored(source)
        shutil.rmtree(there)


CHILD = """
import sys
import kvstore, kvstore.migration.moving
from kvstore import TKV1
kvstore.migration.moving.BATCH_BYTES = 200_000
source, there, how = sys.argv[1:]
print("begun", flush=True)
codec = TKV1(step=0.5) if how == "recode" else None
kvstore.migrate(source, there, resume=True, codec=codec)
"""


@pytest.mark.parametrize("how", ["move", "recode"])
def test_killed_from_outside_again_and_again(tmp_path, how):
    source, there = tmp_path / "a.kv", tmp_path / "b.kv"
    model = kvstore.Model.uniform(name="m", n_layers=4, n_kv_heads=2, head_dim=32)
    x = np.random.default_rng(0).standard_normal((4, 2, 4000, 32), dtype=np.float32)
    with (
        kvstore.open(source, "a") as archive,
        archive.create_session("s", model=model, codec=Raw(), block_tokens=64) as session,
    ):
        session.append(x, x)
        session.commit()
        session.fork("t", at=1000)
    rng = random.Random(7)
    n_killed = 0
    while True:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD, str(source), str(there), how],
            stdout=subprocess.PIPE,
        )
        process.stdout.readline()
        time.sleep(rng.uniform(0, 0.15 * (1 + n_killed)))
        ended = process.poll() is not None
        if not ended:
            process.kill()
        process.stdout.close()
        if process.wait() == 0:
            break
        assert process.returncode == -signal.SIGKILL
        n_killed += 1
        if there.exists():
            assert_sound(there)
            with kvstore.open(there) as archive:
                assert archive.names() == ["s", "t"]
    assert n_killed >= 1
    assert_sound(there)
    if how == "move":
        assert stored(there) == stored(source)
    assert not (tmp_path / "b.kv.partial").exists()
