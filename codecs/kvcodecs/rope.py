"""Rotary position embedding: explicit frequencies, and the way into and out of the coded domain.

K is coded before RoPE and in half-split channel order. `to_coded` takes K as a model has it
(either side of RoPE, either pairing, rotating all or some channels) and `from_coded` gives it
back. All arithmetic is float32 with separate multiply and add, so the C++ and GPU decoders,
which rotate while they write, agree with the numpy code here bit for bit. FORMAT.md section 1.3.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import Corrupt, InvalidArgument, Unsupported
from .tensor import as_array, as_float32, check_tensor

if TYPE_CHECKING:
    from .spec import F32, KState, StreamSpec

RopeStyle: TypeAlias = Literal["half", "interleaved"]

#: Positions up to here are exact in float32, the type the angle is computed in.
MAX_POSITION: Final = 1 << 24

# Far wider than any model's, and far from where float32 squares of it lose bits.
_MIN_SCALING: Final = 1e-6
_MAX_SCALING: Final = 1e6
_STYLES: Final = ("half", "interleaved")
# Values per pass of the rotation, so that its temporaries stay in the L2 cache.
_PASS_VALUES: Final = 1 << 15


class RopeTable(NamedTuple):
    """Cosines and sines of successive positions, already multiplied by the scaling.

    Attributes
    ----------
    first_token
        Position of row 0.
    cos, sin : (n_tokens, n_pairs) float32, C-contiguous
    """

    first_token: int
    cos: F32
    sin: F32

    def rows(self, start: int, stop: int) -> tuple[F32, F32]:
        """Return views of the cosines and sines of positions ``[start, stop)``.

        Raises
        ------
        InvalidArgument
            The table does not cover the range.
        """
        lo, hi = start - self.first_token, stop - self.first_token
        if not 0 <= lo <= hi <= len(self.cos):
            raise InvalidArgument(
                f"rope table covers positions [{self.first_token}, "
                f"{self.first_token + len(self.cos)}), asked for [{start}, {stop})"
            )
        return self.cos[lo:hi], self.sin[lo:hi]

    def checked(self) -> RopeTable:
        """Return the table as its attributes are described; itself, if it is so.

        Raises
        ------
        InvalidArgument
            Cosines and sines are not two tables of numbers of one shape.
        """
        try:
            cos, sin = (np.ascontiguousarray(part, np.float32) for part in (self.cos, self.sin))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"rope table: {error}") from error
        if cos.ndim != 2 or cos.shape != sin.shape:
            raise InvalidArgument(
                f"rope table: cosines of shape {cos.shape}, sines of shape {sin.shape}; expected "
                "(n_tokens, n_pairs) both"
            )
        return self if cos is self.cos and sin is self.sin else self._replace(cos=cos, sin=sin)


@dataclass(frozen=True, eq=False, slots=True)
class Rope:
    """Rotary embedding of one layer's K, as the model computes it.

    Parameters
    ----------
    inv_freq : (n_pairs,) float32
        The model's own frequencies, copied. Recomputing them from theta in another precision
        is off by 2.8e-3 in the rotated value at 8192 tokens.
    style
        Which channels form pair ``i``: ``"half"`` pairs ``(i, i + n_pairs)`` (Llama, Qwen),
        ``"interleaved"`` pairs ``(2 i, 2 i + 1)`` (GPT-J).
    scaling
        Attention scaling that multiplies cosine and sine (YaRN), positive.

    Raises
    ------
    InvalidArgument
        `inv_freq` is not a non-empty list of finite numbers, or another value is out of range.
    """

    inv_freq: F32
    style: RopeStyle = "half"
    scaling: float = 1.0

    def __post_init__(self) -> None:
        given = as_array(self.inv_freq, "rope: inv_freq")
        if given.ndim != 1 or given.size == 0:
            raise InvalidArgument(f"rope: inv_freq has shape {given.shape}, expected (n_pairs,)")
        with np.errstate(over="ignore"):
            frequencies = given.astype(np.float32)
        if not np.isfinite(frequencies).all():
            raise InvalidArgument("rope: inv_freq holds a value that is not finite")
        if self.style not in _STYLES:
            raise InvalidArgument(f"rope: style {self.style!r}, expected one of {_STYLES}")
        if not _MIN_SCALING <= self.scaling <= _MAX_SCALING:
            raise InvalidArgument(
                f"rope: scaling {self.scaling!r} is outside [{_MIN_SCALING}, {_MAX_SCALING}]"
            )
        frequencies.flags.writeable = False
        object.__setattr__(self, "inv_freq", frequencies)
        object.__setattr__(self, "scaling", float(np.float32(self.scaling)))

    @classmethod
    def from_theta(
        cls,
        theta: float,
        rotary_dim: int,
        *,
        style: RopeStyle = "half",
        scaling: float = 1.0,
    ) -> Rope:
        """Return the plain RoPE ``inv_freq[i] = theta ** (-2 i / rotary_dim)``.

        Computed in float64 and rounded once. Where the model keeps its own `inv_freq`, pass
        that instead.

        Raises
        ------
        InvalidArgument
            `theta` is not positive, or `rotary_dim` is not positive and even.
        """
        if not (math.isfinite(theta) and theta > 0.0):
            raise InvalidArgument(f"rope: theta {theta!r} is not positive")
        if rotary_dim <= 0 or rotary_dim % 2:
            raise InvalidArgument(f"rope: rotary_dim {rotary_dim} is not positive and even")
        exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
        frequencies = (float(theta) ** -exponents).astype(np.float32)
        return cls(frequencies, style=style, scaling=scaling)

    @property
    def n_pairs(self) -> int:
        """Number of rotated channel pairs."""
        return len(self.inv_freq)

    @property
    def rotary_dim(self) -> int:
        """Number of rotated channels; the channels after them pass through."""
        return 2 * self.n_pairs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rope) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[bytes, str, float]:
        return self.inv_freq.tobytes(), self.style, self.scaling

    def to_json(self) -> dict[str, object]:
        """Return a JSON object; `inv_freq` as base64 of little-endian float32."""
        packed = base64.b64encode(self.inv_freq.astype("<f4").tobytes()).decode("ascii")
        return {"inv_freq": packed, "style": self.style, "scaling": self.scaling}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Rope:
        """Return what `to_json` described.

        Raises
        ------
        Corrupt
            A field is missing or malformed.
        Unsupported
            A style this release does not know.
        """
        if not isinstance(data, Mapping):
            raise Corrupt(f"rope: {data!r} is not an object")
        packed, style, scaling = (data.get(key) for key in ("inv_freq", "style", "scaling"))
        if not (isinstance(packed, str) and isinstance(style, str)):
            raise Corrupt("rope: inv_freq and style must be strings")
        if isinstance(scaling, bool) or not isinstance(scaling, int | float):
            raise Corrupt(f"rope: scaling {scaling!r} is not a number")
        if style not in _STYLES:
            raise Unsupported(f"rope: style {style!r}, this release knows {_STYLES}")
        try:
            raw = base64.b64decode(packed, validate=True)
            return cls(
                np.frombuffer(raw, dtype="<f4"),
                style="half" if style == "half" else "interleaved",
                scaling=float(scaling),
            )
        except (binascii.Error, ValueError, OverflowError) as error:
            raise Corrupt(f"rope: {error}") from error

    def channel_order(self, head_dim: int) -> npt.NDArray[np.int32]:
        """Return the tensor channel that each coded channel holds.

        Coded pair ``i`` is coded channels ``(i, head_dim / 2 + i)``. Channels that are not
        rotated fill coded positions ``n_pairs ..`` and ``head_dim / 2 + n_pairs ..`` in order.

        Returns
        -------
        order : (head_dim,) int32
            A new array.

        Raises
        ------
        InvalidArgument
            `head_dim` is odd or smaller than `rotary_dim`.
        """
        if head_dim % 2 or head_dim < self.rotary_dim:
            raise InvalidArgument(
                f"rope: head_dim {head_dim} must be even and at least rotary_dim {self.rotary_dim}"
            )
        first, second = self._pair_channels()
        n, half = self.n_pairs, head_dim // 2
        order = np.empty(head_dim, dtype=np.int32)
        channels = np.arange(head_dim, dtype=np.int32)
        order[:n], order[half : half + n] = channels[first], channels[second]
        rest = channels[2 * n :]
        order[n:half], order[half + n :] = rest[: half - n], rest[half - n :]
        return order

    def keeps_order(self, head_dim: int) -> bool:
        """Whether coded and tensor channel order are the same."""
        return self.n_pairs == 1 == head_dim // 2 or (
            self.style == "half" and self.rotary_dim == head_dim
        )

    def table(self, start: int, stop: int) -> RopeTable:
        """Return the cosines and sines of positions ``[start, stop)``.

        The angle is ``float32(position) * inv_freq`` in float32, as models compute it; its
        cosine and sine are taken in float64 and rounded to float32, so that they do not depend
        on the platform's float32 routines, then multiplied by the scaling in float32.

        Raises
        ------
        InvalidArgument
            A negative or descending range, or a position beyond `MAX_POSITION`.
        """
        if not 0 <= start <= stop:
            raise InvalidArgument(f"rope: positions [{start}, {stop}) are not a range")
        _check_exact(stop - 1)
        return self._table(start, np.arange(start, stop))

    def table_at(self, positions: npt.NDArray[np.int64]) -> RopeTable:
        """Return the cosines and sines of any positions, as those of rows 0 on; see `table`."""
        if positions.size and positions.min() < 0:
            raise InvalidArgument(f"rope: position {positions.min()} is negative")
        _check_exact(int(positions.max(initial=0)))
        return self._table(0, positions)

    def _table(self, first_token: int, positions: npt.NDArray[np.int64]) -> RopeTable:
        cos, sin = np.empty((2, len(positions), self.n_pairs), dtype=np.float32)
        for rows in _passes((1, len(positions), self.n_pairs)):
            some = positions[rows].astype(np.float32)
            with np.errstate(over="ignore"):
                angles = (some[:, None] * self.inv_freq).astype(np.float64)
            if not np.isfinite(angles).all():
                raise InvalidArgument(
                    f"rope: an angle overflows float32 up to position {positions.max()}"
                )
            cos[rows], sin[rows] = np.cos(angles), np.sin(angles)
        if self.scaling != 1.0:
            cos *= np.float32(self.scaling)
            sin *= np.float32(self.scaling)
        return RopeTable(first_token, cos, sin)

    def _pair_channels(self) -> tuple[slice, slice]:
        """Return the tensor channels that are the first and the second of each pair."""
        n = self.n_pairs
        if self.style == "half":
            return slice(0, n), slice(n, 2 * n)
        return slice(0, 2 * n, 2), slice(1, 2 * n, 2)


def to_coded(
    x: npt.NDArray[np.generic],
    spec: StreamSpec,
    k_state: KState = "pre",
    start: int = 0,
    table: RopeTable | None = None,
) -> F32:
    """Bring a tensor into the coded domain.

    Parameters
    ----------
    x : (heads, n, head_dim) float16, bfloat16, float32 or float64, any strides
        float64 is narrowed to float32; values beyond its range become infinite.
    spec
        The stream; V and K without RoPE only change dtype.
    k_state
        Whether `x` was taken before or after RoPE; ignored for V.
    start
        Position of the first token.
    table
        Cosines and sines that cover the positions; computed when None.

    Returns
    -------
    y : (heads, n, head_dim) float32, C-contiguous
        `x` itself when there is nothing to do, else a new array.

    Raises
    ------
    InvalidArgument
        Wrong shape or dtype, positions beyond `MAX_POSITION`, or post-RoPE K without RoPE.
    """
    check_tensor(x, spec, "to_coded")
    rope, rotation = _rotation(spec, k_state, start, x.shape[1], table)
    if rope is None:
        return as_float32(x)
    n, half = rope.n_pairs, spec.head_dim // 2
    first, second = rope._pair_channels()
    y = np.empty(x.shape, dtype=np.float32)
    for rows in _passes(x.shape):
        part, to = as_float32(x[:, rows]), y[:, rows]
        a, b, c, d = part[..., first], part[..., second], to[..., :n], to[..., half : half + n]
        if rotation is None:
            c[:], d[:] = a, b
        else:
            _unrotate(a, b, rotation[0][rows], rotation[1][rows], rope.scaling, c, d)
        to[..., n:half] = part[..., 2 * n : half + n]
        to[..., half + n :] = part[..., half + n :]
    return y


def from_coded(
    y: F32,
    spec: StreamSpec,
    k_state: KState = "pre",
    start: int = 0,
    table: RopeTable | None = None,
) -> F32:
    """Take a tensor out of the coded domain; the counterpart of `to_coded`.

    Parameters
    ----------
    y : (heads, n, head_dim) float32, any strides
    spec, k_state, start
        As for `to_coded`; `start` may differ from the stored position (relocation).
    table
        Cosines and sines that cover the positions; computed when None.

    Returns
    -------
    x : (heads, n, head_dim) float32, C-contiguous
        `y` itself when there is nothing to do, else a new array. The decoders' rotation on
        write gives the same bits.

    Raises
    ------
    InvalidArgument
        Wrong shape or dtype, positions beyond `MAX_POSITION`, or post-RoPE K without RoPE.
    """
    check_tensor(y, spec, "from_coded")
    rope, rotation = _rotation(spec, k_state, start, y.shape[1], table)
    if rope is None:
        return as_float32(y)
    n, half = rope.n_pairs, spec.head_dim // 2
    first, second = rope._pair_channels()
    x = np.empty(y.shape, dtype=np.float32)
    for rows in _passes(y.shape):
        part, to = as_float32(y[:, rows]), x[:, rows]
        a, b, c, d = part[..., :n], part[..., half : half + n], to[..., first], to[..., second]
        if rotation is None:
            c[:], d[:] = a, b
        else:
            _rotate(a, b, rotation[0][rows], rotation[1][rows], c, d)
        to[..., 2 * n : half + n] = part[..., n:half]
        to[..., half + n :] = part[..., half + n :]
    return x


def _rotate(a: F32, b: F32, cos: F32, sin: F32, first: F32, second: F32) -> None:
    """Write ``a cos - b sin`` and ``b cos + a sin``."""
    with np.errstate(over="ignore", invalid="ignore"):  # whoever takes the result checks it
        np.subtract(a * cos, b * sin, out=first)
        np.add(b * cos, a * sin, out=second)


def _unrotate(a: F32, b: F32, cos: F32, sin: F32, scaling: float, first: F32, second: F32) -> None:
    """Write the inverse; `cos` and `sin` carry the scaling once each, which is divided away."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(a * cos, b * sin, out=first)
        np.subtract(b * cos, a * sin, out=second)
    if scaling != 1.0:
        square = np.float32(scaling) * np.float32(scaling)
        first /= square
        second /= square


def check_k_state(k_state: object, where: str = "") -> KState:
    """Return whether K before or after RoPE is meant.

    Raises
    ------
    InvalidArgument
        Neither ``"pre"`` nor ``"post"``; `where` stands before that.
    """
    if k_state == "pre":
        return "pre"
    if k_state == "post":
        return "post"
    raise InvalidArgument(
        f"{f'{where}: ' if where else ''}k_state {k_state!r}: use 'pre' or 'post'"
    )


def _rotation(
    spec: StreamSpec, k_state: KState, start: int, n_tokens: int, table: RopeTable | None
) -> tuple[Rope | None, tuple[F32, F32] | None]:
    """Return the RoPE whose order or rotation must be undone, and its cosines and sines."""
    check_k_state(k_state)
    rope = spec.rope if spec.kind == "k" else None
    if spec.kind == "v" or k_state == "pre":
        return (None if rope is None or rope.keeps_order(spec.head_dim) else rope), None
    if rope is None:
        raise InvalidArgument("k_state 'post' needs the stream's RoPE; give the model one")
    stop = start + n_tokens
    return rope, (rope.table(start, stop) if table is None else table).rows(start, stop)


def _check_exact(position: int) -> None:
    if position > MAX_POSITION:
        raise InvalidArgument(
            f"rope: position {position} is beyond {MAX_POSITION}, the last exact in float32"
        )


def _passes(shape: tuple[int, ...]) -> list[slice]:
    heads, n_tokens, head_dim = shape
    tokens = max(1, _PASS_VALUES // (heads * head_dim))
    return [slice(at, min(at + tokens, n_tokens)) for at in range(0, n_tokens, tokens)]
