"""Migrating sessions into an archive that is there: each is published when it is whole."""

from __future__ import annotations

from contextlib import ExitStack

from kvcodecs.errors import InvalidArgument

from .. import keys
from ..backend import Transaction
from .needed import Item
from .publishing import indexed_ids, publish
from .work import Migrated, Migration, remove


class Adding(Migration):
    """Adds sessions to an open archive."""

    def run(self) -> Migrated:
        """Add all of them; each is there whole or not at all."""
        for name in self._missing():
            item = self.plan.load(name)
            with ExitStack() as leases:
                if self.plan.is_recoded(item):
                    self._add_recoded(item, leases)
                else:
                    self._add_moved(item, leases)
        return self.finish()

    def _missing(self) -> list[str]:
        """Return the sessions that the target lacks.

        Raises
        ------
        InvalidArgument
            It has another one of the same name; or the same one, and this does not resume.
        """
        names = []
        with self.target.backend.read() as there:
            for name in self.plan.order:
                value = there.get(keys.session_key(name))
                if value is None:
                    names.append(name)
                    continue
                where = f"{self.target.backend.path}: session {name!r}"
                if not self.plan.is_outcome(bytes(value), self.plan.load(name), where):
                    raise InvalidArgument(
                        f"{where} exists, and is another one than that of {self.plan.path}; rename "
                        "or delete one of them"
                    )
                if not self.resume:
                    raise InvalidArgument(f"{where} is there already; resume=True passes over it")
                self.done.skipped.append(name)
        return names

    def _add_moved(self, item: Item, leases: ExitStack) -> None:
        backend, mover = self.target.backend, self.mover
        for owner, number in mover.begin(item).items():
            leases.callback(backend.lease(number, self.plan.home[owner]).release)
        try:
            self.move(item)
            if self.verify:
                mover.flush()
                self.compare(item)
            ids = indexed_ids(self.plan.snapshot, item)

            def name_it(transaction: Transaction) -> None:
                mover.check_there(transaction, item)
                publish(transaction, self.target.catalog, item, ids)

            mover.flush(name_it)
        except BaseException as error:
            mover.forget()
            remove(self.target, item.claims, error)
            raise
        self.target.moved.add(item.record.id)
        self.done.moved.append(item.name)

    def _add_recoded(self, item: Item, leases: ExitStack) -> None:
        owner = self.plan.new_owner(item)
        leases.callback(self.target.backend.lease(owner, item.name).release)
        try:
            made, ids = self.recode(item)
            self.target.write(lambda t: publish(t, self.target.catalog, made, ids))
        except BaseException as error:
            remove(self.target, [owner], error)
            raise
        self.target.moved.add(owner)
        self.note_recoded(item)
