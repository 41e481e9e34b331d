"""What only a real device has: streams, tensors of other libraries, memory of its own."""

import kvgpu
import numpy as np
import pytest
from kvcodecs.errors import InvalidArgument
from kvcodecs.plan import Plan
from kvgpu.device import current
from kvtools import cli
from test_gpu_decode import DTYPES, Stream, assert_same
from test_gpu_readme import check_readme

from kvstore import KVR1

pytestmark = pytest.mark.gpu


@pytest.fixture
def cupy():
    current()  # says what is missing
    import cupy

    return cupy


@pytest.fixture
def stream():
    return Stream(KVR1())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_of_pytorch(cupy, stream, dtype):
    torch = pytest.importorskip("torch")
    want = stream.decode(0, 100, DTYPES[["float32", "float16", "bfloat16"].index(dtype)])
    wide = torch.zeros((2, 120, 20), dtype=getattr(torch, dtype), device="cuda")
    torch.cuda.synchronize()
    kvgpu.decode(stream.add(Plan(), 0, 100, wide[:, 10:110, 2:18]))
    bits = {4: torch.int32, 2: torch.int16}[want.itemsize]
    found = wide.view(bits).cpu().numpy().view(want.dtype)
    assert_same(np.ascontiguousarray(found[:, 10:110, 2:18]), want)
    found[:, 10:110, 2:18] = 0
    assert not found.any()


def test_other_streams(cupy, stream):
    want = stream.decode(0, 100, np.float16)
    own = cupy.cuda.Stream(non_blocking=True)
    for given in (own, own.ptr, None):
        with own:
            out = cupy.zeros(want.shape, np.float16)
            kvgpu.decode(stream.add(Plan(), 0, 100, out), stream=given)
        assert_same(cupy.asnumpy(out), want)
    with pytest.raises(InvalidArgument, match="stream 'x'"):
        kvgpu.decode(stream.add(Plan(), 0, 100, out), stream="x")


def test_memory_of_the_host_is_refused(cupy, stream):
    from kvgpu.host_device import HostArray

    out = HostArray(np.zeros((2, 100, 16), np.float16))
    with pytest.raises(InvalidArgument, match="is not memory of device"):
        kvgpu.decode(stream.add(Plan(), 0, 100, out))


def test_decodes_from_many_threads(cupy, stream):
    from concurrent.futures import ThreadPoolExecutor

    want = stream.decode(0, 100, np.float16)

    def decode(_):
        out = cupy.zeros(want.shape, np.float16)
        kvgpu.decode(stream.add(Plan(), 0, 100, out))
        return cupy.asnumpy(out)

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(decode, range(64)):
            assert_same(found, want)


def test_the_example_of_the_readme(cupy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_readme(cupy.asnumpy)


def test_the_benchmark(cupy, monkeypatch, capsys):
    from kvtools.bench import device

    monkeypatch.setattr(device, "SIZES", (1, 64))
    assert cli.main(["bench", "--device", "cuda", "--reps", "1"]) == 0
    assert "kvr1, 64 blocks" in capsys.readouterr().out
