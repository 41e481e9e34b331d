"""The `kvstore` command: which commands there are, and how it ends.

Exit codes: 0 done, 1 an error (one line on stderr) or a failed check, 2 wrong usage, 130
interrupted. Arguments are in the modules ``*_commands``. What a command does lives in a module of
its own, which is imported when it runs, so that `kvstore -h` stays fast.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from kvtools import (
    archive_commands,
    migration_commands,
    packing_commands,
    session_commands,
    trial_commands,
)
from kvtools.command import Command
from kvtools.signals import ending_signals
from kvtools.terminal import accept_any_text, notes_of_log, plain
from kvtools.trial_commands import BENCH_GROUPS as BENCH_GROUPS

DESCRIPTION = """\
Keep attention KV caches in compressed archives.

An archive holds many sessions; a session is the K and V of one token sequence. Any token range
is read back within a stated error by decoding only the blocks that cover it.
"""

#: What the library advises its callers, and what that is for somebody at a shell.
ADVICE = {
    "open it with mode='r'": "get write access to it, or copy it and write to the copy",
    "open it with mode='a' to begin an archive": "kvstore pack begins an archive",
    "open it with mode='a' to begin one": "kvstore pack begins one",
    "reopen with a larger map_size": "remove sessions, or pack into another archive",
    "use Raw() or a larger bound": "use --codec raw or a larger bound",
    "ask for float32": "use --dtype float32",
    "open it with archive.session(...), or delete_session(...) it first": "--replace replaces it",
    "replace=True replaces it": "--replace replaces it",
    "to go on in this session, truncate it": "kvstore trim --to rolls this one back",
    "; commit first what was appended": "",
    "open it with mode='a' once, or run kvstore upgrade": "kvstore upgrade makes it",
    ", or None": ", or none",
    "go on with resume=True": "go on with --resume",
    "resume=True passes over it": "--resume passes over it",
    "open them with kvstore.flat.open": "kvstore ls, info, verify and migrate take them, migrate "
    "also to and from NAME.safetensors",
    "use backup=False": "use --no-backup",
    "unpin or delete sessions, close appenders, or raise the quota": "make room with kvstore pin "
    "--off, kvstore rm or a larger kvstore quota, or end what is appending to sessions",
}

#: Characters of an error message that are shown: a file's header may hold names of megabytes.
MAX_MESSAGE = 2000

EPILOG = """\
kvstore COMMAND -h explains a command and gives an example.
"""


#: In the order of ``kvstore -h``.
COMMANDS: dict[str, Command] = {
    **packing_commands.COMMANDS,
    **archive_commands.COMMANDS,
    **session_commands.COMMANDS,
    **migration_commands.COMMANDS,
    **trial_commands.COMMANDS,
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="kvstore", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, about in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=about.text,
            description=about.text,
            epilog=f"example:\n  {about.example}",
            formatter_class=raw,
        )
        about.add_arguments(command)
        command.add_argument("--json", action="store_true", help="machine-readable result")
        command.add_argument("--quiet", action="store_true", help="no progress, no notes")
        command.set_defaults(module=about.module, parser=command)
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
        with ending_signals(), notes_of_log(quiet=getattr(args, "quiet", False)):
            module = importlib.import_module(f"kvtools.{args.module}")
            code: int = getattr(module, f"run_{args.command.replace('-', '_')}")(args)
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
