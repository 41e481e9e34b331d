"""What lies beside the data of migrated sessions is named where it is damaged, and not read."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from kvcodecs import TKV1

import kvstore
from kvstore import GGML, Model, flat

MODEL = Model.uniform(name="m", n_layers=2, n_kv_heads=2, head_dim=32)
SMALL = ("session.json", "token_ids.i64", "k_000.front", "session")


def fill(root, codec):
    x = np.ones((2, 2, 50, 32), np.float32)
    with kvstore.open(root / "a.kv", "a") as archive:
        for name in ("t", "u"):
            options = {"model": MODEL, "codec": codec, "block_tokens": 16}
            with archive.create_session(name, **options) as session:
                session.append(x, x, token_ids=np.arange(50))
                session.commit()
            archive.session(name).trim_front(20)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Two sessions in each format."""
    from kvtools.cli import main

    root = tmp_path_factory.mktemp("exported")
    for name, codec in (("flat", GGML("q8_0")), ("tkvdir", TKV1()), ("zarr2", TKV1())):
        (root / name).mkdir()
        fill(root / name, codec)
        folder = root / name / ("f.tkvdir" if name == "tkvdir" else "f")
        prefix = "" if name == "tkvdir" else f"{name}:"
        assert main(["migrate", str(root / name / "a.kv"), f"{prefix}{folder}", "--quiet"]) == 0
    return root


@pytest.fixture
def folder(exported, tmp_path):
    return shutil.copytree(exported / "flat" / "f", tmp_path / "f")


@pytest.fixture(autouse=True)
def no_waiting():
    """End a test that waits for the other end of a pipe."""

    def late(*_):
        raise AssertionError("waits for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def spoil(path, how):
    data = path.read_bytes()
    path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "link":
        path.symlink_to("nothing")
    elif how == "loop":
        path.symlink_to(path.name)
    elif how == "huge":
        path.write_bytes(b"")
        os.truncate(path, 1 << 42)
    elif how == "cut":
        path.write_bytes(data[:-8])
    elif how == "flipped":
        path.write_bytes(data[:-3] + bytes([data[-3] ^ 64]) + data[-2:])
    elif how == "swapped":
        path.write_bytes((path.parent / path.name.replace("k_", "v_")).read_bytes())


def change(path, work):
    """Change what is said about a session."""
    data = json.loads(path.read_text())
    work(data.get("kvstore", data))
    path.write_text(json.dumps(data))


def assert_named(run, folder, target, word):
    """Verify and migrate name what is wrong, and nothing is stored."""
    code, out, err = run("verify", f"flat:{folder}")
    assert code == 1
    assert "1 problem" in out
    assert word in out
    code, _, err = run("migrate", f"flat:{folder}", target, "--sessions", "t")
    assert code == 1
    assert err.startswith("kvstore: error: ")
    assert "\n" not in err.rstrip("\n")
    assert not target.exists()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in SMALL for how in ("pipe", "folder")),
        *(("session", how) for how in ("link", "huge")),
        *(("session.json", how) for how in ("link", "loop", "huge")),
        ("token_ids.i64", "huge"),
    ],
)
def test_what_is_no_file_is_named(run, folder, tmp_path, name, how):
    spoil(folder / "t" / name, how)
    assert_named(run, folder, tmp_path / "b.kv", f"t/{name}: ")
    for command in ("ls", "info"):
        code, out, err = run(command, f"flat:{folder}")
        assert code == (1 if name.startswith("session") else 0)
        assert ("damaged session 't'" in err) == bool(code)
        assert "u" in out
    assert len(flat.sessions(folder)) == 2


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("token_ids.i64", how) for how in ("missing", "cut", "flipped")),
        *(("k_000.front", how) for how in ("missing", "cut", "flipped", "swapped")),
        ("session", "missing"),
    ],
)
def test_what_was_changed_is_named(run, folder, tmp_path, name, how):
    spoil(folder / "t" / name, how)
    assert_named(run, folder, tmp_path / "b.kv", f"t/{name}: ")


CHANGES = {
    "no stream": lambda about: about["streams"].pop("k_000"),
    "no object": lambda about: about["streams"].update(k_000=None),
    "no streams": lambda about: about.update(streams=7),
    "fit_tokens": lambda about: about["record"].update(fit_tokens=0),
    "no name": lambda about: about.update(name=None),
    "bad name": lambda about: about.update(name="a\nb"),
    "no crc32c of ids": lambda about: about.pop("token_ids"),
    "other ids": lambda about: about["token_ids"].update(crc32c="00000000"),
    "infinite": lambda about: about["record"].update(created=float("inf")),
}
OF_ROWS = {
    "no crc32c": lambda about: about["streams"]["k_000"].pop("crc32c"),
    "other rows": lambda about: about["streams"]["v_001"].update(crc32c="00000000"),
    "errors": lambda about: about["streams"]["v_001"].update(errors="AAAA"),
    "long front": lambda about: about["record"].update(block_tokens=2),
}


@pytest.mark.parametrize("what", [*CHANGES, *OF_ROWS])
def test_what_is_said_of_flat_layers_is_checked(run, folder, what):
    change(folder / "t" / "session.json", (CHANGES | OF_ROWS)[what])
    code, out, _ = run("verify", f"flat:{folder}")
    assert code == 1
    assert "Corrupt: " in out
    target = folder.parent / "b.kv"
    code, _, err = run("migrate", f"flat:{folder}", target)
    assert code == 1
    assert err.startswith("kvstore: error: ")
    assert not target.exists()


@pytest.mark.parametrize("format", ["tkvdir", "zarr2"])
def test_other_folders_check_what_is_said_and_the_ids(run, exported, tmp_path, format):
    end, prefix = ("f.tkvdir", "") if format == "tkvdir" else ("f", "zarr2:")
    ids, about = "token_ids.i64", "session.json"
    if format == "zarr2":
        ids, about = "token_ids/0", ".zattrs"

    def fails(work, word):
        folder = shutil.copytree(exported / format / end, tmp_path / end)
        work(Path(folder) / "t")
        code, _, err = run("migrate", f"{prefix}{folder}", tmp_path / "b.kv")
        assert code == 1
        assert err.startswith("kvstore: error: ")
        assert word in err
        shutil.rmtree(folder)
        assert not (tmp_path / "b.kv").exists()

    for how in ("flipped", "missing", "pipe"):
        fails(lambda at, how=how: spoil(at / ids, how), f"{ids}: ")
    for how in ("pipe", "link"):
        fails(lambda at, how=how: spoil(at / about, how), f"{about}: ")
    for what in ("no object", "fit_tokens", "no name", "no crc32c of ids"):
        fails(lambda at, what=what: change(at / about, CHANGES[what]), f"{about}: ")
