"""Tensors on their way to float32."""

import ml_dtypes
import numpy as np
import pytest
from kvcodecs.tensor import as_float32


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_every_number_of_sixteen_bits_widens_like_numpy(dtype):
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(4, 128, 128)
    expected = x.astype(np.float32)
    for given in (x, x.reshape(128, 4, 128).transpose(1, 0, 2)):  # any strides
        found = as_float32(given)
        assert found.flags.c_contiguous
        assert found.dtype == np.float32
        same = found if given is x else found.transpose(1, 0, 2).reshape(x.shape)
        np.testing.assert_array_equal(same.view(np.uint32), expected.view(np.uint32))


def test_big_endian_and_empty_arrays_widen():
    x = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
    np.testing.assert_array_equal(as_float32(x.astype(">f2")), x)
    assert as_float32(x[:, :0]).shape == (2, 0, 4)


def test_float32_is_not_copied():
    x = np.zeros((1, 2, 2), np.float32)
    assert as_float32(x) is x
