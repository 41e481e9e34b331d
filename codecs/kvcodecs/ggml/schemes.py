"""Names, numbers and block sizes of the schemes. FORMAT.md section 10."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..errors import InvalidArgument
from ..suggestion import did_you_mean


@dataclass(frozen=True, slots=True)
class Scheme:
    """One scheme.

    Attributes
    ----------
    name
        Lower case, as in ``ggml.q8_0``.
    number
        ggml's number of the tensor type; of `q2_0_128`, which shares that of `q2_0`, our own.
    block_values, block_bytes
        Values of a block, and the bytes it takes.
    aliases
        Other names.
    """

    name: str
    number: int
    block_values: int
    block_bytes: int
    aliases: tuple[str, ...] = ()

    @property
    def bits_per_value(self) -> float:
        return 8 * self.block_bytes / self.block_values

    def row_bytes(self, n_values: int) -> int:
        """Return the bytes of a row; `InvalidArgument` unless it is whole blocks."""
        if n_values % self.block_values:
            fitting = [s.name for s in SCHEMES if n_values % s.block_values == 0]
            raise InvalidArgument(
                f"ggml.{self.name}: rows of {n_values} values are not whole blocks of "
                f"{self.block_values}; these fit: {', '.join(fitting)}"
            )
        return n_values // self.block_values * self.block_bytes


SCHEMES: Final = (
    Scheme("f16", 1, 1, 2),
    Scheme("q8_0", 8, 32, 34, ("q8",)),
    Scheme("q4_0", 2, 32, 18, ("q4",)),
    Scheme("q5_0", 6, 32, 22, ("q5",)),
    Scheme("q4_1", 3, 32, 20),
    Scheme("q5_1", 7, 32, 24),
    Scheme("q1_0", 41, 128, 18, ("q1",)),
    # Two forms under one name and number elsewhere: ggml's own, and that of the Bonsai models.
    Scheme("q2_0", 42, 64, 18, ("q2",)),
    Scheme("q2_0_128", 170, 128, 34),
    Scheme("q2_k", 10, 256, 84, ("q2k",)),
    Scheme("q3_k", 11, 256, 110, ("q3k",)),
    Scheme("q4_k", 12, 256, 144, ("q4k",)),
    Scheme("q5_k", 13, 256, 176, ("q5k",)),
    Scheme("q6_k", 14, 256, 210, ("q6k",)),
    Scheme("q8_k", 15, 256, 292, ("q8k",)),
    Scheme("iq4_nl", 20, 32, 18, ("iq4nl",)),
    Scheme("iq4_xs", 23, 256, 136, ("iq4xs",)),
    Scheme("iq2_xxs", 16, 256, 66, ("iq2xxs",)),
    Scheme("iq2_xs", 17, 256, 74, ("iq2xs",)),
    Scheme("iq2_s", 22, 256, 82, ("iq2s",)),
    Scheme("iq3_xxs", 18, 256, 98, ("iq3xxs",)),
    Scheme("iq3_s", 21, 256, 110, ("iq3s",)),
    Scheme("iq1_s", 19, 256, 50, ("iq1s",)),
    Scheme("iq1_m", 29, 256, 56, ("iq1m",)),
    Scheme("tq1_0", 34, 256, 54, ("tq1",)),
    Scheme("tq2_0", 35, 256, 66, ("tq2",)),
)

_BY_NAME: Final = {name: s for s in SCHEMES for name in (s.name, *s.aliases)}
_FEW: Final = "f16, q8_0, q6_k, q5_0, q4_0, q4_k and iq4_nl; all are in kvcodecs.ggml.SCHEMES"
_BY_NUMBER: Final = {s.number: s for s in SCHEMES}


def scheme_by_name(name: str) -> Scheme:
    """Return the scheme called `name`, in any case, with or without ``ggml.`` before it.

    Raises
    ------
    InvalidArgument
        No such scheme; says which name is close.
    """
    key = name.strip().lower().removeprefix("ggml.") if isinstance(name, str) else None
    if key not in _BY_NAME:
        meant = did_you_mean(key, [s.name for s in SCHEMES])
        raise InvalidArgument(f"scheme {name!r} is unknown{meant or ';'} some are {_FEW}")
    return _BY_NAME[key]


def scheme_by_number(number: int) -> Scheme | None:
    """Return the scheme that stream headers call `number`, if this release has it."""
    return _BY_NUMBER.get(number)
