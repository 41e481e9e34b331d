"""Read everything in an archive and check it; report all problems, not the first.

What is checked: every record, stream header, chunk of token ids and frame has a right checksum
and is in its place, every frame that a session's record promises exists, and with `decode`
every block decodes. Leftovers of killed writers are counted, they are no problem.

What is not: the pages in which LMDB keeps its tree have no checksum. A damaged one mostly shows as
values that are missing or wrong, and can also stop the process (SIGBUS, SIGABRT) or lead back to an
earlier commit. Where that must not take more with it, verify in a process of its own; keep copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvcodecs.codec import codec_by_number
from kvcodecs.errors import Corrupt, KvError, NotFound
from kvcodecs.frame import HEADER_BYTES
from kvcodecs.shared import SHARED_BYTES, short

from . import keys
from .backend import Snapshot
from .catalog import listed_names
from .garbage import living
from .passing import Passing
from .pieces import Piece, all_pieces, count_frames
from .prefix_upkeep import expected_entries
from .reader import Reader
from .receipt_checks import check_receipts, read_receipts
from .records import check_archive, unpack_identity
from .session_record import SessionRecord, StreamName
from .shared_objects import check_object
from .sharing import user_keys
from .spans import head_of, header_of, id_spans, spans_of
from .stored_frame import announced
from .token_ids import CHUNK_TOKENS, read_id_chunk
from .versions import FORMAT_VERSION

if TYPE_CHECKING:
    from kvcodecs.spec import Kind

    from .opened import OpenArchive


class Problem(NamedTuple):
    """One thing that is wrong: where, the kind of error, and what it says."""

    where: str
    kind: str
    message: str


@dataclass(slots=True)
class Report:
    """Outcome of `verify`.

    Attributes
    ----------
    problems
        Empty if the archive is sound.
    n_leftover
        Values that no session names: harmless, removed by `Archive.gc`.
    receipts
        Whether receipts were checked against what they are of.
    n_receipts, n_without
        Receipts there are, and sessions that have none.
    """

    problems: list[Problem] = field(default_factory=list)
    n_sessions: int = 0
    n_frames: int = 0
    frame_bytes: int = 0
    n_values: int = 0
    n_leftover: int = 0
    decoded: bool = False
    receipts: bool = False
    n_receipts: int = 0
    n_without: int = 0

    @property
    def ok(self) -> bool:
        return not self.problems

    def add(self, where: str, error: KvError) -> None:
        """Note an error."""
        self.problems.append(Problem(where, type(error).__name__, str(error)))


def verify(
    archive: OpenArchive,
    *,
    decode: bool = False,
    receipts: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Check a whole archive against one snapshot of it.

    Parameters
    ----------
    decode
        Also decode every block.
    receipts
        Also check every receipt against the frames, parameters and errors that are stored, and
        whether there are receipts for all tokens that there should be.
    progress
        Called with entries checked and entries in all.

    Returns
    -------
    report : Report
        Errors are in it, not raised; only an archive that cannot be read at all raises.

    Notes
    -----
    Pages of LMDB's own have no checksum: a damaged one can stop the process (FORMAT.md 6).
    """
    report = Report(decoded=decode, receipts=receipts)
    with archive._read() as snapshot:
        every = {key for key, _ in snapshot.sizes(b"")}
        seen: set[bytes] = set()
        objects = _Objects(archive, snapshot)

        def checked(key: bytes) -> None:
            seen.add(key)
            if progress is not None:
                progress(len(seen), len(every))

        _check_archive_record(archive, snapshot, report)
        checked(keys.ARCHIVE)
        for key in sorted(every):
            try:
                parsed = keys.parse(key)
            except Corrupt as error:
                report.add(f"key {key!r}", error)
                checked(key)
                continue
            if parsed.prefix == keys.IDENTITY and parsed.digest is not None:
                _check_identity(archive, snapshot, key, parsed.digest, report)
                checked(key)
            elif parsed.prefix == keys.SESSION and parsed.name is not None:
                report.n_sessions += 1
                checked(key)
                for part in _check_session(archive, snapshot, parsed.name, every, objects, report):
                    if part in every:  # a missing one has been reported
                        checked(part)
        objects.report_to(report)
        for key in _check_lists(archive, snapshot, every, report):
            checked(key)
        report.n_leftover = len(every - seen)
    return report


def _check_archive_record(archive: OpenArchive, snapshot: Snapshot, report: Report) -> None:
    try:
        value = snapshot.get(keys.ARCHIVE)
        if value is None:
            raise Corrupt(f"{archive.path}: archive record missing")
        check_archive(value, archive.path)
    except KvError as error:
        report.add("archive record", error)


def _check_identity(
    archive: OpenArchive, snapshot: Snapshot, key: bytes, digest: bytes, report: Report
) -> None:
    where = f"model {digest.hex()}"
    try:
        value = snapshot.get(key)
        if value is None:
            raise NotFound(f"{archive.path}: {where}: missing")
        unpack_identity(value, digest, f"{archive.path}: {where}")
    except KvError as error:
        report.add(where, error)


class _Objects:
    """The objects that stream headers share: each is checked once, for all who need it."""

    def __init__(self, archive: OpenArchive, snapshot: Snapshot) -> None:
        self._path, self._snapshot = archive.path, snapshot
        self._errors: dict[bytes, KvError | None] = {}
        self._sessions: dict[bytes, dict[str, None]] = {}
        for key, _ in snapshot.sizes(keys.SHARED):
            if len(key) == len(keys.SHARED) + SHARED_BYTES:
                self._check(key[len(keys.SHARED) :])

    def are_sound(self, digests: Iterable[bytes], name: str) -> bool:
        """Whether these objects are, which a session needs."""
        found = True
        for digest in digests:
            self._sessions.setdefault(digest, {})[name] = None
            found = self._check(digest) is None and found
        return found

    def _check(self, digest: bytes) -> KvError | None:
        if digest not in self._errors:
            try:
                check_object(self._snapshot, digest, self._path)
                self._errors[digest] = None
            except KvError as error:
                self._errors[digest] = error
        return self._errors[digest]

    def report_to(self, report: Report) -> None:
        """Note what is wrong, and the sessions that cannot be read for it."""
        for digest, error in self._errors.items():
            if error is not None:
                names = list(self._sessions.get(digest, ()))
                text = f"{error}; needed by {listed_names(names)}" if names else str(error)
                report.add(f"shared object {short(digest)}", type(error)(text))


def _check_session(
    archive: OpenArchive,
    snapshot: Snapshot,
    name: str,
    every: set[bytes],
    objects: _Objects,
    report: Report,
) -> Iterator[bytes]:
    """Check one session and yield the keys that it names."""
    where = f"session {name!r}"
    try:
        record = archive._catalog.record(snapshot, name, fresh=True)
        model = archive._catalog.model(snapshot, record.model, fresh=True)
    except KvError as error:
        report.add(where, error)
        return
    yield from (key for key, _ in snapshot.sizes(keys.receipts_prefix(record.id)))

    def on_receipt_error(spot: str, error: KvError) -> None:
        located = type(error)(f"{archive.path}: {where} {spot}: {error}")
        report.add(f"{where} {spot}", located)

    found = read_receipts(snapshot, record, on_receipt_error)
    report.n_receipts += len(found.receipts) + found.n_bad
    report.n_without += record.receipts is None
    reader = Reader(model, f"{archive.path}: {where}")
    n_frames = count_frames(record)
    # A range can be there more than once. Too many are not worth a look at each, nor a line.
    if n_frames > len(every) * (1 + len(record.parts)):
        message = f"the record promises {n_frames} frames, the archive has {len(every)} entries"
        report.add(where, Corrupt(f"{reader.where}: {message}; restore a copy"))
        for prefix in keys.OWNED:
            start = keys.owner_prefix(prefix, record.owner)
            yield from (key for key in every if key.startswith(start))
        return
    passing = Passing(snapshot)
    for layer, kind in record.streams:
        spot = f"{where} layer {layer} {kind}"
        bad_headers = set()
        for owner in _header_owners(record, (layer, kind)):
            yield keys.stream_key(keys.HEADER, owner, layer, kind)
            try:
                number, header = reader.header(snapshot, owner, layer, kind)
                needs = codec_by_number(number).needs(header)
                yield from map(keys.shared_key, needs)
                if objects.are_sound(needs, name):
                    reader.coding(snapshot, owner, layer, kind)
                else:
                    bad_headers.add(owner)
            except KvError as error:
                report.add(f"{spot} header", error)
                bad_headers.add(owner)
        for piece in announced(snapshot, all_pieces(record, layer, kind)):
            yield from piece.keys
            if piece.raw or piece.owner not in bad_headers:
                _check_frame(snapshot, passing, reader, piece, layer, kind, where, report)
        head = head_of(record, (layer, kind))
        if head is not None and record.streams[layer, kind].start + head.n_tokens == record.first:
            # Nothing is read from it, but the session may be taken back to its end.
            yield keys.stream_key(keys.HEAD, head.owner, layer, kind)
    passing.release()
    if report.receipts:
        check_receipts(snapshot, reader, record, found, on_receipt_error)
    if record.has_ids:
        yield from _check_ids(snapshot, record, where, reader.where, report)


def _header_owners(record: SessionRecord, stream: StreamName) -> list[int]:
    first = max(record.first - record.streams[stream].start, 0)
    n_trimmed = first // record.streams[stream].block_tokens
    owners = [span.owner for span in spans_of(record, stream) if span.stop_block > n_trimmed]
    last = header_of(record, stream)
    return list(dict.fromkeys([*owners, *([] if last is None else [last])]))


def _check_frame(
    snapshot: Snapshot,
    passing: Passing,
    reader: Reader,
    piece: Piece,
    layer: int,
    kind: Kind,
    where: str,
    report: Report,
) -> None:
    try:
        coding, _, payload = reader.open(snapshot, piece, layer, kind)
        if report.decoded:
            reader.decode(snapshot, piece, layer, kind)
        passing.add(payload)
        report.n_values += coding.params.spec.n_values(piece.n_tokens)
        report.frame_bytes += HEADER_BYTES + payload.nbytes
        report.n_frames += 1
    except KvError as error:
        report.add(f"{where} {piece.name}", error)


def _check_ids(
    snapshot: Snapshot, record: SessionRecord, spot: str, where: str, report: Report
) -> Iterator[bytes]:
    for owner, first, stop in id_spans(record, CHUNK_TOKENS):
        for chunk in range(max(first, record.first // CHUNK_TOKENS), stop):
            yield keys.tokens_key(owner, chunk)
            try:
                read_id_chunk(snapshot, record, chunk, where)
            except KvError as error:
                report.add(f"{spot} token ids chunk {chunk}", error)


def _check_lists(
    archive: OpenArchive, snapshot: Snapshot, every: set[bytes], report: Report
) -> Iterator[bytes]:
    """Check that the index and the lists of users say all they should; yield their keys."""
    alive = living(archive, snapshot)
    wanted = {key for _, record, model in alive.records for key in user_keys(record, model)}
    pairs = [(record, model) for _, record, model in alive.records]
    unknown: set[int] = set()

    def on_error(record: SessionRecord, error: KvError) -> None:
        # Reported where the ids were read. What the index should say of them nobody knows.
        unknown.update([record.owner, *(owner for owner, _ in record.id_parts)])

    wanted.update(expected_entries(snapshot, pairs, archive.path, on_error))
    wanted.update(key for key in every if unknown and _index_owner(key) in unknown)
    n_missing = len(wanted - every)
    if n_missing and int(archive._about["format"]) == FORMAT_VERSION:  # older ones have no index
        message = f"{n_missing} entries of the prefix index or of the lists of users are missing"
        report.add("prefix index", Corrupt(f"{archive.path}: {message}; run kvstore reindex"))
    yield from wanted & every


def _index_owner(key: bytes) -> int | None:
    try:
        parsed = keys.parse(key)
    except Corrupt:
        return None
    return parsed.owner if parsed.prefix == keys.PREFIX else None
