"""The `kvstore` command: its arguments, and how it ends.

Exit codes: 0 done, 1 an error (one line on stderr) or a failed check, 2 wrong usage, 130
interrupted. The commands live in their own modules and are imported when they run, so that
`kvstore -h` stays fast.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from kvtools.signals import ending_signals
from kvtools.terminal import accept_any_text, plain
from kvtools.values import (
    block_size,
    count,
    layer_list,
    path,
    positive_float,
    positive_int,
    shard,
    token_range,
    up_to,
)

DESCRIPTION = """\
Keep attention KV caches in compressed archives.

An archive holds many sessions; a session is the K and V of one token sequence. Any token range
is read back within a stated error by decoding only the blocks that cover it.
"""

DTYPES = ("float16", "bfloat16", "float32")

#: What the library advises its callers, and what that is for somebody at a shell.
ADVICE = {
    "open it with mode='r'": "get write access to it, or copy it and write to the copy",
    "open it with mode='a' to begin an archive": "kvstore pack begins an archive",
    "reopen with a larger map_size": "remove sessions, or pack into another archive",
    "use Raw() or a larger bound": "use --codec raw or a larger bound",
    "ask for float32": "use --dtype float32",
    "open it with archive.session(...), or delete_session(...) it first": "--replace replaces it",
    "replace=True replaces it": "--replace replaces it",
}

#: The groups of `bench`.
BENCH_GROUPS = ("codec", "rate", "peers", "file", "range", "open", "append", "import", "memory")
#: Bounds of what `bench` repeats and writes.
MAX_REPS = 10_000
MAX_MEMORY_MB = 1_000_000
#: Characters of an error message that are shown: a file's header may hold names of megabytes.
MAX_MESSAGE = 2000

EPILOG = """\
kvstore COMMAND -h explains a command and gives an example.
"""


def _add_codec(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    codec = parser.add_argument_group("codec")
    codec.add_argument(
        "--codec",
        choices=("kvr1", "tkv1", "raw"),
        default="kvr1",
        help="kvr1: frozen tables; tkv1: adapts to each block, several times slower, smaller where "
        "the spread of a channel changes from token to token or where a few values lie far beyond "
        "all others; raw: bit exact (default: kvr1)",
    )
    policy = codec.add_mutually_exclusive_group()
    narrow = "float16 and bfloat16 add half a unit in their last place"
    for flag, metavar, text in (
        ("--rel-step", "R", "quantiser step as a multiple of each stream's RMS (default: 0.25)"),
        ("--step", "S", "quantiser step; the error is at most half of it, as --max-error"),
        ("--max-error", "E", f"largest absolute error as float32; {narrow}"),
        ("--rmse", "E", "root mean square error to aim at"),
        ("--bpv", "BITS", "bits per value of the payload, to aim at; headers come on top"),
    ):
        policy.add_argument(flag, type=positive_float, metavar=metavar, help=text)
    codec.add_argument(
        "--sink", type=count, metavar="N", help="first N tokens are coded finer (default: 4)"
    )
    codec.add_argument(
        "--sink-div", type=positive_int, metavar="D", help="how many times finer (default: 16)"
    )
    return codec


def _add_pack(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input",
        type=path,
        metavar="INPUT",
        help="safetensors file with tensors k_pre (K before RoPE) or k (after it), and v, "
        "[layers][heads][tokens][head_dim]; or layers.N.k_pre, layers.N.k and layers.N.v, "
        "[heads][tokens][head_dim]; F16, BF16 or F32; token_ids if it has them",
    )
    parser.add_argument("archive", type=path, metavar="ARCHIVE", help="archive, created if missing")
    parser.add_argument("--session", metavar="NAME", help="session name (default: INPUT's stem)")
    parser.add_argument(
        "--replace", action="store_true", help="replace the session if the archive has it"
    )
    parser.add_argument(
        "--renumber",
        action="store_true",
        help="pack a part of a session, written by unpack --range, as tokens 0.. of a new one; "
        "K before RoPE only",
    )
    parser.add_argument(
        "--block-tokens",
        type=block_size,
        default="auto",
        metavar="N",
        help="tokens per block; auto: 128 to 1024 for each stream, so that blocks reach about "
        "32 KB (default: auto)",
    )
    _add_codec(parser).add_argument(
        "--fit-tokens",
        type=positive_int,
        default=128,
        metavar="N",
        help="fewest tokens that statistics are fitted to; shorter inputs are stored uncompressed "
        "(default: 128)",
    )
    keys = parser.add_argument_group(
        "keys and RoPE",
        "RoPE frequencies come from the options below, else from the key rope_inv_freq_f32\n"
        "of the input header's metadata (a JSON list), else from the same key of a file\n"
        "STEM.json beside the input. What unpack wrote needs none of this.",
    )
    keys.add_argument(
        "--k-state",
        choices=("pre", "post"),
        help="K before or after RoPE (default: pre for tensors k_pre, post for k)",
    )
    source = keys.add_mutually_exclusive_group()
    source.add_argument(
        "--inv-freq",
        type=path,
        metavar="JSON",
        help="RoPE frequencies: a JSON list, or a file that holds one",
    )
    source.add_argument(
        "--rope-theta", type=positive_float, metavar="T", help="RoPE frequencies from a base"
    )
    keys.add_argument(
        "--rotary-dim", type=positive_int, metavar="N", help="with --rope-theta (default: head_dim)"
    )
    keys.add_argument("--rope-style", choices=("half", "interleaved"), help="pairs (default: half)")
    keys.add_argument(
        "--rope-scaling", type=positive_float, metavar="G", help="attention scaling (default: 1)"
    )
    model = parser.add_argument_group(
        "model",
        "The session's identity: whatever differs here is never taken for the same KV.\n"
        "What unpack wrote keeps its own, but for what is given here.",
    )
    model.add_argument("--model-name", metavar="NAME", help="(default: the input's, or unknown)")
    for flag, metavar, text in (
        ("--revision", "REV", "of the model, a commit for example"),
        ("--weights", "DIGEST", "of the model's weights"),
        ("--tokenizer", "DIGEST", "of the tokenizer"),
        ("--adapter", "NAME", "what changes the weights (LoRA): a name, or better a digest"),
        ("--layout", "TEXT", "how heads and channels are arranged, where that can differ"),
        ("--salt", "TEXT", "keeps apart what is equal otherwise, tenants for example"),
    ):
        model.add_argument(flag, metavar=metavar, help=text)
    model.add_argument(
        "--shard",
        type=shard,
        metavar="RANK/SIZE:START-STOP",
        help="tensor-parallel shard and the range of the model's KV heads that it holds, "
        "such as 1/8:4-8",
    )
    model.add_argument(
        "--dtype", choices=DTYPES, help="what reads return by default (default: the input's)"
    )
    model.add_argument(
        "--no-v",
        action="store_true",
        help="K only: V of the input is left out, and layers get no V (as with multi-head latent "
        "attention)",
    )


def _add_unpack(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("archive", type=path, metavar="ARCHIVE")
    parser.add_argument("output", type=path, metavar="OUT.safetensors")
    parser.add_argument("--session", metavar="NAME", help="(default: the only one)")
    parser.add_argument(
        "--range",
        type=token_range,
        metavar="A:B",
        help="tokens (default: all that each layer has)",
    )
    parser.add_argument(
        "--layers",
        type=layer_list,
        metavar="LIST",
        help="such as 0,3,5-7, counted from 0 in the archive (default: all)",
    )
    parser.add_argument(
        "--k-state", choices=("pre", "post"), default="pre", help="(default: pre, as tensor k_pre)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="(default: the session's)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")


def _add_ls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("archive", type=path, metavar="ARCHIVE")


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("archive", type=path, metavar="ARCHIVE")
    parser.add_argument("--session", metavar="NAME", help="(default: all)")
    parser.add_argument("--layers", action="store_true", help="one line per layer and kind")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("archive", type=path, metavar="ARCHIVE")
    parser.add_argument("--decode", action="store_true", help="decode every block as well")


def _add_rm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("archive", type=path, metavar="ARCHIVE")
    parser.add_argument("session", metavar="SESSION", nargs="+")


def _add_gc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("archive", type=path, metavar="ARCHIVE")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep", type=path, metavar="DIR", help="keep the archive in this folder")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=path, metavar="FILE", help="(default: the packaged sample)")
    _add_codec(parser)
    parser.add_argument("--reps", type=up_to(MAX_REPS), default=5, metavar="N", help="(default: 5)")
    parser.add_argument(
        "--only", metavar="GROUPS", help=f"some of {','.join(BENCH_GROUPS)} (default: all)"
    )
    parser.add_argument("--csv", type=path, metavar="FILE", help="write the rows here as well")
    parser.add_argument(
        "--memory-mb", type=up_to(MAX_MEMORY_MB), default=64, metavar="MB",
        help="size of the input of the memory group (default: 64)",
    )  # fmt: skip


# name: (module, what it does, arguments, example)
_Command = tuple[str, str, Callable[[argparse.ArgumentParser], None], str]
COMMANDS: dict[str, _Command] = {
    "pack": (
        "pack",
        "Pack a safetensors file of K and V into an archive, in constant memory.",
        _add_pack,
        "kvstore pack chat.safetensors chats.kv --session alice/42 --rel-step 0.25",
    ),
    "unpack": (
        "unpack",
        "Write a session, or some tokens or layers of it, to a safetensors file.",
        _add_unpack,
        "kvstore unpack chats.kv out.safetensors --session alice/42 --range 1000:1200",
    ),
    "ls": ("listing", "List the sessions of an archive.", _add_ls, "kvstore ls chats.kv"),
    "info": (
        "info",
        "Show identity, geometry, size and recorded error, without decoding.",
        _add_info,
        "kvstore info chats.kv --session alice/42 --layers",
    ),
    "verify": (
        "listing",
        "Read every frame and record and check it; exit 1 if anything is wrong.",
        _add_verify,
        "kvstore verify chats.kv --decode",
    ),
    "rm": (
        "listing",
        "Delete sessions; none of them if one is missing.",
        _add_rm,
        "kvstore rm chats.kv alice/42",
    ),
    "gc": (
        "listing",
        "Free the space of what killed writers left behind; the file keeps its size.",
        _add_gc,
        "kvstore gc chats.kv",
    ),
    "demo": (
        "demo",
        "Do the whole job on packaged real data in two processes, and check the result.",
        _add_demo,
        "kvstore demo",
    ),
    "bench": (
        "bench",
        "Measure size, speed, memory and start-up, after checking that results are equal.",
        _add_bench,
        "kvstore bench --data kv.safetensors --only codec --csv bench.csv",
    ),
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="kvstore", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, (module, text, add_arguments, example) in COMMANDS.items():
        command = commands.add_parser(
            name, help=text, description=text, epilog=f"example:\n  {example}", formatter_class=raw
        )
        add_arguments(command)
        command.add_argument("--json", action="store_true", help="machine-readable result")
        command.add_argument("--quiet", action="store_true", help="no progress, no notes")
        command.set_defaults(module=module, parser=command)
    return parser


def _version() -> str:
    from importlib.metadata import version

    return f"kvstore {version('kvstore')}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return the exit code.

    Wrong usage and ``-h`` leave by `SystemExit`, as argparse does.
    """
    accept_any_text()
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.version:
        print(_version())
        return 0
    if args.command is None:
        parser.error("a command is needed")

    from kvcodecs.errors import KvError

    try:
        with ending_signals():
            module = importlib.import_module(f"kvtools.{args.module}")
            code: int = getattr(module, f"run_{args.command}")(args)
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output left; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (KvError, OSError, MemoryError, UnicodeEncodeError) as error:
        print(f"kvstore: error: {_one_line(error)}", file=sys.stderr)
        return 1


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif isinstance(error, MemoryError):
        text = f"not enough memory: {error}".rstrip(": ")
    elif isinstance(error, UnicodeEncodeError):
        text = f"{error.object}: not valid UTF-8; choose another name"
    else:
        text = str(error) or type(error).__name__
    for advice, here in ADVICE.items():
        text = text.replace(advice, here)
    text = plain(" ".join(text.split()))
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + " ..."
