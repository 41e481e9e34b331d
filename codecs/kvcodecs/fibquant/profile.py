"""The profile of a FibQuant book: what rotation and codewords follow from. FORMAT.md 11.1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, Self

from ..digests import document_digest
from ..errors import Corrupt, InvalidArgument, KvError, Unsupported

Rotation = Literal["haar", "hadamard"]

SCHEMA: Final = "fib_quant_profile_v1"
CODEBOOK_VERSION: Final = "fib-quant:paper-core-v1"
ROTATIONS: Final[dict[str, Rotation]] = {
    "kvstore-householder-chacha8-v1": "haar",
    "kvstore-hadamard-chacha8-v1": "hadamard",
}

MAX_AMBIENT_DIM: Final = 16384
MAX_BLOCK_DIM: Final = 256
MAX_CODEBOOK_SIZE: Final = 1 << 20
MAX_TRAINING_SAMPLES: Final = 10_000_000
MAX_ROTATION_VALUES: Final = 1 << 24
MAX_CODEBOOK_VALUES: Final = 1 << 26
MAX_LLOYD_RESTARTS: Final = 1024
MAX_LLOYD_ITERATIONS: Final = 100_000
RATE_TOLERANCE: Final = 1e-12
#: The codebook's generator starts this far from the rotation's, modulo 2^64.
SEED_STEP: Final = 0x9E3779B97F4A7C15

#: What each named choice may be; not all of them can be built.
_CHOICES: Final = {
    "norm_format": ("fp16_paper", "f32_reference"),
    "source_mode": ("canonical_spherical_beta", "reference_gaussian_projection"),
    "radius_method": ("beta_quantile", "k2_closed_form", "large_d_single_shell_explicit"),
    "direction_method": ("fibonacci_spiral", "fibonacci_sphere", "roberts_kronecker"),
    "empty_cell_policy": ("split_highest_distortion", "fail_closed"),
}
_U64: Final = ("rotation_seed", "codebook_seed")
#: What is wrong, and the kind of error where stored bytes say so.
Fault = tuple[type[KvError], str]


@dataclass(frozen=True)
class Profile:
    """Parameters of one rotation and codebook. Nothing is checked before `validate`.

    Attributes
    ----------
    schema_version
        ``"fib_quant_profile_v1"``.
    ambient_dim
        d: values of a vector, at most 16384, and 4096 with a dense rotation.
    block_dim
        k: values of a sub-block; a divisor of d, less than d, at most 256.
    codebook_size
        N: codewords, 2 to 2^20.
    paper_rate_bits_per_coord, wire_index_bits, wire_bits_per_coord
        log2(N) / k; bits of an index, ceil(log2 N); bits of an index per value. The norm is not
        counted in either rate.
    norm_format
        ``"fp16_paper"``.
    rotation_seed, codebook_seed
        Unsigned 64-bit seeds.
    rotation_algorithm_version
        A key of `ROTATIONS`.
    codebook_version
        ``"fib-quant:paper-core-v1"``.
    source_mode, radius_method, direction_method
        How codewords start; the methods go with ``block_dim``.
    lloyd_restarts, lloyd_iterations, training_samples
        Effort of the refinement.
    empty_cell_policy
        Whether an empty cell takes half of the worst one, or fails the build.
    """

    schema_version: str
    ambient_dim: int
    block_dim: int
    codebook_size: int
    paper_rate_bits_per_coord: float
    wire_index_bits: int
    wire_bits_per_coord: float
    norm_format: str
    rotation_seed: int
    rotation_algorithm_version: str
    codebook_seed: int
    codebook_version: str
    source_mode: str
    radius_method: str
    direction_method: str
    lloyd_restarts: int
    lloyd_iterations: int
    training_samples: int
    empty_cell_policy: str

    @classmethod
    def paper_default(
        cls,
        ambient_dim: int,
        block_dim: int,
        codebook_size: int,
        seed: int,
        *,
        rotation: Rotation = "haar",
    ) -> Self:
        """Return the paper's parameters for vectors of `ambient_dim` values.

        Raises
        ------
        InvalidArgument
            A size, seed or rotation that `validate` refuses.
        """
        d, k, n = ambient_dim, block_dim, codebook_size
        for name, value in (("ambient_dim", d), ("block_dim", k), ("codebook_size", n)):
            _raise_argument(_integer_faults(name, value, 32))
        _raise_argument(_integer_faults("seed", seed, 64))
        _raise_argument(_part_faults(d, k, n))
        names = [name for name, found in ROTATIONS.items() if found == rotation]
        if not names:
            raise InvalidArgument(f"rotation {rotation!r}: haar or hadamard")
        bits = _index_bits(n)
        radius, direction = _methods(k)
        profile = cls(
            schema_version=SCHEMA,
            ambient_dim=d,
            block_dim=k,
            codebook_size=n,
            paper_rate_bits_per_coord=math.log2(n) / k,
            wire_index_bits=bits,
            wire_bits_per_coord=bits / k,
            norm_format="fp16_paper",
            rotation_seed=seed,
            rotation_algorithm_version=names[0],
            codebook_seed=(seed + SEED_STEP) % (1 << 64),
            codebook_version=CODEBOOK_VERSION,
            source_mode="canonical_spherical_beta",
            radius_method=radius,
            direction_method=direction,
            lloyd_restarts=4,
            lloyd_iterations=25,
            training_samples=min(max(30 * n, 256), MAX_TRAINING_SAMPLES),
            empty_cell_policy="split_highest_distortion",
        )
        profile.validate()
        return profile

    def validate(self) -> None:
        """Check every field, in the order of FORMAT.md 11.1.

        Raises
        ------
        InvalidArgument
            The first field that is wrong, and what it may be.
        """
        _raise_argument(self._faults())

    def digest(self) -> str:
        """Return the digest of the fields in their order, ``"blake3:..."``; nothing is checked."""
        return document_digest(SCHEMA, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the fields in their order."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Return the profile of a stored document.

        Raises
        ------
        Corrupt
            Fields that are missing, not known, or wrong.
        Unsupported
            A schema, rotation or method of a newer release.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(document, Mapping) or list(document) != names:
            raise Corrupt(f"FibQuant profile: its fields are not {', '.join(names)}, in this order")
        profile = cls(**document)
        for kind, text in profile._faults():
            raise kind(text)
        return profile

    @property
    def rotation(self) -> Rotation:
        """``"haar"``, a dense matrix, or ``"hadamard"``, signs and fast transforms."""
        return ROTATIONS[self.rotation_algorithm_version]

    def _faults(self) -> Iterator[Fault]:
        yield from self._type_faults()
        if self.schema_version != SCHEMA:
            yield Unsupported, f"FibQuant profile: schema {self.schema_version!r}, not {SCHEMA!r}"
        d, k, n = self.ambient_dim, self.block_dim, self.codebook_size
        yield from _part_faults(d, k, n)
        dense = ROTATIONS.get(self.rotation_algorithm_version) != "hadamard"
        if dense and d * d > MAX_ROTATION_VALUES:
            yield Corrupt, f"ambient_dim {d}: a dense rotation has at most 4096 rows; use hadamard"
        if n * k > MAX_CODEBOOK_VALUES:
            yield Corrupt, f"codebook of {n} x {k} values: at most {MAX_CODEBOOK_VALUES}"
        if self.norm_format != "fp16_paper":
            yield Corrupt, f"norm_format {self.norm_format!r}: only fp16_paper can be stored"
        if self.source_mode != "canonical_spherical_beta":
            yield Corrupt, f"source_mode {self.source_mode!r}: only canonical_spherical_beta"
        if self.rotation_algorithm_version not in ROTATIONS:
            name = self.rotation_algorithm_version
            yield Unsupported, f"rotation_algorithm_version {name!r}: one of {', '.join(ROTATIONS)}"
        yield from self._rate_faults(_index_bits(n))
        if (self.radius_method, self.direction_method) != _methods(k):
            yield (
                Corrupt,
                f"radius_method {self.radius_method!r} and direction_method "
                f"{self.direction_method!r}: {' and '.join(_methods(k))} for block_dim {k}",
            )
        for name, least, most in (
            ("lloyd_restarts", 1, MAX_LLOYD_RESTARTS),
            ("lloyd_iterations", 1, MAX_LLOYD_ITERATIONS),
            ("training_samples", n, MAX_TRAINING_SAMPLES),
        ):
            if not least <= getattr(self, name) <= most:
                yield Corrupt, f"{name} {getattr(self, name)}: {least} to {most}"

    def _type_faults(self) -> Iterator[Fault]:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                yield from _integer_faults(field.name, value, 64 if field.name in _U64 else 32)
            elif field.type == "float":
                if not isinstance(value, float) or not math.isfinite(value):
                    yield Corrupt, f"{field.name} {value!r}: a finite float"
            elif not isinstance(value, str):
                yield Corrupt, f"{field.name} {value!r}: text"
            elif field.name in _CHOICES and value not in _CHOICES[field.name]:
                choices = ", ".join(_CHOICES[field.name])
                yield Unsupported, f"{field.name} {value!r}: one of {choices}"

    def _rate_faults(self, bits: int) -> Iterator[Fault]:
        n, k = self.codebook_size, self.block_dim
        if self.wire_index_bits != bits:
            yield Corrupt, f"wire_index_bits {self.wire_index_bits}: {bits} for {n} codewords"
        for name, rate in (
            ("paper_rate_bits_per_coord", math.log2(n) / k),
            ("wire_bits_per_coord", bits / k),
        ):
            if abs(getattr(self, name) - rate) > RATE_TOLERANCE:
                yield Corrupt, f"{name} {getattr(self, name)}: {rate} for {n} codewords of {k}"


def _index_bits(n_codewords: int) -> int:
    return (n_codewords - 1).bit_length()


def _methods(block_dim: int) -> tuple[str, str]:
    """Return the radius and direction methods of a block size."""
    if block_dim == 2:
        return "k2_closed_form", "fibonacci_spiral"
    return "beta_quantile", "fibonacci_sphere" if block_dim == 3 else "roberts_kronecker"


def _integer_faults(name: str, value: object, bits: int) -> Iterator[Fault]:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << bits:
        yield Corrupt, f"{name} {value!r}: an integer from 0 to 2^{bits} - 1"


def _part_faults(d: int, k: int, n: int) -> Iterator[Fault]:
    if d == 0:
        yield Corrupt, "ambient_dim 0: at least 2"
    if k == 0 or k >= d:
        yield Corrupt, f"block_dim {k}: at least 1 and less than ambient_dim {d}"
    if d % k:
        yield Corrupt, f"block_dim {k}: does not divide ambient_dim {d}"
    if d > MAX_AMBIENT_DIM:
        yield Corrupt, f"ambient_dim {d}: at most {MAX_AMBIENT_DIM}"
    if k > MAX_BLOCK_DIM:
        yield Corrupt, f"block_dim {k}: at most {MAX_BLOCK_DIM}"
    if not 2 <= n <= MAX_CODEBOOK_SIZE:
        yield Corrupt, f"codebook_size {n}: 2 to {MAX_CODEBOOK_SIZE}"


def _raise_argument(faults: Iterator[Fault]) -> None:
    for _, text in faults:
        raise InvalidArgument(text)
