"""The parameters and buffers of a module that all ranks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_

import torch
from torch import nn

from bagua_comm import Communicator

from .broadcast import broadcast_optimizer, broadcast_tensors
from .flats import lay_out_state


def parts_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The module and all its submodules, each once, with the prefix of its parameters' names.

    They are in the order of `module.named_modules()`. This is faster, as it runs in every forward pass.
    """
    seen: set[nn.Module] = set()
    parts: list[tuple[str, nn.Module]] = []
    left = [("", module)]
    while left:
        path, part = left.pop()
        if part in seen:
            continue
        seen.add(part)
        parts.append((path, part))
        if part._modules:
            inner = [(f"{path}{name}.", child) for name, child in part._modules.items() if child is not None]
            left += reversed(inner)
    return parts


class ModelState:
    """The parameters and buffers of a module that all ranks share.

    Args:
        module: The module.
        ignored: Names of parameters and buffers that belong to each rank alone. A tied parameter is ignored only
            if all its names are ignored.
    """

    def __init__(self, module: nn.Module, ignored: set[str]) -> None:
        self.module, self.ignored = module, ignored
        self.all = dict(module.named_parameters())
        """Every parameter of the module when it was wrapped; a tied one under its first name."""
        every = module.named_parameters(remove_duplicate=False)
        common = {id(parameter) for name, parameter in every if name not in ignored}
        self.parameters = {name: parameter for name, parameter in self.all.items() if id(parameter) in common}
        """The parameters that are not ignored."""
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        """The parameters among these that get a gradient, or got one before they were frozen."""
        self._wrapped = self._present()
        self._frozen = [parameter for parameter in self._wrapped if not parameter.requires_grad]

    @property
    def unchanged(self) -> bool:
        """Whether the module has the same parameters as on wrapping, and no frozen one was unfrozen.

        Trained parameters may be frozen, and unfrozen again.
        """
        now = self._present()
        same = len(now) == len(self._wrapped) and all(map(is_, now, self._wrapped))
        return same and not any(parameter.requires_grad for parameter in self._frozen)

    def train(self, unfrozen: Mapping[str, nn.Parameter]) -> None:
        """Add these parameters to `trained`."""
        trained = {name: p for name, p in self.parameters.items() if name in self.trained or name in unfrozen}
        self.trained.clear()  # in place: other objects refer to it
        self.trained.update(trained)
        ids = {id(parameter) for parameter in unfrozen.values()}
        self._frozen = [parameter for parameter in self._frozen if id(parameter) not in ids]

    def _present(self) -> list[nn.Parameter]:
        """The parameters of all submodules, with repeated tied ones."""
        self._parts = parts_of(self.module)
        return [each for _, part in self._parts for each in part._parameters.values() if each is not None]

    def buffers(self, *, of_step: bool = False) -> dict[str, torch.Tensor]:
        """The present buffers that are not ignored, by their first name.

        With `of_step`, the submodules of the last check are used, which is faster.
        """
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for path, part in self._parts if of_step else parts_of(self.module):
            for name, buffer in part._buffers.items() if part._buffers else ():
                if buffer is not None:
                    found.setdefault(id(buffer), (f"{path}{name}", buffer))
        return {name: buffer for name, buffer in found.values() if name not in self.ignored}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers."""
        return {**self.parameters, **self.buffers()}

    def copy_all(self, comm: Communicator, optimizers: Sequence[torch.optim.Optimizer], *, root: int = 0) -> None:
        """Copy the parameters, buffers and optimizer states of `root` to all ranks.

        Collective.
        """
        broadcast_tensors(comm, list(self.tensors().values()), root=root)
        self.copy_optimizers(comm, optimizers, root=root)

    def copy_optimizers(
        self, comm: Communicator, optimizers: Sequence[torch.optim.Optimizer], *, root: int = 0
    ) -> None:
        """Copy the optimizer states of `root` to all ranks, except for ignored parameters.

        Collective.
        """
        common = {id(parameter) for parameter in self.parameters.values()}
        for optimizer in optimizers:
            given = [group["params"] for group in optimizer.param_groups]
            for group, parameters in zip(optimizer.param_groups, given, strict=True):
                group["params"] = [parameter for parameter in parameters if id(parameter) in common]
            mine = [p for parameters in given for p in parameters if id(p) not in common]
            kept = {p: optimizer.state.pop(p) for p in mine if p in optimizer.state}
            try:
                broadcast_optimizer(comm, optimizer, root=root)
            finally:
                for group, parameters in zip(optimizer.param_groups, given, strict=True):
                    group["params"] = parameters
                optimizer.state.update(kept)
            lay_out_state(optimizer)
