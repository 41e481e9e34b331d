"""Small frozen structs that are stored as JSON, and most of them named by a digest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Final, Self

from ..digests import document_digest
from ..errors import Corrupt, InvalidArgument, Unsupported

MAX_U32: Final = (1 << 32) - 1


class Document:
    """Base of frozen dataclasses whose fields are plain values, tuples of them, or documents.

    Attributes
    ----------
    schema
        Name and version, and the domain of the digest; empty for parts of other documents.
    """

    schema: ClassVar[str] = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields in their order, after the schema where there is one."""
        head = {"schema_version": self.schema} if self.schema else {}
        return head | {name: _plain(getattr(self, name)) for name in self._names()}

    def digest(self) -> str:
        """Return the digest of all fields, ``"blake3:..."``."""
        return document_digest(self.schema, self.to_json())

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Return what `to_json` described.

        Raises
        ------
        Corrupt
            Fields that are missing, unknown or wrong.
        Unsupported
            A newer schema.
        """
        what = cls.__name__
        if not isinstance(data, Mapping):
            raise Corrupt(f"{what}: {type(data).__name__} instead of a JSON object")
        given = dict(data)
        if cls.schema:
            _check_schema(given.pop("schema_version", None), cls.schema, what)
        names = cls._names()
        if set(given) != set(names):
            raise Corrupt(f"{what}: its fields are not {', '.join(names)}")
        values = {name: cls._read(name, given[name]) for name in names}
        try:
            return cls(**values)
        except InvalidArgument as error:
            raise Corrupt(f"stored {what}: {error}") from error

    @classmethod
    def _names(cls) -> list[str]:
        return [field.name for field in fields(cls)]  # type: ignore[arg-type]  # a dataclass is

    @classmethod
    def _read(cls, name: str, value: object) -> object:
        """Return a field from its JSON."""
        return tuple(value) if isinstance(value, list) else value


def check_type(value: object, kind: type, what: str) -> None:
    """Raise `InvalidArgument` unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise InvalidArgument(f"{what} is a {type(value).__name__}: give a {kind.__name__}")


def check_u32(value: object, what: str, least: int = 0) -> None:
    """Raise `InvalidArgument` unless `value` is an integer from `least` to 2^32 - 1."""
    if type(value) is not int or not least <= value <= MAX_U32:
        raise InvalidArgument(f"{what} {value!r}: must be an integer from {least} to {MAX_U32}")


def check_choice(value: object, what: str, choices: tuple[str, ...]) -> None:
    """Raise `InvalidArgument` unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgument(f"{what} {value!r}: use one of {', '.join(choices)}")


def _check_schema(found: object, schema: str, what: str) -> None:
    if found != schema:
        family = schema.rstrip("0123456789")
        newer = isinstance(found, str) and found.startswith(family)
        kind = Unsupported if newer else Corrupt
        raise kind(f"{what}: schema {found!r}, this release reads {schema!r}")


def _plain(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    return list(value) if isinstance(value, tuple) else value
