"""What a safetensors file of KV says besides its tensors: in its header, or in a file beside it.

`unpack` leaves the whole model under `METADATA_KEY` of the header's metadata. Plain fields that any
program can write are read as well: ``model``, ``revision``, ``layers``, ``first_token``,
``rope_inv_freq_f32``, ``rope_style`` and ``rope_scaling``, from the metadata or, where it lacks
them, from a ``.json`` file with the same stem.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from kvcodecs.errors import Corrupt, InvalidArgument, KvError
from kvcodecs.rope import Rope

from kvstore import Model
from kvstore.identity import MAX_LAYERS
from kvstore.session_record import MAX_TOKENS
from kvtools.tensorfile import TensorFile
from kvtools.terminal import listed

#: Key of the header's metadata under which `unpack` keeps what only we understand.
METADATA_KEY = "kvstore"
#: Of a file of frequencies or the like, which holds kilobytes.
MAX_JSON_BYTES = 16_000_000


class Hints:
    """What `file` and the sidecar beside it state.

    Attributes
    ----------
    stored : Model or None
        The model that `unpack` left in the file.

    Raises
    ------
    Corrupt
        The sidecar or what `unpack` left cannot be parsed.
    """

    def __init__(self, file: TensorFile) -> None:
        self._path = file.path
        self._values = {**_read_sidecar(file.path.with_suffix(".json")), **file.metadata}
        self.stored = _stored_model(file)

    def text(self, name: str) -> str | None:
        """Return a string such as ``"model"``; None for anything else."""
        value = self._values.get(name)
        return value if isinstance(value, str) and value else None

    def rope(self) -> Rope | None:
        """Return the RoPE that the plain fields state, or None."""
        frequencies = self._get("rope_inv_freq_f32", list)
        if frequencies is None:
            return None
        return rope_from(
            frequencies,
            where=str(self._path),
            style=self._values.get("rope_style", "half"),
            scaling=self._get("rope_scaling", (int, float), 1.0),
        )

    def first_token(self) -> int:
        """Position of the first token; not 0 in what `unpack --range` wrote."""
        first = int(self._get("first_token", int, 0))
        if not 0 <= first <= MAX_TOKENS:
            raise InvalidArgument(f"{self._path}: 'first_token' is no position from 0 to 2^40")
        return first

    def layer_numbers(self) -> list[int] | None:
        """Return the model's own numbers of the layers, in the order of the tensors."""
        numbers = self._get("layers", list)
        if not numbers:
            return None
        if not are_layer_numbers(numbers):
            raise InvalidArgument(
                f"{self._path}: 'layers' is [{listed(numbers)}], expected different layer numbers "
                f"from 0 to {MAX_LAYERS - 1}"
            )
        return list(numbers)

    def _get(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self._values.get(name, default)
        if isinstance(value, str):  # the header's metadata holds strings only
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                value = None
            if value is None:
                raise InvalidArgument(f"{self._path}: metadata {name!r} is not JSON")
        if value is not default and (not isinstance(value, kind) or isinstance(value, bool)):
            raise InvalidArgument(f"{self._path}: {name!r} is a {type(value).__name__}")
        return value


def are_layer_numbers(numbers: list[Any]) -> bool:
    """Whether all are different integers that can be a layer's number."""
    plain = all(type(n) is int and 0 <= n < MAX_LAYERS for n in numbers)
    return plain and len(set(numbers)) == len(numbers)


def rope_from(values: object, *, where: str, style: object, scaling: float) -> Rope:
    """Build a `Rope` from what a JSON document held; `where` goes into error messages."""
    if not isinstance(values, list) or not all(
        isinstance(x, (int, float)) and not isinstance(x, bool) for x in values
    ):
        raise InvalidArgument(f"{where}: RoPE frequencies are not a list of numbers")
    if style != "half" and style != "interleaved":
        raise InvalidArgument(f"{where}: RoPE style {style!r}; use half or interleaved")
    try:
        frequencies = np.array(values, np.float64)
    except OverflowError:
        raise InvalidArgument(f"{where}: a RoPE frequency is out of range") from None
    return Rope(frequencies, style=style, scaling=scaling)  # type: ignore[arg-type]  # narrows


def read_json(path: Path) -> Any:
    """Parse a JSON file of reasonable size.

    Raises
    ------
    Corrupt
        Not JSON, or absurdly large.
    """
    with path.open("rb") as file:
        text = file.read(MAX_JSON_BYTES + 1)  # not by its size: a device or a pipe states none
    if len(text) > MAX_JSON_BYTES:
        raise Corrupt(
            f"{path}: larger than {MAX_JSON_BYTES} bytes, so not what states RoPE frequencies and "
            "the like; move it away, or name another file"
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{path}: not valid JSON: {error}") from error


def _read_sidecar(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise Corrupt(f"{path}: not a JSON object")
    return content


def _stored_model(file: TensorFile) -> Model | None:
    text = file.metadata.get(METADATA_KEY)
    if text is None:
        return None
    where = f"{file.path}: metadata {METADATA_KEY!r}"
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where} is not JSON: {error}") from error
    if not isinstance(data, dict) or "model" not in data:
        raise Corrupt(f"{where} has no model")
    try:
        return Model.from_json(data["model"])
    except KvError as error:
        raise Corrupt(f"{where}: {error}") from error
