"""Commands that find sessions for a prompt, and that share, cut, rename and pin them."""

from __future__ import annotations

import argparse

from kvtools.command import Command, add_archive
from kvtools.values import count, json_object, path, token_range


def _add_match(parser: argparse.ArgumentParser) -> None:
    add_archive(parser)
    parser.add_argument(
        "ids",
        type=path,
        metavar="IDS",
        help="the prompt's token ids: a JSON list, a file that holds one, a safetensors file with "
        "token_ids, or - for a JSON list on standard input",
    )
    parser.add_argument(
        "--like",
        required=True,
        metavar="SESSION",
        help="the prompt is for the model of this session: only KV of an equal one matches",
    )
    parser.add_argument(
        "--salt", metavar="TEXT", help="of the tenant (default: that of SESSION's model)"
    )
    parser.add_argument(
        "--fork",
        metavar="NEW",
        help="fork what matches as NEW, at once: between two commands the session might change",
    )


def _add_fork(parser: argparse.ArgumentParser) -> None:
    add_archive(parser)
    parser.add_argument("session", metavar="SESSION")
    parser.add_argument("new", metavar="NEW", help="name of the fork")
    parser.add_argument("--at", type=count, metavar="N", help="first N tokens (default: all)")
    parser.add_argument("--replace", action="store_true", help="replace NEW if it exists")
    parser.add_argument(
        "--metadata", type=json_object, metavar="JSON", help="an object (default: SESSION's)"
    )


def _add_trim(parser: argparse.ArgumentParser) -> None:
    add_archive(parser)
    parser.add_argument("session", metavar="SESSION")
    parser.add_argument(
        "--front",
        type=count,
        metavar="N",
        help="drop what is before position N, for a sliding window; positions stay what they are, "
        "and the session matches no prompt any more",
    )
    parser.add_argument("--to", type=count, metavar="N", help="drop the tokens from N on")


def _add_rename(parser: argparse.ArgumentParser) -> None:
    add_archive(parser)
    parser.add_argument("session", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument("--replace", action="store_true", help="replace NEW if it exists")


def _add_append_range(parser: argparse.ArgumentParser) -> None:
    add_archive(parser)
    parser.add_argument("session", metavar="SESSION", help="what grows")
    parser.add_argument("source", metavar="SOURCE", help="a session of an equal model")
    parser.add_argument("range", type=token_range, metavar="A:B", help="tokens of SOURCE")


def _add_pin(parser: argparse.ArgumentParser) -> None:
    add_archive(parser)
    parser.add_argument("session", metavar="SESSION", nargs="+")
    parser.add_argument("--off", action="store_true", help="let them be evicted again")


COMMANDS = {
    "match": Command(
        "match",
        "Find the session that shares most of a prompt's first tokens; exit 0 also if none does.",
        _add_match,
        "kvstore match chats.kv prompt.json --like alice/42",
    ),
    "fork": Command(
        "sessions",
        "Begin a session with the first tokens of another one, whose frames it shares.",
        _add_fork,
        "kvstore fork chats.kv alice/42 alice/43 --at 1000",
    ),
    "trim": Command(
        "sessions",
        "Drop tokens at the front or at the end of a session, for good.",
        _add_trim,
        "kvstore trim chats.kv alice/43 --front 256 --to 900",
    ),
    "rename": Command(
        "sessions",
        "Give a session another name.",
        _add_rename,
        "kvstore rename chats.kv alice/43 bob/1",
    ),
    "append-range": Command(
        "sessions",
        "Append tokens of one session to another; blocks that lie alike are shared.",
        _add_append_range,
        "kvstore append-range chats.kv alice/43 alice/42 1024:2048",
    ),
    "pin": Command(
        "sessions",
        "Keep sessions from being evicted to meet the quota.",
        _add_pin,
        "kvstore pin chats.kv alice/42",
    ),
}
