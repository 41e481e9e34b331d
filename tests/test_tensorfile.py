"""The safetensors reader and writer: validation, constant-memory reads, all-or-nothing writes."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from kvcodecs.errors import Corrupt, InvalidArgument, NotFound, Truncated, Unsupported
from kvtools.tensorfile import TensorFile, TensorWriter


def container(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(path: Path, arrays: dict[str, np.ndarray], **kwargs: object) -> Path:
    sizes = {name: (a.dtype, a.shape) for name, a in arrays.items()}
    with TensorWriter(path, sizes, **kwargs) as writer:
        for name, a in arrays.items():
            writer.array(name)[...] = a
    return path


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "k": rng.standard_normal((2, 3, 5, 4)).astype(np.float16),
        "v": rng.standard_normal((2, 3, 5, 4)).astype(ml_dtypes.bfloat16),
        "w": rng.standard_normal((3, 5, 2)).astype(np.float32),
        "token_ids": np.arange(5, dtype=np.int32),
    }


def test_round_trip_is_bit_exact_and_aligned(tmp_path, arrays):
    path = write(tmp_path / "x.safetensors", arrays, metadata={"a": "b"})
    with TensorFile(path) as file:
        assert file.metadata == {"a": "b"}
        assert set(file.tensors) == set(arrays)
        for name, expected in arrays.items():
            found = file.read(name)
            assert found.dtype == expected.dtype
            assert found.tobytes() == expected.tobytes()
            assert file.info(name).start % expected.dtype.itemsize == 0
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_pinned_bytes(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": np.array([1.0, -2.0], np.float16)})
    head = b'{"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}}  '
    assert path.read_bytes() == b"\x38" + bytes(7) + head + b"\x00\x3c\x00\xc0"


def test_read_tokens_is_a_slice_of_the_whole(tmp_path, arrays):
    path = write(tmp_path / "x.safetensors", arrays)
    with TensorFile(path) as file:
        for layer in range(2):
            for start, stop in [(0, 5), (1, 4), (2, 2), (4, 5)]:
                part = file.read_tokens("v", (layer,), start, stop)
                assert part.tobytes() == arrays["v"][layer, :, start:stop].tobytes()
        assert file.read_tokens("w", (), 1, 3).tobytes() == arrays["w"][:, 1:3].tobytes()
        with pytest.raises(InvalidArgument, match="0:6"):
            file.read_tokens("w", (), 0, 6)


def test_empty_tensors(tmp_path):
    path = write(tmp_path / "x.safetensors", {"k": np.empty((2, 3, 0, 4), np.float16)})
    with TensorFile(path) as file:
        assert file.read("k").shape == (2, 3, 0, 4)
        assert file.read_tokens("k", (1,), 0, 0).shape == (3, 0, 4)


def test_missing_file_and_tensor(tmp_path, arrays):
    with pytest.raises(NotFound, match=r"nope\.safetensors: no such file"):
        TensorFile(tmp_path / "nope.safetensors")
    with pytest.raises(InvalidArgument, match="a folder, expected a safetensors file"):
        TensorFile(tmp_path)
    path = write(tmp_path / "x.safetensors", arrays)
    with TensorFile(path) as file, pytest.raises(NotFound, match="k, token_ids, v, w"):
        file.info("k_pre")


def test_every_truncation_is_refused(tmp_path, arrays):
    whole = write(tmp_path / "x.safetensors", arrays).read_bytes()
    cut = tmp_path / "cut.safetensors"
    for n in range(len(whole)):
        cut.write_bytes(whole[:n])
        with pytest.raises(Truncated, match=r"cut\.safetensors"):
            TensorFile(cut)


def test_truncated_after_it_was_opened(tmp_path, arrays):
    path = write(tmp_path / "x.safetensors", arrays)
    with TensorFile(path) as file:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(Truncated, match="ends inside"):
            [file.read(name) for name in arrays]


GOOD = entry("F16", [2], 0, 4)
MALFORMED = {
    "long header": (2**63).to_bytes(8, "little") + b"{}",
    "not json": container(b"{]"),
    "not utf-8": container(b'{"\xff":1}'),
    "not an object": container([]),
    "deep": container(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "huge number": container(b'{"a":' + b"9" * 10_000 + b"}"),
    "duplicate key": container(
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
        b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    ),
    "entry not an object": container({"a": 3}),
    "missing field": container({"a": {"dtype": "F16", "shape": [2]}}, bytes(4)),
    "extra field": container({"a": {**GOOD, "x": 1}}, bytes(4)),
    "dtype not a string": container({"a": {**GOOD, "dtype": 5}}, bytes(4)),
    "negative size": container({"a": entry("F16", [-2], 0, 4)}, bytes(4)),
    "bool size": container({"a": entry("U8", [True], 0, 1)}, bytes(1)),  # type: ignore[list-item]
    "float size": container({"a": entry("F16", [2.0], 0, 4)}, bytes(4)),  # type: ignore[list-item]
    "one offset": container({"a": {**GOOD, "data_offsets": [0]}}, bytes(4)),
    "negative offset": container({"a": {**GOOD, "data_offsets": [-4, 0]}}, bytes(4)),
    "backwards": container({"a": entry("F16", [2], 4, 0)}, bytes(4)),
    "shape too small": container({"a": entry("F16", [1], 0, 4)}, bytes(4)),
    "shape too large": container({"a": entry("F16", [2**60, 2**60], 0, 4)}, bytes(4)),
    "overlap": container({"a": GOOD, "b": entry("F16", [2], 2, 6)}, bytes(6)),
    "same bytes twice": container({"a": GOOD, "b": GOOD}, bytes(4)),
    "hole": container({"a": GOOD, "b": entry("F16", [2], 6, 10)}, bytes(10)),
    "hole in front": container({"a": entry("F16", [2], 2, 6)}, bytes(6)),
    "bytes after": container({"a": GOOD}, bytes(5)),
    "metadata not strings": container({"__metadata__": {"a": 1}}),
    "metadata a list": container({"__metadata__": []}),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_malformed_is_corrupt(tmp_path, fault):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(MALFORMED[fault])
    with pytest.raises(Corrupt, match=r"bad\.safetensors"):
        TensorFile(path)


def test_offsets_past_the_end_are_truncation(tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(container({"a": entry("U8", [2**62], 0, 2**62)}, bytes(4)))
    with pytest.raises(Truncated):
        TensorFile(path)


def test_unknown_dtypes_do_not_matter_until_asked_for(tmp_path):
    path = tmp_path / "x.safetensors"
    header = {"a": entry("F8_E4M3", [2], 0, 2), "b": entry("NEW", [7], 2, 5)}
    path.write_bytes(container(header, bytes(5)))
    with TensorFile(path) as file:
        for name in ("a", "b"):
            with pytest.raises(Unsupported, match=name):
                file.read(name)


def test_an_error_leaves_nothing(tmp_path):
    with (
        pytest.raises(RuntimeError, match="stop"),
        TensorWriter(tmp_path / "x.safetensors", {"a": ("float32", (1000,))}),
    ):
        raise RuntimeError("stop")
    assert os.listdir(tmp_path) == []


def test_existing_files_are_kept_unless_asked(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    a = np.ones(3, np.float32)
    with pytest.raises(InvalidArgument, match="--force"):
        write(path, {"a": a})
    with (
        pytest.raises(RuntimeError),
        TensorWriter(path, {"a": ("float32", (3,))}, overwrite=True),
    ):
        raise RuntimeError
    assert path.read_bytes() == b"old"
    write(path, {"a": a}, overwrite=True)
    with TensorFile(path) as file:
        assert (file.read("a") == a).all()


def test_a_file_that_appears_meanwhile_is_kept(tmp_path):
    path = tmp_path / "x.safetensors"
    with (
        pytest.raises(InvalidArgument, match="exists"),
        TensorWriter(path, {"a": ("float32", (3,))}),
    ):
        path.write_bytes(b"theirs")
    assert path.read_bytes() == b"theirs"
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_targets_that_cannot_be_written(tmp_path):
    with pytest.raises(InvalidArgument, match="plain file"):
        write(tmp_path, {"a": np.ones(3, np.float32)}, overwrite=True)
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "no" / "x", {"a": np.ones(3, np.float32)})
    with pytest.raises(InvalidArgument, match="complex"):
        write(tmp_path / "x", {"a": np.ones(3, np.complex128)})


def test_errors_name_the_target(tmp_path, monkeypatch):
    a = np.ones(3, np.float32)
    with pytest.raises(FileNotFoundError) as missing:
        write(tmp_path / "no" / "x", {"a": a})
    assert missing.value.filename == str(tmp_path / "no" / "x")
    assert missing.value.strerror == "its folder does not exist"
    number = errno.EACCES

    def refuse(path, *_):
        raise OSError(number, os.strerror(number), str(path))

    for name in ("open", "link"):  # while it is begun, and when it is put in its place
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            patch.setattr(os, "replace", refuse)
            with pytest.raises(PermissionError) as denied:
                write(tmp_path / "x", {"a": a})
        assert str(denied.value) == f"[Errno 13] Permission denied: '{tmp_path / 'x'}'"
        assert os.listdir(tmp_path) == []


NO_SAFETENSORS = {
    "empty": (b"", Truncated),
    "short": (b"hi\n", Truncated),
    "text": (b"Hello, this is a text file of some length.\n", Corrupt),
    "small length": (b"\x30" + bytes(7) + b"KV", Truncated),
    "other content": (b"\x04" + bytes(7) + b"\x00\x01\x02\x03\x04", Corrupt),
    "array": (b"\x02" + bytes(7) + b"[]", Corrupt),
}


@pytest.mark.parametrize("case", NO_SAFETENSORS)
def test_other_files_are_called_what_they_are(tmp_path, case):
    content, kind = NO_SAFETENSORS[case]
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    with pytest.raises(kind, match="not a safetensors file"):
        TensorFile(path)


def test_a_symbolic_link_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "x.safetensors"
    link.symlink_to(tmp_path / "real" / "y.safetensors")
    write(link, {"a": np.ones(3, np.float32)})
    assert link.is_symlink()
    assert os.listdir(tmp_path / "real") == ["y.safetensors"]
