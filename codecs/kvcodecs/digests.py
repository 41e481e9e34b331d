"""BLAKE3 digests of documents and tensors, each in a domain of its own. FORMAT.md section 2.3.

A document is hashed as canonical JSON: fields in the order they have, no spaces, numbers in their
shortest form that reads back. So whoever writes the same fields has the same digest, in any
language.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from .errors import InvalidArgument
from .frame import BytesLike, byte_view

DIGEST_BYTES: Final = 32
_PREFIX: Final = "blake3:"
_TENSOR_DOMAIN: Final = "fib_quant_kv_tensor_f32_v1"
_VECTOR_DOMAIN: Final = "fib_quant_source_vector_v1"
_FORM: Final = re.compile(r"blake3:[0-9a-f]{64}")
#: Numbers of more digits before the point, or with so many zeros after it, have an exponent.
_MOST_DIGITS: Final = 16
_MOST_ZEROS: Final = 5


def document_digest(domain: str, document: Mapping[str, object]) -> str:
    """Return ``"blake3:"`` and 64 hexadecimal digits of a document in a domain.

    Parameters
    ----------
    domain
        What the document is, by convention the name and version of its schema.
    document
        Numbers, strings, booleans, None, and lists and mappings of them.

    Raises
    ------
    InvalidArgument
        A number that is not finite, or a value that JSON has no form for.
    """
    return bytes_digest(domain, canonical_json(document))


def bytes_digest(domain: str, *parts: BytesLike) -> str:
    """Return the digest of bytes in a domain, as `document_digest` does."""
    hasher = blake3(domain.encode() + b"\0")
    for part in parts:
        hasher.update(byte_view(part))
    return _PREFIX + hasher.hexdigest()


def raw_digest(domain: str, *parts: BytesLike) -> bytes:
    """Return the 32 bytes of the digest of bytes in a domain."""
    return bytes.fromhex(bytes_digest(domain, *parts).removeprefix(_PREFIX))


def tensor_digest(values: npt.NDArray[np.float32]) -> str:
    """Return the digest of the values of a K or V tensor in C order."""
    return _values_digest(_TENSOR_DOMAIN, values)


def vector_digest(values: npt.NDArray[np.float32]) -> str:
    """Return the digest of one vector."""
    return _values_digest(_VECTOR_DOMAIN, values)


def is_digest(text: object) -> bool:
    """Whether `text` has the form of a digest."""
    return isinstance(text, str) and _FORM.fullmatch(text) is not None


def canonical_json(value: object) -> bytes:
    """Return the canonical JSON of a value; see `document_digest`."""
    try:
        return _json(value).encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"canonical JSON: {error}") from error


def _values_digest(domain: str, values: npt.NDArray[np.float32]) -> str:
    flat = np.ascontiguousarray(values, "<f4").reshape(-1)
    return bytes_digest(domain, flat.size.to_bytes(8, "little"), flat.view(np.uint8))


def _json(value: Any) -> str:
    if value is None or isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int | np.integer):
        return str(int(value))
    if isinstance(value, float | np.floating):
        return _number(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_name(k)}:{_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return "[" + ",".join(map(_json, value)) + "]"
    raise InvalidArgument(f"canonical JSON: no form for {type(value).__name__} {value!r}")


def _name(key: object) -> str:
    if not isinstance(key, str):
        raise InvalidArgument(f"canonical JSON: field name {key!r} is no string")
    return json.dumps(key, ensure_ascii=False)


def _number(value: float | np.floating[Any]) -> str:
    """Return the shortest decimal that reads back, of a float32 as a float32."""
    if not math.isfinite(value):
        raise InvalidArgument(f"canonical JSON: {value!r} is no number")
    if value == 0:
        return "-0.0" if math.copysign(1.0, value) < 0 else "0.0"
    shortest = np.format_float_scientific(value, unique=True, trim="-")
    mantissa, exponent = shortest.lstrip("-").split("e")
    digits, sign = mantissa.replace(".", ""), "-" if value < 0 else ""
    point = int(exponent) + 1  # digits before the decimal point
    if len(digits) <= point <= _MOST_DIGITS:
        return f"{sign}{digits.ljust(point, '0')}.0"
    if 0 < point <= _MOST_DIGITS:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if -_MOST_ZEROS < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    fraction = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{fraction}e{point - 1}"
