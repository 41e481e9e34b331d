"""What the norms of a tensor's vectors are, and what that recommends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final, get_args

import numpy as np

from ..digests import is_digest, tensor_digest
from ..errors import InvalidArgument
from ..spec import F32
from .config import Axis
from .documents import Document, check_choice, check_type
from .policies import axis_of_role
from .shape import Role, TensorShape

#: `KvProfile.calibration_digest` where nothing was calibrated.
NO_CALIBRATION: Final = "missing:calibration"


@dataclass(frozen=True, slots=True)
class CalibrationSummary(Document):
    """Norms of the vectors of one tensor.

    Attributes
    ----------
    shape_digest, source_digest
        Of the tensor.
    role
        Of the tensor.
    vector_count, mean_norm, max_norm
        Vectors, and their Euclidean norms in float64.
    outlier_count
        Vectors whose norm is above a threshold.
    recommended_axis
        K per channel, V per token.
    recommended_first_tokens_raw, recommended_last_tokens_raw
        0 and 1.
    recommended_bits_per_coord
        None: no recommendation.

    Raises
    ------
    InvalidArgument
        A field that no tensor has.
    """

    schema: ClassVar[str] = "fib_quant_kv_calibration_summary_v1"

    shape_digest: str
    source_digest: str
    role: Role
    vector_count: int
    mean_norm: float
    max_norm: float
    outlier_count: int
    recommended_axis: Axis
    recommended_first_tokens_raw: int = 0
    recommended_last_tokens_raw: int = 1
    recommended_bits_per_coord: float | None = None

    def __post_init__(self) -> None:
        for name in ("shape_digest", "source_digest"):
            if not is_digest(getattr(self, name)):
                raise InvalidArgument(f"calibration: {name} {getattr(self, name)!r} is no digest")
        check_choice(self.role, "calibration: role", get_args(Role))
        check_choice(self.recommended_axis, "calibration: recommended_axis", get_args(Axis))
        for name, least in (
            ("vector_count", 1),
            ("outlier_count", 0),
            ("recommended_first_tokens_raw", 0),
            ("recommended_last_tokens_raw", 0),
        ):
            count = getattr(self, name)
            if type(count) is not int or count < least:
                raise InvalidArgument(f"calibration: {name} {count!r}: at least {least}")
        for name in ("mean_norm", "max_norm"):
            if not _is_number(getattr(self, name)):
                raise InvalidArgument(
                    f"calibration: {name} {getattr(self, name)!r}: must be finite and >= 0"
                )
        bits = self.recommended_bits_per_coord
        if bits is not None and not (_is_number(bits) and bits > 0):
            raise InvalidArgument(
                f"calibration: recommended_bits_per_coord {bits!r}: must be finite and > 0"
            )


def calibrate(values: F32, shape: TensorShape, *, outlier_threshold: float) -> CalibrationSummary:
    """Measure the norms of a tensor.

    Parameters
    ----------
    values : (batch, layers, kv_heads, tokens, head_dim) float32
        Finite, in C order.
    outlier_threshold
        Norms above it are counted as outliers.

    Raises
    ------
    InvalidArgument
        Values that are not those of `shape`, or a threshold that is negative or not finite.

    Examples
    --------
    >>> import numpy as np
    >>> shape = TensorShape("key", "mha", 1, 1, 1, 1, 2, 2, "f32", "pre_rope")
    >>> x = np.array([3, 4, 0, 1], np.float32).reshape(shape.array_shape)
    >>> summary = calibrate(x, shape, outlier_threshold=2)
    >>> summary.mean_norm, summary.max_norm, summary.outlier_count, summary.recommended_axis
    (3.0, 5.0, 1, 'per_channel')
    """
    check_type(shape, TensorShape, "calibration: shape")
    x = shape.check_values(values, "calibration")
    if isinstance(outlier_threshold, bool) or not isinstance(outlier_threshold, int | float):
        raise InvalidArgument(f"calibration: outlier_threshold {outlier_threshold!r}: no number")
    if not 0 <= outlier_threshold < math.inf:
        raise InvalidArgument(
            f"calibration: outlier_threshold {outlier_threshold}: must be finite and >= 0"
        )
    rows = x.reshape(-1, shape.head_dim)
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    return CalibrationSummary(
        shape_digest=shape.digest(),
        source_digest=tensor_digest(x),
        role=shape.role,
        vector_count=shape.n_vectors,
        mean_norm=float(norms.mean()),
        max_norm=float(norms.max()),
        outlier_count=int((norms > outlier_threshold).sum()),
        recommended_axis=axis_of_role("role_aware", shape.role),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value >= 0
