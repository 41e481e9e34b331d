"""FibQuant profiles: digests, limits, and every check in its order."""

from dataclasses import asdict, replace

import pytest
from kvcodecs.errors import Corrupt, InvalidArgument, KvError, Unsupported
from kvcodecs.fibquant import Profile

GOOD = Profile.paper_default(64, 4, 32, 42)
#: The published algorithm's name for its rotation, which ours is not.
PUBLISHED = "qr-gaussian-chacha8-sign-corrected-v1"


@pytest.mark.parametrize(
    ("sizes", "digest"),
    [
        ((8, 2, 8, 7), "e2ee7b77f138839722c669c28d282c25e20a86022c7214e1c47f7bba5ee1d614"),
        ((64, 4, 32, 42), "9a8a1f10bf77afb2d19f9f83d1791a3ad53893ed3b71e0890e507af63b4c6266"),
    ],
)
def test_digests_are_those_of_the_published_profiles(sizes, digest):
    profile = Profile.paper_default(*sizes)
    published = replace(profile, rotation_algorithm_version=PUBLISHED)
    assert published.digest() == f"blake3:{digest}"
    assert profile.digest() != published.digest()


def test_rates_count_the_index_alone():
    profile = Profile.paper_default(8, 2, 3, 1)
    assert profile.wire_index_bits == 2
    assert profile.wire_bits_per_coord == 1.0
    assert profile.paper_rate_bits_per_coord == pytest.approx(0.79248125)


def test_defaults_follow_the_block_size():
    methods = {k: Profile.paper_default(12, k, 9, 0) for k in (1, 2, 3, 4)}
    assert [p.radius_method for p in methods.values()] == [
        "beta_quantile",
        "k2_closed_form",
        "beta_quantile",
        "beta_quantile",
    ]
    assert [p.direction_method for p in methods.values()] == [
        "roberts_kronecker",
        "fibonacci_spiral",
        "fibonacci_sphere",
        "roberts_kronecker",
    ]
    assert Profile.paper_default(64, 4, 8, 0).training_samples == 256
    assert Profile.paper_default(64, 4, 1 << 20, 0).training_samples == 10_000_000
    largest = Profile.paper_default(64, 4, 8, (1 << 64) - 1)
    assert largest.codebook_seed == 0x9E3779B97F4A7C15 - 1


def test_each_rotation_has_a_profile_of_its_own():
    haar, hadamard = (
        Profile.paper_default(64, 4, 32, 42, rotation=r) for r in ("haar", "hadamard")
    )
    assert (haar.rotation, hadamard.rotation) == ("haar", "hadamard")
    assert haar.digest() != hadamard.digest()
    assert Profile.paper_default(16384, 4, 32, 42, rotation="hadamard").rotation == "hadamard"


#: In the order of the checks.
FAULTS = [
    ({"ambient_dim": -1}, "ambient_dim -1: an integer", Corrupt),
    ({"wire_bits_per_coord": 1}, "wire_bits_per_coord 1: a finite float", Corrupt),
    ({"codebook_seed": 1 << 64}, "codebook_seed .* an integer", Corrupt),
    ({"codebook_version": 3}, "codebook_version 3: text", Corrupt),
    ({"empty_cell_policy": "give_up"}, "empty_cell_policy 'give_up': one of", Unsupported),
    ({"schema_version": "fib_quant_profile_v2"}, "schema 'fib_quant_profile_v2'", Unsupported),
    ({"ambient_dim": 0}, "ambient_dim 0", Corrupt),
    ({"block_dim": 0}, "block_dim 0", Corrupt),
    ({"block_dim": 64}, "block_dim 64: .* less than", Corrupt),
    ({"block_dim": 65}, "block_dim 65: .* less than", Corrupt),
    ({"block_dim": 5}, "does not divide", Corrupt),
    ({"ambient_dim": 16388}, "ambient_dim 16388: at most 16384", Corrupt),
    ({"ambient_dim": 1028, "block_dim": 257}, "block_dim 257: at most 256", Corrupt),
    ({"codebook_size": 1}, "codebook_size 1", Corrupt),
    ({"codebook_size": (1 << 20) + 1}, "codebook_size 1048577", Corrupt),
    ({"ambient_dim": 4100}, "at most 4096 rows", Corrupt),
    ({"block_dim": 128, "ambient_dim": 256, "codebook_size": 1 << 20}, "codebook of", Corrupt),
    ({"norm_format": "f32_reference"}, "norm_format", Corrupt),
    ({"source_mode": "reference_gaussian_projection"}, "source_mode", Corrupt),
    ({"rotation_algorithm_version": PUBLISHED}, "rotation_algorithm_version", Unsupported),
    ({"wire_index_bits": 6}, "wire_index_bits 6: 5 for 32", Corrupt),
    ({"paper_rate_bits_per_coord": 1.25 + 1e-11}, "paper_rate_bits_per_coord", Corrupt),
    ({"wire_bits_per_coord": 1.5}, "wire_bits_per_coord", Corrupt),
    ({"radius_method": "k2_closed_form"}, "radius_method", Corrupt),
    ({"radius_method": "large_d_single_shell_explicit"}, "radius_method", Corrupt),
    ({"direction_method": "fibonacci_sphere"}, "direction_method", Corrupt),
    ({"lloyd_restarts": 0}, "lloyd_restarts 0", Corrupt),
    ({"lloyd_restarts": 1025}, "lloyd_restarts 1025", Corrupt),
    ({"lloyd_iterations": 0}, "lloyd_iterations 0", Corrupt),
    ({"lloyd_iterations": 100_001}, "lloyd_iterations 100001", Corrupt),
    ({"training_samples": 31}, "training_samples 31", Corrupt),
    ({"training_samples": 10_000_001}, "training_samples 10000001", Corrupt),
]


@pytest.mark.parametrize(("wrong", "text", "kind"), FAULTS)
def test_every_field_is_checked(wrong, text, kind):
    profile = replace(GOOD, **wrong)
    with pytest.raises(InvalidArgument, match=text):
        profile.validate()
    with pytest.raises(kind, match=text):
        Profile.from_json(asdict(profile))


def test_checks_come_in_their_order():
    wrong_so_far = {}
    for wrong, text, _ in reversed(FAULTS):
        if wrong.keys() & {"ambient_dim", "codebook_size"} or wrong.get("block_dim", 5) != 5:
            continue  # of the sizes, which hide each other, one is enough
        wrong_so_far |= wrong
        with pytest.raises(InvalidArgument, match=text):
            replace(GOOD, **wrong_so_far).validate()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("block_dim"),
        lambda d: d.update(more=1),
        lambda d: d.update(schema_version=d.pop("schema_version")),
    ],
)
def test_stored_fields_are_all_there_in_their_order(change):
    document = GOOD.to_json()
    assert Profile.from_json(document) == GOOD
    change(document)
    with pytest.raises(Corrupt, match="fields"):
        Profile.from_json(document)
    with pytest.raises(Corrupt, match="fields"):
        Profile.from_json([document])


@pytest.mark.parametrize(
    "arguments",
    [
        (0, 2, 8, 7),
        (8, 0, 8, 7),
        (8, 2, 1, 7),
        (8, 2, 8, -1),
        (8, 2, 8, 1 << 64),
        (8.0, 2, 8, 7),
        (8, True, 8, 7),
        (4100, 4, 8, 7),
    ],
)
def test_default_refuses_what_cannot_be_a_profile(arguments):
    with pytest.raises(InvalidArgument) as caught:
        Profile.paper_default(*arguments)
    assert isinstance(caught.value, KvError)


def test_default_refuses_an_unknown_rotation():
    with pytest.raises(InvalidArgument, match="haar or hadamard"):
        Profile.paper_default(8, 2, 8, 7, rotation="givens")
