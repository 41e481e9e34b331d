"""Sessions that come from formats that are no archive: stored as they are coded, then published."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcodecs.errors import InvalidArgument, KvError

import kvstore
from kvstore import Model, keys
from kvstore.backend import Transaction
from kvstore.migration.destination import move_into_place, partial_folder
from kvstore.migration.moving import Target
from kvstore.migration.needed import BATCH_BYTES, Item, make_item
from kvstore.migration.publishing import publish
from kvstore.migration.work import check_values, remove
from kvstore.place import Place
from kvstore.session_record import SessionRecord, check_record
from kvstore.shared_objects import put_all
from kvstore.token_ids import CHUNK_TOKENS, Ids, pack_ids
from kvstore.users import is_prefix, users_of


@contextmanager
def target_archive(text: str, *, resume: bool) -> Iterator[kvstore.Archive]:
    """Open an archive that sessions come into; one that begins with them appears when they are in.

    On object storage, where nothing can be renamed, each session appears when it is whole.
    """
    place = Place.of(text)
    if place.folder is None or place.holds({}) == "archive":
        with kvstore.open(text, "a") as archive:
            yield archive
        return
    partial = place.partial
    if partial.folder is None:
        raise InvalidArgument(f"{text}: not a folder")
    names: list[str] = []
    with partial_folder(partial.folder, resume=resume), tidied(partial.folder, lambda: not names):
        with kvstore.open(partial.text, "a") as archive:
            try:
                yield archive
            finally:
                names += archive.names()
        move_into_place(partial.folder, place.folder)


@contextmanager
def tidied(partial: Path, is_empty: Callable[[], bool]) -> Iterator[None]:
    """Remove a target that is being built if that fails before anything is in it, else say so."""
    try:
        yield
    except KvError as error:
        if is_empty():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            advice = "go on with resume=True, or remove it"
            error.args = (f"{error}; {partial} keeps what was written: {advice}",)
        raise


@dataclass(slots=True)
class Incoming:
    """A session that comes into an archive.

    Attributes
    ----------
    item
        What it will be; its values are keys and bytes.
    ids
        Token ids from the first chunk that was not trimmed on.
    only_anew
        Why it can only be coded anew; empty where it need not be.
    left_out
        What of it does not come along, and why.
    """

    archive: kvstore.Archive
    item: Item
    ids: Ids | None
    only_anew: str = ""
    left_out: list[str] = field(default_factory=list)
    n_bytes: int = 0
    _values: list[tuple[bytes, bytes]] = field(default_factory=list)
    _n_waiting: int = 0

    @classmethod
    def of(
        cls,
        archive: kvstore.Archive,
        name: str,
        record: SessionRecord,
        model: Model,
        ids: Ids | None,
        **more: Any,
    ) -> Incoming:
        """Return a session whose record the archive will be able to read; `more` are attributes.

        Raises
        ------
        InvalidArgument
            It would not.
        """
        where = f"{archive.path}: session {name!r}"
        value = check_record(record, name, model, where)
        return cls(archive, make_item(name, value, record, model, where), ids, **more)

    def store(self, values: Iterable[tuple[bytes, bytes]], *, verify: bool) -> None:
        """Store its values and publish it; nothing of it stays if that fails.

        Raises
        ------
        InvalidArgument
            The archive has it already, or its frames.
        """
        archive, record = self.archive, self.item.record
        target = Target(archive._backend, archive._catalog, archive._room, archive._timeout)
        with archive._read() as snapshot:
            others = users_of(snapshot, record.owner)
            if self.item.name in archive or others:
                there = others[0].name if others else self.item.name
                raise InvalidArgument(
                    f"{archive.path}: has session {self.item.name!r} already, as {there!r}"
                )
        lease = archive._backend.lease(record.owner, self.item.name)
        try:
            for key, value in values:
                self._add(target, key, value)
            for key, value in self._id_values():
                self._add(target, key, value)
            if verify:
                self._flush(target)
                with archive._read() as snapshot:
                    check_values(snapshot, self.item)
            ids = self.ids
            if ids is not None:
                serves = is_prefix(record, self.item.model)
                ids = ids[: record.n_faithful_tokens] if serves else None
            self._flush(target, lambda t: publish(t, archive._catalog, self.item, ids))
        except BaseException as error:
            remove(target, [record.owner], error)
            raise
        finally:
            lease.release()

    def _id_values(self) -> Iterator[tuple[bytes, bytes]]:
        if self.ids is None:
            return
        record, owner = self.item.record, self.item.record.owner
        first = record.first // CHUNK_TOKENS
        for chunk in range(first, -(-record.n_tokens // CHUNK_TOKENS)):
            lo = (chunk - first) * CHUNK_TOKENS
            part = self.ids[lo : lo + CHUNK_TOKENS]
            yield keys.tokens_key(owner, chunk), pack_ids(part, owner, chunk)

    def _add(self, target: Target, key: bytes, value: bytes) -> None:
        self._values.append((key, value))
        self._n_waiting += len(value)
        # An object goes with the stream header that follows.
        if self._n_waiting >= BATCH_BYTES and key[:1] != keys.SHARED:
            self._flush(target)

    def _flush(
        self, target: Target, more: Callable[[Transaction], None] = lambda transaction: None
    ) -> None:
        values, n_bytes = sorted(self._values), self._n_waiting

        def store(transaction: Transaction) -> None:
            put_all(transaction, values)
            more(transaction)

        target.write(store, n_bytes=n_bytes)
        self.n_bytes += n_bytes
        self._values, self._n_waiting = [], 0
