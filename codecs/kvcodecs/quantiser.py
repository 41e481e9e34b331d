"""The closed-loop quantiser that the lossy codecs share: what is asked of it, what it stores.

Values become integers of a unit, predicted per channel; how the residuals become bytes is each
codec's own. FORMAT.md sections 3.1 and 4.5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from .errors import Corrupt, InvalidArgument, Unsupported
from .spec import StreamSpec

#: Values are integers of the unit; float32 holds these exactly and re-encoding is idempotent.
MAX_UNITS: Final = 1 << 23
#: A session's unit keeps this many significant bits: integer times unit is then exact in float32 up
#: to 2^16 units, and the error bound holds without a rounding term. It shrinks by less than 1/128.
_UNIT_BITS: Final = 8
EXACT_UNITS: Final = 1 << 16
_POLICIES: Final = ("rel_step", "step", "max_error", "rmse", "bpv")


@dataclass(frozen=True, slots=True)
class QuantiserConfig:
    """What the user asks of a quantising codec. At most one of the first five.

    Attributes
    ----------
    rel_step
        Quantiser step over the RMS of the prefill, per layer and kind; 1/4 if nothing is asked.
    step
        Absolute step: decoded values are within ``step / 2``.
    max_error
        Largest absolute error of a value, of K as it was given: a step of ``2 max_error``, or
        ``sqrt(2) max_error / scaling`` for K given after RoPE, as a rotation mixes two channels.
    rmse
        Expected root mean square error: a step of ``sqrt(12) rmse``.
    bpv
        Bits per value of the prefill: the finest step that needs no more.
    sink, sink_div
        The first `sink` positions are coded `sink_div` times finer.
    ar
        Fit a one-token predictor per channel.

    Raises
    ------
    InvalidArgument
        Several policies, or a field of the wrong type or out of range.
    """

    codec: ClassVar[str]
    max_sink_div: ClassVar[int]

    rel_step: float | None = None
    step: float | None = None
    max_error: float | None = None
    rmse: float | None = None
    bpv: float | None = None
    sink: int = 4
    sink_div: int = 16
    ar: bool = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        given = [policy for policy in _POLICIES if getattr(self, policy) is not None]
        if len(given) > 1:
            raise InvalidArgument(f"{name}: give one of {', '.join(given)}, not several")
        for policy in given:
            object.__setattr__(self, policy, _positive(getattr(self, policy), f"{name}: {policy}"))
        if not given:
            object.__setattr__(self, "rel_step", 0.25)
        check_integer(self.sink, f"{name}: sink")
        check_integer(self.sink_div, f"{name}: sink_div")
        if not isinstance(self.ar, bool):
            raise InvalidArgument(f"{name}: ar {self.ar!r} is not True or False")
        if not 0 <= self.sink < 1 << 32:
            raise InvalidArgument(f"{name}: sink {self.sink} is not 0 to 2^32 - 1")
        if not 1 <= self.sink_div <= self.max_sink_div:
            raise InvalidArgument(
                f"{name}: sink_div {self.sink_div} is not 1 to {self.max_sink_div}"
            )

    @property
    def policy(self) -> tuple[str, float]:
        """Name and value of the step policy."""
        name = next(name for name in _POLICIES if getattr(self, name) is not None)
        return name, float(getattr(self, name))

    def to_json(self) -> dict[str, object]:
        """Return the fields that `from_fields` takes, and the codec's name."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _POLICIES}
        policy, value = self.policy
        return {"codec": self.codec, policy: value, **values}

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration with these JSON fields; `Unsupported` or `Corrupt`."""
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise Unsupported(f"{cls.__name__}: configuration fields {unknown}; upgrade")
        try:
            return cls(**values)
        except (TypeError, InvalidArgument) as error:
            raise Corrupt(f"{cls.__name__}: configuration {dict(values)!r}: {error}") from error


def check_integer(value: object, what: str) -> None:
    """Raise `InvalidArgument` unless `value` is an int, and not a bool."""
    if type(value) is not int:
        raise InvalidArgument(f"{what} {value!r} is not an integer")


def _positive(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise InvalidArgument(f"{what} {value!r} is not a number")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond float64
        number = math.inf
    if not (number > 0 and math.isfinite(number)):
        raise InvalidArgument(f"{what} is not a positive, finite number")
    return number


@dataclass(frozen=True, eq=False)
class QuantiserParams:
    """What a stream header stores of the quantiser and its statistics.

    Attributes
    ----------
    spec
        The stream.
    step
        Quantiser step as float64; decoded values are within half of it.
    sink, sink_div, ar
        As in `QuantiserConfig`.
    mean : (channels,) int32
        Channel means in units, coded channel order.
    rho : (channels,) uint8
        AR(1) coefficients in sixteenths.
    cls : (channels,) uint8
        Spread classes, by the codec's scale.
    """

    spec: StreamSpec
    step: float
    sink: int
    sink_div: int
    ar: bool
    mean: npt.NDArray[np.int32]
    rho: npt.NDArray[np.uint8]
    cls: npt.NDArray[np.uint8]

    @property
    def unit(self) -> float:
        """``step / sink_div`` as float32: every decoded value is an integer times this."""
        return float(np.float32(self.step / self.sink_div))

    @classmethod
    def extend(cls, quantiser: QuantiserParams, **more: Any) -> Self:
        """Return a codec's parameters: those of its quantiser and `more`."""
        shared = {f.name: getattr(quantiser, f.name) for f in fields(QuantiserParams)}
        return cls(**shared, **more)


def session_step(step: float, sink_div: int, where: str) -> float:
    """Return the step that a session uses for `step`: at most it, with a short unit.

    Raises
    ------
    InvalidArgument
        The unit leaves the normal float32 numbers.
    """
    unit = step / sink_div
    # A little above the least normal number, since the unit is rounded down below.
    if not (unit_fits(unit) and unit_fits(unit * (1 - 2.0**-7))):
        raise InvalidArgument(
            f"{where}: step {step!r} over sink_div {sink_div} is outside float32; use Raw() or a "
            "larger bound"
        )
    mantissa, exponent = math.frexp(unit)
    return (
        math.ldexp(math.floor(math.ldexp(mantissa, _UNIT_BITS)), exponent - _UNIT_BITS) * sink_div
    )


def unit_fits(unit: float) -> bool:
    """Whether `unit` and every value below 2^24 units are normal float32 numbers."""
    tiny, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    return tiny <= unit <= largest / (2 * MAX_UNITS)


def means_fit(mean: npt.NDArray[np.int64]) -> bool:
    """Whether channel means are below 2^24 units; abs() would wrap for the least integer."""
    return bool(((mean < 2 * MAX_UNITS) & (mean > -2 * MAX_UNITS)).all())
