"""Mark and sweep: what no session needs, and the lists that say who needs what, made anew.

Nothing here is needed from day to day, since every change frees what it makes useless. Killed
writers leave frames behind, and a damaged session what could not be told apart. FORMAT.md 5.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcodecs.errors import Corrupt, KvError, Locked

from . import keys
from .backend import Snapshot, Transaction
from .identity import Model
from .prefix import parse_entry
from .prefix_upkeep import expected_entries
from .session_record import SessionRecord
from .shared_objects import needs_of
from .sharing import Claim, claims_of, has_unused, sweep, user_keys
from .survey import session_names
from .users import users_of

if TYPE_CHECKING:
    from .opened import OpenArchive


@dataclass(slots=True)
class Living:
    """The sessions whose records can be read.

    Attributes
    ----------
    records
        Name, record and model of each.
    all_read
        Whether there are no others: only then is what none of them needs garbage.
    """

    records: list[tuple[str, SessionRecord, Model]] = field(default_factory=list)
    all_read: bool = True


def living(archive: OpenArchive, snapshot: Snapshot) -> Living:
    """Return all sessions, read anew."""
    found = Living()
    names = session_names(snapshot)
    found.all_read = len(names) == sum(1 for _ in snapshot.sizes(keys.SESSION))
    for name in names:
        try:
            record = archive._catalog.record(snapshot, name, fresh=True)
            model = archive._catalog.model(snapshot, record.model, fresh=True)
            found.records.append((name, record, model))
        except KvError:
            found.all_read = False
    return found


def collect_garbage(archive: OpenArchive) -> int:
    """Remove what no session needs; return its bytes. See `Archive.gc`."""

    def work(transaction: Transaction) -> int:
        alive = living(archive, transaction)
        claims, appenders = _marks(alive)
        n_bytes = 0
        for owner in _owners(transaction):
            if not alive.all_read and not _is_known(transaction, owner, alive, claims):
                continue  # a damaged session may need it
            if not has_unused(transaction, owner, claims.get(owner, [])):
                continue
            session, name = appenders.get(owner, (owner, f"{owner:016x}"))
            try:
                lease = archive._backend.lease(session, name)
            except Locked:
                continue  # somebody is appending, or storing a session not yet published
            try:
                n_bytes += sweep(transaction, owner, claims.get(owner, []))
            finally:
                lease.release()
        if alive.all_read:
            n_bytes += _sweep_lists(transaction, alive)
        return n_bytes + _sweep_objects(transaction)

    n_bytes = archive._room.write(work, frees=True)
    return n_bytes + archive._backend.collect(archive._timeout)


def rebuild_index(archive: OpenArchive) -> tuple[int, list[KvError]]:
    """Make the lists of users and the prefix index anew. See `Archive.reindex`."""
    return archive._room.write(lambda transaction: index_anew(archive, transaction), frees=True)


def index_anew(archive: OpenArchive, transaction: Transaction) -> tuple[int, list[KvError]]:
    """Make the lists of users and the prefix index anew inside a transaction."""
    alive = living(archive, transaction)
    errors: list[KvError] = []
    wanted = dict(_wanted_users(alive))
    pairs = [(record, model) for _, record, model in alive.records]
    names = {record.id: name for name, record, _ in alive.records}

    def on_error(record: SessionRecord, error: KvError) -> None:
        errors.append(type(error)(f"session {names[record.id]!r}: {error}"))

    entries = expected_entries(transaction, pairs, archive.path, on_error)
    wanted.update(dict.fromkeys(entries, b""))
    lists = (keys.USER, keys.PREFIX)
    stored = [key for prefix in lists for key, _ in transaction.sizes(prefix)]
    for key in stored:
        # What a session needs that cannot be read is not known: its lists stay.
        if key not in wanted and alive.all_read:
            transaction.delete(key)
    for key, value in sorted(wanted.items()):
        transaction.put(key, value)
    return sum(key[:1] == keys.PREFIX for key in wanted), errors


def _is_known(
    snapshot: Snapshot, owner: int, alive: Living, claims: dict[int, list[Claim]]
) -> bool:
    """Whether all who use an owner's frames have records that can be read."""
    ids = {record.id for _, record, _ in alive.records}
    return owner in claims and all(user.id in ids for user in users_of(snapshot, owner))


def _wanted_users(alive: Living) -> Iterator[tuple[bytes, bytes]]:
    for name, record, model in alive.records:
        for key in user_keys(record, model):
            yield key, name.encode("utf-8")


def _marks(alive: Living) -> tuple[dict[int, list[Claim]], dict[int, tuple[int, str]]]:
    """Return the claims on every owner, and whose appender stores under it."""
    claims: dict[int, list[Claim]] = {}
    appenders = {}
    for name, record, _ in alive.records:
        appenders[record.owner] = record.id, name
        for owner, claim in claims_of(record).items():
            claims.setdefault(owner, []).append(claim)
    return claims, appenders


def _sweep_lists(transaction: Transaction, alive: Living) -> int:
    """Remove models, users, receipts and entries of the index that belong to no session."""
    models = {record.model for _, record, _ in alive.records}
    users = dict(_wanted_users(alive))
    owners = {keys.parse(key).owner for key in users}
    unused = [
        (key, n_bytes) for key, n_bytes in transaction.sizes(keys.IDENTITY) if key[1:] not in models
    ]
    unused += [(key, n_bytes) for key, n_bytes in transaction.sizes(keys.USER) if key not in users]
    sessions = {record.id for _, record, _ in alive.records}
    unused += [
        (key, n_bytes)
        for key, n_bytes in transaction.sizes(keys.RECEIPT)
        if _session_of(key) not in sessions
    ]
    for key, n_bytes in transaction.sizes(keys.PREFIX):
        try:
            _, _, owner = parse_entry(key)
        except Corrupt:
            unused.append((key, n_bytes))
            continue
        if owner not in owners:
            unused.append((key, n_bytes))
    for key, _ in unused:
        transaction.delete(key)
    return sum(size for _, size in unused)


def _sweep_objects(transaction: Transaction) -> int:
    """Remove the objects that no stored stream header needs, if all of these can be read.

    Headers of whoever is storing a session are among them.
    """
    sizes = dict(transaction.sizes(keys.SHARED))
    if not sizes:
        return 0
    try:
        for key, value in transaction.scan(keys.HEADER):
            for digest in needs_of(value, f"key {key!r}"):
                sizes.pop(keys.shared_key(digest), None)
    except KvError:
        return 0
    for key in sizes:
        transaction.delete(key)
    return sum(sizes.values())


def _session_of(key: bytes) -> int | None:
    try:
        return keys.parse(key).session
    except Corrupt:
        return None


def _owners(snapshot: Snapshot) -> list[int]:
    found = set()
    for prefix in keys.OWNED:
        for key, _ in snapshot.sizes(prefix):
            try:
                owner = keys.parse(key).owner
            except Corrupt:
                continue  # `verify` reports it
            if owner is not None:
                found.add(owner)
    return sorted(found)
