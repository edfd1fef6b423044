"""Optimizers of arrays, for training without a framework.

    optimizer = SGD(lr=0.1, momentum=0.9)
    states = [optimizer.init(bucket.flat) for bucket in weights]
    optimizer.step(weight, grad, state)         # in place, after the gradients are averaged

They are frozen dataclasses of settings; the formulas are those of `torch.optim`. `Muon` steps
matrices, all by one call.
"""

from .flat import SGD, Adam, AdamState, QAdam, QAdamState, SGDState
from .muon import Muon, MuonState
from .owners import Matrix, Owners

__all__ = [
    "SGD",
    "Adam",
    "AdamState",
    "Matrix",
    "Muon",
    "MuonState",
    "Owners",
    "QAdam",
    "QAdamState",
    "SGDState",
]
