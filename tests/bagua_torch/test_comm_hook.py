"""Our averages in PyTorch's own DistributedDataParallel: exchanges that fail. tests/mpi has successful ones."""

import pytest
import torch
from support.torch_training import batch, loss_of, make_model
from torch import nn

from bagua_comm import Average, CommAborted, CommTimeout
from bagua_comm.testing import run_ranks
from bagua_torch import comm_hook


class Late(Average):
    """An average for which a rank is late, in the call of this number."""

    def __init__(self, fails):
        self.fails, self.calls = fails, 0

    def bind(self, comm):
        def average(x):
            self.calls += 1
            if self.calls == self.fails:
                raise CommTimeout("a rank is late")
            return x

        return average


def train(ddp, steps):
    for step in range(steps):
        loss_of(ddp, batch(0, step)).backward()


def with_communicator(body):
    return run_ranks(1, body, timeout_s=5)


@pytest.mark.parametrize(("fails", "static"), [(1, False), (2, False), (6, False), (1, True), (2, True)])
def test_backward_raises_the_error_of_an_exchange_and_does_not_wait_for_ever(fails, static, gloo):
    """Whichever bucket it is of: the lane refuses the ones behind it. In the first step of a static graph PyTorch
    waits itself, and raises its own error."""

    def body(comm):
        ddp = nn.parallel.DistributedDataParallel(make_model(), static_graph=static, bucket_cap_mb=1e-5)
        ddp.register_comm_hook(None, comm_hook(Late(fails), comm))
        with pytest.raises(RuntimeError if static and fails == 1 else CommTimeout, match="a rank is late"):
            train(ddp, steps=2)  # PyTorch begins with few buckets, and forms more in the second step

    with_communicator(body)


def test_the_futures_of_a_hook_hold_its_errors_where_nothing_else_waits(gloo):
    """As in PyTorch's `join`, which calls the hook outside of a backward pass."""

    class Bucket:
        def index(self):
            return 0

        def buffer(self):
            return torch.ones(3)

        def parameters(self):
            return parameters

    parameters = [nn.Parameter(torch.ones(3))]

    def body(comm):
        hook = comm_hook(Late(1), comm)
        futures = [hook(None, Bucket()) for _ in range(2)]
        for future, error in zip(futures, (CommTimeout, CommAborted), strict=True):
            with pytest.raises(error):
                future.wait()

    with_communicator(body)
