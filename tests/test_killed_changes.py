"""Killed in the middle of any change, an archive is what it was before it, or after it.

Each change runs in a child that kills itself (SIGKILL) at the n-th write inside a transaction, or
right before or after LMDB commits, for every n there is.
"""

from __future__ import annotations

import os
import shutil
import signal

import numpy as np
import pytest
from kvcodecs.raw import Raw

import kvstore
from kvstore.backends import lmdb
from kvstore.backends._transactions import LmdbTransaction

MODEL = kvstore.Model.uniform(name="m", n_layers=1, n_kv_heads=1, head_dim=4)
B = 16


def values(n, seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, 1, 1, n, 4), dtype=np.float32), rng.integers(0, 50, n)


def add(session, n, seed):
    (k, v), ids = values(n, seed)
    session.append(k, v, token_ids=ids)
    session.commit()


def make(path):
    """A parent with a fork that went on, one that did not, and a session of its own."""
    with kvstore.open(path, "a") as archive:
        options = {"model": MODEL, "codec": Raw(), "block_tokens": B, "fit_tokens": 8}
        for seed, name in enumerate(("parent", "other")):
            with archive.create_session(name, **options) as session:
                add(session, 100, seed)
        with archive.session("parent").fork("fork", at=70) as fork:
            add(fork, 30, 5)
        archive.session("parent").fork("bare", at=50)


def state(path):
    """Names, values, ids and what prompts find: all that a user can see."""
    with kvstore.open(path, "a") as archive:
        report = archive.verify(decode=True)
        assert report.ok, report.problems
        seen = {}
        for name in archive.names():
            session = archive.session(name)
            k, v = session.read_all()
            ids = session.token_ids()
            match = archive.match_prefix(ids, MODEL).n_tokens
            entry = (session.first_token, k.tobytes(), v.tobytes(), ids.tobytes(), match)
            seen[name] = (*entry, session.pinned, str(session.metadata))
        archive.gc()
        assert archive.verify().n_leftover == 0
        return seen


def append(archive):
    add(archive.session("other"), 40, 7)


def truncate(archive):
    archive.session("fork").truncate(60)


def truncate_and_append(archive):
    with archive.session("parent") as session:
        session.truncate(90)


def append_range(archive):
    # To a block's edge first, in a change of its own: 96 tokens.
    with archive.session("other") as session:
        session.append_range(archive.session("parent"), 16, 48)


CHANGES = {
    "commit": append,
    "first commit of a fork": lambda archive: add(archive.session("bare"), 20, 8),
    "fork": lambda archive: archive.session("parent").fork("new", at=77),
    "fork in place of another": lambda a: a.session("parent").fork("other", at=30, replace=True),
    "truncate": truncate,
    "truncate what a fork shares": truncate_and_append,
    "trim": lambda archive: archive.session("parent").trim_front(40),
    "rename": lambda archive: archive.session("fork").rename("other", replace=True),
    "pin and metadata": lambda archive: archive.session("fork").pin(),
    "delete": lambda archive: archive.delete_session("other"),
    "delete a parent": lambda archive: archive.delete_session("parent"),
    "append a range": append_range,
    "gc": lambda archive: archive.gc(),
    "reindex": lambda archive: archive.reindex(),
    "evict": lambda archive: archive._room._evict(1, (), 1 << 20),
}


def killing_at(n):
    """Make the n-th write, or step of a commit, of this process its last."""
    count = [0]

    def killing(call):
        def wrapped(self, *args, **kwargs):
            if count[0] == n:
                os.kill(os.getpid(), signal.SIGKILL)
            count[0] += 1
            return call(self, *args, **kwargs)

        return wrapped

    def ending(call):
        def wrapped(self, *args, **kwargs):
            killing(call)(self, *args, **kwargs)
            killing(lambda self: None)(self)

        return wrapped

    LmdbTransaction.put = killing(LmdbTransaction.put)
    LmdbTransaction.delete = killing(LmdbTransaction.delete)
    lmdb._Writer.end = ending(lmdb._Writer.end)


def run(path, change, n):
    """Run a change in a child; return whether it got to its end."""
    pid = os.fork()
    if pid == 0:
        try:
            archive = kvstore.open(path, "a")
            killing_at(n)
            change(archive)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


@pytest.mark.parametrize("name", CHANGES)
def test_before_or_after(tmp_path, name):
    change = CHANGES[name]
    make(tmp_path / "a.kv")
    if name == "append a range":
        with kvstore.open(tmp_path / "a.kv", "a") as archive:
            archive.session("other").truncate(96)
    if name == "gc":
        leave_frames(tmp_path / "a.kv")
    before = state(shutil.copytree(tmp_path / "a.kv", tmp_path / "before.kv"))
    shutil.copytree(tmp_path / "a.kv", tmp_path / "after.kv")
    assert run(tmp_path / "after.kv", change, -1)
    after = state(tmp_path / "after.kv")
    seen, n, ended = set(), 0, False
    while not ended:
        trial = shutil.copytree(tmp_path / "a.kv", tmp_path / f"{n}.kv")
        ended = run(trial, change, n)
        found = state(trial)
        assert found in (before, after), f"killed at step {n}"
        seen.add(found == after)
        shutil.rmtree(trial)
        n += 1
    assert n > 2
    assert seen == ({True, False} if before != after else {True})


def leave_frames(path):
    """Leave what a killed appender leaves: frames stored ahead of a commit."""
    pid = os.fork()
    if pid == 0:
        from kvstore import writer

        writer.SPILL_BYTES = 1
        archive = kvstore.open(path, "a")
        (k, v), ids = values(60, 9)
        archive.session("other").append(k, v, token_ids=ids)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
