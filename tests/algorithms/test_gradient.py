"""Gradient averaging: against the mean, worked out from the list of all ranks' gradients."""

import numpy as np
import pytest

from bagua_comm import (
    ByteGrad,
    Engine,
    Exact,
    Float16,
    GradientAllReduce,
    Hierarchical,
    Int4,
    MinMaxUInt8,
    Plan,
    Point,
    Quantized,
    TensorSpec,
)
from bagua_comm.testing import run_ranks, sample

SPECS = [TensorSpec(name, shape, "float32") for name, shape in (("a", (7, 3)), ("b", (1000,)), ("c", ()))]


def averaged(comm, algorithm):
    plan = Plan.pack(SPECS, bucket_bytes=256, alignment=8 * comm.size)
    with Engine(comm, algorithm, plan, plan.allocate()) as engine:
        for bucket in engine.buckets:
            for name, view in bucket.views.items():
                view[...] = sample(comm.rank, view.shape, "float32", seed=ord(name))
        for spec in SPECS:
            engine.ready(spec.name)
        engine.at(Point.BACKWARD)
        return {name: view.copy() for bucket in engine.buckets for name, view in bucket.views.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("average", "tolerance"),
    [
        (Exact(), 1e-6),
        (Hierarchical(), 1e-6),
        (Quantized(Float16()), 2e-3),
        (Quantized(Int4(), 0), 0.6),
        (Quantized(), 7 / 255),  # two roundings of half a step each; the range is below 7
    ],
    ids=repr,
)
def test_gradients_become_the_mean_of_all_ranks(ranks, average, tolerance):
    expected = {
        spec.name: np.mean(
            [sample(r, spec.shape, "float32", seed=ord(spec.name)) for r in range(ranks)],
            axis=0,
            dtype=np.float64,
        )
        for spec in SPECS
    }
    nodes = [rank // 3 for rank in range(ranks)]

    for actual in run_ranks(ranks, lambda comm: averaged(comm, GradientAllReduce(average)), nodes=nodes):
        for name, value in expected.items():
            np.testing.assert_allclose(actual[name], value, rtol=0, atol=tolerance)


def test_bytegrad_is_gradient_averaging_through_eight_bits():
    assert ByteGrad() == GradientAllReduce(Quantized(MinMaxUInt8(block=512, eps=0.0)))
