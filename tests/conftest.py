"""What the tests of the command line share."""

from __future__ import annotations

import pytest
from kvtools import cli


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Run a command line; return (exit code, stdout, stderr)."""

    def run_main(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = cli.main([str(arg) for arg in argv])
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run_main
