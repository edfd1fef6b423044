"""Arrays that differ between ranks are an error on all, also where padded or encoded ones have as many bytes."""

import numpy as np
import pytest

from bagua_comm import (
    ArrayError,
    CommMismatch,
    ErrorFeedback,
    Exact,
    Hierarchical,
    MinMaxUInt8,
    Quantized,
    Reproducible,
    TopK,
)
from bagua_comm.testing import run_ranks

EIGHT_BITS, SPARSE = Quantized(min_bytes=0), TopK(4, 2)
AVERAGES = [
    *(Exact(), EIGHT_BITS, Quantized(MinMaxUInt8.bagua(), min_bytes=0), ErrorFeedback(EIGHT_BITS)),
    *(SPARSE, TopK(4, 2, bits=16), TopK(4, 2, whole_below=8), ErrorFeedback(SPARSE)),
    *(Hierarchical(), Hierarchical(EIGHT_BITS, inside=EIGHT_BITS), Hierarchical(ErrorFeedback(SPARSE))),
    Reproducible(),
]
DIFFERENT = [
    (np.ones(5, np.float32), np.ones(6, np.float32)),
    (np.ones(5, np.float32), np.ones(5, np.float16)),
    (np.ones(0, np.float32), np.ones(5, np.float32)),
    (np.ones(32, np.float32), np.ones(64, np.float16)),
]


@pytest.mark.parametrize("average", AVERAGES, ids=repr)
def test_shapes_may_differ(average):
    def body(comm):
        x = np.ones((2, 3) if comm.rank else 6, np.float32)
        return average.bind(comm)(x).reshape(-1).tolist()

    first, second = run_ranks(2, body, timeout_s=20)
    assert first == second


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    ("average", "nodes"),
    [
        *((each, "aa") for each in AVERAGES),
        *((each, "ab") for each in AVERAGES if isinstance(each, Hierarchical)),
    ],
    ids=str,
)
def test_different_arrays_are_an_error_on_all_ranks(average, nodes, check):
    def body(comm, given):
        mean = average.bind(comm)
        with pytest.raises((CommMismatch, ArrayError)):
            mean(given[comm.rank].copy())

    for given in DIFFERENT:
        run_ranks(2, lambda comm, given=given: body(comm, given), nodes=nodes, check=check, timeout_s=20)
