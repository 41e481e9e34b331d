"""The kernels as NVRTC compiles them, which needs no GPU: for each architecture, within bounds.

Deselected by default; ``pytest -m nvrtc`` needs libnvrtc, as the wheels nvidia-cuda-nvrtc-cu12 and
nvidia-cuda-nvrtc bring it. ``-rP`` shows what the kernels take.
"""

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from kvgpu.source import OPTIONS, source

pytestmark = pytest.mark.nvrtc

ARCHITECTURES = ["sm_75", "sm_80", "sm_89", "sm_90", "sm_100"]
# What CuPy adds to the options of a RawModule (cupy/cuda/compiler.py), besides the architecture.
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")
# Most registers: what 1,024 threads of a processor leave for each, fewer where more are needed.
REGISTERS = {
    "kv_decode_blocks": 64,
    "kv_decode_blocks_compact": 64,
    "kv_decode_lanes": 96,
    "kv_look_through_payloads": 64,
    "kv_decode_vectors": 72,
    "kv_copy_rows": 64,
}


class Usage(NamedTuple):
    """What the assembler says that a kernel takes."""

    spilled_bytes: int
    registers: int


class Compiler:
    """NVRTC, of the newest wheel installed."""

    def __init__(self) -> None:
        package = importlib.util.find_spec("nvidia")
        folders = package.submodule_search_locations if package is not None else None
        found = [file for folder in folders or () for file in Path(folder).rglob("libnvrtc.so.*")]
        if not found:
            pytest.fail("NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12")
        self._library = ctypes.CDLL(str(max(found)))

    def compile(self, text: str, options: tuple[str, ...]) -> tuple[str, str]:
        """Return the log and the PTX; what does not compile fails the test."""
        program = ctypes.c_void_p()
        self._call(
            "CreateProgram", ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None
        )
        values = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        done = self._library.nvrtcCompileProgram(program, len(options), values)
        log = self._get("ProgramLog", program)
        assert done == 0, log
        assert self._size("CUBIN", program) > 0
        return log, self._get("PTX", program)

    def _get(self, what: str, program: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(self._size(what, program))
        self._call(f"Get{what}", program, text)
        return text.value.decode()

    def _size(self, what: str, program: ctypes.c_void_p) -> int:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        return size.value

    def _call(self, name: str, *arguments: object) -> None:
        assert getattr(self._library, f"nvrtc{name}")(*arguments) == 0, name


def usage_of(log: str) -> dict[str, Usage]:
    """Return what each kernel takes, as the assembler reports it."""
    found = re.findall(
        r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    return {name: Usage(int(out) + int(back), int(n)) for name, out, back, n in found}


@pytest.fixture(scope="module")
def compiler():
    return Compiler()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_stay_within_their_registers(compiler, architecture):
    options = (*OPTIONS, *CUPY_OPTIONS, f"-arch={architecture}", "--ptxas-options=-v")
    quiet = "--diag-suppress=177"  # constants that only the host uses
    log, ptx = compiler.compile(source(), (*options, quiet))
    assert "warning" not in log
    usage = usage_of(log)
    assert usage.keys() == REGISTERS.keys()
    for name, (spilled_bytes, registers) in usage.items():
        print(f"{architecture} {name}: {registers} registers, {spilled_bytes} bytes spilled")
        assert registers <= REGISTERS[name], name
        assert spilled_bytes == 0, name
    # Multiply and add round apart, and what is small stays, as on the CPU.
    assert "mul.rn.f32" in ptx
    assert "fma." not in ptx
    assert ".ftz" not in ptx
