"""What an option's text may be: numbers within bounds, token ranges, layers, paths.

Every number that a loop or an allocation follows has an upper bound here or where it meets the
input, so that a mistyped one is an error at once. `layer_list` does not expand its ranges: only
the archive knows how many layers there are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

#: More than any size in an archive; numbers above are not worth carrying on.
MAX_NUMBER = 10**18
#: Characters of a bad value that its error message quotes.
_MAX_QUOTED = 60
#: More than any number of layers or heads.
MAX_INDEX = 1 << 16
_BYTES = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?) ?(?:([KMGT])(I?))?B?", re.ASCII)


def _refuse(text: str, fault: str) -> argparse.ArgumentTypeError:
    quoted = text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "..."
    return argparse.ArgumentTypeError(f"{quoted!r} {fault}")


def _whole(text: str) -> int | None:
    """Parse a whole number from 0 to `MAX_NUMBER`; None for anything else."""
    digits = text.lstrip("0") or "0"
    if not (text and text.isascii() and text.isdecimal()) or len(digits) > len(str(MAX_NUMBER)):
        return None
    value = int(digits)
    return value if value <= MAX_NUMBER else None


def token_range(text: str) -> tuple[int, int | None]:
    """Parse ``a:b`` (either may be left out) into start and stop."""
    start, colon, stop = text.partition(":")
    first = _whole(start) if start else 0
    last = _whole(stop) if stop else None
    if not colon or first is None or (stop and last is None) or (last or first) < first:
        raise _refuse(text, "is no token range a:b with 0 <= a <= b")
    return first, last


def layer_list(text: str) -> list[range]:
    """Parse ``0,3,5-7`` into ranges, in the order given."""
    spans: list[range] = []
    for part in text.split(","):
        start, dash, stop = part.partition("-")
        first = _whole(start)
        last = _whole(stop) if dash else first
        if first is None or last is None or last < first:
            raise _refuse(text, "is no list of numbers like 0,3,5-7")
        spans.append(range(first, last + 1))
    ordered = sorted(spans, key=lambda span: span.start)
    for before, after in itertools.pairwise(ordered):
        if after.start < before.stop:
            raise _refuse(text, "names one twice")
    return spans


def indices(text: str) -> tuple[int, ...]:
    """Parse ``0,3,5-7`` into numbers, each below `MAX_INDEX`."""
    found = layer_list(text)
    if any(span.stop > MAX_INDEX for span in found):
        raise _refuse(text, f"goes beyond {MAX_INDEX - 1}")
    return tuple(itertools.chain.from_iterable(found))


def shard(text: str) -> tuple[int, int, int, int]:
    """Parse ``rank/size:start-stop`` into these four."""
    group, colon, heads = text.partition(":")
    rank, slash, size = group.partition("/")
    start, dash, stop = heads.partition("-")
    numbers = [number for part in (rank, size, start, stop) if (number := _whole(part)) is not None]
    if not (colon and slash and dash) or len(numbers) != 4:
        raise _refuse(text, "is no shard rank/size:start-stop, such as 1/8:4-8")
    if not (numbers[0] < numbers[1] and numbers[2] < numbers[3]):
        raise _refuse(text, "is no shard with rank < size and start < stop")
    return numbers[0], numbers[1], numbers[2], numbers[3]


def positive_float(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise _refuse(text, "is no positive number")
    return value


def positive_int(text: str) -> int:
    """Parse a whole number of 1 or more."""
    value = _whole(text)
    if not value:
        raise _refuse(text, "is no positive whole number")
    return value


def codec_name(text: str) -> str:
    """Parse the name of a codec: ``kvr1``, or ``ggml.`` and a scheme, in any case.

    FibQuant may name its codebook: ``fibquant.4x256``.
    """
    name = text.lower()
    if name.startswith("fibquant."):
        from kvcodecs.codec import config_by_name
        from kvcodecs.errors import KvError

        try:
            config_by_name(name)
        except KvError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return name
    if name.startswith("ggml."):
        from kvcodecs.errors import InvalidArgument
        from kvcodecs.ggml.schemes import scheme_by_name

        try:
            return f"ggml.{scheme_by_name(name).name}"
        except InvalidArgument as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    if name not in ("kvr1", "tkv1", "raw", "fibquant"):
        known = "kvr1, tkv1, raw, fibquant and ggml.SCHEME, such as ggml.q8_0"
        raise _refuse(text, f"is none of {known}")
    return name


def up_to(limit: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from 1 to `limit`."""

    def parse(text: str) -> int:
        value = _whole(text)
        if not value or value > limit:
            raise _refuse(text, f"is no whole number from 1 to {limit}")
        return value

    return parse


def count(text: str) -> int:
    """Parse a whole number of 0 or more."""
    value = _whole(text)
    if value is None:
        raise _refuse(text, "is no whole number of 0 or more")
    return value


def integer(text: str) -> int:
    """Parse a whole number that may be negative."""
    value = _whole(text.removeprefix("-"))
    if value is None:
        raise _refuse(text, "is no whole number")
    return -value if text.startswith("-") else value


def byte_count(text: str) -> int:
    """Parse bytes: ``500M`` and ``10GB`` count in powers of 1000, ``1.5GiB`` in powers of 1024."""
    found = _BYTES.fullmatch(text.upper())
    number, unit, binary = found.groups() if found is not None else ("", None, None)
    if not number or ("." in number and unit is None):
        raise _refuse(text, "is no size such as 500M, 10G or 1.5GiB")
    power = " KMGT".index(unit or " ")
    value = int(Fraction(number) * (1024 if binary else 1000) ** power)
    if value > MAX_NUMBER:
        raise _refuse(text, "is more than any file has")
    return value


def quota(text: str) -> int | str:
    """Parse ``none`` or bytes."""
    return text if text == "none" else byte_count(text)


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object; the library has more to say about what may be in it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _refuse(text, "is no JSON object")
    return value


def block_size(text: str) -> int | str:
    """Parse ``auto`` or a positive whole number."""
    return text if text == "auto" else positive_int(text)


def path(text: str) -> str:
    """Take a path as it is; an empty one, as of an unset variable, would mean this folder."""
    if not text or "\0" in text:
        raise _refuse(text, "is no path")
    return text
