"""Reproducible sums over MPI processes: the bytes that threads give, on any number of them."""

import numpy as np
import pytest

from bagua_comm import (
    Engine,
    GradientAllReduce,
    Plan,
    Point,
    Reproducible,
    TensorSpec,
    reproducible_allreduce,
    reproducible_sum,
)
from bagua_comm.elastic import share
from bagua_comm.testing import run_ranks, sample, whole_range

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "complex128"])
@pytest.mark.parametrize("count", [1, 1000, 70_000])
def test_processes_give_the_bytes_of_threads_in_another_order(comm, count, dtype):
    def summed(comm, rank):
        return reproducible_allreduce(comm, whole_range(rank, (count,), dtype), op="avg").tobytes()

    threads = run_ranks(comm.size, lambda local: summed(local, comm.size - 1 - local.rank))
    assert summed(comm, comm.rank) == threads[0]


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_the_sum_of_all_elements_does_not_depend_on_the_number_of_processes(comm, dtype):
    values = sample(0, (1000,), dtype) * 10.0 ** (np.arange(1000) % 30 - 15)
    values = values.astype(dtype)
    (alone,) = run_ranks(1, lambda local: reproducible_sum(local, values).tobytes())
    cut = np.random.default_rng(1).permutation(values)[comm.rank**2 : (comm.rank + 1) ** 2]
    rest = np.random.default_rng(1).permutation(values)[comm.size**2 :]
    mine = np.concatenate([cut, rest]) if comm.rank == comm.size - 1 else cut
    assert reproducible_sum(comm, mine).tobytes() == alone


def test_processes_train_as_one_does(comm):
    specs = [TensorSpec(name, (count,), "float32") for name, count in (("a", 1000), ("b", 7), ("c", 300))]
    plan = Plan.pack(specs, bucket_bytes=3000)

    def means(comm):
        with Engine(comm, GradientAllReduce(Reproducible(addends=24)), plan, plan.allocate()) as engine:
            for i in (mine := share(24, comm)):
                for bucket in engine.buckets:
                    bucket.flat[...] = np.random.default_rng([i, bucket.index]).standard_normal(bucket.spec.size)
                if i != mine[-1]:
                    engine.hold()
            for spec in specs:
                engine.ready(spec.name)
            engine.at(Point.BACKWARD)
            return [bucket.flat.tobytes() for bucket in engine.buckets]

    (alone,) = run_ranks(1, means)
    assert means(comm) == alone
