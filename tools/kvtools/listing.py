"""`kvstore ls`, `info`, `verify`, `rm`, `gc`: what is in an archive, and whether it is sound."""

from __future__ import annotations

import argparse
from typing import Any

from kvcodecs.errors import KvError

import kvstore
from kvstore import SessionInfo, StreamInfo
from kvtools.terminal import number_text, progress, show_json, show_pairs, show_table, size_text


def run_ls(args: argparse.Namespace) -> int:
    """List sessions, in byte order of their names."""
    with kvstore.open(args.archive) as archive:
        sessions = archive.sessions()
    if args.json:
        show_json([_summary(info) for info in sessions])
        return 0
    rows = [
        (
            info.name,
            info.model.name,
            str(info.model.n_layers),
            str(info.n_tokens),
            number_text(info.bits_per_value, 3),
            size_text(info.total_bytes),
        )
        for info in sessions
    ]
    show_table("", ("session", "model", "layers", "tokens", "bits/value", "size"), rows)
    return 0


def run_info(args: argparse.Namespace) -> int:
    """Describe an archive and its sessions from records and frame headers."""
    with kvstore.open(args.archive) as archive:
        about = archive.info()
        if args.session is None:
            sessions = archive.sessions()
        else:
            sessions = [archive.session(args.session).info()]
    if args.json:
        show_json(
            {
                "path": about.path,
                "backend": about.backend,
                "writer": about.writer,
                "created": about.created,
                "n_sessions": about.n_sessions,
                "file_bytes": about.file_bytes,
                "free_bytes": about.free_bytes,
                "frame_bytes": about.frame_bytes,
                "file_bytes_over_frame_bytes": about.overhead,
                "sessions": [_details(info, layers=args.layers) for info in sessions],
            }
        )
        return 0
    show_pairs(
        [
            ("archive", about.path),
            ("backend", about.backend),
            ("sessions", str(about.n_sessions)),
            ("file", f"{size_text(about.file_bytes)}, {size_text(about.free_bytes)} of it free"),
            ("frames", size_text(about.frame_bytes)),
            ("file / frames", number_text(about.overhead)),
        ]
    )
    for info in sessions:
        print()
        _show_session(info, layers=args.layers)
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Check everything; print one line per problem and exit with 1 if there is any."""
    with kvstore.open(args.archive) as archive:
        label = "decode" if args.decode else "verify"
        with progress(label, quiet=args.quiet or args.json) as advance:
            report = archive.verify(decode=args.decode, progress=advance)
    if args.json:
        show_json(
            {
                "ok": report.ok,
                "problems": [problem._asdict() for problem in report.problems],
                "n_sessions": report.n_sessions,
                "n_frames": report.n_frames,
                "frame_bytes": report.frame_bytes,
                "n_values": report.n_values,
                "n_leftover": report.n_leftover,
                "decoded": report.decoded,
            }
        )
        return 0 if report.ok else 1
    for problem in report.problems:
        print(" ".join(f"{problem.kind}: {problem.message}".split()))
    if not args.quiet:
        verdict = "sound" if report.ok else f"{len(report.problems)} problems"
        print(
            f"{args.archive}: {verdict}; {report.n_sessions} sessions, {report.n_frames} frames, "
            f"{size_text(report.frame_bytes)}"
            + (", all decoded" if report.decoded and report.ok else "")
        )
        if report.n_leftover:
            print(
                f"{report.n_leftover} values left over from killed writers; they do no harm, and "
                "`kvstore gc` removes them"
            )
    return 0 if report.ok else 1


def run_gc(args: argparse.Namespace) -> int:
    """Remove leftovers of killed writers."""
    with _existing(args.archive) as archive:
        n_bytes = archive.gc()
    if args.json:
        show_json({"archive": args.archive, "freed_bytes": n_bytes})
    elif not args.quiet:
        print(f"{args.archive}: {size_text(n_bytes)} freed for what is written next")
    return 0


def run_rm(args: argparse.Namespace) -> int:
    """Delete sessions; a missing one is an error, reported after the others are gone."""
    removed, errors = [], []
    with _existing(args.archive) as archive:
        for name in args.session:
            try:
                archive.delete_session(name)
                removed.append(name)
            except KvError as error:
                errors.append(error)
    if args.json:
        show_json({"removed": removed})
    elif not args.quiet:
        for name in removed:
            print(f"removed {name!r}")
    if errors:
        raise errors[0]
    return 0


def _existing(path: str) -> kvstore.Archive:
    """Open an archive for writing; a missing one is an error, not an empty new one."""
    kvstore.open(path).close()
    return kvstore.open(path, mode="a")


def _summary(info: SessionInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "model": info.model.name,
        "n_layers": info.model.n_layers,
        "n_tokens": info.n_tokens,
        "n_values": info.n_values,
        "total_bytes": info.total_bytes,
        "bits_per_value": info.bits_per_value,
        "ratio_fp16": info.ratio_fp16,
    }


def _details(info: SessionInfo, *, layers: bool) -> dict[str, Any]:
    details = {
        **_summary(info),
        "identity": info.model.to_json(),
        "k_state": info.k_state,
        "has_token_ids": info.has_token_ids,
        "codecs": {kind: dict(config) for kind, config in info.codecs.items()},
        "created": info.created,
        "metadata": dict(info.metadata),
        "n_frames": info.n_frames,
        "frame_bytes": info.frame_bytes,
        "payload_bytes": info.payload_bytes,
        "header_bytes": info.header_bytes,
        "record_bytes": info.record_bytes,
        "max_error": info.error.max_error,
        "rms_error": info.error.rms,
        "largest_error_over_bound": _error_over_bound(info),
    }
    if layers:
        details["layers"] = [_stream_details(stream) for stream in info.streams]
    return details


def _stream_details(stream: StreamInfo) -> dict[str, Any]:
    return {
        "layer": stream.layer,
        "kind": stream.kind,
        "heads": stream.heads,
        "head_dim": stream.head_dim,
        "codec": stream.codec,
        "step": stream.step,
        "bound": _bound(stream),
        "max_error": stream.error.max_error,
        "rms_error": stream.error.rms,
        "start_token": stream.start_token,
        "n_head_tokens": stream.n_head_tokens,
        "block_tokens": stream.block_tokens,
        "n_frames": stream.n_frames,
        "n_values": stream.n_values,
        "total_bytes": stream.total_bytes,
        "bits_per_value": stream.bits_per_value,
    }


def _show_session(info: SessionInfo, *, layers: bool) -> None:
    model = info.model
    rope = model.rope
    error = info.error
    show_pairs(
        [
            ("session", info.name),
            ("model", f"{model.name} {model.revision}".strip()),
            ("layers", f"{model.n_layers}: {_geometry(info)}"),
            (
                "rope",
                "unknown"
                if rope is None
                else f"{rope.n_pairs} pairs, {rope.style}, scaling {rope.scaling:g}",
            ),
            ("dtype", model.dtype or "float32"),
            ("tokens", f"{info.n_tokens}{', with ids' if info.has_token_ids else ''}"),
            ("codec", _codec_text(info)),
            ("bits/value", number_text(info.bits_per_value)),
            ("ratio", f"{number_text(info.ratio_fp16, 3)} to float16"),
            ("size", f"{size_text(info.total_bytes)} in {info.n_frames} frames"),
            ("max error", f"{number_text(error.max_error)}, {_bound_text(info)}"),
            ("RMS error", number_text(error.rms)),
        ]
    )
    if layers:
        print()
        rows = [
            (
                f"{stream.layer} {stream.kind}",
                f"{stream.heads} x {stream.head_dim}",
                f"{stream.block_tokens}",
                f"{stream.n_frames}",
                number_text(stream.bits_per_value, 4),
                number_text(stream.error.max_error),
                number_text(_bound(stream)),
                number_text(stream.error.rms),
            )
            for stream in info.streams
        ]
        columns = ("layer", "heads x dim", "block", "frames", "bits/value", "max error")
        show_table("", (*columns, "bound", "RMS error"), rows)


def _bound(stream: StreamInfo) -> float | None:
    """Largest error the codec allows in the coded domain; 0 when lossless, None when unknown."""
    if stream.step is not None:
        return stream.step / 2
    return 0.0 if stream.error.max_error == 0 else None


def _error_over_bound(info: SessionInfo) -> float | None:
    """Largest ratio of measured error to bound over all streams; None without a bound."""
    ratios = [
        stream.error.max_error / bound
        for stream in info.streams
        if (bound := _bound(stream)) and stream.error.is_known
    ]
    return max(ratios, default=None)


def _bound_text(info: SessionInfo) -> str:
    ratio = _error_over_bound(info)
    if ratio is None:
        return "bit exact" if info.error.max_error == 0 else "no bound recorded"
    return f"at most {ratio:.4f} of each stream's bound"


def _geometry(info: SessionInfo) -> str:
    shapes = {
        f"{layer.heads} heads x {layer.head_dim_k}"
        + ("" if layer.head_dim_v == layer.head_dim_k else f" (V: {layer.head_dim_v or 'none'})")
        for layer in info.model.layers
    }
    return shapes.pop() if len(shapes) == 1 else f"{len(shapes)} geometries"


def _codec_text(info: SessionInfo) -> str:
    texts = {
        kind: " ".join(f"{key}={value}" for key, value in config.items() if value is not None)
        for kind, config in info.codecs.items()
    }
    if len(set(texts.values())) == 1:
        return texts["k"]
    return "; ".join(f"{kind}: {text}" for kind, text in texts.items())
