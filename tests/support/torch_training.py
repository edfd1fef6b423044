"""A small model to train with PyTorch, and the algorithms to train it by.

Ranks are threads here, which share PyTorch's generator, so all random numbers come from other generators.
"""

import copy
import io

import torch
from torch import nn

from bagua_comm import QAdam
from bagua_comm.algorithms import from_name
from bagua_comm.algorithms.base import core_of
from bagua_torch import DistributedDataParallel, QAdamOptimizer, as_array

GRADIENT_ALGORITHMS = [from_name(name) for name in ("exact", "bytegrad", "error-feedback", "hierarchical-bytes")]
QADAM = from_name("qadam", warmup_steps=3)
WEIGHT_ALGORITHMS = [
    *(
        from_name(name)
        for name in ("decentralized", "shift-one", "one-peer", "low-precision-ring", "low-precision-one-peer")
    ),
    from_name("diloco", local_steps=3),
    from_name("diloco", local_steps=2, average="error-feedback"),
    from_name("streaming-diloco", local_steps=3, fragments=2),
    from_name("every", n=2, algorithm="shift-one"),
]
CHANGING_ALGORITHMS = [
    from_name("after", steps=3, first="exact", then="low-precision-ring"),
    from_name("after", steps=2, first="low-precision-one-peer", then="bytegrad"),
]
ASYNC_ALGORITHMS = [from_name("async", interval_s=0), from_name("async", interval_s=0, warmup_steps=2)]
ALGORITHMS = [
    *GRADIENT_ALGORITHMS,
    QADAM,
    *WEIGHT_ALGORITHMS,
    *CHANGING_ALGORITHMS,
    *ASYNC_ALGORITHMS,
]


def make_model(seed=0):
    return filled(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), seed=seed
    )


def filled(module, seed=0):
    """The module with parameters that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return module


def batch(rank, step, size=6):
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model, x):
    """The mean over a batch, so that the mean over ranks is the mean over one large batch."""
    return model(x).square().sum(-1).mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def optimizer_for(algorithm, parameters, **settings):
    """The optimizer that QAdam needs, or SGD with momentum."""
    for phase in algorithm.phases if algorithm else ():
        core = core_of(phase)
        if isinstance(core, QAdam):
            return QAdamOptimizer(parameters, lr=0.01, warmup_steps=core.warmup_steps, **settings)
    return sgd(parameters)


def train_step(model, optimizer, x):
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step()


def wrapped(comm, algorithm=None, *, model=None, make=None, lr=None, **settings):
    """A model, its optimizer, and the wrapper that trains them. Collective.

    Args:
        comm: Its ranks train together.
        algorithm: None for the default.
        model: None for `make_model()`.
        make: Makes the optimizer of parameters; None for that which the algorithm needs.
        lr: That of plain SGD in its place.
        settings: More arguments of the wrapper.
    """
    model = make_model() if model is None else model
    if lr is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    else:
        optimizer = make(model.parameters()) if make else optimizer_for(algorithm, model.parameters())
    return model, optimizer, DistributedDataParallel(model, optimizer, algorithm, comm=comm, **settings)


def train(comm, ddp, optimizer, steps):
    for step in steps:
        train_step(ddp, optimizer, batch(comm.rank, step))


def weights(module):
    """A copy of all parameters, one behind the other."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def final_weights(ddp):
    """Close a wrapper; the weights of its module after that."""
    ddp.close()
    return weights(ddp.module)


def gradients(module):
    return torch.cat([parameter.grad.reshape(-1) for parameter in module.parameters()])


def assert_same_on_all_ranks(comm, *modules):
    """Parameters and buffers are equal bit for bit."""
    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            comm.check_consistency(as_array(tensor.detach().clone()))


def through_a_file(value):
    """`value` after saving and loading it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Training:
    """One rank's model, optimizers, scheduler and wrapper."""

    def __init__(self, comm, algorithm=None, make=None, *, seed=0, bucket_bytes=200, optimizers=1):
        self.comm = comm
        self.model = nn.Sequential(nn.BatchNorm1d(4), make_model(seed))
        parameters = list(self.model.parameters())
        parts = [parameters] if optimizers == 1 else [parameters[:3], parameters[3:]]
        self.optimizers = [make(part) if make else optimizer_for(algorithm, part) for part in parts]
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizers[0], [3, 5], gamma=0.5)
        self.ddp = DistributedDataParallel(
            self.model, self.optimizers, algorithm, comm=comm, bucket_bytes=bucket_bytes
        )

    def run(self, first, last, *, data=lambda comm, step: batch(comm.rank, step), skipped=()):
        """Train from step `first` to `last`; `skipped`: pairs of a rank and a step in which it doesn't step."""
        for step in range(first, last):
            self.model.zero_grad()
            loss_of(self.ddp, data(self.comm, step)).backward()
            if (self.comm.rank, step) not in skipped:
                self.optimizers[step % len(self.optimizers)].step()
                self.scheduler.step()

    @property
    def objects(self):
        return {"scheduler": self.scheduler, "model": self.ddp, "optimizer": self.optimizers[0]}

    def saved(self):
        return through_a_file(
            {
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "scheduler": self.scheduler.state_dict(),
                "ddp": self.ddp.state_dict(),
                "module": self.model.state_dict(),
            }
        )

    def load(self, saved):
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.scheduler.load_state_dict(saved["scheduler"])
        self.ddp.load_state_dict(saved["ddp"])

    def close(self):
        """The final weights and buffers."""
        self.ddp.close()
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def assert_gradients_match_those_of_torch(
    comm, make_model, loss_of, make_optimizer, *, dtype=torch.float32, steps=20, aligned=False, tolerance
):
    """Train beside PyTorch's own DistributedDataParallel; if `aligned`, with equal weights in every step."""
    torch.manual_seed(0)
    mine = make_model().to(dtype)
    theirs = copy.deepcopy(mine)
    my_optimizer, their_optimizer = make_optimizer(mine.parameters()), make_optimizer(theirs.parameters())
    my_ddp = DistributedDataParallel(mine, my_optimizer, comm=comm, bucket_bytes=16_384)
    their_ddp = nn.parallel.DistributedDataParallel(theirs)
    assert len(my_ddp.engine.buckets) > 3

    for step in range(steps):
        if aligned:
            theirs.load_state_dict(mine.state_dict())
        for ddp, optimizer in ((my_ddp, my_optimizer), (their_ddp, their_optimizer)):
            torch.manual_seed(100 * step + comm.rank)  # dropout
            optimizer.zero_grad()
            loss_of(ddp, torch.Generator().manual_seed(100 * step + comm.rank)).backward()
        largest = max(parameter.grad.abs().max().item() for parameter in theirs.parameters())
        for (name, parameter), expected in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            what = f"{name} in step {step}"
            torch.testing.assert_close(
                parameter.grad,
                expected.grad,
                rtol=0,
                atol=tolerance * largest,
                msg=lambda text, what=what: f"{what}: {text}",
            )
        my_optimizer.step()
        their_optimizer.step()

    my_ddp.close()
    for parameter in mine.parameters():
        comm.check_consistency(as_array(parameter))
    for buffer in theirs.buffers():  # rank 0's, which PyTorch's own copies in the next forward pass
        comm.broadcast(as_array(buffer), root=0)
    for (name, value), expected in zip(mine.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(
            value, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
