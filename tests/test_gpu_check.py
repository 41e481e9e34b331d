"""What `tools/gpu_check.sh` says before it needs a GPU."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "gpu_check.sh"


def check(*arguments, python=sys.executable):
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, env=os.environ | {"PYTHON": python}
    )


def test_help():
    done = check("-h")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: tools/gpu_check.sh")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wheels"], "--wheels needs a folder"),
        (["--wheels", "/nope"], "--wheels /nope: no such folder"),
        (["--wheels", "."], "--wheels .: no wheels there"),
        (["--fast"], "--fast: no such argument"),
    ],
)
def test_wrong_arguments(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = check(*arguments)
    assert done.returncode == 2
    assert done.stderr == f"gpu_check.sh: {message}; -h shows the usage\n"


def test_what_is_missing_is_told_first():
    done = check(python="/nonexistent")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("missing: /nonexistent")
    # An environment without packages, and a CuPy that is none.
    code = "import runpy, sys; sys.path[1:] = [p for p in sys.path if 'site-packages' not in p]; "
    code += "sys.modules['cupy'] = None; sys.argv[:] = sys.argv[:1]; "
    code += f"runpy.run_path({str(SCRIPT.with_name('gpu_needs.py'))!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("missing: ")
    assert "packaging" in line
    assert "CuPy (cupy-cuda12x" in line


def test_wheels_for_another_python(tmp_path):
    name = "zarr-3.1.5-cp27-none-any.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        about = "Metadata-Version: 2.1\nName: zarr\nVersion: 3.1.5\nRequires-Dist: nowhere>=2\n"
        wheel.writestr("zarr-3.1.5.dist-info/METADATA", about)
    done = check("--wheels", str(tmp_path))
    assert done.returncode == 1
    assert f"{name} for this Python" in done.stderr
    assert "nowhere>=2" in done.stderr  # what a wheel needs in turn


def test_what_was_measured_is_shown_at_the_deadline(tmp_path):
    """A Python with which all goes well until the benchmark is stopped."""
    python = tmp_path / "python"
    python.write_text(
        """#!/bin/bash
[[ " $* " == *" bench "* ]] || exit 0
for n in 1 4,096; do
  echo "kvstore: kvr1, $n blocks: upload 1.5, decode 20, end to end 6e-3, of raw upload 2" >&2
done
exit 124
"""
    )
    python.chmod(0o755)
    done = check(python=str(python))
    assert done.returncode == 124
    title, *table, last = done.stdout.splitlines()[-4:]
    assert title.startswith("Measured until then")
    assert [line.split(maxsplit=3) for line in table] == [
        ["kvr1,", "1", "blocks", "1.5, 20, 6e-3, 2"],
        ["kvr1,", "4,096", "blocks", "1.5, 20, 6e-3, 2"],
    ]
    assert last.startswith("FAILED: something ran out of time")
