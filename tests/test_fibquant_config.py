"""What can be asked of FibQuant, and what cannot."""

import json

import numpy as np
import pytest
from kvcodecs import FibQuant
from kvcodecs.codec import config_from_json
from kvcodecs.errors import Corrupt, InvalidArgument, Unsupported
from kvcodecs.fibquant.profile import Profile
from kvcodecs.fibquant.quality import QualityBudget


def test_a_configuration_comes_back_from_json():
    for config in (
        FibQuant(),
        FibQuant(2, 17, rotation="haar", seed=2**64 - 1, axis="raw", first_tokens=0),
        FibQuant(8, 1 << 20, last_tokens=5, raw_layers=[3, 1, 3], raw_heads=range(2)),
        FibQuant(on_failure="fail_closed", axis="per_channel"),
        FibQuant(budget=QualityBudget(max_logit_mse=1.5, fallback_on_violation=False)),
    ):
        assert config_from_json(json.loads(json.dumps(config.to_json()))) == config
    assert FibQuant(raw_layers=[3, 1, 3]).raw_layers == (1, 3)
    assert config_from_json({"codec": "fibquant.2x64"}) == FibQuant(2, 64)
    assert config_from_json({"codec": "fibquant", "scheme": "raw"}) == FibQuant(axis="raw")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_dim": 1}, "block_dim 1 is not 2 to 256"),
        ({"block_dim": 257}, "block_dim 257 is not"),
        ({"block_dim": 4.0}, "block_dim 4.0 is not an integer"),
        ({"block_dim": True}, "block_dim True is not an integer"),
        ({"codebook_size": 1}, "codebook_size 1 is not 2 to 1048576"),
        ({"codebook_size": (1 << 20) + 1}, "codebook_size 1048577 is not"),
        ({"seed": -1}, "seed -1 is not 0 to"),
        ({"seed": 1 << 64}, "seed .* is not 0 to"),
        ({"first_tokens": -1}, "first_tokens -1"),
        ({"last_tokens": 1 << 32}, "last_tokens"),
        ({"rotation": "walsh"}, "rotation 'walsh': use one of haar, hadamard"),
        ({"axis": "per_head"}, "axis 'per_head': use one of per_channel, per_token"),
        ({"axis": None}, "axis None"),
        ({"on_failure": "ignore"}, "on_failure 'ignore': use one of keep_raw, fail_closed"),
        ({"raw_layers": "12"}, "raw_layers '12': give indices"),
        ({"raw_layers": 3}, "raw_layers 3: give indices"),
        ({"raw_heads": [0, -1]}, "raw_heads -1: indices are not negative"),
        ({"budget": 0.5}, "budget 0.5: give a QualityBudget or None"),
        ({"raw_heads": [np.int64(1)]}, "raw_heads .* is not an integer"),
    ],
)
def test_what_cannot_be_asked_is_refused(fields, message):
    with pytest.raises(InvalidArgument, match=message):
        FibQuant(**fields)
    if message != "raw_heads .* is not an integer":  # JSON has no such integers
        with pytest.raises(Corrupt, match=message):
            config_from_json({"codec": "fibquant", **fields})


def test_stored_configurations_that_are_newer_are_refused():
    with pytest.raises(Unsupported, match=r"'pages'.*upgrade"):
        config_from_json({"codec": "fibquant", "pages": 4})
    for scheme in ("4", "x", "4x", "04x3", "4x256x2", 5):
        with pytest.raises(Unsupported, match=r"as in fibquant\.4x256"):
            config_from_json({"codec": "fibquant", "scheme": scheme})


def test_axes_and_rates_of_streams():
    by_role = FibQuant(axis="role_aware")
    assert [by_role.axis_of(kind) for kind in "kv"] == ["per_channel", "per_token"]
    for axis in ("per_channel", "per_token", "raw"):
        assert {FibQuant(axis=axis).axis_of(kind) for kind in "kv"} == {axis}
    assert FibQuant(4, 256).bits_per_value == 2
    assert FibQuant(8, 257).bits_per_value == 9 / 8
    assert FibQuant(axis="raw").bits_per_value == 16


def test_layers_are_kept_raw_as_asked():
    config = FibQuant(raw_layers=(0, 5), first_tokens=7)
    assert config.of_layer(3) == FibQuant(first_tokens=7)
    for layer in (0, 5):
        assert config.of_layer(layer) == FibQuant(axis="raw", raw_layers=[layer], first_tokens=7)


def test_the_profile_is_the_one_of_the_paper():
    profile = FibQuant(2, 32, rotation="haar", seed=7).profile(64)
    assert profile == Profile.paper_default(64, 2, 32, 7)
    assert FibQuant().profile(64).rotation == "hadamard"
    for head_dim, message in (
        (6, "4 does not divide head_dim 6 into two or more; use one of 2, 3"),
        (4, "use one of 2$"),
        (7, "no number does"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            FibQuant().profile(head_dim)


def test_stored_budgets_are_checked():
    budget = QualityBudget().to_json()
    for wrong in (budget | {"max_logit_mse": -1}, budget | {"most": 3}):
        with pytest.raises(Corrupt, match="QualityBudget"):
            config_from_json({"codec": "fibquant", "budget": wrong})
