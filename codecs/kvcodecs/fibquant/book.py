"""Books: a rotation and codewords, as archives store them once. FORMAT.md section 11.2."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from .. import _core
from ..digests import canonical_json, document_digest
from ..errors import Corrupt, Truncated, Unsupported
from ..frame import BytesLike, byte_view
from ..shared import shared_digest
from ..varints import read_varints, varint
from . import cache
from .codebook import build_codewords
from .documents import check_type
from .lloyd import LloydReport
from .profile import Profile, Rotation
from .rotation import build_rotation, rotation_digest, rotation_shape

F32 = npt.NDArray[np.float32]

_CODEBOOK_SCHEMA: Final = "fib_codebook_v1"
_VERSION: Final = 1
_WHERE: Final = "FibQuant book"
#: Of rotation and codewords: so no decoded value leaves float32.
_LARGEST_VALUE: Final = 2.0
_MOST_REMEMBERED: Final = 64
#: From so many codewords on, building them takes so long that it is told to the log.
_MANY_CODEWORDS: Final = 1024

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Book:
    """What a decoder needs to know about FibQuant vectors.

    Attributes
    ----------
    profile
        What the book was built from.
    rotation_data
        float32, C order: the matrix Q ``(d, d)`` of a Haar rotation, or the signs ``(2, d)`` of a
        Hadamard one.
    codewords
        float32 ``(N, k)``, C order.
    report
        How the codewords were found.
    """

    profile: Profile
    rotation_data: F32
    codewords: F32
    report: LloydReport

    @property
    def d(self) -> int:
        """Values of a vector."""
        return self.profile.ambient_dim

    @property
    def k(self) -> int:
        """Values of a sub-block."""
        return self.profile.block_dim

    @property
    def n_codewords(self) -> int:
        """Points that an index chooses from."""
        return self.profile.codebook_size

    @property
    def index_bits(self) -> int:
        """Bits of an index."""
        return self.profile.wire_index_bits

    @property
    def index_bytes(self) -> int:
        """Bytes of one vector's indices."""
        return (self.d // self.k * self.index_bits + 7) // 8

    @property
    def rotation(self) -> Rotation:
        """``"haar"`` or ``"hadamard"``."""
        return self.profile.rotation

    @cached_property
    def core(self) -> _core.FibBook:
        """The book as the core has it."""
        rotation = 0 if self.rotation == "haar" else 1
        return _core.FibBook(rotation, self.rotation_data, self.codewords)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes, of the packed book."""
        return shared_digest(self._packed)

    @cached_property
    def rotation_digest(self) -> str:
        """Digest of the rotation, ``"blake3:..."``."""
        return rotation_digest(self.profile, self.rotation_data)

    @cached_property
    def codebook_digest(self) -> str:
        """Digest of the codewords, ``"blake3:..."``."""
        return document_digest(
            _CODEBOOK_SCHEMA,
            {
                "schema_version": _CODEBOOK_SCHEMA,
                "profile_digest": self.profile.digest(),
                "rotation_digest": self.rotation_digest,
                "codewords": list(self.codewords.reshape(-1)),
                "init_mse": self.report.init_mse,
                "training_mse": self.report.best_mse,
                "refinement_report": self.report.to_json(),
            },
        )

    def pack(self) -> bytes:
        """Return the bytes that archives store."""
        return self._packed

    @classmethod
    def unpack(cls, data: BytesLike) -> Self:
        """Return the book of packed bytes, which are copied.

        Raises
        ------
        Truncated, Corrupt
            Bytes that end early, or are not a book's.
        Unsupported
            The book of a newer release.
        """
        view = byte_view(data)
        if view.nbytes < 1:
            raise Truncated(f"{_WHERE}: no bytes")
        if view[0] == 0:
            raise Corrupt(f"{_WHERE}: version 0 does not exist")
        if view[0] > _VERSION:
            raise Unsupported(f"{_WHERE}: version {view[0]}, newer than {_VERSION}; upgrade")
        (profile_bytes, report_bytes), start = read_varints(view, 1, 2, _WHERE)
        profile_end = start + profile_bytes
        report_end = profile_end + report_bytes
        _enough(view, report_end)
        profile = Profile.from_json(_document(view[start:profile_end]))
        report = LloydReport.from_json(_document(view[profile_end:report_end]))
        rotation, end = _read_rotation(view, report_end, profile)
        size = 4 * profile.codebook_size * profile.block_dim
        _enough(view, end + size)
        if view.nbytes > end + size:
            raise Corrupt(f"{_WHERE}: {view.nbytes - end - size} bytes behind its end")
        codewords = _floats(view[end:]).reshape(profile.codebook_size, profile.block_dim)
        return cls(profile, rotation, codewords, report)

    @cached_property
    def _packed(self) -> bytes:
        profile = canonical_json(self.profile.to_json())
        report = canonical_json(self.report.to_json())
        rotation = self.rotation_data.astype("<f4").tobytes()
        if self.rotation == "hadamard":
            rotation = np.packbits(self.rotation_data.reshape(-1) < 0, bitorder="little").tobytes()
        return b"".join(
            (
                bytes([_VERSION]),
                varint(len(profile)),
                varint(len(report)),
                profile,
                report,
                rotation,
                self.codewords.astype("<f4").tobytes(),
            )
        )


def book_for(profile: Profile) -> Book:
    """Return the book of a profile: of this process, of the folder of books, or built now.

    Raises
    ------
    InvalidArgument
        A profile that is not valid or cannot be built.
    """
    check_type(profile, Profile, f"{_WHERE}: profile")
    profile.validate()
    key = profile.digest()
    book = _of_profiles.get(key)
    if book is None:
        packed = cache.load(key)
        book = None if packed is None else _book_of_profile(profile, packed)
        if book is None:
            if profile.codebook_size >= _MANY_CODEWORDS:
                _log.info(
                    "building a FibQuant codebook of %d points; thousands can take minutes, "
                    "more take longer; it is kept in %s",
                    profile.codebook_size,
                    cache.folder() or "this process",
                )
            book = build_book(profile)
            cache.save(key, book.pack())
        _of_profiles.add(key, book)
    return book


def book_of(digest: bytes, data: BytesLike) -> Book:
    """Return the book of stored bytes, which are read once for each digest in this process.

    Raises
    ------
    Truncated, Corrupt, Unsupported
        As `Book.unpack`, and bytes of another digest.
    """
    book = _of_digests.get(digest)
    if book is None:
        if shared_digest(data) != digest:
            raise Corrupt(
                f"{_WHERE} {digest.hex()}: its bytes have another digest; restore a copy of what "
                "held it"
            )
        book = Book.unpack(data)
        _of_digests.add(digest, book)
    return book


def build_book(profile: Profile) -> Book:
    """Build the book of a valid profile, which takes minutes where codewords are thousands."""
    codewords, report = build_codewords(profile)
    rotation = build_rotation(profile)
    for array in (codewords, rotation):
        array.flags.writeable = False
    return Book(profile, rotation, codewords, report)


class _Remembered:
    """The books that this process used last, by digest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._books: OrderedDict[Any, Book] = OrderedDict()

    def get(self, key: object) -> Book | None:
        with self._lock:
            book = self._books.get(key)
            if book is not None:
                self._books.move_to_end(key)
            return book

    def add(self, key: object, book: Book) -> None:
        with self._lock:
            self._books[key] = book
            while len(self._books) > _MOST_REMEMBERED:
                self._books.popitem(last=False)


_of_profiles = _Remembered()
_of_digests = _Remembered()


def _book_of_profile(profile: Profile, packed: bytes) -> Book | None:
    """Return the book of cached bytes, None where it is another one's or of another release."""
    try:
        book = Book.unpack(packed)
    except (Corrupt, Truncated, Unsupported):
        return None
    return book if book.profile == profile else None


def _document(part: memoryview) -> Any:
    """Return a JSON document, which must be in the form that it is written in."""
    try:
        document = json.loads(bytes(part))
        if canonical_json(document) == part:
            return document
    except (ValueError, RecursionError):
        pass
    raise Corrupt(f"{_WHERE}: profile or report is not canonical JSON")


def _read_rotation(view: memoryview, start: int, profile: Profile) -> tuple[F32, int]:
    rows, d = rotation_shape(profile)
    if profile.rotation == "haar":
        end = start + 4 * rows * d
        _enough(view, end)
        return _floats(view[start:end]).reshape(rows, d), end
    end = start + (rows * d + 7) // 8
    _enough(view, end)
    bits = np.unpackbits(np.frombuffer(view[start:end], np.uint8), bitorder="little")
    if bits[rows * d :].any():
        raise Corrupt(f"{_WHERE}: bits set behind the signs of its rotation")
    signs = np.float32(1) - np.float32(2) * bits[: rows * d].reshape(rows, d).astype(np.float32)
    signs.flags.writeable = False
    return signs, end


def _floats(part: memoryview) -> F32:
    values = np.frombuffer(part, "<f4").astype(np.float32)
    if not (np.abs(values) <= _LARGEST_VALUE).all():
        raise Corrupt(f"{_WHERE}: a value of rotation or codewords is beyond {_LARGEST_VALUE}")
    values.flags.writeable = False
    return values


def _enough(view: memoryview, end: int) -> None:
    if view.nbytes < end:
        raise Truncated(f"{_WHERE} ends after {view.nbytes} of at least {end} bytes")
