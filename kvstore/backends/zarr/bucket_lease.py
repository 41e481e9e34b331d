"""Leases in a bucket: an object that says who may write, and until when.

The right to write to an archive (``_kvstore/writer``) and to append to a session
(``_kvstore/leases/<16 hex digits>``) are objects with the JSON text

    {"epoch":3,"holder":"0123456789abcdef","expires":1760000000.25}

`epoch` counts how often the lease was taken, `holder` is random for each time, `expires` is in
seconds since 1970, 0 once it was given back. The object is only ever created where there is
none, or replaced if it is still the one that was read, so of two who want it one gets it. It
stays when the lease is given back, or the epoch would begin again.

Clocks of machines may differ by a few seconds: who has a clock that is ahead by more than a
lease lasts takes leases that are in use. That costs their holders a transaction, no data, since
whoever holds a lease renews it before anything that depends on it, and learns then that it is
lost. A holder that stands still between that and its next request is kept from harm by what it
asks for: commits are put where there is none, frames are replaced if they are those it read.

A thread renews the leases of the process. None is held by a forked child.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, NamedTuple

from kvcodecs.errors import Closed, Corrupt, KvError, Locked

from ...forklock import ForkLock
from ._at_once import at_once
from ._requests import Requests

#: Seconds after which a lease is free that its process does not renew.
LEASE_SECONDS: Final = 60.0
# A writer's lease is not renewed again within so many seconds, or a quarter of its time.
_RENEWAL_PAUSE: Final = 1.0
_SHORTEST_WAIT: Final = 0.01
_RENEWED_AT_ONCE: Final = 8
# How long the end of the process waits for a renewal that is under way.
_EXIT_SECONDS: Final = 2.0


class State(NamedTuple):
    """What a lease object says."""

    epoch: int
    holder: str
    expires: float

    @property
    def is_free(self) -> bool:
        """Whether its holder gave it back."""
        return not self.expires

    @property
    def is_expired(self) -> bool:
        """Whether its holder has not given it back, and not renewed it in time."""
        return 0 < self.expires <= time.time()

    def to_bytes(self) -> bytes:
        """Return the object."""
        return json.dumps(self._asdict(), separators=(",", ":")).encode()


def parse(where: str, key: str, data: bytes) -> State:
    """Return what a lease object says; raises `Corrupt`."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        fields = json.loads(data)
        epoch, holder, expires = fields["epoch"], fields["holder"], fields["expires"]
        if (
            type(epoch) is int
            and epoch > 0
            and type(holder) is str
            and type(expires) in (int, float)
            and 0 <= expires < math.inf
        ):
            return State(epoch, holder, float(expires))
    raise Corrupt(f"{where}: {key}: not a lease; delete it while nobody has the archive open")


class BucketLease:
    """A lease that is held; both a `Writer` and a `Lease`.

    Parameters
    ----------
    requests, key
        Where it is.
    state, tag
        What was put there.
    seconds
        How long it lasts.
    is_alive
        Whether the life of the process is sign enough; else `check` and `renew` are.
    pause
        Seconds within which `check` does not ask again.
    lost
        The error of a holder that was too slow.
    """

    def __init__(
        self,
        requests: Requests,
        key: str,
        state: State,
        tag: str,
        seconds: float,
        *,
        is_alive: bool,
        pause: float,
        lost: Callable[[], Locked],
    ) -> None:
        self._requests, self._key, self._state, self._tag = requests, key, state, tag
        self._seconds, self._is_alive, self._pause, self._lost = seconds, is_alive, pause, lost
        self._sign = state.expires - seconds
        self._asked = self._confirmed = _clock()
        self._error: Callable[[], KvError] | None = None  # why it is not held any more
        self._lock = ForkLock()
        _renewer.add(self)

    @property
    def epoch(self) -> int:
        """How often the lease was taken."""
        return self._state.epoch

    def check(self) -> None:
        """Renew the lease; raises `Locked` if another has taken it."""
        with self._lock:
            self._require()
            self._sign = time.time()
            if _clock() - self._confirmed >= self._pause:
                self._extend()

    def renew(self) -> None:
        """Show a sign of life, which the renewing thread passes on if there is time enough."""
        self._sign = time.time()
        if self._sign > self._state.expires - self._seconds / 2:
            self.renew_now()

    def release(self) -> None:
        """Give the lease back; a second call does nothing."""
        self._give_back()
        _renewer.wake()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self._give_back()

    def renewal_due(self) -> float:
        """When the thread renews it next, in seconds from now."""
        return math.inf if self._error else self._asked + self._seconds / 3 - _clock()

    def renew_now(self) -> None:
        """Renew it if there was a sign of life since; nothing is raised."""
        with self._lock, contextlib.suppress(KvError):
            self._asked = _clock()
            if self._is_alive:
                self._sign = time.time()
            if self._error is None and self._sign + self._seconds > self._state.expires:
                self._extend()

    def forget(self) -> None:
        """Hold nothing: this is a forked child."""
        self._error = self._forked

    def _give_back(self) -> None:
        with self._lock:
            if self._error is not None:
                return
            self._error = self._given_back
            free = self._state._replace(expires=0)
            # One that cannot be given back expires.
            with contextlib.suppress(KvError):
                self._requests.replace(self._key, free.to_bytes(), self._tag, max_retries=1)

    def _require(self) -> None:
        if self._error is not None:
            raise self._error()

    def _extend(self) -> None:
        state = self._state._replace(expires=self._sign + self._seconds)
        begun = self._asked = _clock()
        while True:
            tag = self._requests.replace(self._key, state.to_bytes(), self._tag)
            if tag is not None:
                self._state, self._tag, self._confirmed = state, tag, begun
                return
            # An earlier renewal of which no answer came may have happened after all.
            found = self._requests.get_tagged(self._key)
            if found is not None:
                now = parse(self._requests.where, self._key, found.data)
                if now[:2] == state[:2] and not now.is_free and found.tag != self._tag:
                    self._tag = found.tag
                    continue
            self._error = self._lost
            raise self._lost()

    def _given_back(self) -> KvError:
        return Closed(f"{self._requests.where}: {self._key}: the lease was given back")

    def _forked(self) -> KvError:
        return Closed(
            f"{self._requests.where}: {self._key}: the lease is that of the process before a fork"
        )


def take(
    requests: Requests,
    key: str,
    seconds: float,
    *,
    expired_too: bool,
    lost: Callable[[], Locked],
    is_alive: bool = True,
    renews_always: bool = False,
) -> BucketLease | State | None:
    """Take a lease, at once or not at all.

    Parameters
    ----------
    expired_too
        Whether to take one over that has expired.
    renews_always
        Whether each `BucketLease.check` asks the storage, however short ago it did.

    Returns
    -------
    BucketLease or State or None
        The lease; or what its holder has put; or None if somebody else was faster.
    """
    found = requests.get_tagged(key)
    epoch = 1
    if found is not None:
        state = parse(requests.where, key, found.data)
        if not (state.is_free or (state.is_expired and expired_too)):
            return state
        epoch += state.epoch
    new = State(epoch, secrets.token_hex(8), time.time() + seconds)
    data = new.to_bytes()
    tag = requests.create(key, data) if found is None else requests.replace(key, data, found.tag)
    if tag is None:
        return None
    pause = 0.0 if renews_always else min(_RENEWAL_PAUSE, seconds / 4)
    return BucketLease(requests, key, new, tag, seconds, is_alive=is_alive, pause=pause, lost=lost)


class _Renewer:
    """Renews the leases of this process; its thread is there as long as one is held."""

    def __init__(self) -> None:
        # Nothing is ever taken out but by the collector: it may do so at any time, and then
        # the set keeps itself in order.
        self._leases: weakref.WeakSet[BucketLease] = weakref.WeakSet()
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._is_over = False

    def add(self, lease: BucketLease) -> None:
        with self._changed:
            self._leases.add(lease)
            is_running = self._thread is not None and self._thread.is_alive()
            if not is_running and not self._is_over:
                self._thread = threading.Thread(
                    target=self._run, name="kvstore-leases", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        """Stop, and give back what is held: the process ends."""
        deadline = _clock() + _EXIT_SECONDS
        with self._changed:
            self._is_over = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(_EXIT_SECONDS)
        for lease in list(self._leases):
            if _clock() < deadline:
                lease.release()

    def held(self) -> list[BucketLease]:
        return list(self._leases)

    def _run(self) -> None:
        try:
            while self._wait():
                at_once(BucketLease.renew_now, self._due()[0], _RENEWED_AT_ONCE)
        finally:
            with self._changed:
                self._thread = None

    def _wait(self) -> bool:
        """Wait until a lease is to be renewed; False if there will be none."""
        with self._changed:
            while True:
                seconds = self._due()[1]  # keeps no lease while it waits
                if seconds == math.inf or self._is_over:
                    self._thread = None
                    return False
                if seconds <= 0:
                    return True
                self._changed.wait(max(seconds, _SHORTEST_WAIT))

    def _due(self) -> tuple[list[BucketLease], float]:
        """Return the leases that are to be renewed now, and seconds until the next one is."""
        waits = [(lease, lease.renewal_due()) for lease in self.held()]
        due = [lease for lease, seconds in waits if seconds <= 0]
        return due, min((seconds for _, seconds in waits), default=math.inf)


def _clock() -> float:
    """Return seconds that go on while the machine sleeps, where the system counts so."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _after_fork_in_child() -> None:
    global _renewer
    for lease in _renewer.held():
        lease.forget()
    _renewer = _Renewer()  # thread and locks are not those of this process


_renewer = _Renewer()
atexit.register(lambda: _renewer.end())
os.register_at_fork(after_in_child=_after_fork_in_child)
