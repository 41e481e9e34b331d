"""Say what `gpu_check.sh` needs and this Python or machine lacks, in one line.

Takes the folder of wheels that will be installed, if any.
"""

import shutil
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ["pip>=23.1", "pytest>=8", "hypothesis>=6.100"]


def missing_packages(wheels: list[str]) -> list[str]:
    """Return requirements, also of what is required, that neither wheels nor this Python meet.

    Wheels that are not for this Python are among them.
    """
    import tomllib

    from packaging.requirements import Requirement
    from packaging.tags import sys_tags
    from packaging.utils import canonicalize_name, parse_wheel_filename

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    left = [*project["build-system"]["requires"], *project["project"]["dependencies"], *TOOLS]
    found: dict[str, metadata.Distribution] = {}
    for one in metadata.distributions(path=[*wheels, *sys.path]):
        found.setdefault(canonicalize_name(one.metadata["Name"]), one)
    tags, seen = set(sys_tags()), set()
    missing = [
        f"{Path(wheel).name} for this Python, {'.'.join(map(str, sys.version_info[:2]))}"
        for wheel in wheels
        if not tags & parse_wheel_filename(Path(wheel).name)[3]
    ]
    while left:
        text = left.pop(0)
        needed = Requirement(text)
        if text in seen or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        seen.add(text)
        dist = found.get(canonicalize_name(needed.name))
        if dist is None or not needed.specifier.contains(dist.version, prereleases=True):
            missing.append(f"{needed.name}{needed.specifier}")
        else:
            left += dist.requires or []
    return missing


def missing_device() -> list[str]:
    try:
        import cupy
        from cupy.cuda import nvrtc
    except ImportError:
        return ["CuPy (cupy-cuda12x or cupy-cuda13x, as nvidia-smi's CUDA version says)"]
    try:
        nvrtc.getVersion()
    except (OSError, RuntimeError) as error:  # the library does not load
        return [f"NVRTC for CuPy ({error})"]
    try:
        n_devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return [f"a GPU ({error})"]
    return [] if n_devices else ["a GPU"]


def main() -> int:
    missing = [name for name in ("g++", "cmake", "ninja") if not shutil.which(name)]
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        missing.append(f"Python.h of {sys.executable}")
    try:
        missing += missing_packages(
            [str(path) for arg in sys.argv[1:] for path in Path(arg).glob("*.whl")]
        )
    except ImportError as error:
        missing.append(str(error.name))
    missing += missing_device()
    if missing:
        print(f"missing: {', '.join(missing)}", file=sys.stderr)
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
