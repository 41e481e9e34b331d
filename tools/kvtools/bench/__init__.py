"""`kvstore bench`: one harness for every number the project states.

Results are compared with the input before anything is timed. Times are medians, measured in turns
where they are compared with each other.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvcodecs.codec import CodecConfig
from kvcodecs.errors import InvalidArgument

from kvtools.bench.rows import Row, environment, write_csv
from kvtools.codec_options import codec_config, given_options
from kvtools.info import codec_text
from kvtools.sample import Sample, load_sample
from kvtools.terminal import listed, note, number_text, progress, show_json, show_table

#: Sessions of these lengths are compared by the group `range`.
RANGE_TOKENS = (1024, 16384)
IMPORT_REPS = 5


def run_bench(args: argparse.Namespace) -> int:
    """Run the chosen groups, print their rows, and write them as CSV if asked to."""
    codec_config(args)  # wrong usage is reported first
    if args.device is not None:
        known: tuple[str, ...] = ("device",)
    elif args.family is not None:
        known = FAMILIES[args.family]
    else:
        known = tuple(GROUPS)
    usual = [name for name in known if name != "device" or args.device]  # few machines have one
    chosen = usual if args.only is None else args.only.split(",")
    unknown = [name for name in chosen if name not in known]
    if unknown:
        option = "" if args.device is None else f"--device {args.device} "
        args.parser.error(f"{option}--only {','.join(unknown)}: groups are {', '.join(known)}")
    if args.csv is not None and not Path(args.csv).resolve().parent.is_dir():
        raise InvalidArgument(f"{args.csv}: no such folder")
    sample = load_sample(args.data)
    config = codec_config(args, sample.model.dtype)
    rows: list[Row] = []
    with progress("bench", quiet=args.quiet or args.json) as advance:
        for done, name in enumerate(chosen):
            advance(done, len(chosen))
            with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
                rows += GROUPS[name](args, config, sample, Path(folder))
    measured = {row.group for row in rows}
    empty = [name for name in chosen if name not in measured]
    if empty:
        message = f"{listed(empty)}: only with --codec kvr1, which is compared with others there"
        if not rows:
            raise InvalidArgument(message)
        note(message, quiet=args.quiet)
    context = {
        "data": sample.label,
        **({"codec": codec_text(config.to_json())} if {*chosen} - WITHOUT_CODEC else {}),
        "reps": str(args.reps),
        **environment(),
    }
    if args.csv is not None:
        write_csv(args.csv, rows, context)
    if args.json:
        shown = [
            {"group": r.group, "name": r.name, "value": r.value, "unit": r.unit, "note": r.note}
            for r in rows
        ]
        show_json({"context": context, "rows": shown})
        return 0
    if not args.quiet:
        print("\n".join(f"{name}: {value}" for name, value in context.items()))
        print()
    _show(rows)
    return 0


def _show(rows: list[Row]) -> None:
    from kvtools.bench import device, normal_values, quality, schemes, vector_speed

    reports = {
        schemes.GROUP: schemes.show_schemes,
        device.GROUP: device.show_device,
        vector_speed.GROUP: vector_speed.show_vectors,
        normal_values.GROUP: normal_values.show_normal,
        quality.GROUP: quality.show_quality,
    }
    others = [row for row in rows if row.group not in reports]
    for group, show in reports.items():
        report = [row for row in rows if row.group == group]
        if report:
            show(report)
            if report[-1] is not rows[-1]:
                print()
    if others:
        lines = [(f"{r.group}: {r.name}", number_text(r.value), r.unit, r.note) for r in others]
        show_table("", ("what", "value", "unit", "note"), lines)


_Group = Callable[[argparse.Namespace, CodecConfig, Sample, Path], list[Row]]


def _codec(args: argparse.Namespace, config: CodecConfig, sample: Sample, _: Path) -> list[Row]:
    from kvtools.bench.speed import measure_codec

    return measure_codec(config, sample, args.reps)


def _rate(args: argparse.Namespace, config: CodecConfig, sample: Sample, _: Path) -> list[Row]:
    from kvtools.bench.rate import measure_rate

    return measure_rate(config, sample)


def _peers(args: argparse.Namespace, config: CodecConfig, sample: Sample, _: Path) -> list[Row]:
    from kvtools.bench.byte_coders import measure_peers

    return measure_peers(config, sample, args.reps)


def _file(args: argparse.Namespace, config: CodecConfig, sample: Sample, path: Path) -> list[Row]:
    from kvtools.bench.archive import measure_file

    return measure_file(config, sample, path, args.reps)


def _range(args: argparse.Namespace, config: CodecConfig, sample: Sample, path: Path) -> list[Row]:
    from kvtools.bench.archive import measure_range

    return measure_range(config, sample, path, args.reps, RANGE_TOKENS)


def _open(args: argparse.Namespace, config: CodecConfig, sample: Sample, path: Path) -> list[Row]:
    from kvtools.bench.archive import measure_open

    return measure_open(config, sample, path, args.reps)


def _append(args: argparse.Namespace, config: CodecConfig, sample: Sample, path: Path) -> list[Row]:
    from kvtools.bench.archive import measure_append

    return measure_append(config, sample, path)


def _prefix(args: argparse.Namespace, config: CodecConfig, sample: Sample, path: Path) -> list[Row]:
    from kvtools.bench.commits import measure_commits
    from kvtools.bench.many import measure_many
    from kvtools.bench.sharing import measure_sharing

    rows = measure_many(sample.token_ids, path, args.sessions, args.reps)
    rows += measure_sharing(config, sample, path, args.reps)
    return rows + measure_commits(config, sample, path)


def _zarr(args: argparse.Namespace, config: CodecConfig, sample: Sample, path: Path) -> list[Row]:
    from kvtools.bench.zarr_archives import measure_zarr

    return measure_zarr(config, sample, path, args.reps)


def _import(args: argparse.Namespace, config: CodecConfig, sample: Sample, _: Path) -> list[Row]:
    from kvtools.bench.processes import measure_import

    return measure_import(max(args.reps, IMPORT_REPS))


def _memory(args: argparse.Namespace, config: CodecConfig, sample: Sample, path: Path) -> list[Row]:
    from kvtools.bench.processes import measure_memory

    options = ["--codec", args.codec]
    for name, value in given_options(args).items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        options += ["--" + name.replace("_", "-"), text]
    return measure_memory(sample, path, args.memory_mb, options)


def _schemes(args: argparse.Namespace, _: CodecConfig, sample: Sample, __: Path) -> list[Row]:
    from kvtools.bench.schemes import measure_schemes

    return measure_schemes(sample, args.reps)


def _rows(args: argparse.Namespace, _: CodecConfig, sample: Sample, __: Path) -> list[Row]:
    from kvtools.bench.row_speed import measure_rows

    return measure_rows(sample, args.reps, all_sizes=args.only is not None)


def _attention(args: argparse.Namespace, _: CodecConfig, sample: Sample, path: Path) -> list[Row]:
    from kvtools.bench.attention import measure_attention

    return measure_attention(sample, args.reps, path)


def _flat(args: argparse.Namespace, _: CodecConfig, sample: Sample, path: Path) -> list[Row]:
    from kvtools.bench.flat import measure_flat

    return measure_flat(sample, args.reps, path)


def _vectors(args: argparse.Namespace, _: CodecConfig, sample: Sample, __: Path) -> list[Row]:
    from kvtools.bench.vector_speed import measure_vectors

    return measure_vectors(sample, args.reps)


def _normal(*_: object) -> list[Row]:
    from kvtools.bench.normal_values import measure_normal

    return measure_normal()


def _quality(_: argparse.Namespace, __: CodecConfig, sample: Sample, ___: Path) -> list[Row]:
    from kvtools.bench.quality import measure_quality

    return measure_quality(sample)


def _device(args: argparse.Namespace, config: CodecConfig, sample: Sample, _: Path) -> list[Row]:
    from kvtools.bench.device import measure_device

    return measure_device(config, sample, args.reps, quiet=args.quiet)


GROUPS: dict[str, _Group] = {
    "codec": _codec,
    "rate": _rate,
    "peers": _peers,
    "file": _file,
    "range": _range,
    "open": _open,
    "append": _append,
    "prefix": _prefix,
    "zarr": _zarr,
    "schemes": _schemes,
    "rows": _rows,
    "attention": _attention,
    "flat": _flat,
    "vectors": _vectors,
    "normal": _normal,
    "quality": _quality,
    "import": _import,
    "memory": _memory,
    "device": _device,
}

#: The groups of ``--family``.
FAMILIES: dict[str, tuple[str, ...]] = {
    "blockquant": ("schemes", "rows", "attention", "flat"),
    "fibquant": ("vectors", "normal", "quality"),
}
#: Those that ``--codec`` changes nothing of.
WITHOUT_CODEC = {*(name for groups in FAMILIES.values() for name in groups), "import"}
