"""The memory of the buckets, of which gradients and weights are views.

autograd accumulates a gradient straight into its bucket, because `p.grad` is a view of it. Where an algorithm
exchanges weights, the parameters themselves are views.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.autograd.graph import increment_version

from bagua_comm import Plan, TensorSpec
from bagua_comm.algorithms.base import Payload

from .arrays import dtype_name

ALIGNMENT = 32
"""Buckets are padded to a multiple of this many elements, times the number of ranks."""


def pack(parameters: Mapping[str, nn.Parameter], bucket_bytes: int, ranks: int) -> Plan:
    """Which gradients travel together: buckets of about `bucket_bytes`, padded for this number of ranks."""
    return Plan.pack(specs_of(parameters), bucket_bytes=bucket_bytes, alignment=ALIGNMENT * ranks)


def specs_of(parameters: Mapping[str, nn.Parameter]) -> list[TensorSpec]:
    """The parameters in about the order in which a backward pass computes their gradients: the last one first."""
    return [
        TensorSpec(name, tuple(parameter.shape), dtype_name(parameter))
        for name, parameter in reversed(list(parameters.items()))
    ]


class BucketMemory:
    """The tensors behind the buckets of a plan, for gradients, for weights, or for both.

    Args:
        parameters: The parameters that are trained, by name. All are on one device.
        plan: How they are packed.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], plan: Plan) -> None:
        self.parameters, self.plan = parameters, plan
        self.names = [[tensor.name for tensor in bucket.tensors] for bucket in plan.buckets]
        """The parameters of each bucket."""
        self.flats: dict[Payload, list[torch.Tensor]] = {}
        """One flat tensor for each bucket, by what the buckets hold."""
        self.gradients: dict[str, torch.Tensor] = {}
        """Views of the buckets of gradients, by parameter."""
        self.weights: dict[str, torch.Tensor] = {}
        """Views of the buckets of weights, by parameter."""
        self._pairs: list[list[tuple[nn.Parameter, torch.Tensor]]] = []
        """The parameters of each bucket, each with its view; empty while gradients are not exchanged."""
        self.commits = 0
        """How often, when autograd was last told, the engine had written to the buckets."""

    def allocate(self, payload: Payload) -> None:
        """Make the memory for gradients or for weights. It is zero."""
        firsts = [self.parameters[bucket.tensors[0].name] for bucket in self.plan.buckets]
        self.flats[payload] = [
            torch.zeros(bucket.size, dtype=first.dtype, device=first.device)
            for bucket, first in zip(self.plan.buckets, firsts, strict=True)
        ]
        views = self.plan.cut(self.flats[payload])
        if payload == "grad":
            self.gradients = views
            self._pairs = [[(self.parameters[name], views[name]) for name in names] for names in self.names]
        else:
            self.weights = views

    def provide(self, payloads: Collection[Payload]) -> None:
        """Make the memory for `payloads` that is not there yet; for weights, parameters become views of it."""
        for payload in payloads:
            if payload in self.flats:
                continue
            self.allocate(payload)
            for name, view in self.weights.items() if payload == "weight" else ():
                view.copy_(self.parameters[name].detach())
                self.parameters[name].data = view

    def replace(self, old: BucketMemory) -> None:
        """Let gradients and parameters be views of this memory, to which the engine has moved their values."""
        for name, view in self.gradients.items():
            if self.parameters[name].grad is old.gradients[name]:
                self.parameters[name].grad = view
        for name, view in self.weights.items():
            self.parameters[name].data = view
        self.commits = old.commits

    def attach(self, name: str) -> None:
        """Make `p.grad` a view of its bucket, if gradients are exchanged: with its values, or zeros for none."""
        if name in self.gradients:
            _attach(self.parameters[name], self.gradients[name])

    def attach_bucket(self, index: int) -> None:
        """Do the same for all parameters of a bucket."""
        for parameter, view in self._pairs[index] if self._pairs else ():
            _attach(parameter, view)

    def attach_all(self) -> set[str]:
        """Do the same for all parameters.

        Returns:
            The names of those that had no gradient.
        """
        without: set[str] = set()
        for index, pairs in enumerate(self._pairs):
            fresh = [name for name, (p, _) in zip(self.names[index], pairs, strict=True) if p.grad is None]
            without.update(fresh)
            if len(fresh) < len(pairs):
                self.attach_bucket(index)
                continue
            self.flats["grad"][index].zero_()  # at once, which takes less time than one after another
            for parameter, view in pairs:
                parameter.grad = view
        return without

    def note(self, commits: int) -> None:
        """Tell autograd if the engine, by its number of commits, has written to the buckets since the last time.

        Autograd would not notice by itself. It then raises where an older graph needs the weights as they were.
        """
        if self.commits != commits:
            self.commits = commits
            increment_version(self.parameters.values())


def _attach(parameter: nn.Parameter, view: torch.Tensor) -> None:
    gradient = parameter.grad
    if gradient is view:
        return
    if gradient is None:
        view.zero_()
    else:
        view.copy_(gradient.detach())
    parameter.grad = view


class KeptGradients:
    """What `p.grad` is now, to put it back after the buckets have held other values.

    Args:
        memory: The memory of the buckets.
    """

    def __init__(self, memory: BucketMemory) -> None:
        self._parameters = memory.parameters
        self._now = {name: memory.parameters[name].grad for name in memory.gradients}
        self._values = {name: view.clone() for name, view in memory.gradients.items() if self._now[name] is view}

    def put_back(self) -> None:
        """Make `p.grad` what it was, with the values that it had."""
        for name, gradient in self._now.items():
            self._parameters[name].grad = gradient
            if gradient is not None and name in self._values:
                gradient.copy_(self._values[name])
