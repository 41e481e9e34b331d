"""Migrating sessions into an archive that begins with them: it appears whole, or not at all.

Frames come first, then the lists of users and the index, and in one last transaction the records
of all sessions and that of the archive, without which nobody opens it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping

from kvcodecs.errors import Corrupt

from .. import keys
from ..backend import Lease, Transaction
from ..catalog import writer_name
from ..records import pack_archive
from ..session_record import load_session, unpack_session
from .needed import Item, make_item
from .publishing import enlist, forget_lists, indexed_ids
from .work import Migrated, Migration, settle_homes

#: Leases that are held at a time: each may be an open file.
_MOST_LEASES = 200
#: Sessions whose lists are stored in one transaction.
_TOGETHER = 64


class Building(Migration):
    """Fills a backend that has nothing yet, or the rest of an earlier try."""

    def run(self) -> Migrated:
        """Move all sessions, read them again, and make an archive of them."""
        if self.resume:
            forget_lists(self.target)
        self._made: dict[str, bytes] = {}
        self._receipts: dict[str, Mapping[bytes, bytes]] = {}
        self._leases: dict[int, Lease] = {}
        self._under_way: deque[Item] = deque()
        try:
            for name in self.plan.order:
                item = self.plan.load(name)
                if self.plan.is_recoded(item):
                    self._recode(item)
                elif self.elsewhere is None:
                    self._move(item)
                else:
                    self._hold_all(item)
                    settle_homes(self.mover, item)
                    self.elsewhere.start(item)
                    self._under_way.append(item)
                    if len(self._under_way) >= self.elsewhere.n_ahead:
                        self._move(self._under_way.popleft())
            while self._under_way:
                self._move(self._under_way.popleft())
            self.mover.flush()
        finally:
            self._under_way.clear()
            self._release()
        if self.verify:
            for name in self.done.moved:
                self.compare(self.plan.load(name))
        for names in self._groups():
            self._enlist(names)
        self.target.write(self._put_records)
        self._check_records()
        return self.finish()

    def _move(self, item: Item) -> None:
        self._hold_all(item)
        self.move(item)
        if len(self._leases) >= _MOST_LEASES:
            self.mover.flush()
        if not self.mover.waits:
            self._release()
        self.done.moved.append(item.name)

    def _recode(self, item: Item) -> None:
        self.mover.flush()
        self._hold(self.plan.new_owner(item), item.name)
        made, _ = self.recode(item)
        self._release()
        self._made[item.name] = made.value
        self._receipts[item.name] = made.receipts
        self.note_recoded(item)

    def _hold_all(self, item: Item) -> None:
        for owner in item.claims:
            self._hold(owner, self.plan.home[owner])

    def _hold(self, owner: int, name: str) -> None:
        """Take the lease of an owner: it tells the backend whose frames they are."""
        if owner not in self._leases:
            self._leases[owner] = self.target.backend.lease(owner, name)

    def _release(self) -> None:
        """Give back the leases that nothing under way needs."""
        needed = {owner for item in self._under_way for owner in item.claims}
        for owner in [owner for owner in self._leases if owner not in needed]:
            self._leases.pop(owner).release()

    def _outcome(self, name: str) -> Item:
        """Return a session as it will be stored."""
        item = self.plan.load(name)
        value = self._made.get(name)
        if value is None:
            return item
        data = load_session(value, name, item.where)
        record = unpack_session(data, item.model.streams(), item.where)
        return make_item(name, value, record, item.model, item.where, self._receipts[name])

    def _groups(self) -> Iterator[list[str]]:
        for at in range(0, len(self.plan.order), _TOGETHER):
            yield self.plan.order[at : at + _TOGETHER]

    def _enlist(self, names: list[str]) -> None:
        def work(transaction: Transaction) -> None:
            for name in names:
                ids = indexed_ids(self.plan.snapshot, self.plan.load(name))
                enlist(transaction, self.target.catalog, self._outcome(name), ids)

        self.target.write(work)

    def _put_records(self, transaction: Transaction) -> None:
        for name in self.plan.order:
            transaction.put(keys.session_key(name), self._outcome(name).value)
        about = {"writer": writer_name(), "created": int(time.time())}
        transaction.put(keys.ARCHIVE, pack_archive(about))

    def _check_records(self) -> None:
        with self.target.backend.read() as there:
            for name in self.plan.order:
                outcome = self._outcome(name)
                written = {keys.session_key(name): outcome.value, **outcome.receipts}
                for key, value in written.items():
                    found = there.get(key)
                    if found is None or bytes(found) != value:
                        what = "record is" if key[:1] == keys.SESSION else "receipts are"
                        raise Corrupt(
                            f"{self.target.backend.path}: session {name!r}: its {what} not what "
                            "was written"
                        )
