"""What `copy.deepcopy`, `pickle` and `torch.save` make of the wrapper: its module, which training wraps again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import SupportsIndex

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bagua_comm import Communicator
from bagua_comm.bootstrap.world import current

from ..errors import MisuseError

KEPT = (
    *("algorithm", "bucket_bytes", "broadcast_buffers", "find_unused_parameters", "static_graph"),
    *("gradient_as_bucket_view", "device_ids"),
)
"""Arguments of the wrapper that a copy has too, each an attribute of the same name."""


def reduced(wrapper: nn.Module, comm: Communicator, ignored: Collection[str]) -> tuple[object, ...]:
    """The result of `__reduce_ex__` of a wrapper on `comm`, where names of the module are `ignored`."""
    arguments = {name: getattr(wrapper, name) for name in KEPT}
    arguments["params_and_buffers_to_ignore"] = ignored
    arguments["comm"] = None if comm is current() else comm  # which a copy shares, and pickle refuses
    return CopiedWrapper, (type(wrapper), wrapper.module, arguments), {"training": wrapper.training}


@nn.parallel.DistributedDataParallel.register
class CopiedWrapper(nn.Module):
    """A copy of a wrapper, in this process or another: for evaluation, as of averaged weights, or for training.

    It runs the module. The first training forward pass with gradients, and the first use of a method or an
    attribute of the wrapper, wrap the module: they are collective, and its weights become rank 0's. Before, a
    backward pass of an evaluation raises `MisuseError`. Optimizers are not copied: make new ones for its
    parameters.

    Args:
        wrap: The class of the wrapper.
        module: The copy of the module.
        arguments: Those of `wrap` beside the module.
    """

    _wrap: Callable[..., nn.Module]
    _arguments: Mapping[str, object]
    _made: nn.Module | None
    """The wrapper, once there is one; no part of the module."""
    _guards: list[RemovableHandle]
    """Hooks of parameters that refuse gradients of a pass in evaluation mode, which nobody would average."""

    def __init__(
        self, wrap: Callable[..., nn.Module], module: nn.Module, arguments: Mapping[str, object]
    ) -> None:
        super().__init__()
        self.module = module
        vars(self).update(_wrap=wrap, _arguments=arguments, _made=None, _guards=[])

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        if self._made is not None:  # it may have another algorithm by now
            return self._wrapper().__reduce_ex__(protocol)  # type: ignore[return-value]
        return type(self), (self._wrap, self.module, self._arguments), {"training": self.training}

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the module. Collective while training with gradients."""
        if self._made is None:
            self._unguard()
            trained = [p for p in self.module.parameters() if p.requires_grad] if torch.is_grad_enabled() else []
            if not (trained and self.training):
                self._guards.extend(p.register_hook(_refuse) for p in trained)  # type: ignore[no-untyped-call]
                return self.module(*args, **kwargs)
        return self._wrapper()(*args, **kwargs)

    def state_dict(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        """Return the state dict of the wrapper, or before there is one, what it will be."""
        if self._made is None:
            return super().state_dict(*args, **kwargs)  # type: ignore[call-overload]
        return self._made.state_dict(*args, **kwargs)  # type: ignore[call-overload]

    def load_state_dict(
        self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False
    ) -> object:
        """Load a state dict of the wrapper. Collective once the copy was trained."""
        if self._made is None:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        return self._made.load_state_dict(state_dict, strict=strict, assign=assign)

    def _wrapper(self) -> nn.Module:
        made = self._made
        if made is None:
            self._unguard()
            made = vars(self)["_made"] = self._wrap(self.module, **self._arguments)
        made.training = self.training
        return made

    def _unguard(self) -> None:
        while self._guards:
            self._guards.pop().remove()

    def __getattr__(self, name: str) -> object:  # type: ignore[override]
        """Look up missing attributes in the module, and those of the wrapper there; methods wrap when called."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
        if self._made is None and name in KEPT:
            return self._arguments[name]
        if callable(getattr(self._wrap, name, None)):
            return lambda *args, **kwargs: getattr(self._wrapper(), name)(*args, **kwargs)
        is_wrappers = self._made is not None or hasattr(self._wrap, name)
        return getattr(self._wrapper() if is_wrappers else self.module, name)

    def __setattr__(self, name: str, value: torch.Tensor | nn.Module) -> None:
        """Set an attribute, one of the wrapper there."""
        if isinstance(getattr(vars(self).get("_wrap"), name, None), property):
            setattr(self._wrapper(), name, value)
        else:
            super().__setattr__(name, value)


def _refuse(gradient: torch.Tensor) -> torch.Tensor:
    raise MisuseError(
        "a copy of DistributedDataParallel got gradients in evaluation mode, before it was trained, so that they "
        "would stay on this rank; call its train() for its first forward pass, on all ranks"
    )
