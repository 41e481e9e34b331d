"""`kvstore match`: the longest stored prefix of a prompt."""

from __future__ import annotations

import argparse
import json
import sys
from typing import BinaryIO

from kvcodecs.errors import Corrupt, InvalidArgument

import kvstore
from kvstore.token_ids import Ids, check_ids
from kvtools.existing import existing_archive
from kvtools.tensorfile import TensorFile
from kvtools.terminal import count_text, show_json

#: Of a file of token ids: tens of millions of them.
MAX_JSON_BYTES = 256_000_000


def run_match(args: argparse.Namespace) -> int:
    """Find the session that shares most of a prompt; nothing that matches is no error."""
    ids = _prompt(args.ids)
    forked = None
    opened = existing_archive(args.archive) if args.fork else kvstore.open(args.archive)
    with opened as archive:
        match = archive.match_prefix(ids, archive.session(args.like).model, args.salt)
        name = None if match.session is None else match.session.name
        if args.fork and match.session is not None:
            # The match's own session: had it been rolled back meanwhile, this would fail.
            match.session.fork(args.fork, at=match.n_tokens)
            forked = args.fork
    if args.json:
        show_json(
            {
                "session": name,
                "n_tokens": match.n_tokens,
                "n_sealed": match.n_sealed,
                "n_prompt": len(ids),
                "fork": forked,
            }
        )
    elif name is None:
        print(f"no match for a prompt of {count_text(len(ids), 'token')}")
    else:
        print(
            f"{name!r} has the first {match.n_tokens} of {count_text(len(ids), 'token')}, "
            f"{match.n_sealed} of them in sealed blocks"
            + (f"; forked as {forked!r}" if forked else "")
        )
    return 0


def _prompt(option: str) -> Ids:
    """Return the token ids that the command line gives or names."""
    if option.lstrip().startswith("["):
        return _from_json(option, "IDS")
    if option == "-":
        return _from_json(_read(sys.stdin.buffer, b"", "standard input"), "standard input")
    with open(option, "rb") as file:
        start = file.read(8)
        # A safetensors file begins with a length, whose last bytes are 0; no JSON text has one.
        if b"\0" not in start:
            return _from_json(_read(file, start, option), option)
    with TensorFile(option) as tensors:
        return _checked(tensors.read("token_ids"), f"{option}: ")


def _read(file: BinaryIO, start: bytes, where: str) -> bytes:
    text = start + file.read(MAX_JSON_BYTES + 1 - len(start))
    if len(text) > MAX_JSON_BYTES:
        raise Corrupt(f"{where}: larger than {MAX_JSON_BYTES} bytes, so no list of token ids")
    return text


def _from_json(text: str | bytes, where: str) -> Ids:
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where}: not valid JSON: {error}") from error
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise InvalidArgument(f"{where}: expected a JSON list of token ids")
    if any(not -(2**63) <= token < 2**63 for token in ids):
        raise InvalidArgument(f"{where}: a token id is beyond 64 signed bits")
    return _checked(ids, f"{where}: ")


def _checked(ids: object, where: str) -> Ids:
    try:
        return check_ids(ids)
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}{error}") from error
