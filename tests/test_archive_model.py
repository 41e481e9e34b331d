"""Append, commit, reopen and read against a plain numpy model, as a state machine."""

import tempfile

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvstore
from kvstore import KVR1, TKV1, LayerSpec, Model, Raw, Rope

MODEL = Model(
    "m",
    (
        LayerSpec(2, 4, 4),
        LayerSpec(1, 6, None, rope=Rope.from_theta(100.0, 4, style="interleaved")),
    ),
    rope=Rope.from_theta(1e4, 4),
)
STREAMS = MODEL.streams()
STEP = 0.5
CODECS = {
    "raw": Raw(),
    "kvr1": KVR1(step=STEP),
    "tkv1": TKV1(step=STEP),
    "relative": KVR1(rel_step=0.5),
}
SPECIAL = [0.0, -0.0, 1e-30, 3.0, 6.0, -6.0]


class Expected:
    """One session: what was appended, and what reads must return for committed tokens."""

    def __init__(self, codec):
        self.codec = codec
        self.given = {
            s: np.empty((MODEL.stream(*s).heads, 0, MODEL.stream(*s).head_dim), np.float32)
            for s in STREAMS
        }
        self.values = dict(self.given)
        self.ids = np.empty(0, np.int64)
        self.n = 0

    @property
    def n_committed(self):
        return self.values[STREAMS[0]].shape[1]


class Sessions(RuleBasedStateMachine):
    prefix = "memory"

    @initialize()
    def begin(self):
        self.directory = tempfile.TemporaryDirectory(prefix="kvstore-model-")
        self.place = f"{self.directory.name}/a.kv"
        if self.prefix != "lmdb":
            self.place = f"{self.prefix}:{self.place}"
        self.archive = kvstore.open(self.place, "a")
        self.open = {}
        self.sessions = {}

    @rule(
        name=st.sampled_from("ab"),
        codec=st.sampled_from(sorted(CODECS)),
        block=st.integers(1, 12),
        fit=st.integers(1, 9),
    )
    def create(self, name, codec, block, fit):
        if name in self.sessions:
            return
        self.open[name] = self.archive.create_session(
            name, model=MODEL, codec=CODECS[codec], block_tokens=block, fit_tokens=fit
        )
        self.sessions[name] = Expected(codec)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), n=st.integers(0, 20), seed=st.integers(0, 1 << 20))
    def append(self, data, n, seed):
        name = data.draw(st.sampled_from(sorted(self.sessions)))
        expected = self.sessions[name]
        rng = np.random.default_rng(seed)
        new = {}
        for stream, given in expected.given.items():
            x = rng.standard_normal((given.shape[0], n, given.shape[2])).astype(np.float32)
            if n:
                x[0, 0, 0] = SPECIAL[seed % len(SPECIAL)]
            new[stream] = x
            expected.given[stream] = np.concatenate([given, x], axis=1)
        ids = rng.integers(0, 1000, n)
        k = [new[i, "k"] for i in range(MODEL.n_layers)]
        v = [new.get((i, "v")) for i in range(MODEL.n_layers)]
        self.session(name).append(k, v, token_ids=ids, start=expected.n)
        expected.ids = np.concatenate([expected.ids, ids])
        expected.n += n

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def commit(self, data):
        name = data.draw(st.sampled_from(sorted(self.sessions)))
        session, expected = self.session(name), self.sessions[name]
        session.commit()
        assert session.n_tokens == session.n_committed == expected.n
        for stream, given in expected.given.items():
            got = session.read(*stream)
            before = expected.values[stream]
            # What was committed before has not changed by a bit.
            assert got[:, : before.shape[1]].tobytes() == before.tobytes()
            if expected.codec == "raw":
                assert got.tobytes() == given.tobytes()
            if expected.codec in ("kvr1", "tkv1"):
                assert np.abs(got - given).max(initial=0) <= STEP / 2
            expected.values[stream] = got

    @rule()
    def reopen(self):
        self.archive.close()
        self.archive = kvstore.open(self.place, "a")
        self.open = {}
        for expected in self.sessions.values():
            n = expected.n = expected.n_committed
            expected.ids = expected.ids[:n]
            expected.given = {s: x[:, :n] for s, x in expected.given.items()}

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def read(self, data):
        name = data.draw(st.sampled_from(sorted(self.sessions)))
        expected = self.sessions[name]
        stream = data.draw(st.sampled_from(STREAMS))
        stop = data.draw(st.integers(0, expected.n_committed))
        start = data.draw(st.integers(0, stop))
        got = self.session(name).read(*stream, start, stop)
        assert got.tobytes() == expected.values[stream][:, start:stop].tobytes()
        if expected.n_committed:
            ids = self.session(name).token_ids(start, stop)
            np.testing.assert_array_equal(ids, expected.ids[start:stop])

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def delete(self, data):
        name = data.draw(st.sampled_from(sorted(self.sessions)))
        self.archive.delete_session(name)
        del self.sessions[name]
        self.open.pop(name, None)

    @rule()
    def collect(self):
        self.archive.gc()

    @rule()
    def verify(self):
        report = self.archive.verify(decode=True)
        assert report.ok, report.problems
        assert report.n_leftover == 0

    @invariant()
    def names_and_counts(self):
        assert self.archive.names() == sorted(self.sessions)
        for name, expected in self.sessions.items():
            assert self.session(name).n_tokens == expected.n
            assert self.session(name).n_committed == expected.n_committed

    def session(self, name):
        if name not in self.open:
            self.open[name] = self.archive.session(name, expect=MODEL)
        return self.open[name]

    def teardown(self):
        if hasattr(self, "archive"):
            self.archive.close()
            self.directory.cleanup()


class SessionsInLmdb(Sessions):
    prefix = "lmdb"


class SessionsInZarr(Sessions):
    prefix = "zarr"


TestMemory = Sessions.TestCase
TestLmdb = SessionsInLmdb.TestCase
TestZarr = SessionsInZarr.TestCase
for case in (TestMemory, TestLmdb, TestZarr):
    case.settings = settings(
        max_examples=20,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
