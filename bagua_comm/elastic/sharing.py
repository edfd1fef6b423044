"""Distribution of the microbatches of a step over the ranks."""

from __future__ import annotations

from .. import topology
from ..comm import Communicator
from ..errors import ArrayError


def share(microbatches: int, comm: Communicator) -> range:
    """The numbers of this rank's microbatches, out of `microbatches` in all, numbered from 0.

    Each rank gets a contiguous range, and the sizes of ranges differ by at most one. With the average
    `Reproducible(addends=microbatches)`, the mean of their gradients has the same bits on any number of ranks.

    Raises:
        ArrayError: There are fewer microbatches than ranks, so that a rank would have none.

    >>> from bagua_comm.testing import run_ranks
    >>> run_ranks(3, lambda comm: list(share(8, comm)))
    [[0, 1], [2, 3, 4], [5, 6, 7]]
    """
    if type(microbatches) is not int or microbatches < comm.size:
        raise ArrayError(
            f"share: microbatches is {microbatches!r}, expected an int of at least {comm.size}: one for each rank"
        )
    return topology.share(microbatches, comm.rank, comm.size)
