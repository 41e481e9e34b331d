"""What an archive holds: session records and models, read, checked and kept while they hold."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvcodecs.codec import CodecConfig
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, NotFound, Truncated, Unsupported
from kvcodecs.spec import Kind

from . import keys
from .backend import Backend, Mode, Snapshot, Transaction
from .identity import Model
from .layout import Codecs, check_configs
from .mismatch import check_identity
from .records import (
    check_archive,
    pack_archive,
    pack_identity,
    unpack_identity,
)
from .session_record import (
    SessionRecord,
    check_record,
    id_of,
    load_session,
    model_of,
    unpack_session,
)
from .shared_objects import needs_of, objects_of, put_all
from .sharing import delete_record, delete_unreadable, put_record
from .spans import header_of
from .survey import session_names

#: Stands for the id that a damaged record does not tell; no session has it.
UNKNOWN_ID: Final = 0
#: What to do about a name that is taken; the command line has other advice.
TAKEN_ADVICE: Final = "open it with archive.session(...), or delete_session(...) it first"
REPLACE_ADVICE: Final = "replace=True replaces it"
#: Parsed records that are kept at a time.
MAX_KEPT: Final = 1 << 14
#: So many names are listed where one is not found.
MAX_NAMES: Final = 5


def listed_names(names: Sequence[str]) -> str:
    """Write session names for a message: at most `MAX_NAMES`, and how many more there are."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(map(repr, names[:MAX_NAMES])) + more


class Catalog:
    """Records and models of one archive; parsed once for every stored value.

    Parameters
    ----------
    path
        The archive, for messages.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._models: dict[bytes, Model] = {}
        self._records: dict[str, tuple[bytes, SessionRecord]] = {}

    def id(self, snapshot: Snapshot, name: str) -> int:
        """Return the id of a session, whether or not its frames can be read.

        `UNKNOWN_ID` if the record is damaged and does not say.
        """
        where = f"{self.path}: session {name!r}"
        value = self._stored(snapshot, name, where)
        try:
            return id_of(load_session(value, name, where), where)
        except (Corrupt, Truncated, Unsupported):
            return UNKNOWN_ID

    def record(
        self, snapshot: Snapshot, name: str, session: int | None = None, *, fresh: bool = False
    ) -> SessionRecord:
        """Return a session's record as of `snapshot`.

        `session`, an id, makes sure it is the same session, `fresh` that stored bytes are checked
        again.
        """
        where = f"{self.path}: session {name!r}"
        data = bytes(self._stored(snapshot, name, where))
        cached = None if fresh else self._records.get(name)
        if cached is None or cached[0] != data:
            fields = load_session(data, name, where)
            model = self.model(snapshot, model_of(fields, where))
            cached = (data, unpack_session(fields, model.streams(), where))
            if len(self._records) >= MAX_KEPT:
                self._records.clear()
            self._records[name] = cached
        record = cached[1]
        if session is not None and record.id != session:
            raise NotFound(f"{where}: deleted, and another one was created under its name")
        return record

    def _stored(self, snapshot: Snapshot, name: str, where: str) -> memoryview:
        """Return a session's record as stored; `NotFound` lists some names that there are."""
        value = snapshot.get(keys.session_key(name))
        if value is None:
            names = session_names(snapshot)
            others = f"; there are {listed_names(names)}" if names else ""
            raise NotFound(f"{where}: no such session{others}")
        return value

    def model(self, snapshot: Snapshot, digest: bytes, *, fresh: bool = False) -> Model:
        """Return the model of an identity record."""
        model = None if fresh else self._models.get(digest)
        if model is None:
            where = f"{self.path}: model {digest.hex()}"
            value = snapshot.get(keys.identity_key(digest))
            if value is None:
                raise Corrupt(f"{where}: identity record missing")
            model = self._models[digest] = unpack_identity(value, digest, where)
        return model

    def headers(
        self,
        snapshot: Snapshot,
        name: str,
        model: Model,
        codec: Codecs | None,
        owner: int,
        source: int | None = None,
    ) -> tuple[Mapping[Kind, CodecConfig], dict[bytes, bytes]]:
        """Return the codecs and the stream headers of another session, under a new owner.

        With the headers are the objects that they need.

        `source` is the id that session must have.
        """
        where = f"{self.path}: stats_from session {name!r}"
        values: dict[bytes, bytes] = {}
        record = self.record(snapshot, name)
        if source is not None and record.id != source:
            raise InvalidArgument(f"{where}: the given session is not the one in this archive")
        check_identity(self.model(snapshot, record.model), model, where)
        configs = record.codecs if codec is None else check_configs(codec)
        for layer, kind in record.streams:
            header_owner = header_of(record, (layer, kind))
            if header_owner is None:
                raise InvalidArgument(
                    f"{where}: layer {layer} {kind} has no stream header yet; it needs "
                    f"{record.fit_tokens} committed tokens"
                )
            if configs[kind] != record.codecs[kind]:
                # The step is in the header that is taken: another configuration would be a lie.
                raise InvalidArgument(
                    f"{where}: {kind} is coded with {record.codecs[kind]}, not {configs[kind]}; "
                    "leave codec out"
                )
            value = snapshot.get(keys.stream_key(keys.HEADER, header_owner, layer, kind))
            if value is None:
                raise Corrupt(f"{where}: layer {layer} {kind} header missing")
            where_header = f"{where}: layer {layer} {kind} header"
            objects = objects_of(snapshot, needs_of(value, where_header), where_header)
            values.update((key, bytes(found)) for key, found in objects.items())
            values[keys.stream_key(keys.HEADER, owner, layer, kind)] = bytes(value)
        return configs, values

    def publish(
        self,
        transaction: Transaction,
        name: str,
        record: SessionRecord,
        model: Model,
        values: Mapping[bytes, bytes],
        replaces: int | None = None,
    ) -> None:
        """Store a new session's record, and its model if that is new.

        Parameters
        ----------
        values
            What else to store with them.
        replaces
            Id of the session of this name that goes in the same transaction; may be
            `UNKNOWN_ID`.

        Raises
        ------
        InvalidArgument
            The name is taken, or the record would not read back.
        NotFound
            Another session has the name than the one to replace.
        """
        check_record(record, name, model, f"{self.path}: session {name!r}")
        if replaces is not None:
            self.delete(transaction, name, replaces)
        elif transaction.get(keys.session_key(name)) is not None:
            raise InvalidArgument(f"{self.path}: session {name!r} exists already; {TAKEN_ADVICE}")
        self._publish_model(transaction, record.model, model)
        put_all(transaction, values.items())
        put_record(transaction, self, name, None, record)

    def delete(self, transaction: Transaction, name: str, session: int) -> None:
        """Delete a session, by name and id, and what it alone needed.

        Of one whose record cannot be read what it owned goes as far as the list of users tells,
        the rest is for `gc`.
        """
        if self.id(transaction, name) != session:
            raise NotFound(f"{self.path}: session {name!r} was replaced meanwhile")
        try:
            record = self.record(transaction, name, fresh=True)
        except KvError:
            transaction.delete(keys.session_key(name))
            self.forget(name)
            delete_unreadable(transaction, self, session)
        else:
            delete_record(transaction, self, name, record)

    def _publish_model(self, transaction: Transaction, digest: bytes, model: Model) -> None:
        """Store a model that is not there, or there and damaged: its digest says what it was."""
        try:
            self.model(transaction, digest, fresh=True)
        except (Corrupt, Truncated, Unsupported):
            value = pack_identity(model)
            try:
                unpack_identity(value, digest, f"{self.path}: model {model.name!r}")
            except (Corrupt, Truncated, Unsupported) as error:
                raise InvalidArgument(f"the model would not read back: {error}") from error
            transaction.put(keys.identity_key(digest), value)

    def forget(self, name: str) -> None:
        """Drop what is kept of a deleted session."""
        self._records.pop(name, None)


def begin(backend: Backend, mode: Mode, timeout: float) -> dict[str, Any]:
    """Return the JSON of the archive record; write one into an archive that is empty.

    Raises
    ------
    NotFound
        Empty, and `mode` is "r".
    Truncated, Corrupt, Unsupported
        Not an archive that this release can read.
    """
    with backend.read() as snapshot:
        value = snapshot.get(keys.ARCHIVE)
        if value is not None:
            return check_archive(value, backend.path)
        if next(snapshot.sizes(b""), None) is not None:
            raise Corrupt(
                f"{backend.path}: not an archive of this project, or its record is lost; or the "
                "rest of a migration that did not end: kvstore migrate --resume goes on with it"
            )
    if mode == "r":
        raise NotFound(f"{backend.path}: empty; open it with mode='a' to begin an archive")
    with backend.write(timeout) as transaction:
        if transaction.get(keys.ARCHIVE) is None:
            about = {"writer": writer_name(), "created": int(time.time())}
            transaction.put(keys.ARCHIVE, pack_archive(about))
    return begin(backend, mode, timeout)


def writer_name() -> str:
    """Return name and release of this software."""
    # Imported here: it costs every user 20 ms, and only who begins an archive needs it.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"kvstore {version('kvstore')}"
    except PackageNotFoundError:
        return "kvstore"
