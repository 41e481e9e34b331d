"""Who may import whom, and what an import costs."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

# What a package must not import anywhere, and what it must not import at module level.
FORBIDDEN = {
    "kvcodecs": {"kvstore", "kvgpu", "kvtools", "lmdb", "cupy", "torch"},
    "kvstore": {"kvtools", "cupy", "torch"},
    "kvtools": {"cupy"},
    "kvgpu": {"kvstore", "kvtools", "torch"},
}
LAZY = {"zarr", "icechunk", "numcodecs", "torch", "kvgpu", "rich", "cupy"}
# The modules that a lazy package may be imported by at module level; they are imported lazily.
HOMES = {
    "numcodecs": {"numcodecs_codecs.py", "numcodecs_arrays.py"},
    "zarr": {"zarr_codec.py", "icechunk_store.py"},
    "icechunk": {"icechunk.py", "icechunk_opening.py", "icechunk_store.py"},
}


def _modules(package):
    root = Path(import_module(package).__file__).parent
    return sorted(root.rglob("*.py"))


def _imports(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_import_direction(package):
    for path in _modules(package):
        bad = set(_imports(ast.walk(ast.parse(path.read_text())))) & FORBIDDEN[package]
        assert not bad, f"{path}: imports {bad}"


@pytest.mark.parametrize("package", FORBIDDEN)
def test_heavy_packages_are_imported_where_they_are_used(package):
    for path in _modules(package):
        eager = set(_imports(ast.parse(path.read_text()).body)) & LAZY
        bad = {name for name in eager if path.name not in HOMES.get(name, ())}
        assert not bad, f"{path}: imports {bad} at module level"


def test_backends_do_not_know_each_other():
    import kvstore.backends

    stems = {p.stem for p in Path(kvstore.backends.__file__).parent.glob("*.py")}
    names = {name for name in stems if not name.startswith("_")}  # _environment belongs to lmdb
    for name in names:
        path = Path(kvstore.backends.__file__).parent / f"{name}.py"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                assert (node.module or "").split(".")[0] not in names - {name}, path


def test_import_kvstore_leaves_the_heavy_packages_alone():
    code = "import sys, kvstore; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"zarr", "numcodecs", "torch", "cupy", "kvgpu", "rich"} & set(loaded)


def test_kvgpu_without_cupy_or_a_device():
    """Importing it costs nothing; using it says what is missing."""
    code = """
import sys
import kvgpu, kvgpu.staging
assert "cupy" not in sys.modules
sys.modules["cupy"] = None  # not installed
assert not kvgpu.is_available()
from kvcodecs.plan import Plan
kvgpu.decode(Plan())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "kvcodecs.errors.Unsupported: decoding on a GPU needs CuPy: pip install cupy-cuda12x or "
        "cupy-cuda13x, as the driver needs (nvidia-smi shows its CUDA version), or in a clone "
        "'.[cuda12]' or '.[cuda13]'"
    )


def test_flat_layers_are_imported_when_they_are_asked_for():
    code = (
        "import sys, kvstore\n"
        "assert 'kvstore.flat' not in sys.modules\n"
        "assert kvstore.flat.sessions('.') == []\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_headers_of_the_core_are_installed():
    from kvgpu.source import headers_folder

    source = (headers_folder() / "lane.hpp").read_text()
    assert "struct LaneDecoder" in source
