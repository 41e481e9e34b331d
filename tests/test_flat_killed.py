"""Flat layers and sessions after a kill, or a loss of power, between any two of their writes."""

from __future__ import annotations

import os
import random
import shutil
import signal

import numpy as np
import pytest
from kvcodecs.errors import NotFound

from kvstore import LayerSpec, Model, flat
from kvstore.flat import FlatLayer
from kvstore.flat import file as flat_file
from kvstore.flat.file import LayerFile

# Rows of 16 to a checksum block; values are exact in float16.
HEADS, DIM = 2, 256
MODEL = Model("m", (LayerSpec(2, 256, 256), LayerSpec(1, 512, 256), LayerSpec(2, 512, None)))


class Layer:
    """A layer, and the rows it should have: K is the position, V how often rows were taken back."""

    def __init__(self, target):
        self.target, self.n_taken = target, 0
        self.start, self.rows, self.durable = 0, [], (0, ())
        #: What the disk may have, in order.
        self.states = [(0, ())]

    @property
    def stop(self):
        return self.start + len(self.rows)

    def append(self, n):
        if self._must_commit(n):
            self.note()
        x = np.arange(self.stop, self.stop + n, dtype=np.float32)
        self._append(np.broadcast_to(x[:, None], (n, DIM)), n)
        self.rows += [(p, self.n_taken) for p in range(self.stop, self.stop + n)]

    def _must_commit(self, n):
        return self.target._must_commit(n)

    def _append(self, x, n):
        k = np.stack([x] * HEADS)
        self.target.append(k, np.full_like(k, self.n_taken))

    def drop(self, n):
        self.target.drop_front(n)
        self.start, self.rows = self.start + n, self.rows[n:]

    def commit(self):
        self.note()
        self.target.commit()
        self.durable = self.states[-1]

    def take_back(self, stop):
        del self.rows[stop - self.start :]
        self.note()
        self.target.take_back(stop)
        self.durable = self.states[-1]
        self.n_taken += 1

    def note(self):
        self.states.append((self.start, tuple(self.rows)))

    @staticmethod
    def make(path, **options):
        return FlatLayer.create(path, heads=HEADS, head_dim=DIM, scheme="f16", **options)

    open = staticmethod(FlatLayer.open)

    @staticmethod
    def read(target):
        k, v = target.read_all()
        return target.start, tuple(zip(k[1, :, 3].astype(int), v[0, :, 5].astype(int), strict=True))


class Session(Layer):
    """A session of three layers, of which the last has no V."""

    def _append(self, x, n):
        shapes = [(s.heads, n, s.head_dim_k) for s in MODEL.layers]
        k = [np.broadcast_to(x[None, :, :1], shape) for shape in shapes]
        v = [np.full((HEADS, n, 256), 0.0), np.full((1, n, 256), 0.0), None]
        self.target.append(k, v)

    def take_back(self, stop):
        self.note()  # first all that was appended
        super().take_back(stop)
        self.n_taken = 0

    def _must_commit(self, n):
        return any(layer._must_commit(n) for layer in self.target.layers)

    def note(self):
        # The ends become durable first, all of them.
        start, stop = self.states[-1][0], self.start
        if self.rows and start < stop:
            self.states.append((start, tuple((p, 0) for p in range(start, self.stop))))
        super().note()

    @staticmethod
    def make(path, **options):
        return flat.create(path, MODEL, scheme="f16", **options)

    open = staticmethod(flat.open)

    @staticmethod
    def read(target):
        ks, _ = target.read_all(dtype="float32")
        first = ks[0][0, :, 0].astype(int)
        assert all(np.array_equal(k[-1, :, -1].astype(int), first) for k in ks)
        assert all(layer.stop >= target.stop for layer in target.layers)
        return target.start, tuple((p, 0) for p in first)


def grow(case):
    case.append(5)
    case.commit()
    case.append(11)  # fills a block
    case.append(30)  # needs another segment
    case.commit()
    case.append(3)
    case.commit()


def drop(case):
    case.append(60)
    case.commit()
    case.drop(20)
    case.commit()
    case.append(25)
    case.drop(45)  # more than there was at the last commit
    case.commit()
    case.drop(20)
    case.append(4)
    case.commit()


def take_back(case):
    case.append(40)
    case.commit()
    case.take_back(21)
    case.append(19)
    case.commit()
    case.take_back(16)
    case.append(1)
    case.take_back(16)
    case.append(2)
    case.commit()


def wrap(case):
    case.append(30)
    case.commit()
    case.drop(25)
    case.append(25)
    case.commit()
    for _ in range(3):
        case.drop(18)
        case.append(17)
    case.commit()
    case.drop(25)
    case.commit()


SLOW = pytest.mark.slow
CASES = [
    (Layer, grow, {"capacity": 16}),
    (Layer, drop, {"capacity": 16}),
    (Layer, take_back, {"capacity": 16, "sparse": True}),
    (Layer, wrap, {"max_rows": 32}),
    (Session, grow, {"capacity": 16, "sparse": True}),
    (Session, drop, {"capacity": 16}),
    (Session, take_back, {"capacity": 16}),
    (Session, wrap, {"max_rows": 32}),
]
ids = [f"{kind.__name__} {story.__name__}" for kind, story, _ in CASES]


def run_child(body):
    """Run in a forked child; return whether it got to its end."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def kill_at(n, torn):
    """Kill this process before its n-th change of a file, or in the middle of it."""
    left = [n]

    def killing(real, name):
        def wrapped(*args):
            if left[0] == 0:
                if torn and name == "pwrite":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return real(*args)

        return wrapped

    for name in ("fdatasync", "ftruncate", "posix_fallocate", "link", "unlink", "rename", "pwrite"):
        setattr(os, name, killing(getattr(os, name), name))
    flat_file.punch = killing(flat_file.punch, "punch")


def check(kind, path, allowed, where):
    """Return which of the states it is found in, read in every way, and written on."""
    with kind.open(path) as target:
        found = kind.read(target)
        assert found in allowed, where
    with kind.open(path, "a") as target:
        assert kind.read(target) == found, where
        target.verify()
        case = kind(target)
        case.start, case.rows = found[0], list(found[1])
        case.states, case.n_taken = [found], 7 if kind is Layer else 0
        case.drop(max(0, len(found[1]) + 12 - 32))  # as a ring asks
        case.append(12)
        case.commit()
    with kind.open(path, pread=True) as target:
        assert kind.read(target) == case.states[-1], where
        target.verify()
    return found


@pytest.fixture
def no_waiting(monkeypatch):
    """A kill loses nothing that was written: nobody has to wait for the disk."""
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def kill_everywhere(tmp_path, kind, story, options, n, step, torn):
    path, trial = str(tmp_path / "whole"), str(tmp_path / "trial")
    with kind.make(path, **options) as target:
        whole = kind(target)
        story(whole)
    seen, ended = 0, False
    while not ended:
        kind.make(trial, **options).close()

        def body(n=n):
            with kind.open(trial, "a") as target:
                kill_at(n, torn)
                story(kind(target))

        ended = run_child(body)
        found = check(kind, trial, whole.states[seen:], f"killed at {n}")
        seen = whole.states.index(found, seen)
        remove(trial)
        n += step
    assert seen == len(whole.states) - 1
    assert n > 15


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize(("kind", "story", "options"), CASES, ids=ids)
def test_killed(tmp_path, kind, story, options):
    """At some of the moments, with the write of that moment half done."""
    kill_everywhere(tmp_path, kind, story, options, 0, 19 if kind is Layer else 53, True)


@pytest.mark.slow
@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize(("kind", "story", "options"), CASES, ids=ids)
def test_killed_at_many_moments(tmp_path, kind, story, options):
    kill_everywhere(tmp_path, kind, story, options, 1, 3 if kind is Layer else 10, False)


STEPS = [(Layer, 2), (Session, 5), *(pytest.param(x, 1, marks=SLOW) for x in (Layer, Session))]


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize(("kind", "step"), STEPS)
def test_killed_while_it_is_made(tmp_path, kind, step):
    path = str(tmp_path / "made")
    n, ended = 0, False
    while not ended:

        def body(n=n):
            kill_at(n, torn=False)
            kind.make(path).close()

        ended = run_child(body)
        if os.path.lexists(path):
            check(kind, path, [(0, ())], f"killed at {n}")
            remove(path)
        else:
            with pytest.raises(NotFound):
                kind.open(path)
            kind.make(path).close()  # what is left is in nobody's way
            remove(path)
        n += step
    assert n > 4


def remove(path):
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


class Power:
    """Files as a disk may have them: what was synced, and any part of what was written since."""

    def __init__(self, monkeypatch, rng):
        self.rng, self.files, self.on_event = rng, {}, lambda: None
        power = self

        def logging(name, note):
            real = getattr(LayerFile, name)

            def wrapped(file, *args, **options):
                result = real(file, *args, **options)
                if power.on_event is not None:
                    note(*power.files.setdefault(file.where, (bytearray(), [])), file, *args)
                    power.on_event()
                return result

            monkeypatch.setattr(LayerFile, name, wrapped)

        def write(_, pending, __, offset, data):
            pending.append((offset, bytes(np.ascontiguousarray(np.frombuffer(data, np.uint8)))))

        def punched(_, pending, __, offset, size):
            if size > 0:
                pending.append((offset, bytes(size)))

        def reserve(_, pending, file, *__):
            pending.append((file.size, b""))

        def sync(durable, pending, _):
            for change in pending:
                apply(durable, *change)
            pending.clear()

        for name, note in (
            ("write", write), ("punch", punched), ("reserve", reserve), ("sync", sync),
        ):  # fmt: skip
            logging(name, note)

    def begin(self, path):
        """Take what there is as synced, and the files as those of `path`."""
        found, self.files = self.files, {}
        for where, (durable, pending) in found.items():
            for change in pending:
                apply(durable, *change)
            pending.clear()
            name = os.path.basename(where)
            self.files[path if where == path else os.path.join(path, name)] = durable, pending

    def image(self, path, folder):
        """Write files as they may be after the power is lost now."""
        for where, (durable, pending) in self.files.items():
            data = bytearray(durable)
            for offset, change in pending:
                fate = self.rng.choice(["lost", "whole", "torn"])
                if fate == "whole":
                    apply(data, offset, change)
                elif fate == "torn":
                    for at in range(0, len(change), 128):
                        if self.rng.random() < 0.5:
                            apply(data, offset + at, change[at : at + 128])
            name = path if where == path else os.path.join(path, os.path.basename(where))
            to = folder + name[len(path) :]
            with open(to, "wb") as file:
                file.write(data)


def apply(data, offset, change):
    if len(data) < offset + len(change):
        data.extend(bytes(offset + len(change) - len(data)))
    data[offset : offset + len(change)] = change


def lose_power(tmp_path, monkeypatch, kind, story, options, step):
    path, trial = str(tmp_path / "whole"), str(tmp_path / "trial")
    power = Power(monkeypatch, random.Random(0))
    with kind.make(path, **options) as target:
        if kind is Session:  # made in a folder of another name
            os.mkdir(trial)
            shutil.copy(os.path.join(path, "session"), trial)
        power.begin(path)
        case, n = kind(target), 0

        def look():
            nonlocal n
            n += 1
            if n % step:
                return
            power.image(path, trial)
            oldest = case.states.index(case.durable)
            power.on_event = None
            check(kind, trial, case.states[oldest:], f"lost after change {n}")
            power.on_event = look

        power.on_event = look
        story(case)
    assert n > 15


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize(("kind", "story", "options"), CASES, ids=ids)
def test_power_is_lost(tmp_path, monkeypatch, kind, story, options):
    lose_power(tmp_path, monkeypatch, kind, story, options, 13 if kind is Layer else 37)


@pytest.mark.slow
@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize(("kind", "story", "options"), CASES, ids=ids)
def test_power_is_lost_at_many_moments(tmp_path, monkeypatch, kind, story, options):
    lose_power(tmp_path, monkeypatch, kind, story, options, 2 if kind is Layer else 7)
