"""The benchmark of the error of one coding."""

import numpy as np
import pytest

from benchmarks.codec_quality import codec_of, error_of


def test_the_error_is_relative_in_the_euclidean_norm():
    x = np.array([3.0, 4.0], np.float32)
    assert error_of(codec_of("Float16()"), x) == 0
    # 7 is the largest code, so that codes are integers: 2.4 becomes 2.
    x = np.array([2.4, 7.0], np.float32)
    assert error_of(codec_of("Int4(rotate=1)"), x) == pytest.approx(0.4 / np.hypot(2.4, 7))
