"""The configuration of our codec in `zarr.json`, of an array of anybody's own.

Nothing here imports zarr.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, cast

from .codec import CodecConfig, codec_by_name, config_from_json
from .errors import Corrupt, InvalidArgument, Unsupported
from .fibquant.book import Book, book_for, book_of
from .fibquant.config import FibQuant
from .kvr1 import KVR1
from .raw import Raw
from .shared import shared_digest
from .spec import KINDS, Kind
from .tkv1 import TKV1
from .zarr_configuration import NAME, from_base64

_OWN_KEYS: Final = {"codec", "kind", "step", "rel_step"}
#: Of FibQuant, besides. Whoever codes a chunk does not know which tokens and layer it is of.
_FIBQUANT_KEYS: Final = {f.name for f in fields(FibQuant)} - {
    "first_tokens",
    "last_tokens",
    "raw_layers",
}


@dataclass(frozen=True, slots=True)
class OwnArray:
    """How the chunks of an array outside of archives are coded, each by itself.

    Attributes
    ----------
    codec
        ``"tkv1"``, ``"kvr1"``, ``"raw"``, ``"fibquant"``, or a scheme of ggml: ``"ggml.q8_0"``.
    kind
        ``"k"`` or ``"v"``.
    step
        Quantiser step: values come back within half of it.
    rel_step
        The step as a fraction of the RMS of each chunk. One of both, none for other codecs than
        TKV1 and KVR1.
    fibquant
        What is asked of FibQuant; None for other codecs.
    book
        FibQuant's, packed: all chunks refer to it. None until the array's shape is known, and where
        there is none.

    Raises
    ------
    InvalidArgument
        A value out of range.
    Unsupported
        A codec that this release does not know.
    """

    codec: str
    kind: Kind
    step: float | None = None
    rel_step: float | None = None
    fibquant: FibQuant | None = None
    book: bytes | None = field(default=None, repr=False)

    @classmethod
    def of_options(
        cls, codec: str, kind: Kind, step: float | None, rel_step: float | None, **options: Any
    ) -> OwnArray:
        """Return the array with these options of the codec; only FibQuant has some.

        Raises
        ------
        InvalidArgument, Unsupported
            As the constructor, and an option that there is not.
        """
        is_fibquant = codec_by_name(codec).name == "fibquant"
        unknown = sorted(set(options) - _FIBQUANT_KEYS) if is_fibquant else sorted(options)
        if unknown:
            raise InvalidArgument(f"{NAME}: {codec} has no option {', '.join(unknown)}")
        if not is_fibquant:
            return cls(codec, kind, step, rel_step)
        try:
            asked = config_from_json({"codec": codec, "first_tokens": 0, **options})
        except Corrupt as error:
            raise InvalidArgument(f"{NAME}: {error}") from error
        return cls("fibquant", kind, step, rel_step, cast(FibQuant, asked))

    def __post_init__(self) -> None:
        codec_by_name(self.codec)
        if self.kind not in KINDS:
            raise InvalidArgument(f"{NAME}: kind {self.kind!r}, expected 'k' or 'v'")
        n_steps = (self.step is not None) + (self.rel_step is not None)
        if (self.fibquant is not None) != (self.family == "fibquant"):
            raise InvalidArgument(f"{NAME}: {self.codec} with the options {self.fibquant!r}")
        if self.codec == "raw" and n_steps:
            raise InvalidArgument(f"{NAME}: raw keeps values as they are; give it no step")
        if self.family in ("ggml", "fibquant"):
            if n_steps:
                raise InvalidArgument(f"{NAME}: {self.codec} has a fixed rate; give it no step")
            if self.codec == "ggml":
                raise InvalidArgument(f"{NAME}: ggml needs a scheme, as in 'ggml.q8_0'")
            if self.family == "ggml":
                object.__setattr__(self, "codec", config_from_json({"codec": self.codec}).codec)
        elif self.codec != "raw" and n_steps != 1:
            raise InvalidArgument(f"{NAME}: {self.codec} needs one of step and rel_step")
        self.asked("float32")

    @property
    def family(self) -> str:
        """What the codec is called without its scheme."""
        return codec_by_name(self.codec).name

    @property
    def scheme(self) -> str:
        """What `BlockCodec.name_of` says of chunks."""
        return self.codec if self.fibquant is None else f"{self.codec}.{self.fibquant.scheme}"

    def to_json(self) -> dict[str, Any]:
        """Return the configuration of the codec in `zarr.json`."""
        data: dict[str, Any] = {"codec": self.codec, "kind": self.kind}
        if self.step is not None:
            data["step"] = float(self.step)
        if self.rel_step is not None:
            data["rel_step"] = float(self.rel_step)
        if self.fibquant is not None:
            options = self.fibquant.to_json()
            data |= {key: options[key] for key in options if key in _FIBQUANT_KEYS}
        if self.book is not None:
            data["book"] = base64.b64encode(self.book).decode("ascii")
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OwnArray:
        """Return what `to_json` described; `InvalidArgument`, `Corrupt` or `Unsupported`."""
        if not isinstance(data.get("codec"), str):
            raise InvalidArgument(f"{NAME}: codec {data.get('codec')!r} in the configuration")
        options = {key: value for key, value in data.items() if key not in _OWN_KEYS}
        book = options.pop("book", None)
        known = _FIBQUANT_KEYS if codec_by_name(data["codec"]).name == "fibquant" else set()
        unknown = sorted(set(options) - known)
        if unknown or (book is not None and not known):
            raise Unsupported(f"{NAME}: configuration with {', '.join(unknown) or 'book'}; upgrade")
        steps = data.get("step"), data.get("rel_step")
        array = cls.of_options(data["codec"], data.get("kind", ""), *steps, **options)
        return array if book is None else replace(array, book=from_base64(book, "book"))

    def of_head_dim(self, head_dim: int) -> OwnArray:
        """Return the array with the book for heads of this size, built if there is none.

        Raises
        ------
        InvalidArgument
            What is asked for does not fit them.
        Corrupt, Truncated, Unsupported
            The book, or it is of another profile.
        """
        asked = self.asked("float32")
        if not isinstance(asked, FibQuant) or asked.axis == "raw":
            return self
        book = self.stored_book()
        if book is None:
            return replace(self, book=book_for(asked.profile(head_dim)).pack())
        if book.profile != asked.profile(head_dim):
            raise Corrupt(f"{NAME}: the book in the configuration is another one's")
        return self

    def stored_book(self) -> Book | None:
        """Return the book of the configuration; `Corrupt`, `Truncated` or `Unsupported`."""
        return None if self.book is None else book_of(shared_digest(self.book), self.book)

    def shared(self, digest: bytes) -> bytes:
        """Return the packed book if it is the one with this digest; see `codec.Shared`."""
        if self.book is None or shared_digest(self.book) != digest:
            raise Corrupt(f"{NAME}: a chunk needs another book than the configuration has")
        return self.book

    def asked(self, dtype: str) -> CodecConfig:
        """Return what is asked of the codec for chunks of a dtype."""
        if self.codec == "raw":
            return Raw(dtype)
        if self.fibquant is not None:
            return self.fibquant
        if self.family == "ggml":
            return config_from_json({"codec": self.codec})
        # No sinks: whether a chunk is the first of its array is not known to whoever codes it.
        quantiser = TKV1 if self.codec == "tkv1" else KVR1
        return quantiser(step=self.step, rel_step=self.rel_step, sink=0)
