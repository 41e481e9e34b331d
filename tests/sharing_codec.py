"""A codec for tests whose stream headers share an object: raw values, and a table nobody needs."""

import sys
import types
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
from kvcodecs import codec as registry
from kvcodecs.errors import Corrupt
from kvcodecs.raw import Raw, RawCodec
from kvcodecs.shared import nothing_shared, shared_digest

NUMBER = 99


@dataclass(frozen=True)
class Sharing:
    table: str = "a"
    last_tokens: int = 0
    raw_layers: tuple = ()

    codec = "sharing"

    def to_json(self):
        return {"codec": self.codec, **asdict(self), "raw_layers": list(self.raw_layers)}

    def of_layer(self, layer):
        return Raw() if layer in self.raw_layers else self


def config_from_fields(fields):
    return Sharing(**{**fields, "raw_layers": tuple(fields.get("raw_layers", ()))})


def packed(table):
    return table.encode() * 5000


@dataclass(frozen=True)
class Params:
    raw: object
    table: bytes

    @property
    def spec(self):
        return self.raw.spec


class Encoder:
    """Rounds to whole numbers, but for what is to be kept."""

    def __init__(self, raw):
        self._raw = raw

    def __getattr__(self, name):
        return getattr(self._raw, name)

    def push(self, x, n_threads=1):
        self._raw.push(np.rint(x))

    def keep(self, x):
        self._raw.push(x)


class SharingCodec(RawCodec):
    number = NUMBER
    name = "sharing"
    lossless = False

    def fit(self, config, spec, chunks, k_state="pre"):
        return Params(super().fit(Raw(), spec, chunks), packed(config.table))

    def pack(self, params):
        return super().pack(params.raw) + shared_digest(params.table)

    def needs(self, header):
        return (bytes(header[1:]),)

    def shared(self, params):
        return {shared_digest(params.table): params.table}

    def unpack(self, spec, data, shared=nothing_shared):
        table = bytes(shared(bytes(data[1:])))
        if shared_digest(table) != bytes(data[1:]):
            raise Corrupt("another table")
        return Params(super().unpack(spec, data[:1]), table)

    def check(self, params, x, first_token):
        super().check(params.raw, x, first_token)

    def encoder(self, params, first_token):
        return Encoder(super().encoder(params.raw, first_token))

    def worst_case_bytes(self, params, n_tokens):
        return super().worst_case_bytes(params.raw, n_tokens)

    def schedule(self, plan, params, payload, first_token, placement):
        super().schedule(plan, params.raw, payload, first_token, placement)


@contextmanager
def registered():
    """Make the codec one of those that there are, in this process and meanwhile."""
    module = types.ModuleType("kvcodecs.sharing")
    module.CODEC, module.config_from_fields = SharingCodec(), config_from_fields
    sys.modules[module.__name__] = module
    registry._MODULES[NUMBER] = "sharing"
    registry._NUMBERS["sharing"] = NUMBER
    try:
        yield
    finally:
        del sys.modules[module.__name__], registry._MODULES[NUMBER], registry._NUMBERS["sharing"]
        registry.codec_by_number.cache_clear()
