"""What only TKV1 has: its prior table and lanes. `test_lossy_codecs` has what codecs share."""

import hashlib

import numpy as np
import pytest
from kvcodecs.errors import Corrupt, InvalidArgument
from kvcodecs.spec import StreamSpec
from kvcodecs.tkv1 import CODEC, TKV1, prior_table


def test_the_prior_table_is_the_frozen_one():
    table = prior_table()
    digest = hashlib.sha256(table.astype("<u4").tobytes()).hexdigest()
    assert digest == "c11c735091c359b11e4f6885cc015624f32ee25b376eb9b658a55e6f9935453d"


def test_no_model_of_the_prior_can_reach_the_clamp():
    """The core leaves the clamp to [32, 65504] out: see model_probability in lane.hpp."""
    fast, slow = prior_table() & 0xFFFF, prior_table() >> 16
    for part in (fast, slow):
        assert part.min() >= 64
        assert part.max() <= 65472

    def limits(start, shift):
        low = high = start
        while low > low - (low >> shift) or high < high + ((65536 - high) >> shift):
            low, high = low - (low >> shift), high + ((65536 - high) >> shift)
        return low, high

    reach = [limits(start, shift) for start in (64, 65472) for shift in (4, 7)]
    assert (min(limits(64, 4)[0], 15) + limits(64, 7)[0]) >> 1 >= 32
    assert (limits(65472, 4)[1] + limits(65472, 7)[1]) >> 1 <= 65504
    assert all(low > 0 and high < 65536 for low, high in reach)


@pytest.mark.parametrize("lane_channels", [3, -2, 2.0, True])
def test_lanes_that_cannot_be(lane_channels):
    with pytest.raises(InvalidArgument, match="lane_channels"):
        TKV1(lane_channels=lane_channels)


def test_lanes_must_divide_a_head():
    x = np.ones((2, 150, 8), np.float32)
    with pytest.raises(InvalidArgument, match="divisor"):
        CODEC.fit(TKV1(lane_channels=6), StreamSpec("v", 2, 8), lambda: [x])


def test_the_width_of_a_lane_survives_the_header():
    spec = StreamSpec("v", 2, 8)
    x = np.ones((2, 150, 8), np.float32)
    for lane_channels, width in ((0, 8), (8, 8), (2, 2)):
        params = CODEC.fit(TKV1(lane_channels=lane_channels), spec, lambda: [x])
        header = CODEC.pack(params)
        assert CODEC.unpack(spec, header).width == params.width == width
    for lane_channels in (3, 6, 16):
        bad = bytearray(header)
        bad[14] = lane_channels
        with pytest.raises(Corrupt, match="bad lane width"):
            CODEC.unpack(spec, bad)
