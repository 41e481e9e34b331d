"""CuPy as far as `kvgpu.cuda` uses it, over memory of the host: it runs that module without a GPU.

Names, arguments and results are those of CuPy 14.
"""

import ctypes
from types import SimpleNamespace

import numpy as np
from kvgpu.host_device import HostArray


def make(library):
    """Return a module whose kernels are those of `library`, compiled for the host."""
    log = []

    class CUDARuntimeError(RuntimeError):
        pass

    class Stream:
        null = None
        current = None

        def __init__(self, null=False, ptds=False, non_blocking=False, priority=0):
            self.ptr = 0 if null else id(self)
            self._before = []

        @classmethod
        def from_external(cls, obj):
            version, handle = obj.__cuda_stream__()
            assert version == 0
            stream = cls()
            stream.ptr = handle
            return stream

        def __enter__(self):
            self._before.append(Stream.current)
            Stream.current = self
            return self

        def __exit__(self, *args):
            Stream.current = self._before.pop()

        def record(self, event=None):
            assert event is not None
            log.append(("record", self.ptr))
            return event

        def wait_event(self, event):
            assert isinstance(event, Event)
            log.append(("wait", self.ptr))

    class Event:
        def __init__(self, block=False, disable_timing=False, interprocess=False):
            pass

        def synchronize(self):
            log.append(("synchronize", None))

    Stream.null = Stream.current = Stream(null=True)

    class Pointer:
        def __init__(self, size):
            self._array = np.full(size + 512, 0xA5, np.uint8)
            self.ptr = -(-self._array.ctypes.data // 512) * 512

    def alloc_pinned_memory(size):
        return memoryview(bytearray(max(size, 512)))

    class Runtime(SimpleNamespace):
        def memcpyAsync(self, dst, src, size, kind, stream):
            assert kind in (1, 2, 3)
            log.append(("copy", stream))
            ctypes.memmove(dst, src, size)

        def pointerGetAttributes(self, ptr):
            here = SimpleNamespace(device=0, devicePointer=ptr, hostPointer=0, type=2)
            return self.elsewhere.get(ptr, here)

        def getDeviceCount(self):
            return 1

        def getDeviceProperties(self, device):
            return {"name": b"A fake"}

    class RawKernel:
        num_regs, local_size_bytes = 40, 0
        max_dynamic_shared_size_bytes = 48 << 10

        def __init__(self, name):
            self._run = getattr(library, name.replace("kv_", "kv_host_"))

        def __call__(self, grid, block, args, *, shared_mem=0):
            assert len(grid) == len(block) == len(args) == 1
            assert 1 <= block[0] <= 1024
            assert shared_mem <= self.max_dynamic_shared_size_bytes
            assert type(args[0]) is np.uint64
            log.append(("launch", Stream.current.ptr))
            self._run(ctypes.c_void_p(int(args[0])))

    class RawModule:
        def __init__(self, code=None, *, options=(), backend="nvrtc"):
            assert '#include "' not in code
            assert isinstance(options, tuple)

        def get_function(self, name):
            return RawKernel(name)

    class Device:
        def __init__(self, device=None):
            self.id = 0
            self.attributes = {
                "MultiProcessorCount": 2,
                "MaxSharedMemoryPerBlockOptin": 227 << 10,
            }

    return SimpleNamespace(
        __version__="14.0",
        log=log,
        empty=lambda shape, dtype: HostArray(np.empty(shape, dtype)),
        from_dlpack=lambda array: HostArray(np.from_dlpack(array)),
        RawModule=RawModule,
        cuda=SimpleNamespace(
            Stream=Stream,
            Event=Event,
            Device=Device,
            alloc=Pointer,
            alloc_pinned_memory=alloc_pinned_memory,
            get_current_stream=lambda device_id=-1: Stream.current,
            runtime=Runtime(
                elsewhere={},
                CUDARuntimeError=CUDARuntimeError,
                memcpyHostToDevice=1,
                memcpyDeviceToHost=2,
                memcpyDeviceToDevice=3,
                memoryTypeDevice=2,
                memoryTypeManaged=3,
            ),
        ),
    )
