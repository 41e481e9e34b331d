"""Flat layers and sessions against plain lists of rows: any order of calls, every way to read."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvcodecs.errors import Full, InvalidArgument, NotFound

import kvstore
from kvstore import LayerSpec, Model, flat
from kvstore.flat import FlatLayer

HEADS, DIM, MAX_ROWS = 2, 256, 100  # 16 rows to a block; a ring has 128 slots
ROPE = kvstore.Rope.from_theta(1e4, DIM)
MODEL = Model("m", (LayerSpec(HEADS, DIM, DIM), LayerSpec(1, 512, None)))
SIZES = st.one_of(st.integers(0, 20), st.sampled_from([15, 16, 17, 31, 32, 33, 64, 90]))
FRACTION = st.floats(0, 1)


def numbers(rows):
    """Values of f16 rows: exact, and no two of them alike."""
    return np.array(rows, np.float32).reshape(-1, 1)


class Rows(RuleBasedStateMachine):
    """What a layer or session should have: numbers, by position."""

    options: dict[str, object]
    is_ring = False
    has_name = True

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "rows")
        self.next = 1.0
        self.start, self.rows = 0, []
        self.durable = 0, []
        self.was_used = False
        self.target = None

    def teardown(self):
        if self.target is not None:
            self.target.close()
        self.folder.cleanup()

    @property
    def stop(self):
        return self.start + len(self.rows)

    def fresh(self, n):
        new = [(self.next + i) % 2048 for i in range(n)]
        self.next += n
        return new

    def commits_by_itself(self, n):
        raise NotImplementedError

    def write(self, target, new, start):
        raise NotImplementedError

    def reopened(self):
        return type(self).open(self.path, "a", pread=self.options.get("pread", False))

    @rule(n=SIZES, guarded=st.booleans())
    def append(self, n, guarded):
        new = self.fresh(n)
        if self.is_ring and len(self.rows) + n > MAX_ROWS:
            with pytest.raises(Full, match="do not fit"):
                self.write(self.target, new, None)
            return
        if self.commits_by_itself(n):
            self.durable = self.start, list(self.rows)
        self.write(self.target, new, self.stop if guarded else None)
        self.rows += new
        self.was_used |= n > 0

    @rule(n=st.integers(1, 40))
    @precondition(lambda self: self.was_used and self.stop)
    def append_elsewhere(self, n):
        with pytest.raises(InvalidArgument, match="are there"):
            self.write(self.target, self.fresh(n), self.stop + 1)

    @rule(n=SIZES)
    def drop_front(self, n):
        self.target.drop_front(n)
        n = min(n, len(self.rows))
        self.start, self.rows = self.start + n, self.rows[n:]

    @rule()
    def commit(self):
        self.target.commit()
        self.durable = self.start, list(self.rows)

    @rule(committed=st.booleans())
    @precondition(lambda self: self.has_name)
    def reopen(self, committed):
        if committed:
            self.commit()
        self.target.close()
        self.target = self.reopened()
        self.start, self.rows = self.durable[0], list(self.durable[1])
        self.was_used = self.stop > 0

    @invariant()
    def has_its_rows(self):
        if self.target is not None:
            assert (self.target.start, self.target.stop) == (self.start, self.stop)
            assert len(self.target) == len(self.rows)


class Layer(Rows):
    """One layer."""

    @staticmethod
    def open(path, mode="r", **options):
        return FlatLayer.open(path, mode, **options)

    @initialize(store_k=st.sampled_from(["pre", "post"]))
    def begin(self, store_k):
        options = {
            "heads": HEADS, "head_dim": DIM, "scheme": "f16", "rope": ROPE, "capacity": 16,
            "store_k": store_k, **self.options,
        }  # fmt: skip
        if self.has_name:
            self.target = FlatLayer.create(self.path, **options)
        else:
            self.target = FlatLayer.anonymous(**options)
        self.store_k = store_k

    def commits_by_itself(self, n):
        return self.target._must_commit(n)

    def write(self, target, new, start):
        x = np.broadcast_to(numbers(new), (HEADS, len(new), DIM))
        # K as it is stored, so that it comes back to the bit.
        target.append(x, -x, k_state=self.store_k, start=start)

    @rule(start=st.integers(0, 5000))
    @precondition(lambda self: not self.was_used and not self.stop)
    def begin_elsewhere(self, start):
        new = self.fresh(1)
        self.write(self.target, new, start)
        self.start, self.rows, self.was_used = start, new, True

    @rule(n=SIZES)
    def append_stored(self, n):
        n = min(n, len(self.rows), MAX_ROWS - len(self.rows) if self.is_ring else n)
        rows = {kind: self.target.stored_rows(kind, self.start, self.start + n) for kind in "kv"}
        if self.commits_by_itself(n):
            self.durable = self.start, list(self.rows)
        self.target.append_rows(rows, start=self.stop)
        self.rows += self.rows[:n]

    @rule(fraction=FRACTION)
    def take_back(self, fraction):
        del self.rows[int(fraction * len(self.rows)) :]
        self.target.take_back(self.stop)
        self.durable = self.start, list(self.rows)

    @rule(a=FRACTION, b=FRACTION)
    def read_rows(self, a, b):
        lo, hi = sorted(int(x * len(self.rows)) for x in (a, b))
        self.same(self.target.read_rows(self.start + lo, self.start + hi, **self.as_stored), lo, hi)
        first, pieces = self.start + lo, []
        for start, stop, k, v in self.target.pieces(first, self.start + hi):
            assert start == first
            first = stop
            pieces += k.view(np.float16)[:, 5].tolist()
            assert np.array_equal(-v.view(np.float16)[:, 7], k.view(np.float16)[:, 7])
        assert pieces == self.rows[lo:hi]

    @rule(n=st.integers(0, 200))
    def read_window(self, n):
        lo = max(0, len(self.rows) - n)
        self.same(self.target.read_window(n, **self.as_stored), lo, len(self.rows))

    @rule(fractions=st.lists(st.floats(0, 1, exclude_max=True), max_size=8))
    @precondition(lambda self: self.rows)
    def gather(self, fractions):
        some = [int(x * len(self.rows)) for x in fractions]
        k, v = self.target.gather([self.start + i for i in some], **self.as_stored)
        assert k[1, :, 3].tolist() == (-v[0, :, 9]).tolist() == [self.rows[i] for i in some]

    @rule()
    def views(self):
        if self.options.get("pread"):
            with pytest.raises(InvalidArgument, match="pread"):
                self.target.raw_rows("k")
            return
        views = [view.view(np.float16)[:, 0] for view in self.target.raw_rows("k")]
        found = np.concatenate([np.empty(0), *views])
        lo = self.start - self.target._state.origin
        at = np.arange(lo, lo + len(self.rows))
        assert found[at % len(found) if self.is_ring else at].tolist() == self.rows

    @rule()
    def around_the_rows(self):
        if self.start:
            with pytest.raises(NotFound):
                self.target.read_rows(self.start - 1, self.start)
            with pytest.raises(NotFound):
                self.target.gather([self.start - 1])
        with pytest.raises(InvalidArgument):
            self.target.gather([self.stop])

    @rule()
    def ask_the_kernel(self):
        self.target.prefetch_rows(self.start, self.stop)
        self.target.release()
        self.target.advise_random()
        self.target.verify()

    @rule()
    @precondition(lambda self: self.has_name)
    def read_elsewhere(self):
        with FlatLayer.open(self.path, pread=not self.options.get("pread", False)) as reader:
            assert reader.verify() >= 0
            start, rows = self.durable
            assert (reader.start, reader.stop) == (start, start + len(rows))
            k, v = reader.read_all(**self.as_stored)
            assert k[0, :, 1].tolist() == (-v[1, :, 2]).tolist() == rows

    @property
    def as_stored(self):
        return {"k_state": self.store_k}

    def same(self, pair, lo, hi):
        k, v = pair
        want = np.broadcast_to(numbers(self.rows[lo:hi]), (HEADS, hi - lo, DIM))
        assert np.array_equal(k, want)
        assert np.array_equal(v, -want)


class Session(Rows):
    """Two layers, of which the second has no V."""

    @staticmethod
    def open(path, mode="r", **options):
        return flat.open(path, mode, **options)

    @initialize()
    def begin(self):
        options = {"scheme": "f16", "capacity": 16, **self.options}
        if self.has_name:
            self.target = flat.create(self.path, MODEL, **options)
        else:
            self.target = flat.anonymous(MODEL, **options)

    def commits_by_itself(self, n):
        return any(layer._must_commit(n) for layer in self.target.layers)

    def write(self, target, new, start):
        x = numbers(new)
        k = [np.broadcast_to(x, (s.heads, len(new), s.head_dim_k)) for s in MODEL.layers]
        target.append(k, [-k[0], None], start=start)

    @rule(n=st.integers(1, 20))
    def append_what_one_layer_refuses(self, n):
        if self.is_ring and len(self.rows) + n > MAX_ROWS:
            return
        if self.commits_by_itself(n):
            self.durable = self.start, list(self.rows)
        x = numbers(self.fresh(n))
        k = [np.broadcast_to(x, (HEADS, n, DIM)), np.full((1, n, 512), np.nan)]
        with pytest.raises(InvalidArgument, match="not finite"):
            self.target.append(k, [k[0], None])

    @rule(a=FRACTION, b=FRACTION, layer=st.integers(0, 1))
    def read(self, a, b, layer):
        lo, hi = sorted(int(x * len(self.rows)) for x in (a, b))
        found = self.target.read(layer, "k", self.start + lo, self.start + hi)
        assert found[0, :, 3].tolist() == self.rows[lo:hi]

    @rule(n_threads=st.sampled_from([None, 1, 3]))
    def read_all(self, n_threads):
        (a, b), (v, none) = self.target.read_all(n_threads=n_threads)
        assert a[1, :, 0].tolist() == b[0, :, 9].tolist() == (-v[0, :, 8]).tolist() == self.rows
        assert none is None
        assert self.target.verify() >= 0

    @rule()
    @precondition(lambda self: self.has_name)
    def read_elsewhere(self):
        with flat.open(self.path) as reader:
            start, rows = self.durable
            assert (reader.start, reader.stop) == (start, start + len(rows))
            assert reader.read_all()[0][1][0, :, 7].tolist() == rows
        assert flat.verify(self.path).ok


def machine(kind, name, examples, slow=False, **attributes):
    case = type(name, (kind,), attributes).TestCase
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    return pytest.mark.slow(case) if slow else case


RING = {"options": {"max_rows": MAX_ROWS}, "is_ring": True}
MAPPED = {"options": {}}
PREAD = {"options": {"pread": True, "sparse": True}}
MEMORY = {"options": {}, "has_name": False}
TestMapped = machine(Layer, "Mapped", 6, **MAPPED)
TestPread = machine(Layer, "Pread", 4, **PREAD)
TestMemory = machine(Layer, "Memory", 4, **MEMORY)
TestRing = machine(Layer, "Ring", 6, **RING)
TestSession = machine(Session, "Sessions", 4, **MAPPED)
TestRingSession = machine(Session, "RingSession", 4, **RING)
TestMappedLong = machine(Layer, "Mapped", 25, slow=True, **MAPPED)
TestPreadLong = machine(Layer, "Pread", 10, slow=True, **PREAD)
TestMemoryLong = machine(Layer, "Memory", 10, slow=True, **MEMORY)
TestRingLong = machine(Layer, "Ring", 25, slow=True, **RING)
TestSessionLong = machine(Session, "Sessions", 10, slow=True, **MAPPED)
TestRingSessionLong = machine(Session, "RingSession", 25, slow=True, **RING)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Nothing is lost here: nobody has to wait for the disk."""
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
