"""The parts of a module that all ranks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_

import torch
from torch import nn

from bagua_comm import Communicator

from .broadcast import broadcast_optimizer, broadcast_tensors
from .flats import lay_out_state


def parts_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The module and all parts of it, each once, with what stands before the names of their parameters.

    In the order of `module.named_modules()`, in a fraction of its time: it is asked in every forward pass.
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
        ignored: Names of parameters and buffers that stay a rank's own. A tied parameter is ignored only if all
            its names are here.
    """

    def __init__(self, module: nn.Module, ignored: set[str]) -> None:
        self.module, self.ignored = module, ignored
        self.all = dict(module.named_parameters())
        """Every parameter as it was when the module was wrapped; a tied one under its first name."""
        every = module.named_parameters(remove_duplicate=False)
        common = {id(parameter) for name, parameter in every if name not in ignored}
        self.parameters = {name: parameter for name, parameter in self.all.items() if id(parameter) in common}
        """The parameters that are not ignored."""
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        """The parameters among these that get a gradient, or have got one before they were frozen."""
        self._places = self._places_now()
        self._frozen = [parameter for parameter in self._places if not parameter.requires_grad]

    @property
    def unchanged(self) -> bool:
        """Whether the parameters are where they were on wrapping, and all that are not frozen are `trained`.

        Those that are trained may be frozen, and unfrozen again.
        """
        now = self._places_now()
        same = len(now) == len(self._places) and all(map(is_, now, self._places))
        return same and not any(parameter.requires_grad for parameter in self._frozen)

    def train(self, unfrozen: Mapping[str, nn.Parameter]) -> None:
        """From now on these parameters are among those that are trained."""
        trained = {name: p for name, p in self.parameters.items() if name in self.trained or name in unfrozen}
        self.trained.clear()  # others hold this very dictionary
        self.trained.update(trained)
        ids = {id(parameter) for parameter in unfrozen.values()}
        self._frozen = [parameter for parameter in self._frozen if id(parameter) not in ids]

    def _places_now(self) -> list[nn.Parameter]:
        """The parameters of all parts of the module, tied ones several times."""
        self._parts = parts_of(self.module)
        held = (part._parameters.values() for _, part in self._parts)
        return [parameter for parameter in chain.from_iterable(held) if parameter is not None]

    def buffers(self, *, of_step: bool = False) -> dict[str, torch.Tensor]:
        """The buffers as they are now, without the ignored ones; one that has several names under its first.

        With `of_step`, those of the parts that the module had when it was last checked, which takes less time.
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
        """Give all ranks the parameters, buffers and optimizer states of `root`.

        Collective.
        """
        broadcast_tensors(comm, list(self.tensors().values()), root=root)
        self.copy_optimizers(comm, optimizers, root=root)

    def copy_optimizers(
        self, comm: Communicator, optimizers: Sequence[torch.optim.Optimizer], *, root: int = 0
    ) -> None:
        """Give all ranks the optimizer states of `root`, but keep those of parameters that are a rank's own.

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
