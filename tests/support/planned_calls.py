"""The calls of a step that ranks repeat, each with a result that shows foreign data."""

import numpy as np

CALLS = {
    "allreduce": lambda comm, x: comm.allreduce(x)[comm.rank],
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "alltoall": lambda comm, x: comm.alltoall(x).sum(0),
    "allgather": lambda comm, x: comm.allgather(x).reshape(comm.size, *x.shape).sum(0)[comm.rank],
    "small": lambda comm, x: np.full_like(x[0], comm.allreduce(x[0, :1])[0]),
    "middle": lambda comm, x: np.full_like(x[0], comm.allreduce(x[0, :2000])[0]),
}
"""By name: row `rank` of the sum of all ranks' arrays, (p, m), of equal elements. Four may follow plans."""


def make(comm, call, number, dtype=np.float64):
    """Make a call; if it returns, it must return the sum of what all ranks give in call `number`."""
    found = call(comm, np.full((comm.size, 40_000), 10.0 * number + comm.rank, dtype))
    np.testing.assert_array_equal(found, sum(10.0 * number + rank for rank in range(comm.size)))
