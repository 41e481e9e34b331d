"""The codec that options on the command line ask for; see `packing_commands.add_codec`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from kvcodecs.codec import CodecConfig, config_by_name
from kvcodecs.spec import KINDS, Kind

import kvstore

POLICIES = ("rel_step", "step", "max_error", "rmse", "bpv")
#: Options that a codec with a quantiser takes.
STEP_OPTIONS = (*POLICIES, "sink", "sink_div")
#: Options that FibQuant takes, and what it calls them.
FIB_OPTIONS = {
    "block_dim": "block_dim",
    "codebook_size": "codebook_size",
    "rotation": "rotation",
    "seed": "seed",
    "axis": "axis",
    "raw_first": "first_tokens",
    "raw_last": "last_tokens",
    "raw_layers": "raw_layers",
    "raw_heads": "raw_heads",
    "on_failure": "on_failure",
}
#: All options of codecs.
CODEC_OPTIONS = ("k_codec", "v_codec", *STEP_OPTIONS, *FIB_OPTIONS)

_WITH_STEP: dict[str, type[kvstore.KVR1] | type[kvstore.TKV1]] = {
    "kvr1": kvstore.KVR1,
    "tkv1": kvstore.TKV1,
}
_FLOAT32: Mapping[Kind, str] = {"k": "float32", "v": "float32"}


def codec_configs(
    args: argparse.Namespace, raw_dtypes: Mapping[Kind, str] = _FLOAT32
) -> dict[Kind, CodecConfig]:
    """Return the codecs of K and V that are asked for; wrong usage exits.

    `raw_dtypes` are what raw values of each are kept in.
    """
    names: dict[Kind, str] = {kind: getattr(args, f"{kind}_codec") or args.codec for kind in KINDS}
    given = given_options(args)
    taken = {option for name in names.values() for option in _options_of(name)}
    for option in given:
        if option not in taken:
            asked = " and ".join(dict.fromkeys(names.values()))
            args.parser.error(
                f"{_flag(option)} does not go with --codec {asked}; {_codecs_of(option)}"
            )
    return {kind: _config(name, given, raw_dtypes[kind]) for kind, name in names.items()}


def codec_config(args: argparse.Namespace, raw_dtype: str = "float32") -> CodecConfig:
    """Return the codec of both K and V; wrong usage exits."""
    return codec_configs(args, {"k": raw_dtype, "v": raw_dtype})["k"]


def other_codecs(args: argparse.Namespace) -> dict[Kind, CodecConfig] | None:
    """Return the codecs that are asked for where each session has its own, or None."""
    named = args.codec is not None or (args.k_codec is not None and args.v_codec is not None)
    if named:
        return codec_configs(args)
    for name in CODEC_OPTIONS:
        if getattr(args, name) is not None:
            args.parser.error(f"{_flag(name)} goes with --codec")
    return None


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of codecs that were given, whatever the codec."""
    options = (*STEP_OPTIONS, *FIB_OPTIONS)
    return {name: value for name in options if (value := getattr(args, name)) is not None}


def _options_of(name: str) -> tuple[str, ...]:
    if name in _WITH_STEP:
        return STEP_OPTIONS
    if name == "fibquant":
        return tuple(FIB_OPTIONS)
    # The scheme says what the codebook is.
    is_fib = name.startswith("fibquant.")
    return tuple(set(FIB_OPTIONS) - {"block_dim", "codebook_size"}) if is_fib else ()


def _codecs_of(option: str) -> str:
    if option in ("block_dim", "codebook_size"):
        return "it goes with fibquant, where fibquant.KxN does not name it"
    return "it goes with fibquant" if option in FIB_OPTIONS else "it goes with kvr1 and tkv1"


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _config(name: str, given: Mapping[str, Any], raw_dtype: str) -> CodecConfig:
    options = {option: given[option] for option in _options_of(name) if option in given}
    if name in _WITH_STEP:
        return _WITH_STEP[name](**options)
    if name.startswith("fibquant"):
        fields = {FIB_OPTIONS[option]: value for option, value in options.items()}
        return dataclasses.replace(cast(kvstore.FibQuant, config_by_name(name)), **fields)
    return kvstore.Raw(raw_dtype) if name == "raw" else kvstore.GGML(name)
