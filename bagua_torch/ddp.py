"""DistributedDataParallel over any algorithm of bagua_comm.

The journey of a gradient: autograd accumulates it straight into its bucket, where `p.grad` is a view;
when the bucket is complete it leaves on the engine's lane while the backward pass goes on; when the
backward pass ends, the lane is joined, and the optimizer reads `p.grad`, which never left.

Only public hooks of PyTorch are used: a tensor hook on each parameter (before its gradient is
accumulated), `register_post_accumulate_grad_hook` (after), `register_multi_grad_hook` (which gradients
this backward pass makes, and when the last of them is there), and optimizer step hooks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import nn

import bagua_comm
from bagua_comm import (
    Algorithm,
    ArrayError,
    CommError,
    CommMismatch,
    Communicator,
    Engine,
    GradientAllReduce,
    Plan,
    Point,
    TensorSpec,
    UnsupportedError,
)
from bagua_comm.bucket import DEFAULT_BUCKET_BYTES

from .arrays import as_array, dtype_name

ALIGNMENT = 32
"""Elements to whose multiple, times the ranks, buckets are padded."""


class DistributedDataParallel(nn.Module):
    """Train one model on many ranks: each on its own data, all with the same weights.

    Collective. On construction, parameters and buffers become rank 0's everywhere. Parameters that are
    tied, frozen, at the module's root, unused in a step, or of several dtypes are handled; buffers
    (BatchNorm statistics) follow rank 0 at every training forward pass.

    `module` is the wrapped module; attributes that are missing here are looked up there. As with PyTorch's
    own, gradients must be accumulated by `backward()`: `torch.autograd.grad` of parameters raises. Every rank
    makes the same number of forward and backward passes. Reentrant checkpoints need all parameters used.

    Args:
        module: What to train. Its parameters stay the same objects.
        optimizers: The optimizers that step its parameters, so that a backward pass which reached none
            of them is still completed before a step.
        algorithm: What to exchange and when; `GradientAllReduce()` if None.
        comm: The ranks; `bagua_comm.default()` if None, which connects if need be.
        bucket_bytes: The size at which a bucket is closed.
        broadcast_buffers: Copy rank 0's buffers to all ranks at every training forward pass.
        find_unused_parameters: Agree in every step on the parameters that no rank used, and give them
            no gradient at all, where otherwise theirs is zero. Costs one small allreduce a step.

    Raises:
        ArrayError: The module has no parameter to train.
        CommMismatch: The ranks' modules or algorithms differ.
        UnsupportedError: The communicator or the algorithm cannot carry a parameter; it is named.

    >>> model = DistributedDataParallel(nn.Linear(2, 1), algorithm=bagua_comm.ByteGrad())
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> model.module.bias.grad
    tensor([3.])
    >>> model.close()
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        algorithm: Algorithm | None = None,
        *,
        comm: Communicator | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.comm = comm if comm is not None else bagua_comm.default()
        self.algorithm = algorithm if algorithm is not None else GradientAllReduce()
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        # remove_duplicate, the default, names a tied parameter once.
        self._trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._check_module()
        if getattr(self.algorithm, "payload", "grad") != "grad":
            raise UnsupportedError(f"DistributedDataParallel: {self.algorithm} does not exchange gradients")
        self._check_ranks()
        for parameter in module.parameters():
            self.comm.broadcast(as_array(parameter), root=0)
        _broadcast_together(self.comm, list(module.buffers()))

        specs = [
            TensorSpec(name, tuple(parameter.shape), dtype_name(parameter))
            for name, parameter in reversed(self._trained.items())  # about the order of their gradients
        ]
        alignment = ALIGNMENT * self.comm.size
        plan = Plan.pack(specs, bucket_bytes=bucket_bytes, alignment=alignment)
        flats = [
            torch.zeros(bucket.size, dtype=self._trained[bucket.tensors[0].name].dtype, device=self._device)
            for bucket in plan.buckets
        ]
        self.engine = Engine(self.comm, self.algorithm, plan, [as_array(flat) for flat in flats])
        self._views = _views(plan, flats)
        self._backward = _Backward()
        self._forwarded = self._averaged = False  # since the last optimizer step
        self._buffers_sent = False  # since the last backward pass
        self._closed = False
        self._hooks: list[Any] = []
        self._attach([optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Collective while training: buffers are broadcast."""
        if self.training and torch.is_grad_enabled():
            self._check_forward()
            if self.broadcast_buffers and not self._buffers_sent:
                # Once per backward pass: what an earlier forward pass saved for it must not change.
                _broadcast_together(self.comm, list(self.module.buffers()))
                self._buffers_sent = True
            self._forwarded = True
            self.engine.at(Point.FORWARD)
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped module, where this one has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def close(self) -> None:
        """Remove the hooks and free the engine; gradients stay where they are.

        Collective.
        """
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.engine.close()

    def _check_forward(self) -> None:
        if self._closed:
            raise CommError("DistributedDataParallel: closed; its module would train without the other ranks")
        self._check_backward_ended()
        trained = {id(p): name for name, p in self._trained.items()}
        for name, parameter in self.module.named_parameters():
            if (id(parameter) in trained) != parameter.requires_grad:
                raise ArrayError(
                    f"DistributedDataParallel: {name!r} was added, frozen or unfrozen after the module was "
                    "wrapped; close this one and wrap the module again"
                )

    def _check_backward_ended(self) -> None:
        if self._backward.complete:
            raise CommError(
                "DistributedDataParallel: the last backward pass did not end: it raised, or the module has "
                "unused parameters and reentrant checkpoints; checkpoint with use_reentrant=False"
            )

    def _check_module(self) -> None:
        if not self._trained:
            raise ArrayError("DistributedDataParallel: the module has no parameter to train")
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            if nn.parameter.is_lazy(tensor):
                raise ArrayError(
                    f"DistributedDataParallel: {name!r} is lazy; run the module once before wrapping it"
                )
            try:
                self.comm.accept("DistributedDataParallel", repr(name), as_array(tensor))
            except UnsupportedError as exc:
                raise UnsupportedError(f"DistributedDataParallel: {name!r}: {exc}") from exc
        devices = {parameter.device for parameter in self._trained.values()}
        if len(devices) > 1:
            raise UnsupportedError(
                f"DistributedDataParallel: parameters are on several devices: {sorted(map(str, devices))}"
            )
        self._device = devices.pop()

    def _check_ranks(self) -> None:
        """Compare the modules of all ranks, before anything of them is sent."""
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        mine = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]
        for rank, theirs in enumerate(self.comm.allgather_object(mine)):
            if theirs != mine:
                different = next((b for a, b in zip_longest(mine, theirs) if a != b), None)
                raise CommMismatch(
                    f"DistributedDataParallel: rank {self.comm.rank} and rank {rank} have different modules; "
                    f"rank {rank} has {different} where rank {self.comm.rank} has something else"
                )

    # Hooks, in the order in which they run in a backward pass ------------------------------------------

    def _attach(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for name, parameter in self._trained.items():
            hooked: Any = parameter  # torch leaves these two methods untyped
            self._hooks.append(hooked.register_hook(self._before_accumulation(name)))
            self._hooks.append(hooked.register_post_accumulate_grad_hook(self._after_accumulation(name)))
        self._hooks.append(
            torch.autograd.graph.register_multi_grad_hook(
                tuple(self._trained.values()), self._all_gradients_known, mode="all"
            )
        )
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_optimizer_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_optimizer_step))

    def _before_accumulation(self, name: str) -> Any:
        parameter, view = self._trained[name], self._views[name]

        def attach_gradient(gradient: torch.Tensor) -> None:
            """Make `p.grad` the view, so that autograd accumulates into the bucket."""
            if not self._backward.complete:  # a new pass, or one before its first gradient
                self._backward.expected = None
                self._backward.start_ns = self._backward.start_ns or time.perf_counter_ns()
            self._attach_view(parameter, view)

        return attach_gradient

    def _after_accumulation(self, name: str) -> Any:
        view = self._views[name]

        def gradient_is_complete(parameter: torch.Tensor) -> None:
            """Tell the engine; after the last one, the backward pass has ended."""
            self._attach_view(parameter, view)  # create_graph=True replaces p.grad
            self._backward.complete.add(name)
            self.engine.ready(name)
            self._end_backward_if_complete()

        return gradient_is_complete

    def _attach_view(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        if parameter.grad is view:
            return
        if parameter.grad is None:
            view.zero_()
        else:
            view.copy_(parameter.grad.detach())
        parameter.grad = view

    def _all_gradients_known(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Every gradient of this pass was computed; the last may still have to be accumulated.

        A pass inside another one (reentrant checkpointing) comes here with its own gradients alone, and then
        PyTorch does not call for the outer pass: that one ends when all parameters have their gradients.
        """
        names = {name for name, g in zip(self._trained, gradients, strict=True) if g is not None}
        self._backward.expected = names | (self._backward.expected or set())
        self._end_backward_if_complete()

    def _end_backward_if_complete(self) -> None:
        complete = self._backward.complete
        if len(complete) == len(self._trained) or complete == self._backward.expected:
            self._end_backward()

    def _end_backward(self) -> None:
        done, self._backward = self._backward, _Backward()
        if done.start_ns:
            detail = {"parameters": len(done.complete)}
            self.comm.tracer.add("backward", done.start_ns, time.perf_counter_ns(), detail)
        unused = [name for name in self._trained if name not in done.complete]
        fresh = [name for name in unused if self._trained[name].grad is None]
        for name in unused:  # sent all the same, so that no rank waits for them
            self._attach_view(self._trained[name], self._views[name])
            self.engine.ready(name)
        self.engine.at(Point.BACKWARD)
        self._averaged, self._buffers_sent = True, False
        if self.find_unused_parameters:
            used = np.array([name in done.complete for name in self._trained], np.uint8)
            anywhere = self.comm.allreduce(used, op="max")
            for name, somewhere in zip(self._trained, anywhere, strict=True):
                if not somewhere and name in fresh:
                    self._trained[name].grad = None

    def _before_optimizer_step(self, *_: Any) -> None:
        """A backward pass that reached no parameter ran no hook: complete it, as other ranks do."""
        self._check_backward_ended()
        if self._forwarded and not self._averaged:
            self._end_backward()

    def _after_optimizer_step(self, *_: Any) -> None:
        self._forwarded = self._averaged = False
        self.engine.at(Point.STEP)


@dataclass
class _Backward:
    """How far a backward pass is."""

    complete: set[str] = field(default_factory=set)
    """Parameters whose gradients are accumulated."""
    expected: set[str] | None = None
    """Parameters that get a gradient, as far as that is known."""
    start_ns: int = 0


@torch.no_grad()
def _broadcast_together(comm: Communicator, tensors: Sequence[torch.Tensor]) -> None:
    """Copy rank 0's tensors to all ranks: one message for each dtype."""
    if comm.size == 1:
        return
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        group = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        comm.broadcast(as_array(flat), root=0)
        for tensor, values in zip(group, torch.split(flat, [t.numel() for t in group]), strict=True):
            tensor.copy_(values.view_as(tensor))


def _views(plan: Plan, flats: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A view of its bucket's flat tensor for every tensor of the plan, by name."""
    views = {}
    for bucket, flat in zip(plan.buckets, flats, strict=True):
        start = 0
        for tensor in bucket.tensors:
            views[tensor.name] = flat[start : start + tensor.size].view(tensor.shape)
            start += tensor.size
    return views
