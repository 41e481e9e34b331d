"""What the user asks of FibQuant: the codebook, the axis, what is kept raw."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

from ..errors import Corrupt, InvalidArgument, Unsupported
from ..quantiser import check_integer
from .documents import check_choice
from .profile import MAX_BLOCK_DIM, MAX_CODEBOOK_SIZE, Profile, Rotation
from .quality import QualityBudget

Axis: TypeAlias = Literal["per_channel", "per_token", "role_aware", "raw"]
OnFailure: TypeAlias = Literal["keep_raw", "fail_closed"]

_MAX_TOKENS: Final = 1 << 32
_SCHEME: Final = re.compile(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class FibQuant:
    """Ask for FibQuant: unit vectors, rotated, as points of a codebook; a norm for each vector.

    A vector is one head of one token. Each can be read alone; the rate is fixed but for what is
    kept raw, and there is no step and no bound.

    Parameters
    ----------
    block_dim, codebook_size
        Successive channels that share an index (2 to 256; it divides `head_dim` and is less), and
        points that an index chooses from (2 to 2^20). ``log2(codebook_size) / block_dim`` bits a
        value, and 16 bits for each vector. The first use builds the codebook: seconds up to
        1024 points, minutes with thousands, longer beyond; it is kept in ``~/.cache/kvstore``.
    rotation
        ``"hadamard"``: fast. ``"haar"``: a dense random matrix, ``2 head_dim`` operations a value.
    seed
        Of rotation and codebook.
    axis
        ``"per_channel"``: each channel less its mean, by the root of its standard deviation, both
        of the prefill; then errors are least in sum. ``"per_token"``: values as they are.
        ``"role_aware"``: K per channel, V per token. ``"raw"``: every vector is kept raw.
    first_tokens, last_tokens
        So many of the first tokens are kept raw, and so many of those that are the last ones at
        each commit: for good, as committed values never change. Where each token is committed by
        itself, all of them are kept raw.
    raw_layers, raw_heads
        Layers and heads that are kept raw; a model must have them.
    on_failure
        Of vectors that cannot be coded, for example of zeros, and of a broken budget:
        ``"keep_raw"``, or refuse them with ``"fail_closed"``.
    budget
        A `QualityBudget`: what coding may do to attention, measured on the prefill: of K on its
        first 1024 tokens, which stand in for queries as well; of V on all of it. A head that
        breaks a limit is kept raw.

    Raises
    ------
    InvalidArgument
        A field of the wrong type or out of range.

    Notes
    -----
    "Raw" is exact in the narrowest of float16, bfloat16 and float32 that holds the values.
    """

    codec: ClassVar[str] = "fibquant"

    block_dim: int = 4
    codebook_size: int = 256
    _: KW_ONLY
    rotation: Rotation = "hadamard"
    seed: int = 42
    axis: Axis = "per_channel"
    first_tokens: int = 4
    last_tokens: int = 0
    raw_layers: tuple[int, ...] = ()
    raw_heads: tuple[int, ...] = ()
    on_failure: OnFailure = "keep_raw"
    budget: QualityBudget | None = None

    def __post_init__(self) -> None:
        for name, lo, hi in (
            ("block_dim", 2, MAX_BLOCK_DIM),
            ("codebook_size", 2, MAX_CODEBOOK_SIZE),
            ("seed", 0, (1 << 64) - 1),
            ("first_tokens", 0, _MAX_TOKENS - 1),
            ("last_tokens", 0, _MAX_TOKENS - 1),
        ):
            value = getattr(self, name)
            check_integer(value, f"FibQuant: {name}")
            if not lo <= value <= hi:
                raise InvalidArgument(f"FibQuant: {name} {value} is not {lo} to {hi}")
        for name, known in (("rotation", Rotation), ("axis", Axis), ("on_failure", OnFailure)):
            check_choice(getattr(self, name), f"FibQuant: {name}", get_args(known))
        for name in ("raw_layers", "raw_heads"):
            object.__setattr__(self, name, _indices(getattr(self, name), f"FibQuant: {name}"))
        if self.budget is not None and not isinstance(self.budget, QualityBudget):
            raise InvalidArgument(f"FibQuant: budget {self.budget!r}: give a QualityBudget or None")

    @property
    def scheme(self) -> str:
        """The codebook in short: ``"4x256"``, or ``"raw"``."""
        return "raw" if self.axis == "raw" else f"{self.block_dim}x{self.codebook_size}"

    @property
    def bits_per_value(self) -> float:
        """Of indices; norms and what is kept raw come on top."""
        return (
            16.0 if self.axis == "raw" else (self.codebook_size - 1).bit_length() / self.block_dim
        )

    def axis_of(self, kind: str) -> Axis:
        """Return the axis of K or V streams: what ``"role_aware"`` means for them."""
        if self.axis != "role_aware":
            return self.axis
        return "per_channel" if kind == "k" else "per_token"

    def profile(self, head_dim: int) -> Profile:
        """Return the profile of the book for heads of a size.

        Raises
        ------
        InvalidArgument
            `block_dim` does not divide `head_dim` into two and more, or this is too large.
        """
        if self.block_dim >= head_dim or head_dim % self.block_dim:
            fit = [k for k in range(2, min(head_dim, MAX_BLOCK_DIM + 1)) if head_dim % k == 0]
            choice = f"use one of {', '.join(map(str, fit))}" if fit else "no number does"
            raise InvalidArgument(
                f"FibQuant: block_dim {self.block_dim} does not divide head_dim {head_dim} "
                f"into two or more; {choice}"
            )
        return Profile.paper_default(
            head_dim, self.block_dim, self.codebook_size, self.seed, rotation=self.rotation
        )

    def of_layer(self, layer: int) -> FibQuant:
        """Return what is asked of one layer; all of it is raw if the layer is kept raw."""
        if layer in self.raw_layers:
            return replace(self, axis="raw", raw_layers=(layer,))
        return replace(self, raw_layers=())

    def to_json(self) -> dict[str, object]:
        """Return the fields that `config_from_fields` takes, and the codec's name."""
        data: dict[str, object] = {"codec": self.codec}
        for field in fields(self):
            value = getattr(self, field.name)
            data[field.name] = list(value) if isinstance(value, tuple) else value
        if self.budget is not None:
            data["budget"] = self.budget.to_json()
        return data


def config_from_fields(values: Mapping[str, Any]) -> FibQuant:
    """Return the configuration with these JSON fields.

    A field ``scheme`` stands for codebook and axis as in `FibQuant.scheme`.

    Raises
    ------
    Unsupported
        Fields that this release does not know.
    Corrupt
        A field of the wrong type or out of range.
    """
    values = dict(values)
    scheme = values.pop("scheme", None)
    unknown = sorted(set(values) - {f.name for f in fields(FibQuant)})
    if unknown:
        raise Unsupported(f"FibQuant: configuration fields {unknown}; upgrade")
    if scheme is not None:
        values |= _of_scheme(scheme)
    try:
        if isinstance(values.get("budget"), Mapping):
            values["budget"] = QualityBudget.from_json(values["budget"])
        return FibQuant(**values)
    except InvalidArgument as error:
        raise Corrupt(f"FibQuant: configuration {values!r}: {error}") from error


def _of_scheme(scheme: object) -> dict[str, object]:
    if scheme == "raw":
        return {"axis": "raw"}
    found = _SCHEME.fullmatch(scheme) if isinstance(scheme, str) else None
    if found is None:
        raise Unsupported(
            f"codec 'fibquant.{scheme}' is unknown; give block dim and codebook size, as in "
            "fibquant.4x256"
        )
    block_dim, codebook_size = int(found[1]), int(found[2])
    try:
        FibQuant(block_dim, codebook_size)
    except InvalidArgument as error:
        raise Unsupported(f"codec 'fibquant.{scheme}' is unknown: {error}") from error
    return {"block_dim": block_dim, "codebook_size": codebook_size}


def _indices(value: object, what: str) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidArgument(f"{what} {value!r}: give indices")
    found = list(value)
    for index in found:
        check_integer(index, what)
        if index < 0:
            raise InvalidArgument(f"{what} {index}: indices are not negative")
    return tuple(sorted(set(found)))
