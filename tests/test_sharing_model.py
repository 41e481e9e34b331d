"""Sessions that share frames, cut, trimmed, renamed and matched, against a plain model.

The model is a dict of names: which token ids, and which values a read must return. A committed
value never changes, whoever shares it and whatever happens to the others.
"""

import copy
import tempfile
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvstore
import kvstore.writer
from kvstore import KVR1, TKV1, LayerSpec, Model, Raw, Rope, keys
from kvstore.sharing import claims_of
from kvstore.spans import header_of

WINDOW = 24
MODEL = Model(
    "m",
    (LayerSpec(2, 4, 4), LayerSpec(1, 6, None, window=WINDOW)),
    rope=Rope.from_theta(100.0, 4),
)
STREAMS = MODEL.streams()
STEP = 0.5
CODECS = {"raw": Raw(), "kvr1": KVR1(step=STEP), "tkv1": TKV1(step=STEP)}
NAMES = "abcdef"
#: Chunks of token ids as small as this, so that sessions of hundreds of tokens have many.
CHUNK_TOKENS = 48
HASH_TOKENS = 16


def _bases():
    """Token sequences that share 70, 133 and 300 ids; some are negative or large."""
    rng = np.random.default_rng(5)
    first = rng.integers(-3, 1 << 40, 4000)
    bases = [first]
    for n in (70, 133, 300):
        other = first.copy()
        other[n:] = rng.integers(0, 100, 4000 - n)
        bases.append(other)
    return bases


BASES = _bases()


def rotated(x, positions):
    """K after RoPE, in float64."""
    half = 2
    angles = np.asarray(positions)[:, None] * MODEL.rope.inv_freq.astype(np.float64)
    cos, sin = np.cos(angles), np.sin(angles)
    y = x.astype(np.float64)
    a, b = y[..., :half].copy(), y[..., half : 2 * half].copy()
    y[..., :half], y[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin
    return y


class Expected:
    """One session.

    `values` holds what reads return for committed tokens, `given` what was appended, both from
    the stream's `start` on.
    """

    def __init__(self, codec, metadata, fitted=False):
        self.codec, self.metadata = codec, metadata
        self.fitted = fitted
        self.start = dict.fromkeys(STREAMS, 0)
        self.given = {s: _empty(s) for s in STREAMS}
        self.values = {s: _empty(s) for s in STREAMS}
        self.ids = np.empty(0, np.int64)
        self.has_ids = None  # not known before the first tokens
        self.n = self.n_committed = self.first = 0
        self.faithful = None  # tokens before the first that came from elsewhere; None for all
        self.pinned = False

    @property
    def least(self):
        """Fewest tokens that it can be cut to."""
        return max(self.first, *self.start.values())

    @property
    def matches_from(self):
        """Fewest tokens of a prompt that it can serve; None if none."""
        if not self.has_ids or self.first or not self.n_committed:
            return None
        late = [s for s in STREAMS if self.start[s]]
        return max([1, *(self.start[s] + WINDOW for s in late)])

    def cut(self, n):
        """Keep the first `n` tokens, all committed."""
        for s in STREAMS:
            kept = max(n - self.start[s], 0)
            self.given[s] = self.given[s][:, :kept]
            self.values[s] = self.values[s][:, :kept]
        self.ids = self.ids[:n]
        self.n = self.n_committed = n
        if self.faithful is not None and self.faithful >= n:
            self.faithful = None
        if n == 0:  # anew
            self.start = dict.fromkeys(STREAMS, 0)
            self.first, self.has_ids = 0, None

    def drop(self):
        """Lose what is not committed."""
        n = self.n_committed
        started = any(x.shape[1] for x in self.values.values())
        if n == 0 and not started:
            self.start = dict.fromkeys(STREAMS, 0)
        values, given = self.values, self.given
        self.given = {s: given[s][:, : values[s].shape[1]] for s in STREAMS}
        self.ids, self.n = self.ids[:n], n
        if n == 0:
            self.has_ids = None


def _empty(stream):
    spec = MODEL.stream(*stream)
    return np.empty((spec.heads, 0, spec.head_dim), np.float32)


def common(a, b):
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


class Sharing(RuleBasedStateMachine):
    prefix = "memory"

    @initialize(spill=st.sampled_from([1, 3000, 8 << 20]))
    def begin(self, spill):
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(kvstore.writer, "SPILL_BYTES", spill)
        for module in ("token_ids", "sharing", "writer", "verify", "relocation", "ingest"):
            name = f"kvstore.{module}.CHUNK_TOKENS"
            self.patches.setattr(name, CHUNK_TOKENS, raising=False)
        for module in ("prefix_keys", "prefix", "prefix_upkeep"):
            self.patches.setattr(f"kvstore.{module}.HASH_TOKENS", HASH_TOKENS)
        self.patches.setattr("kvstore.prefix._BLOCK_BYTES", HASH_TOKENS * 8)
        self.directory = tempfile.TemporaryDirectory(prefix="kvstore-model-")
        self.place = f"{self.directory.name}/a.kv"
        if self.prefix != "lmdb":
            self.place = f"{self.prefix}:{self.place}"
        self.archive = kvstore.open(self.place, "a")
        self.open = {}
        self.sessions = {}
        self.maybe_leftover = False
        self.n_steps = 0

    # What makes sessions.

    @rule(
        name=st.sampled_from(NAMES),
        codec=st.sampled_from(sorted(CODECS)),
        block=st.sampled_from([16, 16, 16, 7, "auto"]),
        fit=st.sampled_from([8, 32]),
        replaces=st.booleans(),
    )
    def create(self, name, codec, block, fit, replaces):
        if name in self.sessions and not replaces:
            with pytest.raises(kvstore.InvalidArgument, match="exists already"):
                self.archive.create_session(name, model=MODEL)
            return
        self.open[name] = self.archive.create_session(
            name,
            model=MODEL,
            codec=CODECS[codec],
            block_tokens=block,
            fit_tokens=fit,
            metadata={"made": "new"},
            replace=replaces,
        )
        self.sessions[name] = Expected(codec, {"made": "new"})

    @precondition(lambda self: any(e.fitted for e in self.sessions.values()))
    @rule(data=st.data(), name=st.sampled_from(NAMES), replaces=st.booleans())
    def create_with_stats(self, data, name, replaces):
        source = data.draw(st.sampled_from([n for n, e in self.sessions.items() if e.fitted]))
        if name in self.sessions and not replaces:
            return
        codec = self.sessions[source].codec
        self.open[name] = self.archive.create_session(
            name, model=MODEL, stats_from=source, block_tokens=16, replace=replaces
        )
        self.sessions[name] = Expected(codec, {}, fitted=True)

    @precondition(lambda self: self.sessions)
    @rule(
        data=st.data(),
        name=st.sampled_from(NAMES),
        replaces=st.booleans(),
        metadata=st.sampled_from([None, {"made": "fork"}]),
    )
    def fork(self, data, name, replaces, metadata):
        parent = self.draw_name(data)
        e = self.sessions[parent]
        at = self.draw_cut(data, e)
        if name in self.sessions and (not replaces or name == parent):
            with pytest.raises(kvstore.InvalidArgument):
                self.session(parent).fork(name, at, replace=replaces)
            return
        if 0 < at < e.least:
            with pytest.raises(kvstore.InvalidArgument, match="layers begin at token"):
                self.session(parent).fork(name, at)
            return
        given = None if at == e.n_committed and data.draw(st.booleans()) else at
        made = self.session(parent).fork(name, given, metadata=metadata, replace=replaces)
        self.open[name] = made
        new = self.sessions[name] = copy.copy(e)
        for field in ("start", "given", "values"):
            setattr(new, field, dict(getattr(e, field)))
        new.metadata = dict(e.metadata if metadata is None else metadata)
        new.pinned = False
        new.drop()
        new.cut(at)
        self.check_fitted(name)

    # What changes one.

    @precondition(lambda self: self.sessions)
    @rule(
        data=st.data(),
        n=st.one_of(st.integers(0, 40), st.integers(1, 200), st.sampled_from([16, 32, 96])),
        seed=st.integers(0, 1 << 20),
        base=st.integers(0, len(BASES) - 1),
        late=st.integers(0, 3),
        commits=st.booleans(),
        post=st.booleans(),
    )
    def append(self, data, n, seed, base, late, commits, post):
        name = self.draw_name(data)
        e = self.sessions[name]
        session = self.session(name)
        rng = np.random.default_rng(seed)
        new = {}
        first_append = e.n == 0 and not any(e.start.values())
        for s in STREAMS:
            if first_append and MODEL.layers[s[0]].window and late and n > 10:
                e.start[s] = n - [n, WINDOW, 5, 0][late] if n > WINDOW else 0
            m = n - e.start[s] if first_append else n
            spec = MODEL.stream(*s)
            new[s] = rng.standard_normal((spec.heads, m, spec.head_dim)).astype(np.float32)
            if m:
                new[s][0, 0, 0] = [0.0, -0.0, 6.0, -6.0][seed % 4]
            e.given[s] = np.concatenate([e.given[s], new[s]], axis=1)
        k = [new[i, "k"] for i in range(MODEL.n_layers)]
        v = [new.get((i, "v")) for i in range(MODEL.n_layers)]
        if post:
            k = [rotated(x, range(e.n + n - x.shape[1], e.n + n)).astype(np.float32) for x in k]
        if n and e.has_ids is None:
            e.has_ids = bool(seed % 4)
        ids = BASES[base][e.n : e.n + n] if e.has_ids else None
        session.append(k, v, token_ids=ids, start=e.n, k_state="post" if post else "pre")
        if ids is not None:
            e.ids = np.concatenate([e.ids, ids])
        e.n += n
        if commits:
            self.commit_one(name)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def commit(self, data):
        self.commit_one(self.draw_name(data))

    def commit_one(self, name):
        session = self.session(name)
        session = self.session(name)
        session.commit()
        self.sessions[name].n_committed = self.sessions[name].n
        assert session.n_tokens == session.n_committed == self.sessions[name].n
        self.learn(name)

    def learn(self, name):
        """Take over what reads return for tokens that were just committed."""
        e = self.sessions[name]
        for s in STREAMS:
            lo = max(e.first, e.start[s])
            got = self.session(name).read(*s, lo) if lo <= e.n else _empty(s)
            old = e.values[s][:, lo - e.start[s] :]
            assert got[:, : old.shape[1]].tobytes() == old.tobytes(), f"{name} {s} changed"
            given = e.given[s][:, lo - e.start[s] :]
            tolerance = 2e-5 if e.codec == "raw" else STEP / 2 + 2e-5
            assert np.abs(got - given).max(initial=0) <= tolerance
            e.values[s] = np.concatenate([e.values[s][:, : lo - e.start[s]], got], axis=1)
            e.given[s] = e.values[s]
        self.check_fitted(name)

    def check_fitted(self, name):
        with self.archive._read() as snapshot:
            record = self.archive._catalog.record(snapshot, name)
        fitted = all(header_of(record, stream) is not None for stream in STREAMS)
        self.sessions[name].fitted = fitted

    @precondition(lambda self: any(e.n_committed for e in self.sessions.values()))
    @rule(data=st.data(), aligned=st.booleans())
    def append_range(self, data, aligned):
        name = self.draw_name(data)
        other = data.draw(st.sampled_from([n for n, e in self.sessions.items() if e.n_committed]))
        e, source = self.sessions[name], self.sessions[other]
        stop = data.draw(st.integers(source.least, source.n_committed))
        start = data.draw(st.integers(source.least, stop))
        if aligned:  # blocks may lie alike
            start = max(start // 16 * 16, source.least)
        self.commit_one(name)
        session = self.session(name)
        taken = {s: x[:, start - source.start[s] :] for s, x in source.values.items()}
        taken = {s: x[:, : stop - start] for s, x in taken.items()}
        ids = source.ids[start:stop]
        if e.n and start < stop and e.has_ids != source.has_ids:
            with pytest.raises(kvstore.InvalidArgument, match="token_ids"):
                session.append_range(self.session(other), start, stop)
            return
        done = session.append_range(self.session(other), start, stop)
        assert done.n_tokens == stop - start
        if start == stop:
            return
        at = e.n
        if at == 0:
            e.has_ids = source.has_ids
        e.faithful = at if e.faithful is None else e.faithful
        for s in STREAMS:
            e.given[s] = np.concatenate([e.given[s], taken[s]], axis=1)
        if e.has_ids:
            e.ids = np.concatenate([e.ids, ids])
        e.n = e.n_committed = at + stop - start
        self.learn(name)
        for s in STREAMS:
            mine = e.values[s][:, at - e.start[s] :]
            assert mine[:, : done.n_shared].tobytes() == taken[s][:, : done.n_shared].tobytes()
            assert np.abs(mine - taken[s]).max(initial=0) <= done.max_error

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def drop(self, data):
        name = self.draw_name(data)
        self.maybe_leftover |= self.sessions[name].n > self.sessions[name].n_committed
        self.session(name).close()
        del self.open[name]
        self.sessions[name].drop()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def truncate(self, data):
        name = self.draw_name(data)
        e, session = self.sessions[name], self.session(name)
        n = data.draw(st.one_of(st.integers(0, e.n), st.integers(max(e.n - 20, 0), e.n)))
        self.maybe_leftover |= e.n > e.n_committed
        if 0 < n < e.least and n < e.n:
            with pytest.raises(kvstore.InvalidArgument, match="layers begin at token"):
                session.truncate(n)
            if session.n_committed == e.n:
                e.n_committed = e.n
                self.learn(name)
            return
        session.truncate(n)
        if n > e.n_committed:
            e.cut(n)
            self.learn(name)
        else:
            e.drop()
            e.cut(n)
        assert session.n_committed == session.n_tokens == n
        self.check_fitted(name)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def trim_front(self, data):
        name = self.draw_name(data)
        e = self.sessions[name]
        first = data.draw(st.integers(0, e.n_committed))
        self.session(name).trim_front(first)
        e.first = max(e.first, first)
        assert self.session(name).first_token == e.first

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), new=st.sampled_from(NAMES), replaces=st.booleans())
    def rename(self, data, new, replaces):
        old = self.draw_name(data)
        session = self.session(old)
        if new in self.sessions and new != old and not replaces:
            with pytest.raises(kvstore.InvalidArgument, match="exists already"):
                session.rename(new)
            return
        session.rename(new, replace=replaces)
        assert session.name == new
        self.sessions[new] = self.sessions.pop(old)
        self.open[new] = self.open.pop(old)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data, pinned):
        name = self.draw_name(data)
        self.session(name).pin(pinned)
        self.sessions[name].pinned = pinned

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), value=st.integers())
    def set_metadata(self, data, value):
        name = self.draw_name(data)
        self.session(name).set_metadata({"value": value})
        self.sessions[name].metadata = {"value": value}

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def delete(self, data):
        name = self.draw_name(data)
        self.archive.delete_session(name)
        del self.sessions[name]
        self.open.pop(name, None)

    # What changes nothing.

    @rule()
    def reopen(self):
        self.maybe_leftover |= any(e.n > e.n_committed for e in self.sessions.values())
        self.archive.close()
        self.archive = kvstore.open(self.place, "a")
        self.open = {}
        for e in self.sessions.values():
            e.drop()

    @rule()
    def collect(self):
        freed = self.archive.gc()
        # The model goes once no session is of it.
        assert freed == 0 or self.maybe_leftover or not self.sessions

    @rule()
    def reindex(self):
        before = self.lists()
        _, errors = self.archive.reindex()
        assert errors == []
        # Made anew they are what they were.
        assert self.lists() == before

    def lists(self):
        with self.archive._read() as snapshot:
            return [
                (key, bytes(value))
                for prefix in (keys.USER, keys.PREFIX)
                for key, value in snapshot.scan(prefix)
            ]

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), post=st.booleans(), offset=st.integers(-50, 1000))
    def read(self, data, post, offset):
        name = self.draw_name(data)
        e, session = self.sessions[name], self.session(name)
        stream = data.draw(st.sampled_from(STREAMS))
        stop = data.draw(st.integers(0, e.n_committed))
        start = data.draw(st.integers(0, stop))
        lo = max(e.first, e.start[stream])
        if start < min(lo, stop):
            with pytest.raises(kvstore.InvalidArgument, match=r"trimmed|window"):
                session.read(*stream, start, stop)
            return
        begin = e.start[stream]
        expected = e.values[stream][:, start - begin : stop - begin] if start < stop else None
        got = session.read(*stream, start, stop)
        if expected is None:
            assert got.shape[1] == 0
            return
        assert got.tobytes() == expected.tobytes()
        if post and stream[1] == "k" and start + offset >= 0:
            got = session.read(*stream, start, stop, "post", position_offset=offset)
            wanted = rotated(expected, np.arange(start, stop) + offset)
            np.testing.assert_allclose(got, wanted, atol=1e-3)
        if e.has_ids and start >= e.first:
            np.testing.assert_array_equal(session.token_ids(start, stop), e.ids[start:stop])

    @rule(data=st.data(), n=st.integers(0, 400), mixed=st.integers(0, 40))
    def match(self, data, n, mixed):
        a, b = (data.draw(st.integers(0, len(BASES) - 1)) for _ in range(2))
        cut = data.draw(st.integers(0, n))
        prompt = np.concatenate([BASES[a][:cut], BASES[b][cut:n], np.arange(mixed)])
        with_ids = [e for e in self.sessions.values() if e.n_committed and e.has_ids]
        if with_ids and data.draw(st.booleans()):
            stored = data.draw(st.sampled_from(with_ids)).ids
            prompt = np.concatenate([stored[: data.draw(st.integers(0, len(stored)))], prompt])
        longest = 0
        for e in self.sessions.values():
            if e.matches_from is not None:
                shared = common(e.ids[: e.n_committed], prompt)
                if e.faithful is not None:
                    shared = min(shared, e.faithful)
                longest = max(longest, shared if shared >= e.matches_from else 0)
        found = self.archive.match_prefix(prompt, MODEL)
        assert found.n_tokens == longest
        assert bool(found) == (longest > 0)
        assert not self.archive.match_prefix(prompt, MODEL, salt="another tenant")
        assert not self.archive.match_prefix(prompt, replace(MODEL, revision="2"))
        if not found:
            assert found.session is None
            return
        e = self.sessions[found.session.name]
        assert 0 <= found.n_sealed <= found.n_tokens
        np.testing.assert_array_equal(e.ids[:longest], prompt[:longest])
        for s in STREAMS:
            got = found.session.read(*s, e.start[s], longest)
            assert got.tobytes() == e.values[s][:, : longest - e.start[s]].tobytes()

    # What must hold.

    @rule()
    def verify(self):
        self.check_archive(decode=True)

    def check_archive(self, decode=False):
        appending = any(e.n > e.n_committed for e in self.sessions.values())
        if self.maybe_leftover and not appending:
            for session in self.open.values():
                session.close()
            self.open = {}
            self.archive.gc()
            self.maybe_leftover = False
        report = self.archive.verify(decode=decode)
        assert report.ok, report.problems
        assert report.n_sessions == len(self.sessions)
        self.check_keys()
        if appending or self.maybe_leftover:
            return
        assert report.n_leftover == 0
        if self.sessions:  # else the model may go
            assert self.archive.gc() == 0

    def check_keys(self):
        """Every stored key is claimed, and what is claimed is stored."""
        with self.archive._read() as snapshot:
            stored = {key for key, _ in snapshot.scan(b"")}
            claims = {}
            for name in self.sessions:
                record = self.archive._catalog.record(snapshot, name, fresh=True)
                for owner, claim in claims_of(record, ahead=True).items():
                    claims.setdefault(owner, []).append(claim)
        for key in stored if not self.maybe_leftover else ():
            parsed = keys.parse(key)
            if parsed.prefix in keys.OWNED:
                assert any(c.needs(parsed) for c in claims.get(parsed.owner, [])), parsed
        for owner, of_owner in claims.items():
            for claim in of_owner:
                wanted = [keys.stream_key(keys.HEADER, owner, *s) for s in claim.headers]
                wanted += [keys.stream_key(keys.HEAD, owner, *s) for s in claim.heads]
                wanted += [keys.tokens_key(owner, i) for r in claim.chunks for i in range(*r)]
                assert stored.issuperset(wanted)

    @invariant()
    def state(self):
        if not hasattr(self, "archive"):
            return
        assert self.archive.names() == sorted(self.sessions)
        for name, e in self.sessions.items():
            session = self.session(name)
            assert (session.n_tokens, session.n_committed) == (e.n, e.n_committed)
            assert (session.first_token, session.pinned) == (e.first, e.pinned)
            assert session.metadata == e.metadata
        self.n_steps += 1
        if self.n_steps % 5 == 0:
            self.check_archive()

    def check_values(self):
        for name, e in self.sessions.items():
            for s in STREAMS:
                lo = max(e.first, e.start[s])
                got = self.session(name).read(*s, lo) if lo <= e.n_committed else _empty(s)
                assert got.tobytes() == e.values[s][:, lo - e.start[s] :].tobytes()

    # Helpers.

    def draw_name(self, data):
        return data.draw(st.sampled_from(sorted(self.sessions)))

    def draw_cut(self, data, e):
        """Any committed length; often one that is special."""
        n = e.n_committed
        special = [x for x in (e.least, n, n - 1, n // 16 * 16, 16, 8, 5) if 0 <= x <= n]
        return data.draw(st.one_of(st.integers(0, n), st.sampled_from(special or [0])))

    def session(self, name):
        if name not in self.open:
            self.open[name] = self.archive.session(name, expect=MODEL)
        return self.open[name]

    def teardown(self):
        if not hasattr(self, "archive"):
            return
        try:
            if hasattr(self, "sessions"):
                self.check_values()
                self.reopen()
                self.check_values()
                self.check_archive(decode=True)
                for name in sorted(self.sessions):
                    self.archive.delete_session(name)
                self.archive.gc()
                with self.archive._read() as snapshot:
                    assert [key for key, _ in snapshot.scan(b"")] == [keys.ARCHIVE]
        finally:
            self.archive.close()
            self.directory.cleanup()
            self.patches.undo()


class SharingInZarr(Sharing):
    prefix = "zarr"


class SharingInLmdb(Sharing):
    prefix = "lmdb"


class SharingForLong(Sharing):
    pass


def _settings(n_examples, n_steps):
    return settings(
        max_examples=n_examples,
        stateful_step_count=n_steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


TestMemory = Sharing.TestCase
TestMemory.settings = _settings(40, 40)
TestZarr = pytest.mark.slow(SharingInZarr.TestCase)
TestZarr.settings = _settings(40, 40)
TestLmdb = pytest.mark.slow(SharingInLmdb.TestCase)
TestLmdb.settings = _settings(60, 50)
TestLong = pytest.mark.slow(SharingForLong.TestCase)
TestLong.settings = _settings(100, 60)
