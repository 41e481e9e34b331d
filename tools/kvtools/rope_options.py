"""The RoPE options of `pack`, and how they go with what the input says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from kvcodecs.errors import Corrupt, InvalidArgument, KvError
from kvcodecs.rope import Rope

from kvstore import Model
from kvtools.hints import read_json, rope_from
from kvtools.kvfile import KvFile
from kvtools.source import build_model, has_rope
from kvtools.terminal import note

_OPTIONS = ("inv_freq", "rope_theta", "rope_style", "rope_scaling")


def rope_option(args: argparse.Namespace, kv: KvFile) -> Rope | None:
    """Return the RoPE that the options state, or None to leave it to the file."""
    style, scaling = args.rope_style, args.rope_scaling
    if args.rope_theta is not None:
        widths = {layer.k.head_dim for layer in kv.layers}
        if args.rotary_dim is None and len(widths) > 1:
            raise InvalidArgument("layers have different head_dim: give --rotary-dim or --inv-freq")
        rotary_dim = args.rotary_dim or min(widths)
        if rotary_dim > min(widths):
            raise InvalidArgument(
                f"--rotary-dim {rotary_dim}: K of {kv.file.path} has head_dim {min(widths)}, and "
                "no more channels than that can be rotated"
            )
        with np.errstate(over="ignore"):  # Rope says it better than a warning
            return Rope.from_theta(
                args.rope_theta, rotary_dim, style=style or "half", scaling=scaling or 1.0
            )
    if args.inv_freq is not None:
        return rope_from(
            _frequencies(args.inv_freq),
            where="--inv-freq",
            style=style or "half",
            scaling=scaling or 1.0,
        )
    if style is None and scaling is None:
        return None
    stated = kv.hints.rope()
    if stated is None:
        raise InvalidArgument(
            f"{kv.file.path}: --rope-style and --rope-scaling need frequencies: "
            "give --inv-freq or --rope-theta as well"
        )
    return Rope(stated.inv_freq, style=style or stated.style, scaling=scaling or stated.scaling)


def _frequencies(option: str) -> object:
    """Return the list of `--inv-freq`: inline JSON, or a file that holds it."""
    if option.lstrip().startswith("["):
        try:
            return json.loads(option)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"--inv-freq: not valid JSON: {error}") from error
    content = read_json(Path(option))
    if isinstance(content, dict):
        for key in ("rope_inv_freq_f32", "inv_freq"):
            if key in content:
                return content[key]
        raise Corrupt(f"{option}: no rope_inv_freq_f32 and no inv_freq")
    return content


def check_rope(args: argparse.Namespace, kv: KvFile, model: Model) -> None:
    """Refuse K that cannot be brought before RoPE, and tell the user what may surprise.

    Raises
    ------
    InvalidArgument
        K is after RoPE, and nothing says which.
    """
    if has_rope(model):
        _note_overruled(args, kv, model)
        return
    if kv.k_state == "post":
        raise InvalidArgument(
            f"{kv.file.path}: K is after RoPE and its frequencies are unknown; give --inv-freq or "
            "--rope-theta, put rope_inv_freq_f32 into the metadata or a .json file beside the "
            "input, or say --k-state pre if the model has no RoPE"
        )
    note(
        "no RoPE frequencies known: K is kept as it is and cannot be read after RoPE "
        "(--inv-freq or --rope-theta states them)",
        quiet=args.quiet,
    )


def _note_overruled(args: argparse.Namespace, kv: KvFile, model: Model) -> None:
    given = ["--" + name.replace("_", "-") for name in _OPTIONS if getattr(args, name) is not None]
    if not given:
        return
    try:
        stated = build_model(kv)
    except KvError:
        difference: str | None = "it cannot be used"
    else:
        if not has_rope(stated):
            return
        for index in range(model.n_layers):
            ropes = stated.stream(index, "k").rope, model.stream(index, "k").rope
            difference = _difference(*ropes)
            if difference is not None:
                break
    if difference is not None:
        wins = "wins" if len(given) == 1 else "win"
        note(
            f"{' and '.join(given)} {wins} over the RoPE that {kv.file.path} or the .json file "
            f"beside it states ({difference})",
            quiet=args.quiet,
        )


def _difference(stated: Rope | None, given: Rope | None) -> str | None:
    """Say how two layers' RoPE differ, or None."""
    if stated == given:
        return None
    if stated is None or given is None:
        return "not the same layers have one"
    if stated.n_pairs != given.n_pairs:
        return f"{given.n_pairs} pairs, not {stated.n_pairs}"
    if stated.style != given.style:
        return f"{given.style}, not {stated.style}"
    if stated.scaling != given.scaling:
        return f"scaling {given.scaling:g}, not {stated.scaling:g}"
    i = int(np.abs(given.inv_freq - stated.inv_freq).argmax())
    return f"frequency {i} is {given.inv_freq[i]:.9g}, not {stated.inv_freq[i]:.9g}"
