"""The commands that find, share, cut and bound sessions."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from kvtools import values
from kvtools.tensorfile import TensorFile, TensorWriter

import kvstore
from kvstore import keys

N_TOKENS = 300
IDS = np.arange(N_TOKENS, dtype=np.int32)
ROPE = kvstore.Rope.from_theta(10_000.0, 8)
MODEL = kvstore.Model.uniform(
    name="toy", n_layers=2, n_kv_heads=2, head_dim=8, rope=ROPE, dtype="float32"
)


def kv(tokens: int = N_TOKENS) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((2, 2, tokens, 8), np.float32)


def save(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    shapes = {name: (a.dtype, a.shape) for name, a in arrays.items()}
    metadata = {"rope_inv_freq_f32": json.dumps([float(x) for x in ROPE.inv_freq]), "model": "toy"}
    with TensorWriter(path, shapes, metadata) as writer:
        for name, a in arrays.items():
            writer.array(name)[...] = a
    return path


def load(path: Path) -> dict[str, np.ndarray]:
    with TensorFile(path) as file:
        return {name: file.read(name) for name in file.tensors}


def fails(result: tuple[int, str, str], *words: str) -> None:
    code, _, err = result
    assert code == 1, err
    assert err.startswith("kvstore: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def succeeds(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert (code, err) == (0, "")
    return out


@pytest.fixture
def archive(run, tmp_path: Path) -> Path:
    """An archive with the session ``chat``, packed from a file with token ids."""
    path = save(tmp_path / "chat.safetensors", {"k_pre": kv(), "v": kv(), "token_ids": IDS})
    options = ("--quiet", "--codec", "raw", "--block-tokens", "64")
    succeeds(run("pack", path, tmp_path / "a.kv", *options))
    return tmp_path / "a.kv"


def as_json(run, *argv: object) -> object:
    return json.loads(succeeds(run(*argv, "--json")))


# -- match


def test_match_finds_what_pack_stored(run, tmp_path, archive):
    prompt = [*range(200), 7, 7]
    expected = {"session": "chat", "n_tokens": 200, "n_sealed": 200, "n_prompt": 202, "fork": None}
    text = json.dumps(prompt)
    (tmp_path / "prompt.json").write_text(text)
    ids = {"token_ids": np.array(prompt, np.uint32)}
    for form in (text, tmp_path / "prompt.json", save(tmp_path / "prompt.safetensors", ids)):
        assert as_json(run, "match", archive, form, "--like", "chat") == expected
    out = succeeds(run("match", archive, text, "--like", "chat"))
    assert out == "'chat' has the first 200 of 202 tokens, 200 of them in sealed blocks\n"
    found = as_json(run, "match", archive, json.dumps(IDS.tolist()), "--like", "chat")
    found.pop("fork")
    assert found == {"session": "chat", "n_tokens": 300, "n_sealed": 256, "n_prompt": 300}


def test_match_forks_what_it_found(run, archive):
    argv = ["match", archive, json.dumps([*range(200), 7]), "--like", "chat"]
    found = as_json(run, *argv, "--fork", "next")
    assert found["fork"] == "next"
    with kvstore.open(archive) as opened:
        assert opened.session("next").n_committed == 200
    code, _, err = run(*argv, "--fork", "chat")
    assert code == 1
    assert "exists already" in err or "needs another name" in err
    out = succeeds(run(*argv, "--fork", "other"))
    assert out.endswith("; forked as 'other'\n")


def test_no_match_is_no_error(run, archive):
    nothing = {"session": None, "n_tokens": 0, "n_sealed": 0, "fork": None}
    for options, n_prompt in (
        (["[5, 6]"], 2),
        (["[]"], 0),
        (["[0, 1]", "--salt", "tenant"], 2),
    ):
        argv = ["match", archive, *options, "--like", "chat"]
        assert as_json(run, *argv) == {**nothing, "n_prompt": n_prompt}
    assert succeeds(run("match", archive, "[5, 6]", "--like", "chat")) == (
        "no match for a prompt of 2 tokens\n"
    )


def test_match_takes_the_model_and_the_salt_that_are_asked_for(run, archive):
    path = archive.parent / "chat.safetensors"
    succeeds(run("pack", path, archive, "--session", "salted", "--salt", "t", "--quiet"))
    for options, name in (
        (["--like", "chat"], "chat"),
        (["--like", "salted"], "salted"),
        (["--like", "chat", "--salt", "t"], "salted"),
        (["--like", "salted", "--salt", ""], "chat"),
        (["--like", "salted", "--salt", "T"], None),
    ):
        assert as_json(run, "match", archive, "[0, 1, 2]", *options)["session"] == name


def test_a_prompt_on_standard_input(run, archive, monkeypatch):
    for text, n_tokens in ((b"[0, 1, 2, 9]", 3), (b" \n[0]\n", 1)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert as_json(run, "match", archive, "-", "--like", "chat")["n_tokens"] == n_tokens
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    fails(run("match", archive, "-", "--like", "chat"), "standard input: not valid JSON")


def test_prompts_that_are_none(run, tmp_path, archive):
    def refuse(form, *words):
        fails(run("match", archive, form, "--like", "chat"), *words)

    refuse("[1, oops]", "not valid JSON")
    refuse("[" * 100_000, "not valid JSON")
    for text in ("[1.5]", "[[1]]", '["a"]', "[true]", "[null]", "[NaN]"):
        refuse(text, "expected a JSON list of token ids")
    refuse(f"[{2**63}]", "beyond 64 signed bits")
    (tmp_path / "object.json").write_text('{"token_ids": [1]}')
    refuse(tmp_path / "object.json", "object.json: expected a JSON list")
    refuse(tmp_path / "none.json", "none.json: No such file")
    refuse(tmp_path, "Is a directory")
    for name, array in {
        "two": np.zeros((2, 2), np.int32),
        "float": np.zeros(2, np.float32),
        "big": np.full(2, 2**63, np.uint64),
    }.items():
        path = save(tmp_path / f"{name}.safetensors", {"token_ids": array})
        refuse(path, f"{path}: token_ids: ")
    path = save(tmp_path / "other.safetensors", {"x": np.zeros(2, np.int32)})
    refuse(path, "no tensor 'token_ids'; the file has x")
    fails(run("match", archive, "[1]", "--like", "nope"), "'nope'", "there are 'chat'")


def test_sessions_without_token_ids_match_nothing(run, tmp_path, archive):
    path = save(tmp_path / "bare.safetensors", {"k_pre": kv(), "v": kv()})
    succeeds(run("pack", path, tmp_path / "b.kv", "--quiet"))
    found = as_json(run, "match", tmp_path / "b.kv", "[0]", "--like", "bare")
    assert found["session"] is None


# -- fork, trim, rename, append-range, pin


def test_fork_shares_and_is_no_copy(run, archive):
    out = succeeds(run("fork", archive, "chat", "fork", "--at", "100"))
    assert out == "forked 'chat' as 'fork': 100 tokens shared\n"
    assert as_json(run, "fork", archive, "chat", "all") == {
        "session": "all",
        "parent": "chat",
        "n_tokens": 300,
    }
    assert succeeds(run("fork", archive, "chat", "quiet", "--quiet")) == ""
    fails(run("fork", archive, "chat", "fork"), "exists already; --replace replaces it")
    fails(
        run("fork", archive, "chat", "chat"), "another name; kvstore trim --to rolls this one back"
    )
    fails(run("fork", archive, "nope", "new"), "'nope'")
    fails(run("fork", archive, "chat", ""), "session name ''")
    result = run("fork", archive, "chat", "new", "--at", "301")
    fails(result, "cut at 301: 300 tokens are committed\n")
    options = ("--at", "5", "--replace", "--metadata", '{"a": [1]}', "--quiet")
    succeeds(run("fork", archive, "chat", "fork", *options))
    with kvstore.open(archive) as opened:
        assert opened.names() == ["all", "chat", "fork", "quiet"]
        assert opened.session("fork").metadata == {"a": [1]}
        assert opened.session("all").metadata == opened.session("chat").metadata
        assert opened.session("fork").n_committed == 5
    succeeds(run("rm", archive, "chat"))
    out = archive.parent / "out.safetensors"
    succeeds(run("unpack", archive, out, "--session", "all", "--quiet"))
    assert np.array_equal(load(out)["k_pre"], kv())


def test_trim_at_either_end(run, archive):
    out = succeeds(run("trim", archive, "chat", "--to", "250"))
    assert out == "trimmed 'chat': it has tokens 0:250\n"
    assert as_json(run, "trim", archive, "chat", "--front", "100", "--to", "200") == {
        "session": "chat",
        "first_token": 100,
        "n_tokens": 200,
    }
    fails(run("trim", archive, "chat", "--front", "201"), "has 200 tokens, --front 201")
    fails(run("trim", archive, "chat", "--to", "201"), "200 tokens")
    fails(run("trim", archive, "chat", "--to", "99"), "begin at token 100")
    # Nothing is cut at the end if the front cannot be what is asked for.
    fails(run("trim", archive, "chat", "--front", "300", "--to", "400"))
    with kvstore.open(archive) as opened:
        assert opened.session("chat").n_committed == 200
    path = archive.parent / "out.safetensors"
    fails(run("unpack", archive, path, "--range", "0:150"), "starts at token 100", "after a trim")
    succeeds(run("unpack", archive, path, "--quiet"))
    assert np.array_equal(load(path)["v"], kv()[:, :, 100:200])
    assert load(path)["token_ids"].tolist() == list(range(100, 200))
    assert succeeds(run("trim", archive, "chat", "--front", "150", "--quiet")) == ""
    assert as_json(run, "match", archive, "[0]", "--like", "chat")["session"] is None


def test_rename(run, archive):
    succeeds(run("fork", archive, "chat", "other", "--quiet"))
    fails(run("rename", archive, "chat", "other"), "exists already; --replace replaces it")
    fails(run("rename", archive, "nope", "new"), "'nope'")
    fails(run("rename", archive, "chat", "a\nb"), "session name")
    assert succeeds(run("rename", archive, "other", "new")) == "renamed 'other' to 'new'\n"
    assert as_json(run, "rename", archive, "chat", "new", "--replace") == {
        "session": "new",
        "old_name": "chat",
    }
    with kvstore.open(archive) as opened:
        assert opened.names() == ["new"]


def test_append_range_says_what_was_shared(run, archive):
    succeeds(run("fork", archive, "chat", "two", "--at", "256"))
    out = succeeds(run("append-range", archive, "two", "chat", "0:128"))
    assert out == (
        "appended 'chat' 0:128 to 'two' as its tokens 256:384, 128 of them shared; "
        "no further error\n"
    )
    assert as_json(run, "append-range", archive, "two", "chat", "200:") == {
        "session": "two",
        "source": "chat",
        "start": 200,
        "stop": 300,
        "first_token": 384,
        "n_tokens": 100,
        "n_shared": 0,
        "max_error": 0.0,
    }
    assert succeeds(run("append-range", archive, "two", "chat", "7:7", "--quiet")) == ""
    fails(run("append-range", archive, "two", "chat", "0:301"), "300 tokens are committed")
    fails(run("append-range", archive, "two", "chat", "400:"), "300 tokens are committed")
    fails(run("append-range", archive, "nope", "chat", "0:1"), "'nope'")
    path = archive.parent / "out.safetensors"
    succeeds(run("unpack", archive, path, "--session", "two", "--quiet"))
    expected = np.concatenate([kv()[:, :, :256], kv()[:, :, :128], kv()[:, :, 200:]], axis=2)
    assert np.array_equal(load(path)["k_pre"], expected)
    with kvstore.open(archive, "a") as opened:
        other = kvstore.Model.uniform(name="other", n_layers=2, n_kv_heads=2, head_dim=8)
        opened.create_session("other", model=other).close()
    fails(run("append-range", archive, "other", "chat", "0:1"), "'chat'", "name")


def test_append_range_says_what_coding_again_costs(run, archive):
    path = archive.parent / "chat.safetensors"
    options = ("--session", "lossy", "--block-tokens", "64", "--quiet")
    succeeds(run("pack", path, archive, *options))
    out = succeeds(run("append-range", archive, "lossy", "chat", "0:100"))
    assert re.search(r" 300:400, 0 of them shared; largest further error 0\.\d+\n$", out)
    bound = max(s["bound"] for s in _layers(run, archive, "lossy"))
    done = as_json(run, "append-range", archive, "lossy", "chat", "0:100")
    assert 0 < done["max_error"] <= bound


def _layers(run, archive, name):
    info = as_json(run, "info", archive, "--session", name, "--layers")
    return info["sessions"][0]["layers"]


def test_pin_all_or_none(run, archive):
    succeeds(run("fork", archive, "chat", "b"))
    fails(run("pin", archive, "chat", "nope"), "'nope'; nothing is pinned; there are 'b', 'chat'")
    assert not any(s["pinned"] for s in as_json(run, "ls", archive))
    assert succeeds(run("pin", archive, "b", "chat", "b")) == "pinned 'b'\npinned 'chat'\n"
    assert as_json(run, "pin", archive, "b", "--off") == {"sessions": ["b"], "pinned": False}
    assert [(s["name"], s["pinned"]) for s in as_json(run, "ls", archive)] == [
        ("b", False),
        ("chat", True),
    ]
    assert [s["name"] for s in as_json(run, "ls", archive, "--pinned")] == ["chat"]
    assert succeeds(run("pin", archive, "chat", "--off", "--quiet")) == ""


def test_a_session_that_is_appended_to_is_left_alone(run, archive):
    with kvstore.open(archive, "a") as opened, opened.session("chat") as session:
        session.append(kv(5), kv(5), token_ids=[0] * 5)
        for argv in (
            ["trim", archive, "chat", "--to", "1"],
            ["append-range", archive, "chat", "chat", "0:1"],
        ):
            fails(run(*argv), "'chat'", "append")
        session.commit()
    assert as_json(run, "ls", archive)[0]["n_tokens"] == 305


# -- quota, compact, reindex


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    {
        "1048576": 1 << 20,
        "500M": 500_000_000,
        "500mb": 500_000_000,
        "10G": 10_000_000_000,
        "10 GB": 10_000_000_000,
        "1.5GiB": 3 << 29,
        "1.5gi": 3 << 29,
        "0.001T": 1_000_000_000,
        "7B": 7,
        "none": "none",
    }.items(),
)
def test_sizes(text, n_bytes):
    assert values.quota(text) == n_bytes


def fill(path: Path, names: str, tokens: int = 300) -> None:
    """Create sessions of some 80 kB each."""
    with kvstore.open(path, "a") as archive:
        for name in names:
            with archive.create_session(name, model=MODEL, codec=kvstore.Raw()) as session:
                session.append(kv(tokens), kv(tokens))
                session.commit()


def test_quota_is_shown_set_and_removed(run, tmp_path):
    path = tmp_path / "q.kv"
    fill(path, "abcdefghijklmnopqrst")
    text = succeeds(run("quota", path))
    assert re.match(r"quota     none\nused      1\.\d+ MB\nfile      .* of it free\n", text)
    assert text.endswith("sessions  20, 0 of them pinned\n")
    succeeds(run("pin", path, "a", "b", "--quiet"))
    out = succeeds(run("quota", path, "1MiB")).splitlines()
    assert out[0] == "evicted 'c'"
    assert f"{path}: quota 1.05 MB, " in out[-2]
    assert re.search(r"^the file has 1\.\d+ MB, more than the quota; `kvstore compact`", out[-1])
    found = as_json(run, "quota", path)
    assert found["quota_bytes"] == 1 << 20
    assert (found["n_sessions"], found["n_pinned"]) == (20 - len(out) + 2, 2)
    assert found["used_bytes"] < 1 << 20 < found["file_bytes"] == os.stat(path / "data.mdb").st_size
    assert found["evicted"] == []
    info = as_json(run, "info", path)
    for key in ("quota_bytes", "used_bytes", "file_bytes", "free_bytes", "n_pinned"):
        assert info[key] == found[key]
    assert "quota          1.05 MB\n" in succeeds(run("info", path))

    out = succeeds(run("compact", path))
    assert re.fullmatch(rf"{path}: 1\.\d+ MB before, \d+\.\d+ kB now\n", out)
    found = as_json(run, "compact", path)
    assert found["archive"] == str(path)
    assert found["bytes_before"] == found["bytes_after"] == os.stat(path / "data.mdb").st_size
    assert succeeds(run("compact", path, "--quiet")) == ""
    assert found["bytes_after"] < 1 << 20

    assert succeeds(run("quota", path, "2G", "--quiet")) == ""
    assert as_json(run, "quota", path, "none")["quota_bytes"] is None
    assert "sound" in succeeds(run("verify", path, "--decode"))


def test_a_quota_that_pinned_sessions_exceed(run, tmp_path):
    path = tmp_path / "q.kv"
    names = "abcdefghijklmnopqrst"
    fill(path, names)
    succeeds(run("pin", path, *names, "--quiet"))
    fails(run("quota", path, "5"), "at least 1048576, or none")
    assert as_json(run, "quota", path)["quota_bytes"] is None
    result = run("quota", path, "1MiB")
    fails(result, "used up", "make room with kvstore pin --off, kvstore rm or a larger kvstore")
    assert "evicted" not in result[1]
    assert as_json(run, "quota", path)["n_sessions"] == 20
    code, out, _ = run("quota", path, "1MiB", "--json")
    assert code == 1
    assert json.loads(out)["quota_bytes"] == 1 << 20
    source = save(tmp_path / "x.safetensors", {"k_pre": kv(), "v": kv()})
    fails(run("pack", source, path, "--quiet"), "quota of 1048576 bytes")


def test_an_archive_in_use_is_not_compacted(run, archive):
    with kvstore.open(archive):
        fails(run("compact", archive), "is open")
    succeeds(run("compact", archive))


def test_reindex_makes_a_lost_index_anew(run, archive):
    with kvstore.open(archive, "a") as opened, opened._backend.write(1.0) as transaction:
        for key in [key for key, _ in transaction.scan(keys.PREFIX)]:
            transaction.delete(key)
    match = ("match", archive, "[0, 1]", "--like", "chat")
    assert as_json(run, *match)["session"] is None
    assert run("verify", archive)[0] == 1
    out = succeeds(run("reindex", archive))
    assert out == f"{archive}: 5 entries in the prefix index\n"  # at 0, 64, ... 256
    assert as_json(run, *match)["session"] == "chat"
    assert as_json(run, "reindex", archive) == {
        "archive": str(archive),
        "n_entries": 5,
        "errors": [],
    }
    assert succeeds(run("reindex", archive, "--quiet")) == ""
    assert "sound" in succeeds(run("verify", archive))


def test_reindex_tells_what_it_cannot_read(run, archive):
    with kvstore.open(archive, "a") as opened, opened._backend.write(1.0) as transaction:
        (key,) = [key for key, _ in transaction.scan(keys.TOKENS)]
        value = bytearray(transaction.get(key))
        value[-5] ^= 1
        transaction.put(key, bytes(value))
    code, out, err = run("reindex", archive)
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("Corrupt: ")
    assert "1 session left out" in lines[1]
    code, out, _ = run("reindex", archive, "--json")
    assert code == 1
    (error,) = json.loads(out)["errors"]
    assert error["kind"] == "Corrupt"


# -- unpack at other positions


def test_unpack_turns_k_for_other_positions(run, archive):
    out = archive.parent / "out.safetensors"
    options = ("--range", "100:200", "--k-state", "post", "--dtype", "float32", "--force")
    report = as_json(run, "unpack", archive, out, *options, "--position-offset", "-100")
    assert report["position_offset"] == -100
    with kvstore.open(archive) as opened:
        k, v = opened.session("chat").read_all(100, 200, k_state="post", position_offset=-100)
    found = load(out)
    assert np.array_equal(found["k"], k)
    assert np.array_equal(found["v"], v)
    # What begins at position 0 can be packed as it is.
    succeeds(run("pack", out, archive, "--session", "moved", "--quiet", "--codec", "raw"))
    with kvstore.open(archive) as opened:
        moved = opened.session("moved").read_all()[0]
        assert np.abs(moved - kv()[:, :, 100:200]).max() < 1e-5
    succeeds(run("unpack", archive, out, *options, "--session", "chat", "--position-offset", "7"))
    with TensorFile(out) as file:
        assert file.metadata["first_token"] == "107"
    argv = ("unpack", archive, out, *options, "--session", "chat", "--position-offset")
    fails(run(*argv, "-101"), "--position-offset -101 puts token 100 at position -1")
    fails(run(*argv, "999999999999999"), "beyond 16777216")


# -- ls and info


def test_ls_filters_and_tells_more_if_asked(run, archive):
    succeeds(run("fork", archive, "chat", "alice/1", "--at", "64"))
    succeeds(run("trim", archive, "alice/1", "--front", "10"))
    succeeds(run("fork", archive, "chat", "bob/1", "--metadata", '{"user": "bob"}'))
    succeeds(run("pin", archive, "bob/1"))
    listed = as_json(run, "ls", archive)
    assert [s["name"] for s in listed] == ["alice/1", "bob/1", "chat"]
    assert set(listed[0]) == {
        *("name", "model", "n_layers", "n_tokens", "first_token", "has_token_ids", "pinned"),
        *("finished", "created", "updated", "used", "metadata"),
    }
    assert (listed[0]["first_token"], listed[0]["n_tokens"]) == (10, 64)
    assert (listed[1]["metadata"], listed[1]["pinned"]) == ({"user": "bob"}, True)
    assert listed[2]["used"] >= listed[2]["updated"] >= listed[2]["created"] > 0
    assert [s["name"] for s in as_json(run, "ls", archive, "--prefix", "bob/")] == ["bob/1"]
    assert as_json(run, "ls", archive, "--prefix", "alice/", "--pinned") == []

    lines = [line.split() for line in succeeds(run("ls", archive)).splitlines()]
    assert lines[0] == [
        *("session", "model", "layers", "tokens", "first", "token", "pinned", "last", "use"),
        "(UTC)",
    ]
    assert lines[1][:5] == ["alice/1", "toy", "2", "64", "10"]
    assert lines[2][:6] == ["bob/1", "toy", "2", "300", "0", "yes"]
    assert len(lines) == 4
    text = succeeds(run("ls", archive, "--prefix", "chat"))
    assert text.split()[:4] == ["session", "model", "layers", "tokens"]
    assert "first" not in text
    assert "pinned" not in text
    text = succeeds(run("ls", archive, "--long", "--prefix", "chat"))
    assert re.search(r"tokens  bits/value +size +last use", text)
    assert re.search(r"chat +toy +2 +300 +3\d\.\d +\S+ kB +20", text)
    (long,) = as_json(run, "ls", archive, "--long", "--prefix", "bob")
    assert 0 < long["shared_bytes"] < long["total_bytes"]
    assert set(long) - set(listed[0]) == {
        *("n_values", "total_bytes", "shared_bytes", "object_bytes"),
        *("bits_per_value", "ratio_fp16"),
    }


def test_ls_says_what_is_damaged_where_it_looks(run, archive):
    succeeds(run("fork", archive, "chat", "other"))
    with kvstore.open(archive, "a") as opened, opened._backend.write(1.0) as transaction:
        frame = next(key for key, _ in transaction.scan(keys.FRAME))
        transaction.delete(frame)
        value = bytearray(transaction.get(keys.session_key("other")))
        value[-5] ^= 1
        transaction.put(keys.session_key("other"), bytes(value))
    code, out, err = run("ls", archive)
    assert code == 1
    assert "chat" in out
    assert err.startswith("kvstore: damaged session 'other': ")
    assert err.count("\n") == 1
    succeeds(run("ls", archive, "--prefix", "chat"))
    code, out, err = run("ls", archive, "--long")
    assert code == 1
    assert "chat" not in out
    assert err.count("\n") == 2
    found = json.loads(run("ls", archive, "--long", "--json")[1])
    assert sorted((s["name"], "error" in s) for s in found) == [("chat", True), ("other", True)]
    found = json.loads(run("ls", archive, "--pinned", "--json")[1])
    assert [s["name"] for s in found] == ["other"], "whether it is pinned cannot be told"


def test_info_tells_what_is_shared_trimmed_and_pinned(run, archive):
    succeeds(run("fork", archive, "chat", "fork", "--at", "200"))
    succeeds(run("trim", archive, "fork", "--front", "100"))
    succeeds(run("pin", archive, "fork"))
    text = succeeds(run("info", archive, "--session", "fork"))
    assert "sessions       2, 1 of them pinned\n" in text
    assert "quota          none\n" in text
    assert re.search(r"^index +\d+(\.\d+ k| )B$", text, re.MULTILINE)
    assert re.search(r"^used +\d+\.\d+ kB$", text, re.MULTILINE)
    assert "tokens      200, those before 100 trimmed, with ids\n" in text
    assert re.search(r"^shared +\d+\.\d+ kB of it, with other sessions$", text, re.MULTILINE)
    assert "pinned      yes\n" in text
    assert "committed   20" in text
    text = succeeds(run("info", archive, "--session", "chat"))
    assert "tokens      300, with ids\n" in text
    assert "\nshared " not in text
    assert "\npinned " not in text
    assert "oldest reader" not in text
    info = as_json(run, "info", archive)
    assert (info["n_pinned"], info["n_readers"], info["oldest_reader"]) == (1, 0, None)
    assert info["index_bytes"] > 0
    chat, fork = info["sessions"]
    assert (chat["first_token"], chat["pinned"], chat["shared_bytes"]) == (0, False, 0)
    assert (fork["first_token"], fork["pinned"]) == (100, True)
    assert fork["shared_bytes"] == fork["frame_bytes"]
    assert fork["updated"] >= fork["created"] > 0


def test_info_names_the_oldest_reader(run, archive):
    with kvstore.open(archive) as reading, reading._read():
        succeeds(run("pin", archive, "chat"))
        succeeds(run("pin", archive, "chat", "--off"))
        info = as_json(run, "info", archive)
        reader = info["oldest_reader"]
        assert (reader["pid"], info["n_readers"]) == (os.getpid(), 1)
        assert reader["n_behind"] >= 2
        assert reader["age_seconds"] >= 0
        text = succeeds(run("info", archive))
        assert f"oldest reader  process {os.getpid()}, {reader['n_behind']} transactions" in text
        assert re.search(r"behind, for \d+ s$", text, re.MULTILINE)
