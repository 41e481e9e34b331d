"""Where values that are read go: arrays of the host, or of a GPU."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from kvcodecs.errors import InvalidArgument, Unsupported
from kvcodecs.plan import Plan
from kvcodecs.spec import FLOAT_DTYPES
from kvcodecs.targets import dtype_name, is_device_output


class Queue(Protocol):
    """Executes plans in order; all are done when its context ends without an error."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def add(self, plan: Plan) -> None:
        """Decode a plan, or begin to; its payloads may change when this returns."""


class Destination(Protocol):
    """Makes arrays, and fills them."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a new array, its values undefined."""

    def view(self, array: Any) -> Any:
        """Return what plans write to, and what slices of its tokens are taken of."""

    def queue(self, n_threads: int | None) -> Queue: ...


class Host:
    """NumPy arrays."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return np.empty(shape, dtype)

    def view(self, array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            raise InvalidArgument(
                f"out {type(array).__name__}: device 'cpu' writes NumPy arrays; leave `device` out"
            )
        return array

    def queue(self, n_threads: int | None) -> Queue:
        return _HostQueue(n_threads)


class _HostQueue:
    def __init__(self, n_threads: int | None) -> None:
        self._n_threads = n_threads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def add(self, plan: Plan) -> None:
        plan.run(self._n_threads)


def destination(device: object, out: object = None) -> Destination:
    """Return where values go.

    Parameters
    ----------
    device
        ``"cpu"``, ``"cuda"``, or None: where `out` lies, and without it on the host.

    Raises
    ------
    InvalidArgument
        Another device.
    Unsupported
        There is no such device, or what it needs is not installed.
    """
    if device is None:
        device = "cuda" if is_device_output(out) else "cpu"
    if device == "cpu":
        return Host()
    if device != "cuda":
        raise InvalidArgument(
            f"device {device!r}: expected 'cpu' or 'cuda', which is CuPy's current device; "
            "cupy.cuda.Device(i).use() chooses one"
        )
    try:
        import kvgpu
    except ImportError as error:
        raise Unsupported("device 'cuda': kvgpu is not installed; reinstall kvstore") from error
    return kvgpu.Destination()


def dtype_of(out: Any, where: str) -> np.dtype[Any]:
    """Return the dtype of an array of any library; `InvalidArgument` unless values can go there."""
    name = dtype_name(getattr(out, "dtype", None))
    if name not in FLOAT_DTYPES:
        raise InvalidArgument(f"{where}: out of {name}: expected float32, float16 or bfloat16")
    return FLOAT_DTYPES[name]
