"""`kvstore info`: identity, geometry, sizes and recorded errors of sessions, without decoding."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvcodecs.shared import short

import kvstore
from kvstore import ArchiveInfo, Model, SessionInfo, StreamInfo
from kvstore.backend import ReaderInfo
from kvstore.versions import FORMAT_VERSION
from kvtools.flat_sessions import flat_sessions
from kvtools.terminal import (
    count_text,
    date_text,
    number_text,
    plain,
    ratio_text,
    show_json,
    show_pairs,
    show_table,
    size_text,
)

#: What a model may state besides; shown where it does.
IDENTITY = ("weights", "tokenizer", "adapter", "layout", "shard", "salt")
#: Characters of a session's metadata that `info` shows; ``--json`` shows all of it.
MAX_METADATA = 500
#: What errors and bounds refer to, for K that was given after RoPE.
CODED_DOMAIN = "in the coded domain, K before RoPE"


def run_info(args: argparse.Namespace) -> int:
    """Describe an archive and its sessions from records and frame headers."""
    folders = flat_sessions(args.archive)
    if folders is not None:
        from kvtools import flat_reports

        return flat_reports.info(args, folders)
    with kvstore.open(args.archive) as archive:
        about = archive.info()
        damaged: dict[str, kvstore.KvError] = {}
        if args.session is None:
            found = archive.survey()
            sessions, damaged = found.sessions, found.damaged
        else:
            sessions = [archive.session(args.session).info()]
    if args.json:
        show_json(
            {
                "path": about.path,
                "backend": about.backend,
                "format": about.format,
                "writer": about.writer,
                "created": about.created,
                "n_sessions": about.n_sessions,
                "file_bytes": about.file_bytes,
                "free_bytes": about.free_bytes,
                "used_bytes": about.used_bytes,
                "quota_bytes": about.quota_bytes,
                "index_bytes": about.index_bytes,
                "object_bytes": about.object_bytes,
                "n_pinned": about.n_pinned,
                "n_readers": len(about.readers),
                "oldest_reader": asdict(about.readers[0]) if about.readers else None,
                "frame_bytes": about.frame_bytes,
                "file_bytes_over_frame_bytes": about.overhead,
                "sessions": [_details(info, layers=args.layers) for info in sessions],
                "damaged": {name: str(error) for name, error in damaged.items()},
            }
        )
        return 1 if damaged else 0
    _show_archive(about)
    for info in sessions:
        print()
        _show_session(info, layers=args.layers)
    return show_damaged(damaged)


def _show_archive(about: ArchiveInfo) -> None:
    pinned = f", {about.n_pinned} of them pinned" if about.n_pinned else ""
    pairs = [
        ("archive", about.path),
        ("backend", about.backend),
        ("format", format_text(about.format)),
        ("sessions", f"{about.n_sessions}{pinned}"),
        ("file", f"{size_text(about.file_bytes)}, {size_text(about.free_bytes)} of it free"),
        ("used", size_text(about.used_bytes)),
        ("quota", quota_text(about.quota_bytes)),
        ("frames", size_text(about.frame_bytes)),
        ("index", size_text(about.index_bytes)),
        *((("codebooks", size_text(about.object_bytes)),) if about.object_bytes else ()),
        ("file / frames", number_text(about.overhead)),
    ]
    if about.readers:
        pairs.append(("oldest reader", _reader_text(about.readers[0])))
    show_pairs(pairs)


def format_text(version: int) -> str:
    """Write the version of the archive format, and what to do about an old one."""
    new = f", {FORMAT_VERSION} is the newest: `kvstore upgrade` makes it that"
    return f"{version}{new if version < FORMAT_VERSION else ''}"


def _reader_text(reader: ReaderInfo) -> str:
    behind = count_text(reader.n_behind, "transaction")
    age = "" if reader.age_seconds is None else f", for {reader.age_seconds:.0f} s"
    return f"process {reader.pid}, {behind} behind{age}"


def quota_text(quota: int | None) -> str:
    """Write a quota such as ``"10.00 GB"``, or ``"none"``."""
    return "none" if quota is None else size_text(quota)


def show_damaged(damaged: Mapping[str, kvstore.KvError]) -> int:
    """Say on stderr which sessions cannot be read, and return the exit code."""
    for name, error in damaged.items():
        text = f"kvstore: damaged session {name!r}: {error}; `kvstore rm` removes it"
        print(plain(" ".join(text.split())), file=sys.stderr)
    return 1 if damaged else 0


def session_sizes(info: SessionInfo) -> dict[str, Any]:
    """Return how large a session is, for JSON."""
    return {
        "n_values": info.n_values,
        "total_bytes": info.total_bytes,
        "shared_bytes": info.shared_bytes,
        "object_bytes": info.object_bytes,
        "bits_per_value": info.bits_per_value,
        "ratio_fp16": info.ratio_fp16,
    }


def _details(info: SessionInfo, *, layers: bool) -> dict[str, Any]:
    details = {
        "name": info.name,
        "model": info.model.name,
        "n_layers": info.model.n_layers,
        "n_tokens": info.n_tokens,
        "first_token": info.first_token,
        "pinned": info.pinned,
        "finished": info.finished,
        "zarr_group": info.zarr_group,
        **session_sizes(info),
        "identity": info.model.to_json(),
        "k_state": info.k_state,
        "has_token_ids": info.has_token_ids,
        "codecs": {kind: dict(config) for kind, config in info.codecs.items()},
        "created": info.created,
        "updated": info.updated,
        "metadata": dict(info.metadata),
        "n_frames": info.n_frames,
        "frame_bytes": info.frame_bytes,
        "payload_bytes": info.payload_bytes,
        "header_bytes": info.header_bytes,
        "record_bytes": info.record_bytes,
        "max_error": info.error.max_error,
        "rms_error": info.error.rms,
        "n_recoded": info.n_recoded,
        "largest_error_over_bound": _error_over_bound(info),
    }
    if layers:
        details["layers"] = [
            _stream_details(info, stream, info.model.layers[stream.layer].window)
            for stream in info.streams
        ]
    return details


def _stream_details(info: SessionInfo, stream: StreamInfo, window: int | None) -> dict[str, Any]:
    return {
        "layer": stream.layer,
        "kind": stream.kind,
        "window": window,
        "heads": stream.heads,
        "head_dim": stream.head_dim,
        "codec": stream.codec,
        "n_vectors": stream.n_vectors,
        "n_raw_vectors": stream.n_raw_vectors,
        "codebooks": [digest.hex() for digest in stream.objects],
        "step": stream.step,
        "lossless": stream.lossless,
        "bound": _bound(info, stream),
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
    error, bound = info.error, ", a bound" if info.n_recoded else ""
    pairs = [
        ("session", info.name),
        ("model", f"{model.name} {model.revision}".strip()),
        ("layers", f"{model.n_layers}: {geometry_text(model)}"),
        ("rope", rope_text(model)),
        ("dtype", model.dtype or "float32"),
        *((name, str(value)) for name in IDENTITY if (value := getattr(model, name))),
        ("tokens", _tokens_text(info)),
        ("K given", f"{'after' if info.k_state == 'post' else 'before'} RoPE ({info.k_state})"),
        ("codec", _codec_text(info)),
        *(
            (("codebook", f"{short(digest)}, {size_text(n_bytes)}"))
            for digest, n_bytes in sorted(info.objects.items())
        ),
        *((("kept raw", _raw_text(info)),) if any(s.n_raw_vectors for s in info.streams) else ()),
        ("bits/value", number_text(info.bits_per_value)),
        ("ratio", ratio_text(info.ratio_fp16)),
        ("size", f"{size_text(info.total_bytes)} in {count_text(info.n_frames, 'frame')}"),
        *(
            (("shared", f"{size_text(info.shared_bytes)} of it, with other sessions"),)
            if info.shared_bytes
            else ()
        ),
        ("max error", _error_text(info)),
        *((("RMS error", number_text(error.rms) + bound),) if error.is_known else ()),
        ("created", date_text(info.created)),
        ("committed", date_text(info.updated)),
        *((("pinned", "yes"),) if info.pinned else ()),
        *((("sealed", "yes: nothing is appended any more"),) if info.finished else ()),
        *((("zarr group", info.zarr_group),) if info.zarr_group is not None else ()),
    ]
    if info.metadata:
        pairs.append(("metadata", metadata_text(info.metadata)))
    show_pairs(pairs)
    if layers:
        print()
        # Most models have no windows: their tables stay without the columns.
        windowed = any(layer.window is not None for layer in model.layers)
        rows = [
            (
                f"{stream.layer} {stream.kind}",
                f"{stream.heads} x {stream.head_dim}",
                *(_window_cells(model, stream) if windowed else ()),
                f"{stream.block_tokens}",
                f"{stream.n_frames}",
                number_text(stream.bits_per_value, 4),
                number_text(stream.error.max_error),
                number_text(_bound(info, stream)),
                number_text(stream.error.rms),
            )
            for stream in info.streams
        ]
        columns = (
            *("layer", "heads x dim"),
            *(("window", "first token") if windowed else ()),
            *("block", "frames", "bits/value", "max error", "bound", "RMS error"),
        )
        title = f"errors and bounds: {CODED_DOMAIN}" if info.k_state == "post" else ""
        show_table(title, columns, rows)


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """Write a session's metadata, of a long one its beginning."""
    text = json.dumps(dict(metadata), ensure_ascii=False)
    cut = "... (--json shows all)" if len(text) > MAX_METADATA else ""
    return text[:MAX_METADATA] + cut


def _tokens_text(info: SessionInfo) -> str:
    text = str(info.n_tokens)
    if info.first_token:
        text = f"{info.n_tokens}, those before {info.first_token} trimmed"
    return text + (", with ids" if info.has_token_ids else "")


def _raw_text(info: SessionInfo) -> str:
    n_raw = sum(stream.n_raw_vectors for stream in info.streams)
    n = sum(stream.n_vectors for stream in info.streams)
    return f"{n_raw} of {n} vectors ({n_raw / n:.2%}), one head of one token each"


def _window_cells(model: Model, stream: StreamInfo) -> tuple[str, str]:
    window = model.layers[stream.layer].window
    return "-" if window is None else str(window), str(stream.start_token)


def _bound(info: SessionInfo, stream: StreamInfo) -> float | None:
    """Largest error the codec allows in the coded domain; 0 when exact, None where it states none.

    Of what was coded anew only the last codec is known, and not how far off its input was.
    """
    if info.n_recoded:
        return None
    if stream.step is not None:
        return stream.step / 2
    in_head = stream.n_head_tokens >= stream.n_tokens - stream.start_token
    return 0.0 if stream.lossless or in_head else None


def _error_over_bound(info: SessionInfo) -> float | None:
    """Largest ratio of measured error to bound over all streams; None without a bound."""
    ratios = [
        stream.error.max_error / bound
        for stream in info.streams
        if (bound := _bound(info, stream)) and stream.error.is_known
    ]
    return max(ratios, default=None)


def _error_text(info: SessionInfo) -> str:
    if info.error.is_known:
        return f"{number_text(info.error.max_error)}, {_bound_text(info)}"
    return "not known: some rows came from where it is not kept, such as flat layers"


def _bound_text(info: SessionInfo) -> str:
    if info.n_recoded:
        times = count_text(info.n_recoded + 1, "coding")
        return f"a bound, of {times} together: kvstore migrate --codec coded it anew"
    ratio = _error_over_bound(info)
    unbound = any(_bound(info, stream) is None for stream in info.streams)
    if ratio is None:
        return "measured; the codec states no bound" if unbound else "bit exact"
    text = f"at most {ratio:.4f} of each stream's bound"
    if unbound:
        text += ", where the codec states one"
    if info.k_state == "post":
        return f"{text} (in float32, {CODED_DOMAIN})"
    return f"{text} (in float32)"


def rope_text(model: Model) -> str:
    """Write what RoPE a model has."""
    ropes = [model.stream(layer, "k").rope for layer in range(model.n_layers)]
    known = {rope for rope in ropes if rope is not None}
    if not known:
        return "unknown"
    rope = known.pop()
    text = f"{rope.n_pairs} pairs, {rope.style}, scaling {rope.scaling:g}"
    if known:
        text = f"{len(known) + 1} different ones"
    without = ropes.count(None)
    return text + (f"; {count_text(without, 'layer')} without" if without else "")


def geometry_text(model: Model) -> str:
    """Write the geometry of layers, such as ``"4 heads x 64"``."""
    shapes = {
        f"{layer.heads} heads x {layer.head_dim_k}"
        + ("" if layer.head_dim_v == layer.head_dim_k else f" (V: {layer.head_dim_v or 'none'})")
        for layer in model.layers
    }
    return shapes.pop() if len(shapes) == 1 else f"{len(shapes)} geometries"


def _codec_text(info: SessionInfo) -> str:
    texts = {kind: codec_text(config) for kind, config in info.codecs.items()}
    if len(set(texts.values())) == 1:
        return texts["k"]
    return "; ".join(f"{kind}: {text}" for kind, text in texts.items())


def codec_text(config: Mapping[str, object]) -> str:
    """Write a codec's configuration such as ``"tkv1 rel_step=0.25 sink=4"``."""
    options = {k: v for k, v in config.items() if k != "codec" and v not in (None, [])}
    name = str(config["codec"])
    if "block_dim" in options:
        name += f".{options.pop('block_dim')}x{options.pop('codebook_size')}"
    return " ".join([name, *(f"{k}={_value_text(v)}" for k, v in options.items())])


def _value_text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
