"""The kernels as one text: NVRTC finds no files, and CuPy's cache looks at no headers."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final

import kvcodecs
from kvcodecs.errors import Unsupported

_INCLUDE: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)".*$', re.MULTILINE)
_ONCE: Final = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*$", re.MULTILINE)

#: How every compiler has to treat the text: multiply and add stay separate, as on the CPU.
OPTIONS: Final = ("--std=c++17", "--fmad=false")


def kernels_folder() -> Path:
    """Return the folder of the kernels."""
    return Path(__file__).parent / "kernels"


def headers_folder() -> Path:
    """Return the folder of the headers that host and device share.

    Raises
    ------
    Unsupported
        They are not where an installation or a checkout has them.
    """
    package = Path(kvcodecs.__file__).parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "lane.hpp").is_file():
            return folder
    raise Unsupported(f"kvgpu: the headers of the kernels are not beside {package}; reinstall")


@cache
def source(name: str = "kernels.cu") -> str:
    """Return a file of the kernels with every ``#include "..."`` replaced by that file, once.

    A name is looked up beside the file that includes it, then in `headers_folder`. Includes in
    angle brackets stay: they stand where the device compiler does not look.
    """
    return _inlined(kernels_folder() / name, set())


def _inlined(path: Path, seen: set[Path]) -> str:
    if path in seen:
        return ""
    seen.add(path)

    def include(match: re.Match[str]) -> str:
        for folder in (path.parent, headers_folder()):
            found = (folder / match[1]).resolve()
            if found.is_file():
                return _inlined(found, seen)
        raise Unsupported(f"kvgpu: {path} includes {match[1]!r}, which is missing; reinstall")

    return _INCLUDE.sub(include, _ONCE.sub("", path.read_text()))
