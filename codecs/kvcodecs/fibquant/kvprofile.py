"""All that says how one tensor is coded: its shape, the book, policies and budgets, by digest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Self, get_args

from ..digests import is_digest
from ..errors import InvalidArgument
from .book import Book
from .calibration import NO_CALIBRATION, CalibrationSummary
from .config import Axis
from .documents import Document, check_choice, check_type
from .geometry import PageGeometry, coded_bytes
from .policies import FallbackPolicy, ProtectedPolicy
from .profile import Profile
from .quality import QualityBudget
from .shape import Role, TensorShape

TOKENS_PER_PAGE: Final = 128


@dataclass(frozen=True, slots=True)
class KvProfile(Document):
    """How one tensor is coded. `of` fills in what follows from shape and book.

    Attributes
    ----------
    profile_id
        A name that the user chooses.
    shape_digest
        Of the `TensorShape`.
    fib_profile, fib_profile_digest
        Of the book.
    codebook_digest, rotation_digest
        Of the book: decoding with another one is refused.
    role_policy
        The role of the tensor.
    axis_policy
        ``"per_token"``: vectors as they are. ``"per_channel"``: each channel less its mean, by the
        root of its standard deviation. ``"role_aware"``: K per channel, V per token. ``"raw"``.
    page_geometry
        Of the pages.
    protected_policy, fallback_policy, quality_budget
        What is kept raw, and what fails.
    calibration_digest
        Of a `CalibrationSummary`, or ``"missing:calibration"``.
    """

    schema: ClassVar[str] = "fib_quant_kv_compression_profile_v1"

    profile_id: str
    shape_digest: str
    fib_profile: Profile
    fib_profile_digest: str
    codebook_digest: str
    rotation_digest: str
    role_policy: Role
    axis_policy: Axis
    page_geometry: PageGeometry
    protected_policy: ProtectedPolicy
    fallback_policy: FallbackPolicy
    quality_budget: QualityBudget
    calibration_digest: str = NO_CALIBRATION

    @classmethod
    def of(
        cls,
        shape: TensorShape,
        book: Book,
        *,
        profile_id: str = "default",
        axis: Axis = "role_aware",
        tokens_per_page: int = TOKENS_PER_PAGE,
        protected: ProtectedPolicy | None = None,
        fallback: FallbackPolicy | None = None,
        budget: QualityBudget | None = None,
        calibration: CalibrationSummary | None = None,
    ) -> Self:
        """Return the profile of tensors of `shape` that are coded with `book`.

        Raises
        ------
        InvalidArgument
            A profile that `validate` refuses, or a calibration of another shape.

        Examples
        --------
        >>> from kvcodecs.fibquant import Profile, TensorShape, book_for
        >>> shape = TensorShape("value", "mha", 1, 1, 1, 1, 9, 8, "f32", "not_applicable")
        >>> book = book_for(Profile.paper_default(8, 2, 4, seed=7))
        >>> KvProfile.of(shape, book, tokens_per_page=4).page_geometry.page_count(shape)
        3
        """
        check_type(shape, TensorShape, "KV profile: shape")
        check_type(book, Book, "KV profile: book")
        if calibration is not None:
            check_type(calibration, CalibrationSummary, "KV profile: calibration")
            if calibration.shape_digest != shape.digest():
                raise InvalidArgument("KV profile: the calibration is of another shape")
        fib = book.profile
        profile = cls(
            profile_id=profile_id,
            shape_digest=shape.digest(),
            fib_profile=fib,
            fib_profile_digest=fib.digest(),
            codebook_digest=book.codebook_digest,
            rotation_digest=book.rotation_digest,
            role_policy=shape.role,
            axis_policy=axis,
            page_geometry=PageGeometry.of(
                shape, tokens_per_page, block_dim=fib.block_dim, codebook_size=fib.codebook_size
            ),
            protected_policy=ProtectedPolicy() if protected is None else protected,
            fallback_policy=FallbackPolicy() if fallback is None else fallback,
            quality_budget=QualityBudget() if budget is None else budget,
            calibration_digest=NO_CALIBRATION if calibration is None else calibration.digest(),
        )
        profile.validate(shape)
        return profile

    def validate(self, shape: TensorShape) -> None:
        """Check every field against `shape`, in the order of the fields.

        Raises
        ------
        InvalidArgument
            The first that is wrong.
        """
        check_type(shape, TensorShape, "KV profile: shape")
        for name, part in _PARTS.items():
            check_type(getattr(self, name), part, f"KV profile: {name}")
        fib, head_dim = self.fib_profile, shape.head_dim
        if not isinstance(self.profile_id, str) or not self.profile_id:
            raise InvalidArgument(f"KV profile: profile_id {self.profile_id!r}: give a name")
        if not fib.block_dim or head_dim % fib.block_dim:
            raise InvalidArgument(
                f"KV profile: block_dim {fib.block_dim} does not divide head_dim {head_dim}"
            )
        self._check_digest("shape_digest", shape.digest())
        if self.role_policy != shape.role:
            raise InvalidArgument(
                f"KV profile: role_policy {self.role_policy!r}, the tensor is a {shape.role}"
            )
        fib.validate()
        if fib.ambient_dim != head_dim:
            raise InvalidArgument(
                f"KV profile: a book for {fib.ambient_dim} values, head_dim is {head_dim}"
            )
        self._check_digest("fib_profile_digest", fib.digest())
        for name in ("rotation_digest", "codebook_digest"):
            if not is_digest(getattr(self, name)):
                raise InvalidArgument(f"KV profile: {name} {getattr(self, name)!r} is no digest")
        check_choice(self.axis_policy, "KV profile: axis_policy", get_args(Axis))
        self.page_geometry.validate(shape)
        n_bytes = coded_bytes(head_dim, fib.block_dim, fib.codebook_size)
        if self.page_geometry.encoded_block_bytes != n_bytes:
            raise InvalidArgument(
                "KV profile: page_geometry.encoded_block_bytes "
                f"{self.page_geometry.encoded_block_bytes}, vectors take {n_bytes}"
            )
        self.protected_policy.validate(shape)
        if self.calibration_digest != NO_CALIBRATION and not is_digest(self.calibration_digest):
            raise InvalidArgument(
                f"KV profile: calibration_digest {self.calibration_digest!r}: a digest, or "
                f"{NO_CALIBRATION!r}"
            )

    def check_book(self, book: Book) -> None:
        """Raise `InvalidArgument` unless `book` is the one that the profile names."""
        check_type(book, Book, "KV profile: book")
        self._check_digest("fib_profile_digest", book.profile.digest())
        self._check_digest("rotation_digest", book.rotation_digest)
        self._check_digest("codebook_digest", book.codebook_digest)

    def _check_digest(self, name: str, expected: str) -> None:
        if getattr(self, name) != expected:
            raise InvalidArgument(f"KV profile: {name} {getattr(self, name)!r}, it is {expected}")

    @classmethod
    def _read(cls, name: str, value: object) -> object:
        return _PARTS[name].from_json(value) if name in _PARTS else value


_PARTS: Final[dict[str, type[Profile | Document]]] = {
    "fib_profile": Profile,
    "page_geometry": PageGeometry,
    "protected_policy": ProtectedPolicy,
    "fallback_policy": FallbackPolicy,
    "quality_budget": QualityBudget,
}
