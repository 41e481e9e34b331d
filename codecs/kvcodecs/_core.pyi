from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_U8 = npt.NDArray[np.uint8]
_U16 = npt.NDArray[np.uint16]
_U32 = npt.NDArray[np.uint32]
_U64 = npt.NDArray[np.uint64]
_I32 = npt.NDArray[np.int32]
_I64 = npt.NDArray[np.int64]
_F32 = npt.NDArray[np.float32]
_F64 = npt.NDArray[np.float64]
_Bytes = Any  # any object with a C-contiguous buffer

LANE_BYTES: int
CHANNEL_BYTES: int
BLOCK_BYTES: int
STREAM_BYTES: int
ROW_BLOCK_BYTES: int
ROW_STREAM_BYTES: int
FIB_STREAM_BYTES: int
WIDE: bool

class Statistics:
    def __init__(self, heads: int, head_dim: int, left_out: int = 0) -> None: ...
    def add_mean(self, x: _F32 | _F64) -> None: ...
    def finish_mean(self) -> None: ...
    def add_moments(self, x: _F32 | _F64) -> None: ...
    def finish(
        self,
        step: float,
        mean_unit: float,
        ar: bool,
        pairs: bool,
        class_of_one: int = 8,
        n_classes: int = 48,
    ) -> tuple[_I64, _U8, _U8]: ...
    @property
    def sum_squares(self) -> float: ...
    @property
    def largest(self) -> float: ...
    @property
    def n_tokens(self) -> int: ...

class BlockEncoder:
    error: tuple[float, float, int]
    def push(self, x: _F32, n_threads: int = 1) -> None: ...
    def payload(self) -> bytes: ...
    @property
    def n_tokens(self) -> int: ...

class KVR1Encoder(BlockEncoder): ...

class RansTables:
    def __init__(self, frequencies: _U16) -> None: ...
    @property
    def slots(self) -> _U32: ...
    @property
    def compact(self) -> _U32: ...

def kvr1_encoder(
    tables: RansTables,
    heads: int,
    head_dim: int,
    unit: float,
    sink: int,
    sink_div: int,
    sink_classes: int,
    first_token: int,
    mean: _I32,
    rho: _U8,
    cls: _U8,
    wide: bool = True,
) -> KVR1Encoder: ...
def block_encoder(
    prior: _U32,
    heads: int,
    head_dim: int,
    width: int,
    unit: float,
    sink: int,
    sink_div: int,
    first_token: int,
    mean: _I32,
    rho: _U8,
    cls: _U8,
) -> BlockEncoder: ...
def read_zigzags(data: _Bytes, offset: int, count: int) -> tuple[_I64, int]: ...
def write_zigzags(values: _I64) -> bytes: ...
def read_tkv_channels(
    data: _Bytes, offset: int, count: int, ar: bool
) -> tuple[_I64, _U8, _U8, int]: ...
def scan_entries(data: _Bytes, offset: int, count: int) -> tuple[_U64, int]: ...
def widen_float16(x: _U16) -> _F32: ...
def find_beyond(x: _F32, limit: float) -> int: ...
def release_pages(data: _Bytes) -> None: ...
def gather(
    parts: Sequence[_Bytes], offsets: _U64, start: int, out: _U8, n_threads: int
) -> None: ...
def crc32c(crc: int, data: _Bytes, portable: bool = False) -> int: ...
def frame_checksums(
    frames: Sequence[Any], head: int, payload: int, n_threads: int, portable: bool = False
) -> _U32: ...
def stream_encode(
    prior: _U32,
    step: float,
    sink: int,
    sink_div: int,
    mean: _I64,
    rho: _U8,
    cls: _U8,
    first_token: int,
    y: _F64,
) -> bytes: ...
def stream_decode(
    prior: _U32,
    heads: int,
    head_dim: int,
    step: float,
    sink: int,
    sink_div: int,
    mean: _I64,
    rho: _U8,
    cls: _U8,
    first_token: int,
    n_tokens: int,
    data: _Bytes,
) -> _F64: ...
def rotate(y: _F64, theta: float, first_token: int, sign: float) -> None: ...
def check_lanes(
    prior: _U32,
    lanes: _Bytes,
    channels: _Bytes,
    classes: _U8,
    payload_bytes: _U64,
    output_shapes: _U64,
    rope_shapes: _U64,
) -> None: ...
def run_lanes(
    prior: _U32,
    lanes: _Bytes,
    channels: _Bytes,
    classes: _U8,
    payloads: Sequence[Any],
    outputs: Sequence[npt.NDArray[Any]],
    types: Sequence[int],
    ropes: Sequence[tuple[_F32, _F32]],
    n_threads: int,
    wide: bool = True,
) -> _U8: ...
def level_supported(level: int) -> bool: ...
def check_blocks(
    blocks: _Bytes,
    streams: _Bytes,
    mean: _I32,
    rho: _U8,
    classes: _U8,
    order: _U32,
    payload_bytes: _U64,
    output_shapes: _U64,
    rope_shapes: _U64,
) -> None: ...
def run_blocks(
    tables: RansTables,
    blocks: _Bytes,
    streams: _Bytes,
    mean: _I32,
    rho: _U8,
    classes: _U8,
    order: _U32,
    payloads: Sequence[Any],
    outputs: Sequence[npt.NDArray[Any]],
    types: Sequence[int],
    ropes: Sequence[tuple[_F32, _F32]],
    n_threads: int,
    level: int,
) -> _U8: ...
def ggml_decode(scheme: int, data: _Bytes, level: int = -1) -> _F32: ...
def ggml_decode_half(scheme: int, data: _Bytes, level: int = -1) -> _U16 | None: ...
def ggml_encode(scheme: int, x: _F32, level: int = -1) -> _U8 | None: ...
def ggml_decode_values(
    scheme: int, data: _Bytes, out: npt.NDArray[Any], type: int, n_threads: int, level: int = -1
) -> bool: ...
def ggml_encode_values(
    scheme: int, x: npt.NDArray[Any], type: int, n_threads: int, level: int = -1
) -> tuple[_U8, int, int]: ...

class RowEncoder:
    def push(self, x: _F32, n_threads: int = 1) -> None: ...
    def resume(self, rows: _Bytes, max_error: float, sum_squares: float, n_values: int) -> None: ...
    def payload(self) -> bytes: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def error(self) -> tuple[float, float, int]: ...

def row_encoder(scheme: int, heads: int, head_dim: int) -> RowEncoder: ...
def run_row_blocks(
    blocks: _Bytes,
    streams: _Bytes,
    order: _U32,
    payloads: Sequence[Any],
    outputs: Sequence[npt.NDArray[Any]],
    types: Sequence[int],
    ropes: Sequence[tuple[_F32, _F32]],
    n_threads: int,
    level: int,
) -> _U8: ...

class FibBook:
    def __init__(self, rotation: int, rotation_data: _F32, codewords: _F32) -> None: ...
    @property
    def rotation(self) -> int: ...
    @property
    def rotation_data(self) -> _F32: ...
    @property
    def codewords(self) -> _F32: ...
    @property
    def d(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def n_codewords(self) -> int: ...
    @property
    def index_bits(self) -> int: ...
    @property
    def index_bytes(self) -> int: ...

def fib_encode(
    book: FibBook,
    x: _F32,
    mean: _F32 | None,
    scale: _F32 | None,
    keep: _U8,
    n_threads: int,
    level: int = -1,
) -> tuple[_U8, _U16, _U8, float, float]: ...
def fib_decode(
    book: FibBook, norms: _U16, indices: _U8, n_threads: int = 1, level: int = -1
) -> tuple[_F32, int]: ...
def fib_nearest(book: FibBook, points: _F32, level: int = -1) -> _U32: ...
def fib_check_payload(payload: _Bytes, n_vectors: int, index_bytes: int, head_dim: int) -> int: ...
def check_fib_blocks(
    books: Sequence[FibBook],
    blocks: _Bytes,
    streams: _Bytes,
    order: _U32,
    channels: _F32,
    payload_bytes: _U64,
    output_shapes: _U64,
    rope_shapes: _U64,
) -> None: ...
def run_fib_blocks(
    books: Sequence[FibBook],
    blocks: _Bytes,
    streams: _Bytes,
    order: _U32,
    channels: _F32,
    payloads: Sequence[Any],
    outputs: Sequence[npt.NDArray[Any]],
    types: Sequence[int],
    ropes: Sequence[tuple[_F32, _F32]],
    n_threads: int,
    level: int,
) -> _U8: ...

class Attention:
    def add(
        self,
        k: _Bytes | _F32,
        k_scheme: int,
        v: _Bytes | _F32,
        v_scheme: int,
        first_position: int,
        inv_freq: _F32 | None,
        scaling: float,
        n_threads: int,
    ) -> None: ...
    def result(self) -> _F32: ...

def attention(
    q: _F32,
    v_dim: int,
    scale: float,
    first: _I64,
    last: _I64,
    order: _I32 | None,
    level: int = -1,
) -> Attention: ...
def fib_draws(seed: int, n: int, what: str, shape: float = 0.0) -> _U64 | _F64: ...
def fib_training_vectors(seed: int, d: int, k: int, n: int) -> _F64: ...
def fib_haar_columns(seed: int, d: int, n_threads: int = 1) -> _F64: ...
def fib_nearest_float64(
    samples: _F64, codewords: _F64, n_threads: int = 1
) -> tuple[_U32, _F64]: ...
