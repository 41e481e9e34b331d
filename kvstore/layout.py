"""How a new session is laid out: its codecs, the blocks of each stream, and their writers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np
from kvcodecs.codec import CodecConfig, codec_for, config_by_name, config_of_layer, raw_layers
from kvcodecs.errors import InvalidArgument
from kvcodecs.spec import KINDS, MAX_BLOCK_TOKENS, Kind, StreamSpec

from .identity import Model
from .records import located
from .session_record import SessionRecord, StreamName, StreamState
from .stream import StreamWriter

#: What a caller asks of both streams: a configuration, or the name of a codec without options.
Codecs: TypeAlias = "CodecConfig | str | Mapping[Kind, CodecConfig | str]"

#: What ``block_tokens="auto"`` aims at: frames of 32 KB at 2.5 bits per value, or what a codec of
#: fixed rate has. Pages of 4 KB then waste 6 % on average, which leaves room for records within
#: 1.08 times the frames.
_FRAME_BYTES: Final = 32768
_BITS_PER_VALUE: Final = 2.5
_MIN_BLOCK: Final = 128
_MAX_BLOCK: Final = 1024
MAX_FIT_TOKENS: Final = 1 << 16


def auto_block_tokens(spec: StreamSpec, bits_per_value: float = _BITS_PER_VALUE) -> int:
    """Return the least power of two from 128 to 1024 whose frames reach about 32 KB.

    LMDB rounds values up to pages of 4 KB, so small frames waste much.
    """
    block = _MIN_BLOCK
    while block < _MAX_BLOCK and block * spec.channels * bits_per_value / 8 < _FRAME_BYTES:
        block *= 2
    return block


def new_layout(
    model: Model,
    configs: Mapping[Kind, CodecConfig],
    block_tokens: object,
    has_header: bool,
    where: str,
) -> dict[StreamName, StreamState]:
    """Return the layout of a session without tokens.

    Raises
    ------
    InvalidArgument
        `block_tokens` is out of range, or a codec can code no values of a stream.
    """
    fixed = None if isinstance(block_tokens, str) and block_tokens == "auto" else block_tokens
    if isinstance(fixed, np.integer):
        fixed = int(fixed)
    # A bool is an int to Python, but not in JSON.
    if fixed is not None and not (type(fixed) is int and 1 <= fixed <= MAX_BLOCK_TOKENS):
        raise InvalidArgument(f"block_tokens {block_tokens!r}: 'auto' or 1 to {MAX_BLOCK_TOKENS}")
    layout: dict[StreamName, StreamState] = {}
    check_streams(model, configs, where)
    for name in model.streams():
        n = fixed
        if n is None:
            config = config_of_layer(configs[name[1]], name[0])
            rate = getattr(config, "bits_per_value", _BITS_PER_VALUE)
            n = auto_block_tokens(model.stream(*name), rate)
        layout[name] = StreamState(n, has_header=has_header)
    return layout


def check_streams(model: Model, configs: Mapping[Kind, CodecConfig], where: str) -> None:
    """Raise `InvalidArgument`, naming layer and kind, if a codec cannot code a stream at all.

    Also if it is to keep layers raw that the model does not have.
    """
    n_layers = len(model.layers)
    for kind, config in configs.items():
        missing = [layer for layer in raw_layers(config) if layer >= n_layers]
        if missing:
            raise InvalidArgument(
                f"{where} {kind}: {config.codec}: raw layer {missing[0]}: the model has layers 0 "
                f"to {n_layers - 1}"
            )
    for layer, kind in model.streams():
        with located(f"{where} layer {layer} {kind}"):
            config = config_of_layer(configs[kind], layer)
            codec_for(config).check_stream(config, model.stream(layer, kind))


def check_configs(codec: Codecs) -> dict[Kind, CodecConfig]:
    """Return one configuration per kind; a name is that of a codec without options.

    Raises
    ------
    InvalidArgument
        Not a configuration, or a mapping with other keys than "k" and "v".
    """
    if isinstance(codec, Mapping) and set(codec) != set(KINDS):
        raise InvalidArgument(f"codec: a mapping needs the keys 'k' and 'v', has {list(codec)}")
    asked = codec if isinstance(codec, Mapping) else dict.fromkeys(KINDS, codec)
    configs: dict[Kind, CodecConfig] = {}
    for kind in KINDS:
        config = asked[kind]
        configs[kind] = config_by_name(config) if isinstance(config, str) else config
        codec_for(configs[kind])
    return configs


def make_streams(record: SessionRecord, model: Model, where: str) -> dict[StreamName, StreamWriter]:
    """Return writers for all streams of a session, at their beginning."""
    return {
        (layer, kind): StreamWriter(
            record.owner,
            layer,
            kind,
            model.stream(layer, kind),
            config_of_layer(record.codecs[kind], layer),
            record.fit_tokens,
            record.streams[layer, kind],
            f"{where} layer {layer} {kind}",
        )
        for layer, kind in model.streams()
    }


def first_receipt(receipts: object) -> int | None:
    """Return what the record of a new session says of receipts; `InvalidArgument` if no bool."""
    if not isinstance(receipts, bool):
        raise InvalidArgument(f"receipts {receipts!r}: expected True or False")
    return 0 if receipts else None


def check_fit_tokens(fit_tokens: object) -> None:
    """Raise `InvalidArgument` unless it is an integer from 1 to 65536."""
    if type(fit_tokens) is not int or not 1 <= fit_tokens <= MAX_FIT_TOKENS:
        raise InvalidArgument(f"fit_tokens {fit_tokens!r}: 1 to {MAX_FIT_TOKENS}")
