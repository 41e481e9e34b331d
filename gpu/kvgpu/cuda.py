"""The device as CuPy knows it. CuPy is imported here alone, on first use."""

from __future__ import annotations

import os
from functools import cache
from threading import Lock
from typing import Any, Final, get_args

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import InvalidArgument, Unsupported

from .device import Constants, Memory, Slots, Stream
from .launches import Kernel, Launch, Limits
from .source import OPTIONS, source

# The extras of a checkout, not of whatever has the project's name in a package index.
_INSTALL: Final = (
    "pip install cupy-cuda12x or cupy-cuda13x, as the driver needs (nvidia-smi shows its CUDA "
    "version), or in a clone '.[cuda12]' or '.[cuda13]'"
)
# What thread blocks may ask for beyond 48 KiB, they have to be granted.
_GRANTED: Final = 48 << 10
# The handle of the stream that is 0 where a number has to say which.
_LEGACY: Final = 1

_making = Lock()


def current_device() -> CudaDevice:
    """Return CuPy's current device; `Unsupported` if there is none."""
    number = int(_cupy().cuda.Device().id)
    with _making:
        return _device(number)


def is_available() -> bool:
    """Whether CuPy is installed and finds a device; where not, `decode` says what is missing.

    Imports CuPy.
    """
    try:
        _cupy()
    except Unsupported:
        return False
    return True


@cache
def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise Unsupported(f"decoding on a GPU needs CuPy: {_INSTALL}") from error
    try:
        n_devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise Unsupported(f"no CUDA device: {error}") from error
    if n_devices == 0:
        raise Unsupported("no CUDA device: the driver finds none")
    return cupy


@cache
def _device(number: int) -> CudaDevice:
    return CudaDevice(number)


def _forget() -> None:
    """What a process had of CUDA its forks do not have: they ask anew, and are told so."""
    global _making
    _making = Lock()
    _cupy.cache_clear()
    _device.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class CudaDevice:
    """`kvgpu.device.Device` for one GPU."""

    def __init__(self, number: int) -> None:
        cupy = self._cupy = _cupy()
        self.number = number
        attributes = cupy.cuda.Device(number).attributes
        self.limits = Limits(
            n_processors=attributes["MultiProcessorCount"],
            shared_bytes=attributes["MaxSharedMemoryPerBlockOptin"],
        )
        self._uploads = cupy.cuda.Stream(non_blocking=True)
        self.uploads: Stream = CudaStream(self, self._uploads)
        self.slots, self.constants = Slots(self), Constants(self)
        self._module = cupy.RawModule(code=source(), options=OPTIONS, backend="nvrtc")
        self._kernels: dict[str, Any] = {}
        self._lock = Lock()

    def describe(self) -> str:
        name = self._cupy.cuda.runtime.getDeviceProperties(self.number)["name"].decode()
        lines = [
            f"{name}, {self.limits.n_processors} multiprocessors, CuPy {self._cupy.__version__}"
        ]
        for kernel in get_args(Kernel):
            made = self.kernel(kernel)
            lines.append(
                f"{kernel}: {made.num_regs} registers, {made.local_size_bytes} bytes local"
            )
        return "\n".join(lines)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return self._cupy.empty(shape, dtype)

    def from_dlpack(self, array: Any) -> Any:
        try:
            with self._uploads:  # every decode waits for an upload
                return self._cupy.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidArgument(f"{type(array).__name__}: {error}") from error

    def check_address(self, address: int, what: str) -> None:
        runtime = self._cupy.cuda.runtime
        elsewhere = f"{what} is not memory of device {self.number}, CuPy's current one"
        if address == 0:
            raise InvalidArgument(elsewhere)
        try:
            attributes = runtime.pointerGetAttributes(address)
        except runtime.CUDARuntimeError as error:
            raise InvalidArgument(f"{elsewhere}: {error}") from error
        on_device = attributes.type in (runtime.memoryTypeDevice, runtime.memoryTypeManaged)
        if not on_device or attributes.device != self.number:
            raise InvalidArgument(elsewhere)

    def memory(self, n_bytes: int) -> Memory:
        # CuPy hands memory that was freed in a stream to that stream alone: what others still do
        # with theirs does not reach ours.
        with self._uploads:
            return CudaMemory(self._cupy.cuda.alloc(n_bytes))

    def pinned(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(n_bytes), np.uint8, n_bytes)

    def stream(self, stream: Any) -> Stream:
        cuda = self._cupy.cuda
        if stream is None:
            return CudaStream(self, cuda.get_current_stream())
        if hasattr(stream, "wait_event") and hasattr(stream, "ptr"):
            return CudaStream(self, stream)  # CuPy's
        if not hasattr(stream, "__cuda_stream__"):
            handle = getattr(stream, "cuda_stream", stream)  # of older releases of PyTorch
            if isinstance(handle, bool) or not isinstance(handle, int) or handle < 0:
                raise InvalidArgument(f"stream {stream!r}: a cupy.cuda.Stream, a number, or None")
            stream = _Handle(handle)
        return CudaStream(self, cuda.Stream.from_external(stream))

    def kernel(self, name: str) -> Any:
        """Return a kernel, compiled on first use; CuPy keeps the result on disk."""
        with self._lock:
            if name not in self._kernels:
                kernel = self._module.get_function(name)
                if self.limits.shared_bytes > _GRANTED:  # once, as launches may be concurrent
                    kernel.max_dynamic_shared_size_bytes = self.limits.shared_bytes
                self._kernels[name] = kernel
            return self._kernels[name]


class _Handle:
    """A ``cudaStream_t`` as objects that have one offer it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class CudaMemory:
    """Memory of CuPy's pool."""

    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer
        self.address: int = pointer.ptr


class CudaEvent:
    """An event that a stream has recorded."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


class CudaStream:
    """`kvgpu.device.Stream` for a stream of CuPy."""

    def __init__(self, device: CudaDevice, stream: Any) -> None:
        self._device, self._stream = device, stream
        self._runtime = _cupy().cuda.runtime

    def upload(self, host: npt.NDArray[np.uint8], address: int) -> None:
        self._copy(address, host.ctypes.data, host.nbytes, self._runtime.memcpyHostToDevice)

    def download(self, address: int, host: npt.NDArray[np.uint8]) -> None:
        self._copy(host.ctypes.data, address, host.nbytes, self._runtime.memcpyDeviceToHost)

    def copy(self, source: int, target: int, n_bytes: int) -> None:
        self._copy(target, source, n_bytes, self._runtime.memcpyDeviceToDevice)

    def launch(self, launch: Launch, base: int) -> None:
        # A number of NumPy is passed as it is: eight bytes, the pointer that kernels take.
        argument = np.uint64(base + launch.arguments)
        kernel = self._device.kernel(launch.kernel)
        with self._stream:
            kernel(
                (launch.n_blocks,), (launch.block_threads,), (argument,),
                shared_mem=launch.shared_bytes,
            )  # fmt: skip

    def record(self) -> CudaEvent:
        return CudaEvent(self._stream.record(_cupy().cuda.Event(disable_timing=True)))

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event.event)

    def follow(self, handle: int) -> None:
        handle = handle or _LEGACY
        if handle != (self._stream.ptr or _LEGACY):
            self.wait(self._device.stream(handle).record())

    def _copy(self, target: int, source: int, n_bytes: int, kind: int) -> None:
        self._runtime.memcpyAsync(target, source, n_bytes, kind, self._stream.ptr)
