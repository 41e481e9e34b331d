"""The README's examples run as they are printed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from kvtools import cli
from kvtools.tensorfile import TensorFile, TensorWriter

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def shell_lines() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines() if line]


def run_python(code, folder):
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_python_examples_run(tmp_path):
    archive, *others = blocks("python")
    assert len(archive.splitlines()) <= 30
    for code in others:
        run_python(code, tmp_path)
    done = run_python(archive, tmp_path)
    assert done.stdout.startswith("(2, 100, 64) ")
    assert float(done.stdout.split(")")[1]) < 0.2
    assert (tmp_path / "chats.kv").is_dir()


def test_set_up_is_two_commands():
    assert shell_lines()[:2] == [
        "pip install . && kvstore demo",
        "pip install '.[test]' && pytest",
    ]


def test_command_line_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    values = rng.standard_normal((2, 4, 300, 8)).astype(ml_dtypes.bfloat16)
    shapes = {"k_pre": (values.dtype, values.shape), "v": (values.dtype, values.shape)}
    ids = np.arange(300, dtype=np.int64)
    shapes["token_ids"] = (ids.dtype, ids.shape)
    with TensorWriter("chat.safetensors", shapes) as writer:
        for name in ("k_pre", "v"):
            writer.array(name)[...] = values
        writer.array("token_ids")[...] = ids
    Path("prompt.json").write_text(json.dumps([*range(200), 7, 7, 7]))
    commands = [shlex.split(line)[1:] for line in shell_lines() if line.startswith("kvstore ")]
    assert {argv[0] for argv in commands} == set(cli.COMMANDS) - {"demo"}
    for argv in commands:
        if argv[0] == "bench":
            cli.build_parser().parse_args(argv)
        else:
            assert cli.main(argv) == 0, capsys.readouterr().err
    with TensorFile("part.safetensors") as file:
        assert file.info("v").shape == (2, 4, 100, 8)


@pytest.mark.parametrize("path", re.findall(r"`([a-z]+/[A-Za-z/]+(?:\.md)?)`", README))
def test_files_that_are_named_exist(path):
    assert (Path(__file__).parents[1] / path).exists() or path == "alice/42"
