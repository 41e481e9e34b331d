"""The README's example of decoding on a GPU, run twice; here on the stand-in."""

import numpy as np
from test_gpu_arrays import fake_cupy
from test_readme import blocks

import kvstore

__all__ = ["fake_cupy"]


def check_readme(to_host):
    """Run the example in this folder; `to_host` makes NumPy arrays of CuPy's."""
    (code,) = (code for code in blocks("python") if "import kvgpu" in code)
    for _ in range(2):
        names = {}
        exec(compile(code, "README.md", "exec"), names)
    with kvstore.open("gpu.kv") as archive, archive.session("chat") as session:
        want = session.read_all(k_state="post", dtype="float16")
    for wanted, kind in zip(want, "kv", strict=True):
        np.testing.assert_array_equal(to_host(names[f"{kind}_dev"]), wanted)
        for pool, one in zip(names[f"{kind}_pools"], wanted, strict=True):
            pages = to_host(pool)[60:16:-1]  # [pages][rows][heads][head_dim]
            rows = pages.reshape(44 * 16, 4, 64).transpose(1, 0, 2)
            np.testing.assert_array_equal(rows[:, :600], one)


def test_the_example_of_the_readme(fake_cupy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    check_readme(lambda array: array.array)
    assert capsys.readouterr().out == "600 tokens\n" * 2
