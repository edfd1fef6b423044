"""DistributedDataParallel over any algorithm of bagua_comm: its arguments, and its methods for users.

The path of a gradient: autograd accumulates it in its bucket, since `p.grad` is a part of the bucket (`memory`).
Hooks report that it is complete (`training.backward`). The bucket then leaves on the engine's lane while the
backward pass continues (`engine`). At the end of the backward pass the lane is joined (`training.step`), and the
optimizer reads `p.grad`, which has not moved.

Other files: `model_state`, the parameters and buffers that all ranks share; `checks`, refused arguments;
`wrapper_state`, state dicts and checkpoints; `training.buffers`, copies of buffers; `training.join`, uneven data;
`training.unused`, parameters without a gradient; `training.versions`, optimizers that step too early;
`training.hooks`, hooks, and the end of older wrappers of a module.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from bagua_comm import (
    Algorithm,
    ArrayError,
    Communicator,
    GradientAllReduce,
    Reproducible,
    Tuner,
    UnsupportedError,
)
from bagua_comm.algorithms.base import HOLD_HINT, exchanges_weights
from bagua_comm.bucket import DEFAULT_BUCKET_BYTES
from bagua_comm.engine import check_fit
from bagua_comm.logs import log_on_root
from bagua_comm.topology import share
from bagua_comm.trace import ExchangeCounters

from . import checks
from .comm_hook import HookAlgorithm, check_hook
from .engine import TorchEngine
from .errors import MisuseError
from .memory import pack, specs_of
from .model_state import ModelState
from .process_group import default
from .torch_arguments import bytes_of_cap, check_others, device_of_inputs, moved
from .training.hooks import end_older
from .training.steps import TrainingSteps
from .training.timing import StepTimer
from .wrapper_state import WrapperState

_log = logging.getLogger("bagua_comm.torch")


class DistributedDataParallel(WrapperState):
    """Train one model on many ranks, each on its own data.

    Collective. On construction, parameters, buffers and the state of the optimizers become rank 0's, in place.
    Parameters that are tied, frozen, at the module's root, unused in a step, or of several dtypes are handled. A
    parameter may be frozen after wrapping, and unfrozen again, on all ranks in the same steps. One that was
    frozen on construction may be unfrozen between two steps, and then be given to one of the optimizers: in the
    next training forward pass ranks agree on it, and it becomes rank 0's.

    `module` is the wrapped module; attributes that are missing here are looked up there. A backward pass is
    averaged if it is the first one after a forward pass of this wrapper, or goes through a tensor that such a
    pass returned: each of several, too, as for two losses. `p.grad` is then the mean over ranks of all that they
    computed; an average that rounds, as to eight bits, rounds again in each. Weights are exchanged once in a step
    all the same. `ddp.module(x).backward()` stays on this rank. Before an optimizer steps by any other gradient
    that was not averaged, an error is raised. As with PyTorch's own, gradients must be accumulated by
    `backward()`: `torch.autograd.grad` of parameters raises, and what `torch.distributed.autograd` computes is
    not averaged. Every rank makes the same number of forward and backward passes, or enters `join`.

    Buffers (the statistics of BatchNorm) become rank 0's at the end of every averaged backward pass, so that
    ranks are alike whenever a step is over, and evaluation communicates nothing. With `every` and `DiLoCo` they
    do so in the steps in which weights are sent, with `AsyncModelAverage` in `stop`, `average_weights` and
    `close` alone.

    The module is on the CPU or on the communicator's device, which `bagua_torch.connect` makes PyTorch's current
    one. There, over NCCL, no step of training makes the host wait for the device, unless parameters are frozen
    after wrapping; for other ranks it waits only with `find_unused_parameters`, in `join`, and, where there are
    buffers, for rank 0.

    Construct it under the stream that you train on (`torch.cuda.stream`): gradients are accumulated on the stream
    that was current on construction, and leave from there. On any other the results are the same, but all
    gradients cross from one to the other in every step; PyTorch warns of that once, from 2.10 on.

    `state_dict()` holds what the algorithm keeps as well, which differs between ranks: save it on every rank. An
    algorithm that keeps nothing (GradientAllReduce, except with ErrorFeedback) adds nothing: then the state dict
    holds only tensors, and one of PyTorch's own wrapper loads here. `module.state_dict()` is that of the plain
    module. Where an algorithm exchanges weights after the optimizer's step, they are written back when the module
    next runs, saves or loads.

    Args:
        module: What to train. Its parameters stay the same objects.
        optimizers: All optimizers that step its parameters. Needed for algorithms that exchange weights or count
            steps. With algorithms that exchange gradients, a backward pass that reached no parameter is completed
            before they step.
        algorithm: What to exchange and when; `GradientAllReduce()` if None.
        comm: The ranks; if None, the default communicator; `bagua_torch.connect` makes it, and is called if it
            was not yet.
        bucket_bytes: The size at which a bucket is closed; 10 MiB if None.
        tuner: Searches, while training goes on, for settings faster than `bucket_bytes` and `algorithm`: see
            `bagua_comm.Tuner`. A step lasts from one training forward pass to the next; while it searches, the
            host waits for the device in every step. In `join` the search rests; `switch` ends it.
        broadcast_buffers: Copy rank 0's buffers to all ranks in every step; see above.
        find_unused_parameters: Agree in every step on the parameters that no rank used, and give them
            no gradient at all, where otherwise theirs is zero. Costs one small allreduce a step, on the host.
            Without it PyTorch's own raises in the next forward pass; here unused parameters do no harm.
        static_graph: Say that in every step the same parameters get a gradient on this rank, which is checked.
            The ranks then agree on unused parameters in the first step only. Nothing else needs it here.
        params_and_buffers_to_ignore: Names of parameters and buffers that stay this rank's own: neither compared
            nor copied nor averaged. Those in the module's `_ddp_params_and_buffers_to_ignore`, which PyTorch's
            own has, are ignored as well, and all of a part of the module whose `stays_on_rank` is True, as the
            experts of a `bagua_torch.moe.MoE`. An optimizer may step them too.
        init_sync: If False, copy nothing on construction: the ranks have the same weights already. Nothing is
            copied under `elastic.run` either, if its state has the module and the optimizers.
        bucket_cap_mb: `bucket_bytes` in MiB, by PyTorch's name.
        device_ids: The module's CUDA device, in a list, by PyTorch's name: inputs are moved there.
        forward_sync_buffers: PyTorch's new name for `broadcast_buffers`.
        gradient_as_bucket_view: Let `p.grad` lie in its bucket; by PyTorch's name, but True by default. What is
            kept of it does not change in the next step, but views of it do. If False, gradients are autograd's
            own, and are copied to the bucket and back, which takes longer and more memory.
        others: Further arguments of PyTorch's own, by name. `check_reduction`, `dim`,
            `skip_all_reduce_unused_params` and `batched_grad_copy` change nothing here; `output_device` and
            `process_group` must be the module's device and all ranks; others are refused, unless they are None.

    Close it, or drop it: a wrapper to which nobody refers any more exchanges nothing, but its communicator stays
    open until the end of the program. To wrap a module again, as a second `fit` does, ends the older wrapper.

    Raises:
        ArrayError: The module has no parameter to train; the optimizers step other parameters, or do not fit
            the algorithm; an argument is out of range. It is a RuntimeError as well, where PyTorch's own raises
            one.
        CommMismatch: The ranks' modules, optimizers or algorithms differ.
        UnsupportedError: The communicator or the algorithm cannot carry a parameter, or it is on another device
            than the communicator's; it is named.

    >>> from bagua_comm import ByteGrad
    >>> model = DistributedDataParallel(nn.Linear(2, 1), algorithm=ByteGrad())
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
        gradient_as_bucket_view: bool = True,
        **others: Any,
    ) -> None:
        super().__init__()
        self.module = module
        self.comm = comm if comm is not None else default()
        self.broadcast_buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.tuner = tuner
        self.optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        algorithm = algorithm if algorithm is not None else GradientAllReduce()
        bucket_bytes = bytes_of_cap(bucket_bytes, bucket_cap_mb, DEFAULT_BUCKET_BYTES)

        self._model = ModelState(module, checks.names_to_ignore(module, params_and_buffers_to_ignore))
        self._trained = self._model.trained
        self._device = checks.check_module(self.comm, self._model)
        self._inputs_to = device_of_inputs(device_ids, self._device)
        check_others(others, ranks=self.comm.size, device=self._device)
        checks.check_optimizers(self.optimizers, self._trained, algorithm)
        checks.check_ranks(self.comm, self._model, self.optimizers, tuned=tuner is not None)
        check_fit(algorithm, pack(self._trained, bucket_bytes, self.comm.size), self.comm.size)

        end_older(module, self.comm)
        registry = self.comm.engine_registry
        if init_sync and (registry is None or not registry.already_broadcast(module, *self.optimizers)):
            self._model.copy_all(self.comm, self.optimizers)
        if tuner is not None:
            best = tuner.start(self.comm, algorithm, specs_of(self._trained), bucket_bytes=bucket_bytes)
            bucket_bytes, algorithm = best.bucket_bytes, best.algorithm
        self.algorithm, self.bucket_bytes = algorithm, bucket_bytes
        self._steps = TrainingSteps(
            self.comm,
            self._model,
            self.optimizers,
            algorithm,
            bucket_bytes,
            self._device,
            copies_buffers=self.broadcast_buffers,
            find_unused=find_unused_parameters,
            static=static_graph,
            in_buckets=gradient_as_bucket_view,
        )
        self._steps.attach_to(self)
        self._has_hook = False  # of register_comm_hook
        self._timer = StepTimer(self._device)

    @property
    def engine(self) -> TorchEngine:
        """The engine that exchanges the buckets."""
        return self._steps.engine

    @property
    def counters(self) -> ExchangeCounters:
        """What was exchanged on this rank, and how long training waited for it, by all algorithms so far.

        `.as_dict()` has it as plain numbers, for TensorBoard and the like. Buffers, and what `join` and
        `find_unused_parameters` agree on, are in `comm.counters`.
        """
        return self._steps.exchange.counters

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Collective while training, where an algorithm exchanges before the backward pass."""
        if self._inputs_to is not None:
            args, kwargs = moved((args, kwargs), self._inputs_to)
        if torch.is_grad_enabled():
            self._before_forward()
        if self._steps.hooked:
            return self.module(*args, **kwargs)
        self._steps.settle()
        output = self.module(*args, **kwargs)
        self._steps.returned(self.module, args, output)
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self) -> None:
        self._steps.open(
            find_unused=self.find_unused_parameters,
            static=self.static_graph,
            copies_buffers=self.broadcast_buffers,
            between_steps=self._time_step,
        )

    def _time_step(self) -> None:
        paused = self._steps.joined or self.engine.stopped
        self._timer.next_step(self.tuner, self.replan, paused=paused)

    def __getattr__(self, name: str) -> Any:
        """Look up in the wrapped module what this wrapper does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    _ddp_params_and_buffers_to_ignore = checks.refused_to_pytorchs_own

    def __getstate__(self) -> Any:
        raise UnsupportedError("DistributedDataParallel: cannot be copied or pickled; copy its .module")

    def close(self) -> None:
        """Finish what is under way, remove the hooks and free the engine; gradients stay where they are.

        Collective. Closing twice does nothing.
        """
        self._steps.close()

    # What users ask for in the course of training -------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without averaging: forward and backward passes in this context stay on this rank.

        The first backward pass after it averages all accumulated gradients.
        """
        return self._steps.no_sync()

    def microbatches(self) -> Iterator[int]:
        """The numbers of this rank's microbatches in one step; iterate over it anew in each step.

        For `GradientAllReduce(Reproducible(addends=M))`: M microbatches, numbered from 0, are dealt to the ranks
        as `bagua_comm.elastic.share` does. Make one forward and one backward pass for each. The last backward
        pass leaves the mean over all M in `p.grad`: the same bits on any number of ranks, if each pass gives the
        same gradients on any rank (with as many threads, and deterministic operations). Buffers that a forward
        pass changes, as BatchNorm's, follow rank 0's microbatches, and so depend on the number of ranks.

        Raises:
            ArrayError: The algorithm is another one; a RuntimeError as well. Or this rank has several of them and
                is stopped, so that it averages nothing.

        >>> from bagua_comm import Reproducible
        >>> model = DistributedDataParallel(nn.Linear(1, 1), [], GradientAllReduce(Reproducible(addends=4)))
        >>> for i in model.microbatches():
        ...     model(torch.tensor([float(i)])).sum().backward()
        >>> model.module.weight.grad
        tensor([[1.5000]])
        >>> model.close()
        """
        average = getattr(self.algorithm, "average", None)
        addends = average.addends if isinstance(average, Reproducible) else None
        if addends is None or not isinstance(self.algorithm, GradientAllReduce):
            raise MisuseError(
                f"microbatches: the algorithm is {self.algorithm}, expected {HOLD_HINT} with their number for M"
            )
        *others, last = share(addends, self.comm.rank, self.comm.size)
        for i in others:
            with self.no_sync():
                yield i
            self._steps.exchange.hold()
        yield last

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
        end all ranks get the weights, buffers and optimizer states of a rank that trained to the end. With
        algorithms that exchange weights, it goes on exchanging its own, and keeps them.

        Args:
            enable: If False, do nothing: all ranks have equally many batches.
            throw_on_early_termination: As soon as a rank has no more batches, raise on all ranks: on this one at
                the end, on the others in their next forward pass.
            divide_by_initial_size: Divide sums of gradients by the number of all ranks; if False, by the number
                of those that still have data.
            divide_by_initial_world_size: PyTorch's name for the same.

        Raises:
            CommError: A rank has ended before others, with `throw_on_early_termination`; a RuntimeError as well.
            UnsupportedError: Parts of the module stay on their ranks (`bagua_torch.moe`), so that all ranks are
                needed in every step, or an optimizer is sharded over the ranks, and `throw_on_early_termination`
                is False.
        """
        if not enable:
            yield
            return
        if self.parts_stay and self.comm.size > 1 and not throw_on_early_termination:
            raise UnsupportedError(
                "join: this module has parts that stay on their ranks, such as the experts of a MoE; a rank that "
                "has ended would run them no more, and the other ranks would wait for it. Give it empty batches "
                "instead, so that all ranks make equally many steps, or enter "
                "join(throw_on_early_termination=True)"
            )
        if divide_by_initial_world_size is not None:
            divide_by_initial_size = divide_by_initial_world_size
        with self._steps.join(divide_by_initial_size=divide_by_initial_size, throws=throw_on_early_termination):
            yield

    def expect_backward(self) -> None:
        """Average the next backward pass as well, though it goes through no output of this wrapper.

        Collective. For losses that a module keeps or makes beside its outputs, if they have a backward pass of
        their own. It does nothing if the next one is averaged anyway, in `no_sync`, and where weights are
        exchanged.
        """
        self._steps.expect_backward()

    def end_backward(self) -> None:
        """Complete a backward pass that reached no parameter on this rank, as the other ranks do.

        Collective. The optimizers' step does this as well, unless backward passes run in its closure.
        """
        self._steps.end_backward()

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Average gradients by `hook` from here on, in the place of `GradientAllReduce()`.

        Collective. At most once, and before the first backward pass. It ends the search of a tuner.

        Args:
            state: What the hook gets first; an Average gets nothing.
            hook: An Average such as `Quantized(MinMaxUInt8())`. Or a function that PyTorch's own would take,
                called with `state` and a bucket that has the methods of `torch.distributed.GradBucket`: on the
                thread of the backward pass, for bucket after bucket in the same order on all ranks. It returns a
                `torch.futures.Future` of the averaged tensor; the hook itself divides the sum over ranks.

        Raises:
            ArrayError: A hook was registered before, or it is too late (a RuntimeError as well); the algorithm is
                not GradientAllReduce; the hook does not take (state, bucket).
            UnsupportedError: The hook cannot be called, or the Average does not take the dtype of a parameter.

        >>> from bagua_comm import MinMaxUInt8, Quantized
        >>> model = DistributedDataParallel(nn.Linear(2, 1))
        >>> model.register_comm_hook(None, Quantized(MinMaxUInt8()))
        >>> model.close()
        """
        if self._has_hook:
            raise MisuseError("register_comm_hook: this model has a hook; it can be registered only once")
        if self._steps.averages:
            raise MisuseError("register_comm_hook: call it before the first backward pass")
        if not isinstance(self.algorithm, GradientAllReduce):
            raise ArrayError(
                f"register_comm_hook: the algorithm is {self.algorithm}, which a hook cannot replace; wrap the "
                "module without one"
            )
        if hasattr(hook, "bind"):
            self.switch(GradientAllReduce(hook))
        else:
            self.switch(HookAlgorithm(check_hook(hook), state, self._trained))
        self._has_hook = True

    def switch(self, algorithm: Algorithm) -> None:
        """Go on with another algorithm; the model stays the same.

        Collective. Call it between steps. If weights were exchanged until now, so that ranks' weights differ,
        they become the mean of all ranks, and the optimizer states become rank 0's. The new algorithm counts its
        steps from here.

        Raises:
            ArrayError: The optimizers do not fit the algorithm.
            UnsupportedError: The algorithm cannot carry a parameter; it is named.
        """
        checks.check_optimizers(self.optimizers, self._trained, algorithm)
        check_fit(algorithm, self.engine.plan, self.comm.size)
        checks.check_backward_ended(self._steps.watch.unfinished)
        self._steps.complete()
        self._steps.resume()  # what ranks did while it was stopped is averaged
        differed = exchanges_weights(self.algorithm)
        self.engine.close()
        self.tuner = None
        if differed:
            self._steps.make_equal()
        log_on_root(_log, self.comm.rank, "switch: from %s to %s", self.algorithm, algorithm)
        self._steps.switch(algorithm)
        self.algorithm = algorithm

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
        bucket_bytes = bucket_bytes if bucket_bytes is not None else self.bucket_bytes
        checks.check_optimizers(self.optimizers, self._trained, algorithm)
        checks.check_backward_ended(self._steps.watch.unfinished)
        self._steps.complete()
        self._steps.replan(bucket_bytes, algorithm)
        self.bucket_bytes, self.algorithm = bucket_bytes, algorithm

    def average_weights(self) -> None:
        """Make the weights of all ranks their mean, and buffers rank 0's: where an algorithm lets them differ.

        Collective.
        """
        self._steps.complete()
        self.engine.settle()
        self._steps.exchange.average_weights()
        self.copy_buffers()

    def copy_buffers(self) -> None:
        """Give all ranks the buffers of rank 0 now, as the end of a step does.

        Collective. Does nothing without `broadcast_buffers`.
        """
        self._steps.copy_buffers(enabled=self.broadcast_buffers)

    def stop(self) -> None:
        """Finish what is under way on all ranks, and exchange nothing until `resume`; see `Engine.stop`.

        Collective. Until then, each rank trains as a single process does, and may make any number of steps; a
        `QAdamOptimizer` goes on as it does alone.
        """
        self._steps.stop()

    def resume(self) -> None:
        """Go on after `stop`, with the weights as they are now; see `Engine.resume`.

        Collective. If a rank made steps meanwhile, and the algorithm exchanges gradients, the weights become the
        mean of all ranks, and buffers and optimizer states rank 0's, as by `switch`.
        """
        self._steps.resume()
