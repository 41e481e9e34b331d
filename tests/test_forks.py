"""Forks, finalizers and threads: nobody waits for a lock that will never be free."""

import gc
import os
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest

import kvstore
from kvstore import Model, Raw

MODEL = Model.uniform(name="m", n_layers=1, n_kv_heads=1, head_dim=4)


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "a.kv")
    with kvstore.open(path, "a") as archive:
        archive.create_session("s", model=MODEL, codec=Raw())
    return path


def in_child(body):
    """Run `body` in a forked child; fail if it raises or takes 20 seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which is what is tested
        pid = os.fork()
    if pid == 0:
        import signal

        code = 1
        try:
            signal.alarm(20)
            body()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def held_by_a_thread(*contexts):
    """Return a function that lets a thread, which holds all of them, end."""
    held, done = threading.Event(), threading.Event()

    def hold():
        from contextlib import ExitStack

        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def let_go():
        done.set()
        thread.join()

    return let_go


def test_a_child_never_waits_for_a_thread_of_its_parent(path):
    with kvstore.open(path, "a", lock_timeout=600) as archive:
        session = archive.session("s")
        x = np.ones((1, 1, 1, 4), np.float32)
        session.append(x, x)
        let_go = held_by_a_thread(session._lock, archive._lock, archive._backend.write(1.0))

        def child():
            for use in (
                session.commit,
                lambda: session.append(x, x),
                lambda: archive.create_session("t", model=MODEL),
                lambda: archive.delete_session("s"),
                archive.names,
            ):
                with pytest.raises(kvstore.Closed, match="fork"):
                    use()
            session.close()
            archive.close()

        in_child(child)
        let_go()
        session.commit()
        assert session.n_committed == 1


def test_reopening_in_a_child(path):
    with kvstore.open(path, "a") as archive:

        def reopen():
            with kvstore.open(path) as mine:
                assert mine.names() == ["s"]

        in_child(reopen)
        let_go = held_by_a_thread(archive._read())

        def refuse():
            with pytest.raises(kvstore.Closed, match="process that this one was forked from"):
                kvstore.open(path)
            with pytest.raises(kvstore.Closed, match="before a fork"):
                archive.names()

        in_child(refuse)
        let_go()


def test_a_child_does_not_end_the_reads_of_its_parent(path):
    with kvstore.open(path, "a") as archive:
        snapshot = archive._read()
        snapshot.__enter__()
        in_child(lambda: snapshot.__exit__(None, None, None))
        readers = archive._backend._environment.env.readers()
        transactions = [
            line.split()[2] for line in readers.splitlines() if line.split()[0] == str(os.getpid())
        ]
        assert transactions != ["-"]
        assert len(transactions) == 1
        snapshot.__exit__(None, None, None)


@pytest.mark.parametrize("lock", ["registry", "gate"])
def test_an_archive_collected_anywhere_is_closed(path, lock):
    """The collector may run a finalizer while its own thread holds any lock of ours."""
    code = """
import faulthandler, gc, sys, kvstore
from kvstore.backends import _environment
faulthandler.dump_traceback_later(20, exit=True)
gc.disable()

class Holder: pass
holder = Holder()
holder.me, holder.archive = holder, kvstore.open(sys.argv[1])
environment = holder.archive._backend._environment
del holder
with _environment._registry_lock if sys.argv[2] == "registry" else environment._gate:
    gc.collect()
kvstore.open(sys.argv[1]).close()
assert not _environment._registry and environment._closed
"""
    subprocess.run([sys.executable, "-c", code, path, lock], check=True, timeout=60)


def test_a_memory_lease_collected_while_another_is_taken():
    code = """
import faulthandler, gc
from kvstore.place import open_backend
faulthandler.dump_traceback_later(20, exit=True)
backend = open_backend("memory:", "a")

class Holder: pass
holder = Holder()
holder.me, holder.lease = holder, backend.lease(1, "s")
del holder
with backend._store.lease_lock:
    gc.collect()
backend.lease(1, "s").release()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_sessions_are_opened_while_others_are_deleted():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    stop, errors = threading.Event(), []
    try:
        with kvstore.open("memory:", "a") as archive:
            archive.create_session("a", model=MODEL).close()

            def open_many():
                kept = []
                while not stop.is_set():
                    kept.append(archive.session("a"))
                    if len(kept) > 3000:
                        kept.clear()

            def list_many():
                try:
                    for _ in range(30):
                        archive.create_session("b", model=MODEL).close()
                        archive.delete_session("b")
                except RuntimeError as error:
                    errors.append(error)
                finally:
                    stop.set()

            threads = [threading.Thread(target=f) for f in (open_many, open_many, list_many)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
        gc.collect()
    assert errors == []
