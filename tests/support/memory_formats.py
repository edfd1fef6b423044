"""Modules with parameters of many memory formats, and optimizers that step them."""

import copy

import torch
from torch import nn

from bagua_comm import ByteGrad, Decentralized, GradientAllReduce
from bagua_torch import fuse

EXACT, QUANTIZED, WEIGHTS = GradientAllReduce(), ByteGrad(), Decentralized()


def random_tensor(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def channels_last(x):
    return x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


LAYOUTS = {
    "contiguous": lambda: random_tensor(4, 3, 2, 2),
    "channels_last": lambda: channels_last(random_tensor(4, 3, 2, 2)),
    "one channel": lambda: channels_last(random_tensor(8, 1, 4, 2)),
    "channels_last_3d": lambda: channels_last(random_tensor(2, 3, 2, 2, 2)),
    "transposed": lambda: random_tensor(5, 7).t(),
    "empty": lambda: random_tensor(3, 0, 2),
    "complex64": lambda: random_tensor(3, 5, dtype=torch.complex64).t(),
    "complex128": lambda: channels_last(random_tensor(2, 3, 2, 2, dtype=torch.complex128)),
}
REAL = [name for name in LAYOUTS if not name.startswith("complex")]


class Parts(nn.Module):
    """Parameters that are trained to approach targets, which differ in each element."""

    def __init__(self, *layouts, make=LAYOUTS):
        super().__init__()
        self.parts = nn.ParameterList([make[name]() for name in layouts])

    def forward(self, seed):
        targets = [random_tensor(*p.shape, dtype=p.dtype, seed=seed + i) for i, p in enumerate(self.parts)]
        return sum((p - t).abs().square().sum() for p, t in zip(self.parts, targets, strict=True))


class Mean(nn.Module):
    """The mean of the outputs of all ranks, computed in one process."""

    def __init__(self, module, ranks):
        super().__init__()
        self.module, self.ranks = module, ranks

    def forward(self, seed):
        return sum(self.module(seed + 100 * rank) for rank in range(self.ranks)) / self.ranks


def contiguous(module):
    """Return a copy of the module with contiguous parameters."""
    module = copy.deepcopy(module)
    for p in module.parameters():
        p.data = p.data.contiguous()
    return module


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, foreach=False),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.05, foreach=False),
    "foreach adam": lambda ps: torch.optim.Adam(ps, lr=0.05, foreach=True),
    "fused adam": lambda ps: torch.optim.Adam(ps, lr=0.05, fused=True),
    "fused adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05, fused=True),
    "fused sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, fused=True),
    "fused adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05, fused=True),
    "our adam": lambda ps: fuse(torch.optim.Adam(ps, lr=0.05)),
    "our sgd": lambda ps: fuse(torch.optim.SGD(ps, lr=0.05, momentum=0.9)),
}
PLAIN = {
    "sgd": OPTIMIZERS["sgd"],
    "fused sgd": OPTIMIZERS["sgd"],
    "our sgd": OPTIMIZERS["sgd"],
    "fused adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=False),
    "fused adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05, foreach=False),
}


def steps(model, optimizer, seeds, *, between=None):
    for seed in seeds:
        optimizer.zero_grad()
        model(seed).backward()
        optimizer.step()
        if between is not None:
            between()


def expected_of(module, optimizer, seeds, ranks=2):
    """The weights after training in one process, by a plain optimizer on contiguous parameters."""
    module = contiguous(module)
    steps(Mean(module, ranks), PLAIN.get(optimizer, OPTIMIZERS["adam"])(list(module.parameters())), seeds)
    return [p.detach() for p in module.parameters()]
