"""`demo` and `bench` on the command line: their arguments."""

from __future__ import annotations

import argparse

from kvtools.command import Command
from kvtools.packing_commands import add_codec
from kvtools.values import path, up_to

#: The groups of `bench`.
BENCH_GROUPS = (
    "codec", "rate", "peers", "file", "range", "open", "append", "prefix", "zarr", "schemes",
    "rows", "attention", "flat", "vectors", "normal", "quality", "import", "memory", "device",
)  # fmt: skip
#: Bounds of what `bench` repeats and writes.
MAX_REPS = 10_000
MAX_MEMORY_MB = 1_000_000
MAX_SESSIONS = 1_000_000


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep", type=path, metavar="DIR", help="keep the archive in this folder")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=path, metavar="FILE", help="(default: the packaged sample)")
    add_codec(parser, kinds=False)
    parser.add_argument("--reps", type=up_to(MAX_REPS), default=5, metavar="N", help="(default: 5)")
    parser.add_argument(
        "--only",
        metavar="GROUPS",
        help=f"some of {','.join(BENCH_GROUPS)} (default: all but device)",
    )
    groups = parser.add_mutually_exclusive_group()
    groups.add_argument(
        "--family", choices=("blockquant", "fibquant"),
        help="blockquant: the groups about ggml's schemes (schemes, rows, attention, flat): what "
        "each does to K, V and attention, and how fast rows are coded and read; fibquant: those "
        "about FibQuant (vectors, normal, quality): its speed, its error on normal values, and "
        "what it does to K, V and attention beside others of as many bits; minutes, with --only "
        "less",
    )  # fmt: skip
    groups.add_argument(
        "--device", choices=("cuda",),
        help="cuda: the group device: decode on the GPU, 1 to 1,000,000 blocks of KVR1 or FibQuant "
        "at once, or lanes of TKV1, the parts of its blocks that decode by themselves",
    )  # fmt: skip
    parser.add_argument("--csv", type=path, metavar="FILE", help="write the rows here as well")
    parser.add_argument(
        "--memory-mb", type=up_to(MAX_MEMORY_MB), default=64, metavar="MB",
        help="size of the input of the memory group (default: 64)",
    )  # fmt: skip
    parser.add_argument(
        "--sessions", type=up_to(MAX_SESSIONS), default=1000, metavar="N",
        help="sessions in the archive of the prefix group (default: 1000)",
    )  # fmt: skip


COMMANDS = {
    "demo": Command(
        "demo",
        "Do the whole job on packaged real data in two processes, and check the result.",
        _add_demo,
        "kvstore demo",
    ),
    "bench": Command(
        "bench",
        "Measure size, speed, memory and start-up, after checking that results are equal.",
        _add_bench,
        "kvstore bench --data kv.safetensors --only codec --csv bench.csv",
    ),
}
