"""The `kvstore` command under hostile arguments, inputs and ends: bounded, and nothing left."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from kvtools import hints, signals, temporary, values
from kvtools.tensorfile import TensorFile, TensorWriter

import kvstore


def save(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> Path:
    shapes = {name: (a.dtype, a.shape) for name, a in arrays.items()}
    with TensorWriter(path, shapes, metadata) as writer:
        for name, a in arrays.items():
            writer.array(name)[...] = a
    return path


def kv(layers: int = 2, heads: int = 2, tokens: int = 200, dim: int = 8) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((layers, heads, tokens, dim), np.float32)


def claim(path: Path, tensors: dict[str, list[int]]) -> Path:
    """Write a file whose tensors have shapes but no bytes."""
    header = {n: {"dtype": "F32", "shape": s, "data_offsets": [0, 0]} for n, s in tensors.items()}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "chat.safetensors", {"k_pre": kv(), "v": kv()})


def fails(result: tuple[int, str, str], *words: str) -> None:
    code, _, err = result
    assert code == 1, err
    assert err.startswith("kvstore: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def start(*argv: object, **kwargs) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "kvtools", *map(os.fspath, argv)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs)


# -- arguments


@pytest.mark.parametrize(
    "argv",
    [
        ["unpack", "a", "b", "--layers", "9" * 5000],
        ["unpack", "a", "b", "--layers", "0-" + "9" * 30],
        ["unpack", "a", "b", "--layers", "0-99999,7"],
        ["unpack", "a", "b", "--layers", "\u0663"],
        ["unpack", "a", "b", "--range", "0:" + "9" * 5000],
        ["unpack", "a", "b", "--range", "1_0:20"],
        ["unpack", "a", ""],
        ["pack", "a", ""],
        ["pack", "", "a"],
        ["pack", "a", "b", "--inv-freq", ""],
        ["pack", "a", "b", "--sink", "9" * 5000],
        ["pack", "a", "b", "--block-tokens", "9" * 5000],
        ["ls", ""],
        ["bench", "--data", ""],
        ["bench", "--reps", "10001"],
        ["bench", "--memory-mb", "1000001"],
        ["demo", "--keep", ""],
    ],
    ids=lambda argv: " ".join(argv)[:40],
)
def test_wrong_usage(run, argv):
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert "usage: kvstore" in err
    assert len(err) < 1500
    assert "invalid" not in err  # argparse's word for a parser that failed otherwise


def test_ranges_of_layers_are_not_expanded_before_they_are_checked(run, tmp_path, source):
    assert values.layer_list("10-9999999999,3") == [range(10, 10**10), range(3, 4)]
    run("pack", source, tmp_path / "a.kv")
    for text in ("0-9999999999", "2", "0,2-100000000"):
        result = run("unpack", tmp_path / "a.kv", tmp_path / "o", "--layers", text)
        fails(result, "has layers 0 to 1, not ")
    assert run("unpack", tmp_path / "a.kv", tmp_path / "o", "--layers", "1,0-0")[0] == 0
    with TensorFile(tmp_path / "o") as file:
        assert file.metadata["layers"] == "[1, 0]"


def test_rotary_dim_is_no_wider_than_a_head(run, tmp_path, source):
    options = ["--rope-theta", "1e4", "--rotary-dim"]
    for wide in (10, 2_000_000_000, 10**17):
        fails(run("pack", source, tmp_path / "a.kv", *options, wide), f"--rotary-dim {wide}: ", "8")
    assert run("pack", source, tmp_path / "a.kv", *options, 4, "--quiet")[0] == 0


def test_extreme_theta_is_one_line(tmp_path, source):
    process = start("pack", source, tmp_path / "a.kv", "--rope-theta", "1e-300")
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.count(b"\n")) == (1, 1)
    assert b"not finite" in err


def test_a_file_of_frequencies_is_read_up_to_a_limit(run, tmp_path, source, monkeypatch):
    monkeypatch.setattr(hints, "MAX_JSON_BYTES", 100)
    for size, words in ((101, "larger than 100 bytes"), (100, "not valid JSON")):
        reader, writer = os.pipe()  # states no size, as /dev/zero states none
        os.write(writer, b"[" * size)
        os.close(writer)
        try:
            fails(run("pack", source, tmp_path / "a.kv", "--inv-freq", f"/dev/fd/{reader}"), words)
        finally:
            os.close(reader)
    source.with_suffix(".json").write_text(" " * 101)
    fails(run("pack", source, tmp_path / "a.kv"), "chat.json: larger than 100 bytes", "move it")


def test_a_pipe_is_no_input_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    process = start("pack", tmp_path / "pipe", tmp_path / "a.kv")
    try:
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1
    assert b"not a safetensors file" in err


# -- inputs


CLAIMS = {
    "layers": ({"k_pre": [10**7, 1, 0, 2], "v": [10**7, 1, 0, 2]}, "10000000 layers"),
    "layers of v": ({"k_pre": [1, 1, 0, 2], "v": [10**7, 1, 0, 2]}, "1 layers of K"),
    "more layers": ({"k_pre": [10**12, 1, 0, 2], "v": [10**12, 1, 0, 2]}, "layers"),
    "sizes": ({"k_pre": [2**70, 2**70, 0, 2], "v": [2**70, 2**70, 0, 2]}, "not a list of sizes"),
    "product": ({"k_pre": [1, 2**31, 0, 2**31]}, "too large"),
    "dimensions": ({"k_pre": [0] * 1000}, "1000 dimensions"),
    "heads": ({"k_pre": [1, 0, 4, 2], "v": [1, 0, 4, 2]}, "'k_pre': heads 0"),
    "many heads": ({"k_pre": [1, 2**20, 0, 2], "v": [1, 2**20, 0, 2]}, "'k_pre': heads 1048576"),
    "head_dim": ({"k_pre": [1, 1, 0, 2**20], "v": [1, 1, 0, 2**20]}, "head_dim 1048576"),
    "no head_dim": ({"k_pre": [1, 1, 2**50, 0], "v": [1, 1, 2**50, 0]}, "'k_pre': head_dim 0"),
    "tokens": ({"x": [0], "layers.1.k_pre": [1, 2**50, 0]}, "head_dim 0"),
    "number": ({"layers.65536.k_pre": [1, 0, 2]}, "numbered 0 to 65535"),
    "long number": ({f"layers.{'9' * 4999}.k_pre": [1, 0, 2]}, "999...': layers are numbered"),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_shapes_without_bytes_are_bounded(run, tmp_path, case):
    tensors, words = CLAIMS[case]
    for metadata in (["pack"], ["bench", "--only", "codec", "--data"]):
        path = claim(tmp_path / "x.safetensors", tensors)
        result = run(*metadata, path, *([tmp_path / "a.kv"] if metadata == ["pack"] else []))
        fails(result, str(path), words)
        assert len(result[2]) < 500
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_no_tokens_are_packed_but_not_measured(run, tmp_path):
    shape = [2, 1, 0, 2]
    path = claim(tmp_path / "x.safetensors", {"k_pre": shape, "v": shape})
    assert run("pack", path, tmp_path / "a.kv", "--quiet")[0] == 0
    fails(run("bench", "--data", path, "--only", "codec"), str(path), "no tokens")


def test_messages_do_not_grow_with_the_input(run, tmp_path):
    archive = tmp_path / "a.kv"
    many = {f"layers.{i}.k_pre": [1, 0, 2] for i in range(3000)}
    fails(result := run("pack", claim(tmp_path / "a", many), archive), "[0, 1, 2, ", "2992 more]")
    assert len(result[2]) < 300
    others = {f"x{i}": [0] for i in range(3000)}
    fails(result := run("pack", claim(tmp_path / "b", others), archive), "x0, ", "2992 more")
    assert len(result[2]) < 400
    long = {"k" * 100_000: [2**62, 2**62]}
    fails(result := run("pack", claim(tmp_path / "c", long), archive))
    assert len(result[2]) < 3000


def test_a_key_that_appears_twice_is_found_in_linear_time(run, tmp_path):
    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    names = [f"t{i}" for i in range(50_000)]
    text = ("{" + ",".join(f'"{n}":{entry}' for n in [*names, names[-1]]) + "}").encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    process = start("pack", path, tmp_path / "a.kv")
    try:
        _, err = process.communicate(timeout=15)  # was a minute
    finally:
        process.kill()
    assert b"key 't49999' appears twice" in err


def test_token_ids_that_do_not_fit_are_not_wrapped(run, tmp_path):
    ids = np.full(200, 2**63, np.uint64)
    path = save(tmp_path / "x.safetensors", {"k_pre": kv(), "v": kv(), "token_ids": ids})
    fails(run("pack", path, tmp_path / "a.kv", "--quiet"), "x.safetensors: a token id is beyond")


@pytest.mark.parametrize("numbers", ["[0, 0]", "[0, 65536]", "[0, 1e3]", "[0, true]", "[[0], 1]"])
def test_layer_numbers_of_the_header(run, tmp_path, numbers):
    path = save(tmp_path / "x.safetensors", {"k_pre": kv(), "v": kv()}, {"layers": numbers})
    fails(run("pack", path, tmp_path / "a.kv", "--quiet"), "x.safetensors: 'layers' is [")


def test_positions_beyond_any_session(run, tmp_path):
    metadata = {"first_token": "9" * 4000}
    path = save(tmp_path / "x.safetensors", {"k_pre": kv(), "v": kv()}, metadata)
    fails(result := run("pack", path, tmp_path / "a.kv", "--renumber"), "'first_token'")
    assert len(result[2]) < 300


@pytest.mark.parametrize("layers", [["a", "b"], [[0], [1]], [0.5, float(2**80)], [-1, 0], 7, [3]])
def test_layer_numbers_of_a_session(run, tmp_path, layers):
    model = kvstore.Model.uniform(name="m", n_layers=2, n_kv_heads=2, head_dim=8)
    with (
        kvstore.open(tmp_path / "a.kv", "a") as archive,
        archive.create_session("s", model=model, metadata={"layers": layers}) as session,
    ):
        session.append(kv(), kv())
        session.commit()
    code, _, err = run("unpack", tmp_path / "a.kv", tmp_path / "o")
    assert (code, err) == (0, "")
    with TensorFile(tmp_path / "o") as file:
        assert file.metadata["layers"] == "[0, 1]"


def test_a_damaged_model_in_the_header_names_the_file(run, tmp_path):
    metadata = {"kvstore": '{"model": {"layers": [[65537, 1, 2, 2, null, null]]}}'}
    path = save(tmp_path / "x.safetensors", {"k_pre": kv(), "v": kv()}, metadata)
    fails(run("pack", path, tmp_path / "a.kv"), "x.safetensors: metadata 'kvstore': ", "65537")


def test_the_memory_group_needs_layers_alike(run, tmp_path):
    arrays = {f"layers.{i}.{n}": kv(dim=8 * (i + 1))[0] for i in range(2) for n in ("k_pre", "v")}
    path = save(tmp_path / "x.safetensors", arrays)
    fails(run("bench", "--only", "memory", "--data", path), "layers differ in shape", "--only")


# -- paths and messages


def test_paths_that_are_no_text(tmp_path, source):
    archive = os.path.join(os.fsencode(tmp_path), b"\xffarch")
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    for argv, words, environments in (
        (["pack", source, archive, "--session", "s", "--replace"], b"packed 's'", [{}]),
        (["info", archive], b"\xffarch\n", [{}, ascii_only]),
        (["verify", archive], b"\xffarch: sound", [ascii_only]),
        (["ls", archive], b"s  ", [ascii_only]),
        (["unpack", archive, os.path.join(os.fsencode(tmp_path), b"\xfeout")], b"unpacked", [{}]),
        (["pack", source, archive, "--session", "s", "--replace", "--quiet"], b"", [ascii_only]),
    ):
        for environment in environments:
            process = start(*argv, env={**os.environ, **environment})
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert b"Traceback" not in err
            assert words in out
    process = start("info", archive, "--json")
    report = json.loads(process.communicate(timeout=60)[0])
    assert os.fsencode(report["path"]) == archive
    process = start("ls", os.path.join(os.fsencode(tmp_path), b"\xfdnone"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"\xfdnone: no such archive" in err
    named = os.path.join(os.fsencode(tmp_path), b"\xffin.safetensors")
    os.link(source, named)
    _, err = start("pack", named, archive).communicate(timeout=60)
    assert b"--session" in err


def test_what_is_no_kv_error_is_one_line_too(run, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(kvstore, "open", refuse)
    error: Exception = MemoryError("Unable to allocate 7 GiB")
    fails(run("ls", tmp_path / "a.kv"), "not enough memory: Unable to allocate 7 GiB\n")
    error = MemoryError()
    fails(run("ls", tmp_path / "a.kv"), "error: not enough memory\n")
    error = UnicodeEncodeError("utf-8", "a\ud800", 1, 2, "surrogates not allowed")
    fails(run("ls", tmp_path / "a.kv"), "not valid UTF-8")


def test_names_in_files_are_no_commands_to_a_terminal(run, tmp_path):
    arrays = {"k_pre": kv(), "v": kv(), "x\x1b[2J\ny": np.zeros(1, np.float32)}
    path = save(tmp_path / "x.safetensors", arrays, {"model": "a\x1b[31m\nb\x9b"})
    _, _, err = run("pack", path, tmp_path / "a.kv")
    assert r"not packed: x\x1b[2J\ny" in err
    for command in ("ls", "info"):
        _, out, _ = run(command, tmp_path / "a.kv")
        assert r"a\x1b[31m\nb\x9b" in out
        assert "\x1b" not in out
    save(tmp_path / "y.safetensors", {"q\x1b": kv()})
    fails(run("pack", tmp_path / "y.safetensors", tmp_path / "a.kv"), r"has q\x1b")


# -- ends


def start_pack(tmp_path: Path, **kwargs) -> tuple[subprocess.Popen[bytes], Path]:
    """Start to pack something big, and return when its temporary folder is there."""
    values = np.broadcast_to(kv(1, 4, 1, 16).astype(np.float16), (1, 4, 400_000, 16))
    big = save(tmp_path / "big.safetensors", {"k_pre": values, "v": values})
    process = start("pack", big, tmp_path / "a.kv", "--quiet", **kwargs)
    while process.poll() is None:
        for folder in tmp_path.glob(".*.tmp"):
            if os.listdir(folder):
                return process, folder
    raise AssertionError(process.communicate())


def test_a_terminal_that_closes_leaves_nothing(tmp_path):
    process, _ = start_pack(tmp_path)
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + signal.SIGHUP, b"")
    assert os.listdir(tmp_path) == ["big.safetensors"]


def test_an_ignored_signal_stays_ignored(tmp_path):
    process, _ = start_pack(
        tmp_path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert sorted(os.listdir(tmp_path)) == ["a.kv", "big.safetensors"]


def test_the_next_pack_removes_what_a_killed_one_left(run, tmp_path, source):
    process, left = start_pack(tmp_path)
    try:
        assert run("pack", source, tmp_path / "a.kv", "--quiet")[0] == 0
        assert left.is_dir(), "somebody else's, and in use"
    finally:
        process.kill()
        process.communicate(timeout=60)
    other = tmp_path / ".b.kv.01234567.tmp"
    mine = tmp_path / ".c.kv.mine.tmp"
    other.mkdir()
    mine.mkdir()
    assert left.is_dir()
    kvstore.open(tmp_path / "a.kv").close()
    os.rename(tmp_path / "a.kv", tmp_path / "was.kv")
    assert run("pack", source, tmp_path / "a.kv", "--quiet")[0] == 0
    assert not left.exists()
    assert other.is_dir()
    assert run("pack", source, tmp_path / "c.kv", "--quiet")[0] == 0
    assert mine.is_dir()


def test_a_full_disk_leaves_nothing(tmp_path, source):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    process = start("pack", source, tmp_path / "a.kv", "--quiet", preexec_fn=limit)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith(b"kvstore: error: ")
    assert os.listdir(tmp_path) == ["chat.safetensors"]


def test_folders_where_nothing_can_be_locked(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    abandoned = tmp_path / ".t.01234567.tmp"
    abandoned.mkdir()
    monkeypatch.setattr(temporary.fcntl, "flock", refuse)
    with temporary.folder_for(tmp_path / "t") as folder:
        assert folder.is_dir()
    assert os.listdir(tmp_path) == [abandoned.name], "whose it is cannot be told"


def test_a_folder_taken_for_abandoned_is_made_again(tmp_path, monkeypatch):
    made = []
    lock = temporary._lock

    def meanwhile(folder):
        made.append(os.readlink(f"/proc/self/fd/{folder}"))
        if len(made) == 1:
            os.rmdir(made[0])
        return lock(folder)

    monkeypatch.setattr(temporary, "_lock", meanwhile)
    with temporary.folder_for(tmp_path / "t") as folder:
        assert os.listdir(tmp_path) == [folder.name]
    assert len(made) == 2
    assert os.listdir(tmp_path) == []


def test_a_signal_while_a_folder_is_made_leaves_nothing(tmp_path, monkeypatch):
    create = temporary._create

    def interrupted(target):
        made = create(target)
        os.kill(os.getpid(), signal.SIGTERM)
        return made

    def work():
        with signals.ending_signals(), temporary.folder_for(tmp_path / "t"):
            raise AssertionError("not to be reached")

    monkeypatch.setattr(temporary, "_create", interrupted)
    with pytest.raises(SystemExit) as stop:
        work()
    assert stop.value.code == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) == []


def test_signals_do_not_disturb_the_clearing_up():
    cleared = []

    def clear_up():
        with signals.undisturbed():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            cleared.append(1)

    with pytest.raises(KeyboardInterrupt):
        clear_up()
    assert cleared == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def end():
        with signals.ending_signals():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGHUP)
                cleared.append(2)

    with pytest.raises(SystemExit) as stop:
        end()
    assert (stop.value.code, cleared) == (128 + signal.SIGTERM, [1, 2])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_threads_have_no_signals():
    done = []

    def work():
        with signals.ending_signals(), signals.undisturbed():
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]


# -- info


def test_info_names_windows_and_first_tokens(run, tmp_path):
    layers = (kvstore.LayerSpec(2, 8, 8), kvstore.LayerSpec(2, 8, 8, window=50))
    model = kvstore.Model("m", layers)
    with (
        kvstore.open(tmp_path / "a.kv", "a") as archive,
        archive.create_session("s", model=model) as session,
    ):
        session.append([kv()[0], kv()[1][:, 150:]], [kv()[0], kv()[1][:, 150:]])
        session.commit()
    code, out, _ = run("info", tmp_path / "a.kv", "--layers")
    assert code == 0
    table = [line.split() for line in out.splitlines()[-5:]]
    assert table[0][:6] == ["layer", "heads", "x", "dim", "window", "first"]
    assert table[1][:7] == ["0", "k", "2", "x", "8", "-", "0"]
    assert table[4][:7] == ["1", "v", "2", "x", "8", "50", "150"]
    listed = json.loads(run("info", tmp_path / "a.kv", "--layers", "--json")[1])["sessions"][0]
    assert [s["window"] for s in listed["layers"]] == [None, None, 50, 50]
    assert [s["start_token"] for s in listed["layers"]] == [0, 0, 150, 150]
