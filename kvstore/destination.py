"""Where values that are read go: arrays of the host, or of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np
from kvcodecs.errors import InvalidArgument, Unsupported
from kvcodecs.plan import Plan
from kvcodecs.targets import is_device_output

# Where DLPack's ``__dlpack_device__`` says that memory of the host is: plain, and pinned.
_DLPACK_HOST: Final = (1, 3)


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
    """Makes arrays, and fills them.

    Attributes
    ----------
    batch_bytes
        Payloads and RoPE tables of a plan that it executes at a time; a block may be more.
    """

    @property
    def batch_bytes(self) -> int: ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a new array, its values undefined."""

    def view(self, array: Any) -> Any:
        """Return what plans write to, and what slices of its tokens are taken of."""

    def queue(self, n_threads: int | None) -> Queue: ...


class Host:
    """NumPy arrays."""

    # They are at hand at a time: mapped pages count as memory once touched.
    batch_bytes = 16 << 20

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return np.empty(shape, dtype)

    def view(self, array: Any) -> Any:
        if isinstance(array, np.ndarray):
            return array
        what = f"out {type(array).__name__}: device 'cpu' writes NumPy arrays"
        if _is_on_host(array):
            raise InvalidArgument(
                f"{what}: give np.from_dlpack(out), or out.numpy() of a PyTorch tensor, which "
                "share its memory"
            )
        raise InvalidArgument(f"{what}; leave `device` out")

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


def destination(device: object, outs: Sequence[object] = (), stream: Any = None) -> Destination:
    """Return where values go.

    Parameters
    ----------
    device
        ``"cpu"``, ``"cuda"``, or None: where `outs` lie, and without them on the host.
    stream
        Of the device, in whose order it writes; None for its current one.

    Raises
    ------
    InvalidArgument
        Another device, or a stream for the host or that is none.
    Unsupported
        There is no such device, or what it needs is not installed.
    """
    if device is None:
        on_device = any(is_device_output(out) and not _is_on_host(out) for out in outs)
        device = "cuda" if on_device else "cpu"
    if device == "cpu":
        if stream is not None:
            raise InvalidArgument(
                "stream: only of reads to a GPU; this one writes the host's memory"
            )
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
    return kvgpu.Destination(stream)


def _is_on_host(out: object) -> bool:
    """Whether an array of another library says that it lies on the host."""
    if not hasattr(type(out), "__dlpack_device__"):
        return False
    try:
        return out.__dlpack_device__()[0] in _DLPACK_HOST  # type: ignore[attr-defined]
    except (BufferError, RuntimeError, TypeError, ValueError):
        return False  # it says why when it is to be written
