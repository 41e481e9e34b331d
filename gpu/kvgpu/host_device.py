"""A device that stands in for a GPU: the kernels' text, compiled for the host.

It proves what is around the kernels, and them, on machines without a GPU; it is slow.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from kvcodecs.errors import InvalidArgument, Unsupported

from .device import Constants, Event, Memory, Slots, Stream
from .launches import Launch, Limits
from .source import headers_folder, kernels_folder

#: Multiply and add stay separate, as everywhere.
_OPTIONS: Final = (
    "-std=c++17",
    "-O2",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fPIC",
    "-shared",
)
# A page more than asked for at the ends, which sanitizers and a poison value make visible.
_POISON: Final = 0xA5


def compile_kernels(folder: Path, options: tuple[str, ...] = ()) -> Path:
    """Compile the kernels for the host; return the library's path.

    Raises
    ------
    Unsupported
        There is no compiler, or it refuses.
    """
    target = folder / "kvgpu_host.so"
    includes = (f"-I{headers_folder()}", f"-I{kernels_folder()}")
    shim = str(kernels_folder() / "host_shim.cpp")
    command = ["g++", *_OPTIONS, *options, *includes, shim, "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unsupported(f"kvgpu: the host's kernels need g++: {error}") from error
    if done.returncode:
        raise Unsupported(f"kvgpu: the host's kernels do not compile:\n{done.stderr}")
    return target


class HostArray:
    """An array of the stand-in, as GPU libraries show theirs; `array` is its memory."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, key: Any) -> HostArray:
        return HostArray(self.array[key])

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.array.shape,
            "typestr": "<V2" if self.array.dtype.kind == "V" else self.array.dtype.str,
            "data": (self.array.ctypes.data, not self.array.flags.writeable),
            "strides": self.array.strides,
            "version": 3,
        }


class HostDevice:
    """`kvgpu.device.Device` whose memory is the host's; see `kvgpu.device.using`.

    Parameters
    ----------
    library
        What `compile_kernels` made, loaded.
    limits
        To pretend.
    """

    def __init__(self, library: ctypes.CDLL, limits: Limits | None = None) -> None:
        self.limits = limits or Limits(n_processors=2, shared_bytes=96 << 10)
        self.kernels = library
        self.uploads: Stream = HostStream(self)
        self.slots, self.constants = Slots(self), Constants(self)
        self.launched: list[Launch] = []

    def describe(self) -> str:
        return "the host, in place of a GPU"

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostArray:
        return HostArray(np.empty(shape, dtype))

    def from_dlpack(self, array: Any) -> Any:
        raise InvalidArgument(f"{type(array).__name__}: is no array of this device")

    def check_address(self, address: int, what: str) -> None:
        if address == 0:
            raise InvalidArgument(f"{what} is not memory of this device")

    def memory(self, n_bytes: int) -> Memory:
        return HostMemory(n_bytes)

    def pinned(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        return np.full(n_bytes, _POISON, np.uint8)

    def stream(self, stream: Any) -> Stream:
        return HostStream(self)


class HostMemory:
    """Bytes that nothing has written yet."""

    def __init__(self, n_bytes: int) -> None:
        self._array = np.full(n_bytes + 256, _POISON, np.uint8)
        self.address: int = -(-self._array.ctypes.data // 256) * 256


class HostStream:
    """Does everything at once."""

    def __init__(self, device: HostDevice) -> None:
        self._device = device

    def upload(self, host: npt.NDArray[np.uint8], address: int) -> None:
        ctypes.memmove(address, host.ctypes.data, host.nbytes)

    def download(self, address: int, host: npt.NDArray[np.uint8]) -> None:
        ctypes.memmove(host.ctypes.data, address, host.nbytes)

    def copy(self, source: int, target: int, n_bytes: int) -> None:
        ctypes.memmove(target, source, n_bytes)

    def launch(self, launch: Launch, base: int) -> None:
        self._device.launched.append(launch)
        kernel = getattr(self._device.kernels, launch.kernel.replace("kv_", "kv_host_"))
        kernel(ctypes.c_void_p(base + launch.arguments))

    def record(self) -> Event:
        return HostEvent()

    def wait(self, event: Event) -> None:
        pass

    def follow(self, handle: int) -> None:
        pass


class HostEvent:
    def wait(self) -> None:
        pass
