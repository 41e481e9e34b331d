"""What goes up to a device, and what can be written there: no kernel runs here."""

import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import kvgpu
import ml_dtypes
import numpy as np
import pytest
from kvcodecs import _core
from kvcodecs.errors import InvalidArgument, Unsupported
from kvcodecs.kvr1 import KVR1
from kvcodecs.plan import Plan
from kvgpu import cuda, source
from kvgpu.arrays import view_of
from kvgpu.host_device import HostArray
from kvgpu.image import ALL, Image
from kvgpu.interfaces import bytes_of
from kvgpu.launches import Limits, block_grid, lane_grid


class Tensor:
    """A PyTorch tensor as far as it is looked at; bfloat16 has no array interface there."""

    def __init__(self, array, *, is_cuda=True):
        self.array, self.is_cuda = array, is_cuda
        self.shape, self.dtype = array.shape, f"torch.{array.dtype.name}"

    @property
    def __cuda_array_interface__(self):
        raise TypeError("not for bfloat16")

    def data_ptr(self):
        return self.array.ctypes.data

    def stride(self):
        return tuple(n // self.array.itemsize for n in self.array.strides)

    def is_contiguous(self):
        return self.array.flags.c_contiguous

    def numel(self):
        return self.array.size

    def element_size(self):
        return self.array.itemsize


def refuse(array):
    raise AssertionError("has a better way")


X = np.zeros((2, 9, 8), np.float16)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("library", [HostArray, Tensor])
def test_views_of_arrays(library, dtype):
    wide = np.zeros((3, 2, 20, 12), dtype)
    array = wide[1, :, 4:13, 2:10]
    view = view_of(library(array), refuse)
    assert (view.address, view.shape, view.dtype) == (array.ctypes.data, (2, 9, 8), array.dtype)
    assert (view.head_stride, view.row_stride) == (240, 12)
    part = view[:, 2:7]
    assert (part.address, part.shape) == (array[:, 2:].ctypes.data, (2, 5, 8))
    assert view_of(part, refuse) is part
    described = part.__cuda_array_interface__
    assert described["data"] == (part.address, False)
    assert described["strides"] == array.strides
    with pytest.raises(InvalidArgument, match="only rows can be sliced"):
        view[1:, 2:]


def test_arrays_that_speak_dlpack_alone():
    other = SimpleNamespace(dtype="float16")
    assert view_of(other, lambda array: HostArray(X)).address == X.ctypes.data


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (X, "float32, float16 or bfloat16 on the device"),
        (HostArray(X.view(np.int16)), "output HostArray of int16"),
        (HostArray(X[0]), r"shape \(9, 8\), expected heads, rows, head_dim"),
        (HostArray(X[..., ::2]), "last axis must be contiguous"),
        (HostArray(X[:, ::-1]), "strides positive"),
        (HostArray(np.lib.stride_tricks.as_strided(X, X.shape, (0, 16, 2))), "strides positive"),
        (Tensor(X, is_cuda=False), "lies on the host"),
        (object(), "output object"),
    ],
)
def test_what_cannot_be_written(array, message):
    with pytest.raises(InvalidArgument, match=message):
        view_of(array, refuse)


def test_read_only_and_misplaced_arrays():
    frozen = X.copy()
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgument, match="read-only"):
        view_of(HostArray(frozen), refuse)
    odd = np.zeros(289, np.uint8)[1:].view(np.float16).reshape(2, 9, 8)
    with pytest.raises(InvalidArgument, match="not where float16 may lie"):
        view_of(HostArray(odd), refuse)


def test_payloads_on_the_device():
    x = np.zeros((4, 6), np.uint16)
    for library in (HostArray, Tensor):
        resident = bytes_of(library(x), refuse)
        assert (resident.address, resident.n_bytes) == (x.ctypes.data, 48)
        with pytest.raises(InvalidArgument, match="without gaps"):
            bytes_of(library(x[:, :3]), refuse)
    alone = SimpleNamespace(dtype="uint16")
    assert bytes_of(alone, lambda array: HostArray(x)).address == x.ctypes.data


POOL = HostArray(np.zeros((5, 2, 4, 8), np.float16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pages": [0, 5]}, "page 5: the pool has 5"),
        ({"pages": [2, -1]}, "page -1: the pool has 5; leave out what pads"),
        ({"pages": [2, 1, 2]}, "page 2: holds rows of the output twice"),
        ({"pages": POOL}, "pages: lie on the device"),
        ({"pages": [0.5]}, "expected a list of numbers"),
        ({"pages": [[1]]}, "expected a list of numbers"),
        ({"pages": [1], "n_rows": 5}, re.escape("rows [0, 5): 1 pages hold 4")),
        ({"pages": [1], "first_row": 5}, "1 pages hold 4"),
        ({"pages": [1], "first_row": -1}, "1 pages hold 4"),
        ({"pages": [1], "layout": "DHN"}, "layout 'DHN'"),
        ({"pages": [1], "n_rows": 1.5}, "n_rows 1.5: expected a whole number"),
        ({"pages": [1], "n_rows": True}, "n_rows True"),
        ({"pages": [1], "first_row": "a"}, "first_row 'a'"),
        ({"pool": HostArray(X), "pages": [1]}, r"pool of shape \(2, 9, 8\)"),
    ],
)
def test_pages_are_checked(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        kvgpu.Paged(**{"pool": POOL, "layout": "HND", **arguments})


def test_rows_of_pages():
    paged = kvgpu.Paged(POOL, [3, 1], first_row=1, n_rows=6, layout="HND")
    assert repr(paged) == "<Paged float16 (2, 6, 8): rows from 1 of 2 pages, HND>"
    part = paged[:, 2:5]
    assert part.shape == (2, 3, 8)
    assert view_of(part, refuse).first_row == view_of(paged, refuse)[:, 2:5].first_row == 3
    assert kvgpu.Paged(POOL, [], layout="HND").shape == (2, 0, 8)
    # Block tables are often longer than a sequence, and then end in any page.
    assert kvgpu.Paged(POOL, [3, 1, 0, 0], n_rows=8, layout="HND").shape == (2, 8, 8)
    with pytest.raises(TypeError, match="layout"):
        kvgpu.Paged(POOL, [3])
    for key in ((slice(1), slice(2)), (slice(None), slice(0, 4, 2)), slice(2), 1):
        with pytest.raises(InvalidArgument, match="only rows can be sliced"):
            paged[key]


def test_an_image_is_its_parts_at_their_offsets():
    rng = np.random.default_rng(0)
    image = Image(100)
    table = np.zeros(3, [("at", "u8"), ("n", "u4")])
    parts = [rng.bytes(n) for n in (5, 0, 70, 16, 1)]
    offsets = image.add_all(parts, np.array([len(p) for p in parts], np.uint64))
    assert (offsets % 16 == 0).all()
    table["at"] = offsets[:3]
    here = image.add(table, at=np.array([True, False, True]))
    there = image.add(np.zeros(1, [("at", "u8")]), at=ALL)
    assert image.first == 112
    assert here % 16 == there % 16 == 0
    for base in (1 << 40, 256):  # the memory of one decode may lie below that of the last
        image.place(base)
        assert table["at"].tolist() == [base + offsets[0], offsets[1], base + offsets[2]]
    whole = np.zeros(image.stop, np.uint8)
    image.write(0, whole, 2)
    for offset, part in zip(offsets.tolist(), parts, strict=True):
        assert whole[offset : offset + len(part)].tobytes() == part
    assert whole[here : here + table.nbytes].tobytes() == table.tobytes()
    for size in (1, 7, 64):
        pieces = np.zeros(image.stop, np.uint8)
        for start in range(0, image.stop, size):
            image.write(start, pieces[start : start + size], 3)
        assert pieces.tobytes() == whole.tobytes()


def test_gathering_checks_its_offsets():
    out = np.zeros(8, np.uint8)
    for offsets in ([0, 2], [1 << 63, (1 << 64) - 1], [3, 0]):
        with pytest.raises(InvalidArgument, match="gather"):
            _core.gather([b"abc", b"de"], np.array(offsets, np.uint64), 0, out, 1)
    with pytest.raises(InvalidArgument, match="one offset a part"):
        _core.gather([b"abc"], np.zeros(2, np.uint64), 0, out, 1)
    assert not out.any()


def test_grids_fit_the_device():
    limits = Limits(n_processors=132, shared_bytes=227 << 10)
    for n in (1, 64, 4096, 65536, 10**6):
        grid = lane_grid(n, 5000, limits)
        assert 1 <= grid.n <= n
        assert grid.scratch_bytes <= 1 << 30
        for components in (32, 640, 8192, 1 << 20):
            grid = block_grid(np.full(n, components), 20772, limits)
            shared = 4 * (grid.compact * 20772 + grid.shared_words * grid.block_threads // 32)
            assert shared <= limits.shared_bytes
            assert grid.block_threads <= 1024
            assert 1 <= grid.n <= n
            assert grid.shared_words >= components or grid.scratch_words >= components
    assert block_grid(np.full(10**6, 640), 20772, limits).compact
    assert not block_grid(np.full(64, 640), 20772, limits).compact


def test_the_source_stands_alone():
    text = source.source()
    assert '#include "' not in text
    assert "#pragma once" not in text
    for kernel in ("lanes", "blocks", "blocks_compact"):
        assert re.search(rf"kv_decode_{kernel}\(const", text)
    assert text.count("struct Lane {") == 1


def test_a_header_that_is_missing(tmp_path, monkeypatch):
    (tmp_path / "a.cu").write_text('#include "none.hpp"\n')
    monkeypatch.setattr(source, "kernels_folder", lambda: tmp_path)
    with pytest.raises(Unsupported, match=r"includes 'none\.hpp', which is missing"):
        source.source("a.cu")


@pytest.fixture
def fake_cupy(monkeypatch, host_library):
    """CuPy over memory of the host, so that all of `kvgpu.cuda` runs."""
    import fake_cupy

    def forget():
        cuda._cupy.cache_clear()
        cuda._device.cache_clear()

    forget()
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy.make(host_library))
    yield sys.modules["cupy"]
    forget()


def test_what_cupy_is_asked_for(fake_cupy):
    """Uploads in a stream of their own, everything else in the caller's, which waits for them."""
    from test_gpu_decode import CONFIGS, ROPES, Stream, assert_same

    assert kvgpu.is_available()
    device = cuda.current_device()
    assert device is cuda.current_device()
    assert "A fake, 2 multiprocessors" in device.describe()
    assert "kv_decode_blocks_compact: 40 registers" in device.describe()
    plan, outs, wants = Plan(), [], []
    for config in CONFIGS.values():
        stream = Stream(config, rope=ROPES["half"])
        wants.append(stream.decode(10, 90, np.float16, rotated=True))
        outs.append(device.empty(wants[-1].shape, np.dtype(np.float16)))
        stream.add(plan, 10, 90, outs[-1], rotated=True)
    own = fake_cupy.cuda.Stream(non_blocking=True)
    with own:
        kvgpu.decode(plan)  # compiles, and brings the constants up
    for given, here in ((None, 0), (own, own.ptr), (4711, 4711), (cuda._Handle(4711), 4711)):
        for out in outs:
            out.array[:] = 0
        fake_cupy.log.clear()
        kvgpu.decode(plan, stream=given)
        for out, want in zip(outs, wants, strict=True):
            assert_same(out.array, want)
        there = device._uploads.ptr
        uploads = [entry for entry in fake_cupy.log if entry[1] == there]
        assert uploads[:2] == [("copy", there), ("record", there)]
        assert ("wait", here) in fake_cupy.log
        # The host waits once, for the statuses: not before it has asked for everything.
        last = max(at for at, (what, _) in enumerate(fake_cupy.log) if what != "synchronize")
        first = fake_cupy.log.index(("launch", here))
        assert "synchronize" not in [what for what, _ in fake_cupy.log[first - 2 : last]]
        launches = [at for what, at in fake_cupy.log if what == "launch"]
        assert launches == [here] * 3
        assert fake_cupy.log.index(("wait", here)) < fake_cupy.log.index(("launch", here))
        assert fake_cupy.log[-1] == ("synchronize", None)
    with pytest.raises(InvalidArgument, match="stream 'x'"):
        kvgpu.decode(plan, stream="x")
    many = Stream(KVR1(), n_tokens=600, block=4)
    out = device.empty((2, 600, 16), np.dtype(np.float32))
    kvgpu.decode(many.add(Plan(), 0, 600, out))  # enough blocks for tables in shared memory
    assert device._kernels["kv_decode_blocks_compact"].max_dynamic_shared_size_bytes > 48 << 10
    assert_same(out.array, many.decode(0, 600, np.float32))


def test_payloads_of_other_memory(fake_cupy):
    """Of another GPU, of the host, nowhere: refused before a kernel reads there."""
    from test_gpu_decode import Stream

    device, stream = cuda.current_device(), Stream(KVR1())
    out = device.empty((2, 100, 16), np.dtype(np.float16))
    payloads = [HostArray(np.frombuffer(p, np.uint8).copy()) for _, _, p in stream.blocks]
    plan = stream.add(Plan(), 0, 100, out)
    kvgpu.decode(plan, payloads)
    here = payloads[2].array.ctypes.data
    for number, kind in ((1, 2), (0, 0)):
        fake_cupy.cuda.runtime.elsewhere = {here: SimpleNamespace(device=number, type=kind)}
        with pytest.raises(InvalidArgument, match="payload 2 is not memory of device 0"):
            kvgpu.decode(plan, payloads)


class Produced(HostArray):
    """An array that says in which stream it is worked on."""

    @property
    def __cuda_array_interface__(self):
        return super().__cuda_array_interface__ | {"stream": 0x777}

    def __getitem__(self, key):
        return Produced(self.array[key])


class Exported:
    """An array that speaks DLPack alone."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, key):
        return Exported(self.array[key])

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **options):
        return self.array.__dlpack__()


def test_decodes_follow_the_streams_of_producers(fake_cupy, monkeypatch):
    from test_gpu_decode import Stream, assert_same

    device, stream = cuda.current_device(), Stream(KVR1())
    want = stream.decode(0, 100, np.float16)
    out, payloads = (
        np.zeros_like(want),
        [HostArray(np.frombuffer(p, "u1")) for _, _, p in stream.blocks],
    )
    log = fake_cupy.log
    for given, arguments in (
        (Produced(out), {}),
        (HostArray(out), {"payloads": [Produced(p.array) for p in payloads]}),
    ):
        for runs_in, waits in ((0x999, True), (0x777, False)):
            log.clear()
            kvgpu.decode(stream.add(Plan(), 0, 100, given), stream=runs_in, **arguments)
            assert_same(out, want)
            assert log.count(("record", 0x777)) == 1  # of the producer, or of the decode
            if waits:
                launch = log.index(("launch", runs_in))
                assert ("wait", runs_in) in log[log.index(("record", 0x777)) : launch]
    imported_in = []

    def from_dlpack(array):
        imported_in.append(fake_cupy.cuda.Stream.current.ptr)
        return HostArray(array.array)

    monkeypatch.setattr(fake_cupy, "from_dlpack", from_dlpack)
    kvgpu.decode(stream.add(Plan(), 0, 100, Exported(out)), stream=0x999)
    assert set(imported_in) == {device._uploads.ptr}  # every decode waits for an upload


def test_streams_of_older_pytorch(fake_cupy):
    from test_gpu_decode import Stream

    stream, out = Stream(KVR1()), HostArray(np.zeros((2, 100, 16), np.float16))
    older = SimpleNamespace(cuda_stream=0x55, wait_event=None)
    kvgpu.decode(stream.add(Plan(), 0, 100, out), stream=older)
    assert ("launch", 0x55) in fake_cupy.log
    for bad in (True, -1, SimpleNamespace(cuda_stream="x")):
        with pytest.raises(InvalidArgument, match="stream "):
            kvgpu.decode(stream.add(Plan(), 0, 100, out), stream=bad)


def test_shared_memory_is_granted_once(fake_cupy):
    """Whatever launches ask for at a time: none takes back what another one needs."""
    device = cuda.current_device()
    kernel = device.kernel("kv_decode_blocks")
    assert kernel.max_dynamic_shared_size_bytes == device.limits.shared_bytes == 227 << 10
    assert device.kernel("kv_decode_blocks") is kernel


def test_threads_share_one_device(fake_cupy, monkeypatch):
    made = []

    class Slow(cuda.CudaDevice):
        def __init__(self, number):
            made.append(number)
            time.sleep(0.01)  # others come meanwhile
            super().__init__(number)

    monkeypatch.setattr(cuda, "CudaDevice", Slow)
    with ThreadPoolExecutor(4) as pool:
        devices = set(pool.map(lambda _: cuda.current_device(), range(4)))
    assert len(devices) == len(made) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forks_ask_for_their_own_device(fake_cupy):
    """CUDA does not survive a fork: nothing of it may be used there."""
    cuda.current_device()
    child = os.fork()
    if child == 0:
        os._exit(cuda._device.cache_info().currsize + cuda._cupy.cache_info().currsize)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class CudaError(RuntimeError):
    pass


@pytest.mark.parametrize("n_devices", [0, CudaError("cudaErrorInsufficientDriver")])
def test_cupy_without_a_device(monkeypatch, n_devices):
    def count():
        if isinstance(n_devices, Exception):
            raise n_devices
        return n_devices

    runtime = SimpleNamespace(getDeviceCount=count, CUDARuntimeError=CudaError)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    cuda._cupy.cache_clear()
    assert not kvgpu.is_available()
    with pytest.raises(Unsupported, match=r"no CUDA device: (cudaErrorInsuff|the driver finds)"):
        kvgpu.Destination()
