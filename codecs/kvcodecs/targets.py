"""Where the values of a plan go, and what else its tables refer to by index."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from .errors import InvalidArgument
from .frame import BytesLike
from .rope import RopeTable
from .spec import F32, FLOAT_DTYPES

#: csrc/plan.hpp OutputType of each dtype that values are decoded to.
OUTPUT_TYPES: Final = {
    FLOAT_DTYPES[name]: i for i, name in enumerate(("float32", "float16", "bfloat16"))
}


class DeviceOutput(Protocol):
    """An array of a device: `kvgpu` writes it, this package only looks at its form.

    CuPy arrays and PyTorch tensors are such, and what `kvgpu` makes itself.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


Output: TypeAlias = npt.NDArray[Any] | DeviceOutput

#: A lane or block that did not decode: status, index of its target, and its name in the block.
Failure: TypeAlias = tuple[int, int, str]
#: What tables refer to by index, as the core takes it; see `Targets.arguments`.
Arguments: TypeAlias = tuple[
    list[BytesLike], list[npt.NDArray[Any]], list[int], list[tuple[F32, F32]]
]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the wanted tokens of one block go.

    Attributes
    ----------
    start, stop
        Absolute positions wanted, inside the block.
    n_tokens
        Tokens of the block.
    out : (heads, stop - start, head_dim)
        View of the caller's memory, tensor channel order.
    rope
        Rotate on write with these cosines and sines; None writes the coded domain.
    where
        Prefix of error messages, empty or ending in ``": "``.
    """

    start: int
    stop: int
    n_tokens: int
    out: Output
    rope: RopeTable | None
    where: str

    @property
    def n_rows(self) -> int:
        return self.stop - self.start

    def of_block(self, first_token: int, target: int, rope: int) -> tuple[int, ...]:
        """Return the fields that the blocks of all codecs without lanes end in.

        These are payload, output, n_tokens, stop, skip, row, rope_row, rope and reserved;
        `target` and `rope` are indices into the plan's `Targets`.
        """
        rope_row = 0 if self.rope is None else self.start - self.rope.first_token
        stop, skip = self.stop - first_token, self.start - first_token
        return target, target, self.n_tokens, stop, skip, 0, rope_row, rope, 0


@dataclass(slots=True)
class Targets:
    """What the tables of a plan refer to by index: one entry for each block, and RoPE tables.

    Attributes
    ----------
    payloads, outputs, where
        Of each block, in the order of the plan's additions; no payload where a codec handed over
        its values.
    ropes
        Cosines and sines, ``[rows][pairs]`` each, as `RopeTable.checked` returns them.
    """

    payloads: list[BytesLike] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    ropes: list[tuple[F32, F32]] = field(default_factory=list)
    _rope_index: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, payload: BytesLike, placement: Placement) -> tuple[int, int]:
        """Return the indices of a block and of its RoPE table, -1 for none."""
        self.payloads.append(payload)
        self.outputs.append(placement.out)
        self.where.append(placement.where)
        if placement.rope is None:
            return len(self.outputs) - 1, -1
        cos, sin = placement.rope.cos, placement.rope.sin
        rope = self._rope_index.setdefault((id(cos), id(sin)), len(self.ropes))
        if rope == len(self.ropes):
            self.ropes.append((cos, sin))
        return len(self.outputs) - 1, rope

    def on_host(self) -> list[npt.NDArray[Any]]:
        """Return the outputs; `InvalidArgument` if one is memory of a device."""
        arrays = [out for out in self.outputs if isinstance(out, np.ndarray)]
        if len(arrays) < len(self.outputs):
            raise InvalidArgument("an output of the plan is on a device: use kvgpu.decode(plan)")
        return arrays

    def arguments(self, outputs: list[npt.NDArray[Any]]) -> Arguments:
        """Payloads, outputs, output types and RoPE tables as the core takes them.

        Parameters
        ----------
        outputs
            Host arrays for all entries.
        """
        views = [out if out.dtype == np.float32 else out.view(np.uint16) for out in outputs]
        types = [OUTPUT_TYPES[out.dtype] for out in outputs]
        return self.payloads, views, types, self.ropes


def check_output(out: object, shape: tuple[int, int, int], prefix: str) -> None:
    """Raise `InvalidArgument` unless values of `shape` can be written to `out`.

    Of an array of a device shape and dtype are looked at here, the rest by `kvgpu`.
    """
    if not (isinstance(out, np.ndarray) or is_device_output(out)):
        raise InvalidArgument(f"{prefix}output {type(out).__name__}: expected an array")
    if tuple(out.shape) != shape:
        raise InvalidArgument(f"{prefix}output of shape {tuple(out.shape)}, expected {shape}")
    if dtype_name(out.dtype) not in FLOAT_DTYPES:
        raise InvalidArgument(
            f"{prefix}output of dtype {out.dtype}, expected float32, float16 or bfloat16"
        )
    if not isinstance(out, np.ndarray):
        return
    if not out.flags.writeable:
        raise InvalidArgument(f"{prefix}output is read-only")
    if out.size and (out.strides[2] != out.itemsize or not are_apart(out.shape, out.strides)):
        raise InvalidArgument(f"{prefix}output: the last axis must be contiguous, strides positive")


def are_apart(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether no axis goes backwards or stays where it is."""
    return all(
        stride > 0 or (stride == 0 and n <= 1) for n, stride in zip(shape, strides, strict=True)
    )


def is_device_output(out: object) -> TypeGuard[DeviceOutput]:
    """Whether `out` is an array of a device, by what its type offers."""
    return not isinstance(out, np.ndarray) and (
        hasattr(type(out), "__cuda_array_interface__") or hasattr(type(out), "__dlpack_device__")
    )


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype of NumPy, or of a library that has its own."""
    return str(dtype).rpartition(".")[2]
