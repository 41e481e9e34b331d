"""LMDB's table of readers: the snapshots that are open now, in every process."""

from __future__ import annotations

import os
import time

import lmdb

from ..backend import ReaderInfo
from ._environment import Environment
from ._errors import translate


def readers(environment: Environment) -> list[ReaderInfo]:
    """See `Backend.readers`."""
    found, last = _table(environment)
    began, now, me = sorted(environment.snapshots.copy().values()), time.monotonic(), os.getpid()
    readers = []
    for pid, txn_id in found:
        age: float | None = None
        mine = next((entry for entry in began if entry[0] == txn_id), None)
        if pid == me and mine is not None:
            began.remove(mine)
            age = now - mine[1]
        readers.append(ReaderInfo(pid, max(0, last - txn_id), age))
    return sorted(readers, key=lambda reader: (-reader.n_behind, -(reader.age_seconds or 0.0)))


def has_reader_before(environment: Environment, txn_id: int) -> bool:
    """Whether any process has a snapshot open that is older than a transaction."""
    return any(found < txn_id for _, found in _table(environment)[0])


def _table(environment: Environment) -> tuple[list[tuple[int, int]], int]:
    """Return process and transaction of each open snapshot, and the last transaction."""
    environment.enter()
    try:
        environment.env.reader_check()  # frees the slots of readers that were killed
        text = environment.env.readers()
        last = int(environment.env.info()["last_txnid"])
    except lmdb.Error as error:
        raise translate(error, environment.path) from error
    finally:
        environment.leave()
    # A line of process, thread and transaction for each slot; "-" between two snapshots.
    slots = [line.split() for line in text.splitlines()]
    return [
        (int(slot[0]), int(slot[2]))
        for slot in slots
        if len(slot) == 3 and slot[0].isdigit() and slot[2].isdigit()
    ], last
