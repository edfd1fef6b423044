"""DistributedDataParallel over any algorithm of bagua_comm.

The journey of a gradient: autograd accumulates it straight into its bucket, where `p.grad` is a view;
when the bucket is complete it leaves on the engine's lane while the backward pass goes on; when the
backward pass ends, the lane is joined, and the optimizer reads `p.grad`, which never left. Algorithms that
exchange weights find them in buckets as well: then parameters are views.

Only public hooks of PyTorch are used: a tensor hook on each parameter (before its gradient is
accumulated), `register_post_accumulate_grad_hook` (after), `register_multi_grad_hook` (which gradients
this backward pass makes, and when the last of them is there), optimizer step hooks, and hooks of the module
before it runs, saves or loads.

On a CUDA device a bucket leaves behind what PyTorch has enqueued on its stream; when the backward pass ends, that
stream waits for the lane's, and the host for neither. Autograd runs hooks on threads and streams of its choice,
so whatever comes in from PyTorch is put in the order of its current stream (`torch_stream`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import zip_longest
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import increment_version, register_multi_grad_hook

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
    QAdam,
    TensorSpec,
    Tuner,
    UnsupportedError,
)
from bagua_comm.algorithms.base import Payload, check_algorithm_argument, phases_of
from bagua_comm.algorithms.checkpoints import keeps
from bagua_comm.algorithms.combinators import Every
from bagua_comm.bucket import DEFAULT_BUCKET_BYTES
from bagua_comm.cuda import DeviceClock, DeviceSpan
from bagua_comm.engine import check_fit

from .arrays import as_array, as_tensor, dtype_name, torch_stream
from .broadcast import broadcast_optimizer, broadcast_tensors, map_leaves
from .comm_hook import HookAlgorithm, check_hook
from .optim import QAdamOptimizer
from .torch_arguments import bytes_of_cap, check_others, device_of_inputs, moved

ALIGNMENT = 32
"""Elements to whose multiple, times the ranks, buckets are padded."""

EXTRA_STATE = "_extra_state"
"""PyTorch's name in a state dict for what `get_extra_state` gives."""


Method = TypeVar("Method", bound=Callable[..., Any])


def _in_stream_order(method: Method) -> Method:
    """`method`, with what it enqueues in the order of PyTorch's current stream."""

    @functools.wraps(method)
    def in_order(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        with torch_stream(self._device):
            return method(self, *args, **kwargs)

    return in_order  # type: ignore[return-value]


class DistributedDataParallel(nn.Module):
    """Train one model on many ranks, each on its own data.

    Collective. On construction, parameters, buffers and the state of the optimizers become rank 0's everywhere.
    Parameters that are tied, frozen, at the module's root, unused in a step, or of several dtypes are handled;
    buffers (BatchNorm statistics) follow rank 0 at every training forward pass.

    `module` is the wrapped module; attributes that are missing here are looked up there. A backward pass is
    averaged if it is that of a forward pass of this wrapper, once; `ddp.module(x).backward()`, and a second
    backward pass through the same graph, stay on this rank. As with PyTorch's own, gradients must be accumulated
    by `backward()`: `torch.autograd.grad` of parameters raises, and what `torch.distributed.autograd` computes is
    not averaged. Every rank makes the same number of forward and backward passes, or enters `join`. Reentrant
    checkpoints need all parameters used.

    The module is on the CPU or on the communicator's device, which `bagua_torch.connect` makes PyTorch's current
    one. There, over NCCL, no step of training makes the host wait for the device; for other ranks it waits only
    with `find_unused_parameters` and in `join`.

    Construct it under the stream that you train on (`torch.cuda.stream`): gradients are accumulated on the stream
    that was current on construction, and leave from there. On any other the results are the same, but all
    gradients cross from one to the other in every step; PyTorch warns of that once, from 2.10 on.

    `state_dict()` holds what the algorithm keeps as well, which differs between ranks: save it on every rank. An
    algorithm that keeps nothing (GradientAllReduce but with ErrorFeedback) adds nothing: all is tensors then, and
    state dicts of PyTorch's own load. `module.state_dict()` is that of the plain module. Where an algorithm
    exchanges weights after the optimizer's step, they are written back when the module next runs, saves or loads.

    Args:
        module: What to train. Its parameters stay the same objects.
        optimizers: All optimizers that step its parameters. Needed for algorithms that exchange weights or count
            steps; for gradients, so that a backward pass which reached no parameter is completed before a step.
        algorithm: What to exchange and when; `GradientAllReduce()` if None.
        comm: The ranks; `bagua_comm.default()` if None, which connects if need be.
        bucket_bytes: The size at which a bucket is closed; 10 MiB if None.
        tuner: Searches, while training goes on, for settings faster than `bucket_bytes` and `algorithm`: see
            `bagua_comm.Tuner`. A step lasts from one training forward pass to the next; while it searches, the
            host waits for the device in every step. In `join` the search rests; `switch` ends it.
        broadcast_buffers: Copy rank 0's buffers to all ranks at every training forward pass.
        find_unused_parameters: Agree in every step on the parameters that no rank used, and give them
            no gradient at all, where otherwise theirs is zero. Costs one small allreduce a step, on the host.
            Without it PyTorch's own raises in the next forward pass; here unused parameters do no harm.
        static_graph: In every step the same parameters get a gradient on this rank, which is checked; ranks agree
            in the first step alone on those that none used. Nothing else needs it here.
        params_and_buffers_to_ignore: Names of parameters and buffers that stay this rank's own: neither compared
            nor copied nor averaged. Those in the module's `_ddp_params_and_buffers_to_ignore`, which PyTorch's
            own has, are ignored as well.
        init_sync: If False, copy nothing on construction: the ranks have the same weights already.
        bucket_cap_mb: `bucket_bytes` in MiB, by PyTorch's name.
        device_ids: The module's CUDA device, in a list, by PyTorch's name: inputs are moved there.
        forward_sync_buffers: PyTorch's new name for `broadcast_buffers`.
        others: Further arguments of PyTorch's own, by name. `check_reduction`, `dim`, `gradient_as_bucket_view`,
            `skip_all_reduce_unused_params` and `batched_grad_copy` change nothing here; `output_device` and
            `process_group` must be the module's device and all ranks; others are refused, unless they are None.

    Close it, or let go of it: a wrapper that nobody has any more exchanges nothing, but its communicator stays
    until the end. To wrap a module again, as a second `fit` does, ends the wrapper that it had.

    Raises:
        ArrayError: The module has no parameter to train; the optimizers are not those of the module, or don't fit
            the algorithm; an argument is out of range. A RuntimeError as well, where PyTorch's own raises one.
        CommMismatch: The ranks' modules, optimizers or algorithms differ.
        UnsupportedError: The communicator or the algorithm cannot carry a parameter, or it is on another device
            than the communicator's; it is named.

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
        bucket_bytes: int | None = None,
        tuner: Tuner | None = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        params_and_buffers_to_ignore: Collection[str] = (),
        init_sync: bool = True,
        bucket_cap_mb: float | None = None,
        device_ids: Sequence[int | torch.device] | None = None,
        forward_sync_buffers: bool | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        self.module = module
        self.comm = comm if comm is not None else bagua_comm.default()
        self.broadcast_buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.tuner = tuner
        bucket_bytes = bytes_of_cap(bucket_bytes, bucket_cap_mb, DEFAULT_BUCKET_BYTES)
        self.optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        # remove_duplicate, the default, names a tied parameter once.
        self._wrapped = dict(module.named_parameters())
        self._ignored = self._names_to_ignore(params_and_buffers_to_ignore)
        self._trained = {n: p for n, p in self._common_parameters().items() if p.requires_grad}
        algorithm = algorithm if algorithm is not None else GradientAllReduce()
        self._check_module()
        self._inputs_to = device_of_inputs(device_ids, self._device)
        check_others(others, ranks=self.comm.size, device=self._device)
        self._check_optimizers(algorithm)
        self._check_ranks()
        self._specs = [
            TensorSpec(name, tuple(parameter.shape), dtype_name(parameter))
            for name, parameter in reversed(self._trained.items())  # about the order of their gradients
        ]
        check_fit(algorithm, self._pack(bucket_bytes), self.comm.size)
        self._end_older()
        if init_sync:
            self._copy_all(root=0)
        if tuner is not None:
            best = tuner.start(self.comm, algorithm, self._specs, bucket_bytes=bucket_bytes)
            bucket_bytes, algorithm = best.bucket_bytes, best.algorithm
        self.bucket_bytes = bucket_bytes
        self._step_began_s: float | None = None
        self._plan = self._pack(bucket_bytes)
        self._flats: dict[Payload, list[torch.Tensor]] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        """Views of the buckets, where gradients are exchanged."""
        self._weights: dict[str, torch.Tensor] = {}
        """The same, where weights are: the memory of the parameters."""
        self._clock = DeviceClock(self._device.index) if self._device.type == "cuda" else None
        self._start(algorithm)

        self._backward = _Backward()
        self._without_gradient: set[str] = set()  # parameters between their two hooks
        self._sync = False  # whether the next backward pass is to be averaged: a forward pass says so
        self._synchronizing = True
        self._opened = False  # a forward pass since the last backward pass has been told to the other ranks
        self._forwarded = self._averaged = False  # since the last optimizer step
        self._stepped: set[int] = set()  # optimizers, since the last backward pass
        self._passes = 0  # backward passes that were averaged
        self._hooked = False  # by register_comm_hook
        self._graph = _Graph()
        self._join: _Join | None = None
        self._closed = False
        self._hooks: list[Any] = []
        self._attach()
        # What a wrapper that nobody has any more must undo by itself, whenever that may be on this rank.
        self._give_back = weakref.finalize(self, _give_back, *self._lent())
        self._give_back.atexit = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Collective while training: buffers are broadcast."""
        if self._inputs_to is not None:
            args, kwargs = moved((args, kwargs), self._inputs_to)
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._before_forward()
        if torch.compiler.is_compiling():
            return self.module(*args, **kwargs)  # outputs of compiled graphs have no hooks
        output = self.module(*args, **kwargs)
        self._watch(output)
        return output

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped module, where this one has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __getstate__(self) -> Any:
        raise UnsupportedError("DistributedDataParallel: cannot be copied or pickled; copy its .module")

    @_in_stream_order
    def close(self) -> None:
        """Finish what is under way, remove the hooks and free the engine; gradients stay where they are.

        Collective. Closing twice does nothing.
        """
        if self._closed:
            return
        try:
            self._complete_step()
            self.engine.close()
            self._weights_changed()
        finally:
            self._detach()

    def _detach(self) -> None:
        """Leave the module and the optimizers to themselves; the other ranks hear nothing of it."""
        self._closed = True
        self._give_back.detach()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._share_momenta()

    def _end_older(self) -> None:
        """End the wrappers of this module that came before this one. Collective.

        Those that are there on all ranks are closed. Ranks may lose theirs at different times, though: one that
        is missing somewhere is detached, and its communicator stays.
        """
        parameters = {id(parameter) for parameter in self.module.parameters()}
        older: dict[str, DistributedDataParallel] = {}
        for name, parameter in self.module.named_parameters():
            for hook in list((parameter._backward_hooks or {}).values()):
                wrapper = hook.wrapper() if isinstance(hook, _Hook) else None
                if wrapper is None or wrapper in older.values():
                    continue
                # Others may share some parameters, and go on.
                if wrapper.module is self.module or {id(p) for p in wrapper.module.parameters()} == parameters:
                    older[name] = wrapper
        for hook in list(self.module._forward_pre_hooks.values()):
            if isinstance(hook, _Hook) and hook.wrapper() is None:
                hook.remove_all()
        closable = sorted(name for name, wrapper in older.items() if wrapper.comm is self.comm)
        common = set(closable).intersection(*self.comm.allgather_object(closable))
        for name in closable:
            if name in common:
                # One whose exchanges have failed cannot end as it should; this one begins all the same.
                with suppress(CommError):
                    older[name].close()
        for wrapper in older.values():
            if not wrapper._closed:
                wrapper._detach()

    # What users ask for in the course of training -------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging: forward and backward passes in here stay on this rank.

        The first backward pass after it averages all that has been accumulated.
        """
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    @contextmanager
    def join(
        self,
        *,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        divide_by_initial_size: bool = True,
        divide_by_initial_world_size: bool | None = None,
    ) -> Iterator[None]:
        """Train on unevenly many batches: a rank that has no more takes part in exchanges until all have ended.

        Collective: all ranks enter it around their training loops. In it every training step begins with one
        small allgather. A rank that has ended sends zeros for gradients, and keeps what is in `p.grad`; at the
        end all ranks get the weights, buffers and optimizer states of one that trained to the last. With
        algorithms that exchange weights, it goes on exchanging its own, and keeps them.

        Args:
            enable: If False, do nothing: all ranks have as many batches.
            throw_on_early_termination: As soon as a rank has no more batches, raise on all ranks: on this one at
                the end, on the others in their next forward pass.
            divide_by_initial_size: Divide sums of gradients by the number of all ranks; if False, by the number
                of those that still have data.
            divide_by_initial_world_size: PyTorch's name for the same.

        Raises:
            CommError: A rank has ended before others, with `throw_on_early_termination`; a RuntimeError as well.
        """
        if not enable:
            yield
            return
        if divide_by_initial_world_size is not None:
            divide_by_initial_size = divide_by_initial_world_size
        self._join = _Join(divide_by_initial_size, throw_on_early_termination)
        began = self.engine.step
        try:
            yield
            self._join.steps = self.engine.step - began
            self._follow_the_others()
        finally:
            self._join = None

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Average gradients by `hook` from here on, in the place of `GradientAllReduce()`.

        Collective. At most once, and before the first backward pass. It ends the search of a tuner.

        Args:
            state: What the hook gets first; an Average gets nothing.
            hook: An Average such as `Quantized(MinMaxUInt8())`. Or a function that PyTorch's own would take,
                called with `state` and a bucket that has the methods of `torch.distributed.GradBucket`: on the
                thread of the backward pass, for bucket after bucket in the same order on all ranks. It returns a
                `torch.futures.Future` of the averaged tensor; the sum over ranks is for the hook to divide.

        Raises:
            ArrayError: It was called before, or too late (a RuntimeError as well); the algorithm is not
                GradientAllReduce; the hook takes something else.
            UnsupportedError: The hook cannot be called, or the Average does not take the dtype of a parameter.

        >>> model = DistributedDataParallel(nn.Linear(2, 1))
        >>> model.register_comm_hook(None, bagua_comm.Quantized(bagua_comm.MinMaxUInt8()))
        >>> model.close()
        """
        if self._hooked:
            raise _MisuseError("register_comm_hook: this model has a hook; it can be registered only once")
        if self._passes:
            raise _MisuseError("register_comm_hook: call it before the first backward pass")
        if not isinstance(self.algorithm, GradientAllReduce):
            raise ArrayError(
                f"register_comm_hook: the algorithm is {self.algorithm}, which a hook cannot replace; wrap the "
                "module without one"
            )
        if hasattr(hook, "bind"):
            self.switch(GradientAllReduce(hook))
        else:
            self.switch(HookAlgorithm(check_hook(hook), state, self._trained))
        self._hooked = True

    @_in_stream_order
    def switch(self, algorithm: Algorithm) -> None:
        """Go on with another algorithm; the model stays the same.

        Collective. Call it between steps. If weights were exchanged until now, so that ranks' weights differ,
        they become the mean of all ranks, and the states of the optimizers rank 0's. The new algorithm counts
        its steps from here.

        Raises:
            ArrayError: The optimizers don't fit the algorithm.
            UnsupportedError: The algorithm cannot carry a parameter; it is named.
        """
        self._check_optimizers(algorithm)
        check_fit(algorithm, self._plan, self.comm.size)
        self._check_backward_ended()
        self._complete_step()
        differed = any(phase.payload == "weight" for phase in phases_of(self.algorithm))
        self.engine.close()
        self.tuner = None
        if differed:
            self.average_weights()
            broadcast_tensors(self.comm, self._common_buffers())
            self._copy_optimizers(root=0)
        self._start(algorithm)
        self._share_momenta()

    @_in_stream_order
    def replan(self, *, bucket_bytes: int | None = None, algorithm: Algorithm | None = None) -> None:
        """Go on with buckets of another size, or the same algorithm with other settings.

        Collective. Call it between steps. Gradients move along, and what the algorithm keeps; until they have,
        there is memory for both old and new.

        Args:
            bucket_bytes: The size at which a bucket is closed; as it is if None.
            algorithm: The same with another average or codec, say; as it is if None.

        Raises:
            ArrayError: It is another algorithm, or what it keeps cannot move to other buckets.
            UnsupportedError: The algorithm cannot carry a parameter; it is named.
        """
        algorithm = algorithm if algorithm is not None else self.engine.algorithm
        self._check_optimizers(algorithm)
        self._check_backward_ended()
        self._complete_step()
        bucket_bytes = bucket_bytes if bucket_bytes is not None else self.bucket_bytes
        plan = self._pack(bucket_bytes)
        flats = {phase.payload: self._allocate(plan) for phase in phases_of(algorithm)}
        self.engine.replan(plan, _as_storage(flats), algorithm=algorithm)
        self.bucket_bytes, self.algorithm, self._plan, self._flats = bucket_bytes, algorithm, plan, flats
        old, self._gradients = self._gradients, plan.cut(flats["grad"]) if "grad" in flats else {}
        self._weights = plan.cut(flats["weight"]) if "weight" in flats else {}
        for name, view in self._gradients.items():
            if self._trained[name].grad is old[name]:
                self._trained[name].grad = view
        for name, view in self._weights.items():
            self._trained[name].data = view
        self._weights_changed()
        self._share_momenta()

    @_in_stream_order
    def average_weights(self) -> None:
        """Make the weights of all ranks their mean: for evaluation, where an algorithm lets them differ.

        Collective.
        """
        self._complete_step()
        self.engine.settle()
        for parameter in self._trained.values():
            values = as_array(parameter)
            self.comm.allreduce(values, out=values, op="avg")
        increment_version(self._trained.values())

    @_in_stream_order
    def stop(self) -> None:
        """Finish what is under way on all ranks, and exchange nothing until `resume`; see `Engine.stop`.

        Collective.
        """
        self._complete_step()
        self.engine.stop()
        self._weights_changed()

    def resume(self) -> None:
        """Go on after `stop`.

        Collective.
        """
        self.engine.resume()

    @_in_stream_order
    def get_extra_state(self) -> dict[str, Any]:
        """What the algorithm keeps, for `state_dict()`."""
        self._complete_step()
        return map_leaves(self.engine.state_dict(), _to_tensor)  # type: ignore[no-any-return]

    @_in_stream_order
    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on from what `get_extra_state` gave, by way of `load_state_dict()`. Collective."""
        mine, saved = self.algorithm, None
        if self.tuner is not None:
            names = self.comm.allgather_object(str(state.get("algorithm")) if isinstance(state, dict) else "")
            saved = self.tuner.algorithm_named(names[0]) if len(set(names)) == 1 else None
        if saved not in (None, mine):  # what a tuner tried at that time
            self.replan(algorithm=saved)
        try:
            self.engine.load_state_dict(map_leaves(state, self._to_array))
        except ArrayError:  # on all ranks
            if self.algorithm != mine:
                self.replan(algorithm=mine)
            raise
        if self.algorithm != mine:
            self.replan(algorithm=mine)
        self._forget_step()

    def _keeps_state(self) -> bool:
        """Whether a checkpoint must hold more than the module: values, or a number of steps that matters."""
        plain = isinstance(self.algorithm, (GradientAllReduce, HookAlgorithm))
        return not plain or any(keeps(state) for state in self.engine.states)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.tuner is None and not self._keeps_state():  # a tuner may try another one that does
            del destination[prefix + EXTRA_STATE]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        key, missing = prefix + EXTRA_STATE, args[2]
        if key in missing and not self._keeps_state():
            missing.remove(key)
        if key not in state_dict:
            if self._backward.complete:  # of a pass that did not end
                self.engine.load_state_dict(self.engine.state_dict())
            self._forget_step()

    def _forget_step(self) -> None:
        """What comes next is a new step."""
        self._backward = _Backward()
        self._sync = self._opened = self._forwarded = self._averaged = False
        self._stepped.clear()
        self._weights_changed()

    def _to_array(self, value: Any) -> Any:
        with contextlib.suppress(Exception):  # what cannot be viewed, the engine refuses on all ranks
            return as_array(value.to(self._device)) if isinstance(value, torch.Tensor) else value
        return value

    # Setting up -----------------------------------------------------------------------------------------

    def _names_to_ignore(self, names: Collection[str]) -> set[str]:
        known = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        known |= {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        unknown = sorted(set(names) - known)
        if isinstance(names, str) or unknown:
            raise ArrayError(
                f"DistributedDataParallel: params_and_buffers_to_ignore is {names!r}, expected names of the "
                "module's parameters and buffers" + (f"; there is no {unknown[0]!r}" if unknown else "")
            )
        return {*names, *getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())}

    def _common_parameters(self) -> dict[str, nn.Parameter]:
        """Those that ranks have in common: not to be ignored, under one of their names at least."""
        every = self.module.named_parameters(remove_duplicate=False)
        common = {id(parameter) for name, parameter in every if name not in self._ignored}
        return {name: parameter for name, parameter in self._wrapped.items() if id(parameter) in common}

    def _common_buffers(self) -> list[torch.Tensor]:
        return [buffer for name, buffer in self.module.named_buffers() if name not in self._ignored]

    def _common_tensors(self) -> list[tuple[str, torch.Tensor]]:
        buffers = [(name, buffer) for name, buffer in self.module.named_buffers() if name not in self._ignored]
        return [*self._common_parameters().items(), *buffers]

    def _copy_all(self, *, root: int) -> None:
        """Give all ranks the parameters, buffers and optimizer states of `root`. Collective."""
        broadcast_tensors(self.comm, [*self._common_parameters().values(), *self._common_buffers()], root=root)
        self._copy_optimizers(root=root)

    def _copy_optimizers(self, *, root: int) -> None:
        common = {id(parameter) for parameter in self._common_parameters().values()}
        for optimizer in self.optimizers:
            mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in common]
            kept = {parameter: optimizer.state[parameter] for parameter in mine if parameter in optimizer.state}
            broadcast_optimizer(self.comm, optimizer, root=root)
            for parameter in mine:
                optimizer.state.pop(parameter, None)
            optimizer.state.update(kept)

    @_in_stream_order
    def _start(self, algorithm: Algorithm) -> None:
        """Make the engine, and the memory that it exchanges."""
        payloads = {phase.payload for phase in phases_of(algorithm)}
        if "grad" in payloads and "grad" not in self._flats:
            self._flats["grad"] = self._allocate(self._plan)
            self._gradients = self._plan.cut(self._flats["grad"])
        if "weight" in payloads and "weight" not in self._flats:
            self._flats["weight"] = self._allocate(self._plan)
            for name, view in self._plan.cut(self._flats["weight"]).items():
                parameter = self._trained[name]
                view.copy_(parameter.detach())
                parameter.data = view
                self._weights[name] = view
        self.engine = Engine(self.comm, algorithm, self._plan, _as_storage(self._flats))
        self.algorithm, self._commits = algorithm, 0

    def _pack(self, bucket_bytes: int) -> Plan:
        return Plan.pack(self._specs, bucket_bytes=bucket_bytes, alignment=ALIGNMENT * self.comm.size)

    def _allocate(self, plan: Plan) -> list[torch.Tensor]:
        """Memory for the buckets of one payload."""
        dtypes = [self._trained[bucket.tensors[0].name].dtype for bucket in plan.buckets]
        return [
            torch.zeros(bucket.size, dtype=dtype, device=self._device)
            for bucket, dtype in zip(plan.buckets, dtypes, strict=True)
        ]

    def _check_module(self) -> None:
        if not self._trained:
            raise _MisuseError("DistributedDataParallel: the module has no parameter to train")
        for name, tensor in self._common_tensors():
            if nn.parameter.is_lazy(tensor):
                raise _MisuseError(
                    f"DistributedDataParallel: {name!r} is lazy; run the module once before wrapping it"
                )
            self._check_device(name, tensor)
            try:
                self.comm.carrier(as_array(tensor), call="DistributedDataParallel", name=repr(name))
            except UnsupportedError as exc:
                raise UnsupportedError(f"DistributedDataParallel: {name!r}: {exc}") from exc
        devices = {parameter.device for parameter in self._trained.values()}
        if len(devices) > 1:
            raise UnsupportedError(
                f"DistributedDataParallel: parameters are on several devices: {sorted(map(str, devices))}"
            )
        self._device = devices.pop()

    def _check_device(self, name: str, tensor: torch.Tensor) -> None:
        mine = self.comm.device
        if tensor.device.type != "cuda" or tensor.device.index == mine:
            return
        if mine is None:
            raise UnsupportedError(
                f"DistributedDataParallel: {name!r} is on {tensor.device}, but this communicator has no device; "
                "see `python -m bagua_comm info`"
            )
        raise UnsupportedError(
            f"DistributedDataParallel: {name!r} is on {tensor.device}, but this rank's communicator works on "
            f"cuda:{mine}; move the module there, or call torch.cuda.set_device({mine}) before it is made"
        )

    def _check_optimizers(self, algorithm: Algorithm) -> None:
        check_algorithm_argument("DistributedDataParallel", "algorithm", algorithm)
        phases = phases_of(algorithm)
        owned: set[int] = set()
        trained = {id(parameter) for parameter in self._trained.values()}
        for number, optimizer in enumerate(self.optimizers):
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise ArrayError(
                    f"DistributedDataParallel: optimizers is {self.optimizers!r}, expected those of torch.optim; "
                    "all arguments of PyTorch's own but the module are given by name"
                )
            mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if not mine & trained:
                raise ArrayError(
                    f"DistributedDataParallel: optimizer {number} ({type(optimizer).__name__}) has none of the "
                    "module's parameters; was the module copied after the optimizer was made?"
                )
            owned |= mine
        missing = [name for name, parameter in self._trained.items() if id(parameter) not in owned]
        if self.optimizers and missing:
            raise ArrayError(
                f"DistributedDataParallel: no optimizer given steps {', '.join(map(repr, missing[:3]))}"
                f"{' and others' if len(missing) > 3 else ''}; give all optimizers, or freeze such parameters"
            )
        counting = len(phases) > 1 or any(p.payload == "weight" or isinstance(p, Every) for p in phases)
        if counting and not self.optimizers:
            raise ArrayError(f"DistributedDataParallel: {algorithm} needs to know of steps: give the optimizers")
        for phase in phases:
            if isinstance(phase, QAdam):
                self._check_qadam(phase)

    def _check_qadam(self, algorithm: QAdam) -> None:
        wanted = (algorithm.warmup_steps, algorithm.beta1)
        if not self.optimizers:
            raise ArrayError(f"DistributedDataParallel: {algorithm} needs its QAdamOptimizer: give it")
        for optimizer in self.optimizers:
            if not isinstance(optimizer, QAdamOptimizer):
                raise ArrayError(
                    "DistributedDataParallel: QAdam averages the momentum of a bagua_torch.QAdamOptimizer, "
                    f"but the optimizer is {type(optimizer).__name__}"
                )
            if (optimizer.warmup_steps, optimizer.beta1) != wanted:
                raise ArrayError(
                    f"DistributedDataParallel: the optimizer has warmup_steps={optimizer.warmup_steps} and "
                    f"betas[0]={optimizer.beta1}, but {algorithm} has {wanted[0]} and {wanted[1]}"
                )

    def _check_ranks(self) -> None:
        """Compare the modules of all ranks, before anything of them is sent."""
        mine = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in self._common_tensors()]
        mine.append((f"{len(self.optimizers)} optimizers", (), "", False))
        mine.append(("a tuner" if self.tuner is not None else "no tuner", (), "", False))
        for rank, theirs in enumerate(self.comm.allgather_object(mine)):
            if theirs != mine:
                different = next((b for a, b in zip_longest(mine, theirs) if a != b), None)
                raise _MismatchError(
                    f"DistributedDataParallel: rank {self.comm.rank} and rank {rank} have different modules; "
                    f"rank {rank} has {different} where rank {self.comm.rank} has something else"
                )

    def _attach(self) -> None:
        for name, parameter in self._trained.items():
            hooked: Any = parameter  # torch leaves these two methods untyped
            self._hooks.append(hooked.register_hook(self._hook(self._before_accumulation, name)))
            after = self._hook(self._after_accumulation, name)
            self._hooks.append(hooked.register_post_accumulate_grad_hook(after))
        known = self._hook(self._all_gradients_known)
        self._hooks += _watch_gradients(list(self._trained.values()), known)
        self._parameter_hooks = list(self._hooks)
        for optimizer in self.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._hook(self._before_optimizer_step)))
            self._hooks.append(optimizer.register_step_post_hook(self._hook(self._after_optimizer_step)))
        for register in (
            self.module.register_forward_pre_hook,
            self.module.register_state_dict_pre_hook,
            self.module.register_load_state_dict_pre_hook,
        ):
            self._hooks.append(register(self._hook(self._settle)))

    def _hook(self, method: Callable[..., Any], *args: Any) -> _Hook:
        return _Hook(method, *args, handles=self._hooks)

    def _lent(self) -> tuple[list[Any], list[Any], list[Any]]:
        """What `_give_back` needs, without keeping any of it alive."""
        optimizers = [weakref.ref(o) for o in self.optimizers if isinstance(o, QAdamOptimizer)]
        return self._parameter_hooks, optimizers, [weakref.ref(p) for p in self._trained.values()]

    # A training step, in the order in which it comes here -----------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @_in_stream_order
    def _before_forward(self) -> None:
        if self.training:
            self._check_forward()
            if self._join is not None:
                self._join.forwards += 1
        self._sync = self._synchronizing
        if not self._sync or not self.training:
            return
        if not self._opened:
            # Once per backward pass: what an earlier forward pass saved for it must not change.
            if self._stepped:
                self._end_step()  # not all optimizers stepped
            self._complete_step()
            self._tune()
            self._opened = True
            if self._join is not None:
                self._announce(active=True)
            if self.broadcast_buffers:
                root = self._join.active[0] if self._join is not None else 0
                broadcast_tensors(self.comm, self._common_buffers(), root=root)
        self._share_momenta()
        self._forwarded = True
        self.engine.at(Point.FORWARD)
        self._weights_changed()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _watch(self, output: Any) -> None:
        """Average the backward pass of this forward pass, though that of another one may come first."""
        if self._sync:
            once = [True]
            for tensor in _tensors_in(output):
                if tensor.grad_fn is not None:
                    hooked: Any = tensor  # torch leaves this method untyped
                    hooked.register_hook(_Hook(self._output_reached, once))

    def _output_reached(self, once: list[bool], _: object) -> None:
        """A backward pass begins at an output of a forward pass that was to be averaged."""
        if once[0]:
            once[0] = False
            self._sync = True

    def _tune(self) -> None:
        """Tell the tuner how long the step that ends here took, and do what it says. Collective."""
        if self.tuner is None or not self.tuner.searching:
            return
        if self._join is not None:
            self._step_began_s = None
            return
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if self._step_began_s is not None:
            change = self.tuner.step(time.perf_counter() - self._step_began_s)
            if change is not None:
                self.replan(bucket_bytes=change.bucket_bytes, algorithm=change.algorithm)
        self._step_began_s = time.perf_counter()

    def _check_forward(self) -> None:
        if self._closed:
            raise CommError(
                "DistributedDataParallel: closed, or its module was wrapped again; it would train without the "
                "other ranks"
            )
        self._check_backward_ended()
        trained = {id(p) for p in self._trained.values()}
        for name, parameter in self.module.named_parameters():
            if (id(parameter) in trained) == parameter.requires_grad or name in self._ignored:
                continue
            if not isinstance(parameter, nn.Parameter):
                continue  # lent to the module for this call, by torch.func.functional_call
            if self._wrapped.get(name, parameter) is not parameter:
                raise ArrayError(
                    f"DistributedDataParallel: {name!r} is another parameter than when the module was wrapped; "
                    "close this one and wrap the module again. To torch.func.functional_call give tensors that "
                    "are no nn.Parameter; their gradients stay on this rank"
                )
            raise ArrayError(
                f"DistributedDataParallel: {name!r} was added, frozen or unfrozen after the module was "
                "wrapped; close this one and wrap the module again"
            )
        for name, parameter in self._trained.items():
            # What torch.distributed.optim leaves there; the optimizer would step before gradients are averaged.
            if hasattr(parameter, "_in_backward_optimizers"):
                raise UnsupportedError(
                    f"DistributedDataParallel: {name!r} has an optimizer that steps within the backward pass; "
                    "call optimizer.step() after backward(), when gradients are averaged"
                )
        for name, view in self._weights.items():
            if self._trained[name].data_ptr() != view.data_ptr():
                raise ArrayError(
                    f"DistributedDataParallel: {name!r} was moved, converted or wrapped once more, so its "
                    "weights would not be exchanged; close this one and wrap the module again"
                )

    def _check_backward_ended(self) -> None:
        if self._backward.complete:
            raise CommError(
                "DistributedDataParallel: the last backward pass did not end: it raised, or the module has "
                "unused parameters and reentrant checkpoints; checkpoint with use_reentrant=False"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @_in_stream_order
    def _settle(self, *_: Any) -> None:
        """Before the module runs, saves or loads: what was exchanged since the last step is written back."""
        if not self.module.training:
            self._complete_step()
        self.engine.settle()
        self._weights_changed()

    def _complete_step(self) -> None:
        """Where weights are exchanged, a step left out on this rank (a GradScaler found inf) counts as well."""
        if self._averaged and not self._opened and self.engine.payload == "weight":
            self._end_step()

    def _before_accumulation(self, name: str, gradient: torch.Tensor | None) -> None:
        """Make `p.grad` the view, so that autograd accumulates into the bucket."""
        if self._sync and not self._backward.complete:  # a new pass, or one before its first gradient
            self._backward.expected = None
            if not self._backward.start_ns:
                self._begin_backward()
        if gradient is None:  # a Function may make none; what follows runs all the same
            self._without_gradient.add(name)
        elif self._sync or self._trained[name].grad is None:  # else it may be in the bucket of another wrapper
            self._attach_view(name)

    @_in_stream_order
    def _begin_backward(self) -> None:
        self._backward.start_ns = time.perf_counter_ns()
        if self._clock is not None:
            row = "device: backward"
            self._backward.on_device = DeviceSpan(self.comm.tracer, self._clock, "backward", row)

    def _after_accumulation(self, name: str, _: nn.Parameter) -> None:
        """Tell the engine that a gradient is complete; after the last one, the backward pass has ended."""
        if name in self._without_gradient:
            self._without_gradient.remove(name)
            return
        if self._sync:
            self._attach_view(name)  # create_graph=True replaces p.grad
            self._backward.complete.add(name)
            with torch_stream(self._device):
                self._ready(name)
                self._end_backward_if_complete()

    def _attach_view(self, name: str) -> None:
        parameter, view = self._trained[name], self._gradients.get(name)
        if view is None or parameter.grad is view:
            return
        if parameter.grad is None:
            view.zero_()
        else:
            view.copy_(parameter.grad.detach())
        parameter.grad = view

    @_in_stream_order
    def _all_gradients_known(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Every gradient of this pass was computed; the last may still have to be accumulated.

        A pass inside another one (reentrant checkpointing) comes here with its own gradients alone, and then
        PyTorch does not call for the outer pass: that one ends when all parameters have their gradients.
        """
        if self._sync:
            names = {name for name, g in zip(self._trained, gradients, strict=True) if g is not None}
            self._backward.expected = names | (self._backward.expected or set())
            self._end_backward_if_complete()

    def _end_backward_if_complete(self) -> None:
        complete = self._backward.complete
        if len(complete) == len(self._trained) or complete == self._backward.expected:
            self._end_backward()

    def _end_backward(self) -> None:
        done, self._backward = self._backward, _Backward()
        self._sync = _inside_a_pass()  # what contains this pass goes on
        if done.start_ns:
            detail = {"parameters": len(done.complete)}
            self.comm.tracer.add("backward", done.start_ns, time.perf_counter_ns(), detail)
            if done.on_device is not None:
                done.on_device.end(**detail)
        fresh = []
        for name, parameter in self._trained.items():
            if name in done.complete or self.engine.payload == "weight":
                continue
            if parameter.grad is None:
                fresh.append(name)
            self._attach_view(name)  # unused, but sent all the same: no rank waits for it
            self._ready(name)
        self.engine.at(Point.BACKWARD)
        self._weights_changed()
        self._share_momenta()
        self._averaged, self._opened = True, False
        self._passes += 1
        self._stepped.clear()
        self._forget_unused(fresh, ended=not self._sync)
        if self.static_graph:
            self._graph.compare(done.complete, ended=not self._sync)

    def _forget_unused(self, fresh: Sequence[str], *, ended: bool) -> None:
        """Take away the zero gradients of parameters that had none before, on any rank. Collective.

        With a static graph the ranks ask each other in the first step alone.

        Args:
            fresh: Parameters that had no gradient before.
            ended: Whether this pass is not inside another one, which goes on.
        """
        if self.engine.payload != "grad" or not (self.find_unused_parameters or self.static_graph):
            return
        unused = self._graph.unused
        if unused is None:
            mine = np.array([name not in fresh for name in self._trained], np.uint8)
            somewhere = self.comm.allreduce(mine, op="max")
            unused = {name for name, used in zip(self._trained, somewhere, strict=True) if not used}
            if self.static_graph and ended:
                self._graph.unused = unused
        for name in unused.intersection(fresh):
            self._trained[name].grad = None

    @_in_stream_order
    def _before_optimizer_step(self, *_: Any) -> None:
        """A backward pass that reached no parameter ran no hook: complete it, as other ranks do."""
        self._check_backward_ended()
        if self._forwarded and not self._averaged:
            self._end_backward()
        self.engine.settle()  # if this step was counted already

    @_in_stream_order
    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self.optimizers) and (self._averaged or self.engine.payload == "grad"):
            self._end_step()

    def _end_step(self) -> None:
        self._forwarded = self._averaged = False
        self._stepped.clear()
        self.engine.at(Point.STEP)
        self._weights_changed()

    def _weights_changed(self) -> None:
        """Tell autograd, which would not notice: it raises where an older graph needs them as they were."""
        if self._commits != self.engine.commits:
            self._commits = self.engine.commits
            increment_version(self._trained.values())

    def _share_momenta(self) -> None:
        """Let the optimizers keep their momenta where QAdam averages them, and say whether it has begun to."""
        phase, momenta, frozen = self.engine.phase, dict[torch.Tensor, torch.Tensor](), False
        if isinstance(phase, QAdam) and not self._closed:
            views = self._plan.cut([as_tensor(state.momentum) for state in self.engine.states])
            momenta = {self._trained[name]: view for name, view in views.items()}
            frozen = self.engine.buckets[0].step >= phase.warmup_steps
        for optimizer in self.optimizers:
            if isinstance(optimizer, QAdamOptimizer):
                optimizer.share(self._trained.values(), momenta, frozen=frozen)

    # Uneven data ----------------------------------------------------------------------------------------

    def _announce(self, *, active: bool) -> None:
        """Tell the other ranks whether this one has data, and hear it of them. Collective."""
        table = self.comm.allgather(np.array([active, self.engine.step]))
        assert self._join is not None
        self._join.active = [rank for rank in range(self.comm.size) if table[rank, 0]]
        if self._join.throws and 0 < len(self._join.active) < self.comm.size:
            self._forget_step()
            ended = [rank for rank in range(self.comm.size) if rank not in self._join.active]
            who = f"rank {ended[0]} has" if len(ended) == 1 else f"ranks {ended} have"
            raise _EarlyEndError(
                f"join: {who} no more batches, so all ranks stop, as throw_on_early_termination says"
            )
        if self._join.active and not self._join.divide_by_initial_size:
            self._join.scale = self.comm.size / len(self._join.active)
        while not active and self.engine.step < table[:, 1].max():
            if isinstance(self.engine.phase, QAdam):
                for optimizer in self.optimizers:
                    optimizer.step()  # the momentum is the optimizer's to keep
            else:
                self.engine.at(Point.STEP)

    def _ready(self, name: str) -> None:
        """Hand a gradient to the engine, for a mean over all ranks or over those that have data."""
        if self._join is not None and self._join.scale != 1 and self.engine.payload == "grad":
            # Before it is sent: what the algorithm averages may be more than the gradient, as QAdam's momentum.
            self._gradients[name].mul_(self._join.scale)
        self.engine.ready(name)

    @_in_stream_order
    def _follow_the_others(self) -> None:
        """Take part in the exchanges of ranks that have data left, until none has. Collective."""
        assert self._join is not None
        self._complete_step()
        before = _Gradients(self._trained, self._gradients)
        last: list[int] = []
        zeroed_in = -1
        while True:
            self._announce(active=False)
            if not self._join.active:
                break
            last = self._join.active
            if self.broadcast_buffers:
                broadcast_tensors(self.comm, self._common_buffers(), root=last[0])
            self.engine.at(Point.FORWARD)
            if self.engine.payload == "grad":
                # Where gradients accumulate, averages of the same step are in them already, on all ranks.
                keep = (
                    bool(self.optimizers) and zeroed_in == self.engine.step and self._join.divide_by_initial_size
                )
                zeroed_in = self.engine.step
                for name, view in self._gradients.items():
                    self._trained[name].grad = view if keep else view.zero_()
                    self.engine.ready(name)
            self.engine.at(Point.BACKWARD)
            if self.engine.payload == "weight":
                # Ranks that have data may wait for this exchange before they announce their next step.
                self.engine.at(Point.STEP)
            self._share_momenta()
            self._forget_unused(list(self._trained), ended=True)
        before.put_back()
        self._weights_changed()
        self._end_together(last)

    def _end_together(self, last: Sequence[int]) -> None:
        """Give all ranks what one that trained to the last has. Collective.

        Weights may differ even if no rank had to wait for another one: after steps in `no_sync`, say.

        Args:
            last: The ranks that took part in the last exchange, where this rank had ended before it.
        """
        assert self._join is not None
        if self.engine.payload == "weight":
            return
        table = self.comm.allgather_object((last, self._join.steps, self._join.forwards))
        candidates = {rank for ranks, _, _ in table for rank in ranks} or range(self.comm.size)
        root = max(candidates, key=lambda rank: (*table[rank][1:], -rank))
        self._copy_all(root=root)


def _watch_gradients(
    parameters: Sequence[nn.Parameter], function: Callable[[Sequence[torch.Tensor | None]], None]
) -> list[Any]:
    """Call `function` when all gradients of a pass are known.

    `register_multi_grad_hook` does that, but keeps them all in memory until then: it gets to see stand-ins.
    """
    gradients: dict[int, torch.Tensor] = {}

    def hide(index: int, parameter: nn.Parameter) -> Any:
        nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)

        def stand_in(gradient: torch.Tensor | None) -> torch.Tensor | None:
            # There may be none; and autograd refuses another layout in a gradient's place.
            if gradient is None or gradient.layout is not torch.strided:
                gradients.pop(index, None)  # of a pass that failed
                return None
            gradients[index] = gradient
            return nothing

        return stand_in

    def show(index: int) -> Any:
        return lambda _: gradients.pop(index, None)

    hooked: Any = parameters  # torch leaves register_hook untyped
    handles = [p.register_hook(hide(index, p)) for index, p in enumerate(hooked)]
    handles.append(register_multi_grad_hook(tuple(parameters), function, mode="all"))
    return [*handles, *(p.register_hook(show(index)) for index, p in enumerate(hooked))]


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of what a module returned, as far as they can be found."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors_in(value)
    elif is_dataclass(output):
        for part in fields(output):
            yield from _tensors_in(getattr(output, part.name))


def _inside_a_pass() -> bool:
    """Whether this backward pass was started by another one, as reentrant checkpoints do."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is vars(torch.autograd.function):  # it runs the backward() of a Function
            return True
        frame = frame.f_back
    return False


class _Hook:
    """A hook that calls a method of a wrapper and holds it weakly: once that is gone, the hook does nothing.

    A copy of it does nothing either, as that of a module's hook in a copy of the module.

    Args:
        handles: Those of all hooks of the wrapper.
    """

    def __init__(self, method: Callable[..., Any] | None = None, *args: Any, handles: Sequence[Any] = ()) -> None:
        self._method = weakref.WeakMethod(method) if method is not None else None
        self._args, self._handles = args, handles

    def __call__(self, *given: Any) -> Any:
        method = self._method() if self._method is not None else None
        return method(*self._args, *given) if method is not None else None

    def wrapper(self) -> DistributedDataParallel | None:
        """The wrapper, if it is still there."""
        method: Any = self._method() if self._method is not None else None
        return method.__self__ if method is not None else None

    def remove_all(self) -> None:
        """Remove all hooks of the wrapper."""
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> Any:
        return _Hook, ()


def _give_back(
    hooks: Sequence[Any],
    optimizers: Sequence[Callable[[], QAdamOptimizer | None]],
    parameters: Sequence[Callable[[], torch.Tensor | None]],
) -> None:
    """What is left to do for a wrapper that was not closed: it comes here from anywhere, so it sends nothing.

    The hooks of modules and optimizers are idle, and stay: one of them may be running at this moment, and PyTorch
    would not have it removed.
    """
    for hook in hooks:
        hook.remove()
    own = [p for p in (there() for there in parameters) if p is not None]
    for optimizer in (there() for there in optimizers):
        if optimizer is not None:
            optimizer.share(own, {}, frozen=False)


@dataclass
class _Backward:
    """How far a backward pass is."""

    complete: set[str] = field(default_factory=set)
    """Parameters whose gradients are accumulated."""
    expected: set[str] | None = None
    """Parameters that get a gradient, as far as that is known."""
    start_ns: int = 0
    on_device: DeviceSpan | None = None


@dataclass
class _Graph:
    """What is said once and for all of a static graph."""

    unused: set[str] | None = None
    """Parameters without a gradient on any rank."""
    first: set[str] | None = None
    """Parameters that got one on this rank, in the first step."""
    now: set[str] = field(default_factory=set)
    """The same in this step, as far as it has come."""

    def compare(self, complete: set[str], *, ended: bool) -> None:
        """Compare a step with the first one, on this rank: the exchange is over, so no rank waits."""
        self.now |= complete
        if not ended:
            return
        now, self.now = self.now, set()
        if self.first is None:
            self.first = now
        elif now != self.first:
            name = min(now ^ self.first)
            raise _MisuseError(
                f"DistributedDataParallel: static_graph is True, but {name!r} got {'a' if name in now else 'no'} "
                f"gradient in this step, unlike in the first one; give find_unused_parameters instead"
            )


class _MisuseError(ArrayError, RuntimeError):
    """An error that is a RuntimeError as well, since PyTorch's own raises one there."""


class _MismatchError(CommMismatch, RuntimeError):
    """An error that is a RuntimeError as well, since PyTorch's own raises one there."""


class _EarlyEndError(CommError, RuntimeError):
    """An error that is a RuntimeError as well, since PyTorch's own raises one there."""


@dataclass
class _Join:
    """Who has data left."""

    divide_by_initial_size: bool
    throws: bool = False
    """Whether all ranks are to stop when one has ended."""
    active: list[int] = field(default_factory=list)
    scale: float = 1.0
    """What gradients are multiplied by, so that their mean over all ranks is that over the active ones."""
    steps: int = 0
    """How many optimizer steps this rank made in it."""
    forwards: int = 0
    """How many training forward passes this rank made in it."""


class _Gradients:
    """What `p.grad` is now, to put it back after other values have been in the buckets."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], views: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._now = {name: parameters[name].grad for name in views}
        # The bucket itself is written to.
        self._values = {name: view.clone() for name, view in views.items() if self._now[name] is view}

    def put_back(self) -> None:
        for name, gradient in self._now.items():
            self._parameters[name].grad = gradient
            if gradient is not None and name in self._values:
                gradient.copy_(self._values[name])


def _as_storage(flats: dict[Payload, list[torch.Tensor]]) -> dict[Payload, list[Any]]:
    return {payload: [as_array(flat) for flat in each] for payload, each in flats.items()}


def _to_tensor(value: Any) -> Any:
    return as_tensor(value) if hasattr(value, "dtype") else value
