"""What the user asks of a block-quantised codec: its scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import Corrupt, InvalidArgument, Unsupported
from .schemes import Scheme, scheme_by_name


@dataclass(frozen=True, slots=True)
class GGML:
    """Blocks of one of ggml's schemes, at a fixed rate; no step and no bound: see `Scheme`.

    Parameters
    ----------
    scheme
        ``"q8_0"`` for example, in any case; aliases such as ``"q8"`` are taken for what they mean.

    Raises
    ------
    InvalidArgument
        No such scheme; says which name is close.

    Notes
    -----
    The heads of a token are coded together, so ``heads * head_dim`` must be a multiple of the
    scheme's block size.
    """

    scheme: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "scheme", scheme_by_name(self.scheme).name)

    @property
    def codec(self) -> str:
        return f"ggml.{self.scheme}"

    @property
    def bits_per_value(self) -> float:
        """Of payloads."""
        return scheme_of(self).bits_per_value

    def to_json(self) -> dict[str, object]:
        return {"codec": self.codec}


def scheme_of(config: GGML) -> Scheme:
    """Return the scheme that is asked for."""
    return scheme_by_name(config.scheme)


def config_from_fields(fields: Mapping[str, object]) -> GGML:
    """Return the configuration with these JSON fields: the scheme.

    Raises
    ------
    Corrupt
        Other fields.
    Unsupported
        A scheme that this release does not know.
    """
    scheme = fields.get("scheme")
    if set(fields) != {"scheme"} or not isinstance(scheme, str):
        raise Corrupt(f"ggml codec: configuration {dict(fields)!r}")
    if "." in scheme:
        raise Unsupported(f"codec 'ggml.{scheme}' is unknown to this release")
    try:
        return GGML(scheme)
    except InvalidArgument as error:
        raise Unsupported(f"codec 'ggml.{scheme}' is unknown to this release: {error}") from error
