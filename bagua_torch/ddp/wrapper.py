"""DistributedDataParallel over any algorithm of bagua_comm: its arguments, and its methods for users.

The path of a gradient: autograd accumulates it in its bucket, since `p.grad` is a part of the bucket (`memory`).
Hooks report that it is complete (`training.backward`). The bucket then leaves on the engine's lane while the
backward pass continues (`engine`). At the end of the backward pass the lane is joined (`training.steps`), and the
optimizer reads `p.grad`, which has not moved.

Other files: `model_state`, the parameters and buffers that all ranks share; `checks`, refused arguments;
`torch_names`, attributes of PyTorch's wrapper; `training.buffers`, copies of buffers; `training.join`, uneven
data; `training.stage`, several passes; `training.unused`, parameters without a gradient; `training.unaveraged`,
gradients that are not averaged; `training.hooks`, hooks, and the end of older wrappers of a module.
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn

from bagua_comm import (
    Algorithm,
    ArrayError,
    Average,
    Communicator,
    GradientAllReduce,
    Tuner,
    UnsupportedError,
)
from bagua_comm.algorithms.base import HOLD_HINT, core_of, exchanges_weights
from bagua_comm.algorithms.state import has_saved_state
from bagua_comm.bucket import DEFAULT_BUCKET_BYTES
from bagua_comm.checkpoint.engines import state_of_tree, tree_of_engine
from bagua_comm.codecs.base import codecs_in
from bagua_comm.comm.public_methods import public_method
from bagua_comm.elastic import share
from bagua_comm.engine import check_fit
from bagua_comm.logs import log_on_root
from bagua_comm.trace import ExchangeCounters

from .. import sync_batchnorm
from ..entry import communicator_of, errors_on_all
from ..errors import MissingError, MisuseError
from ..process_group.bootstrap import default_group
from ..tensors import checks
from ..tensors.memory import pack, specs_of
from ..tensors.model_state import ModelState
from ..tensors.sharded import is_sharded_optimizer
from ..training.engine import TorchEngine
from ..training.hooks import end_older
from ..training.spans import StepTimer
from ..training.stage import StepOptions
from ..training.steps import TrainingSteps
from . import torch_names
from .comm_hook import HookAlgorithm, check_hook
from .copies import reduced
from .torch_arguments import bytes_of_cap, check_others, device_of_inputs, moved

_log = logging.getLogger("bagua_comm.torch")
_TorchWrapper = nn.parallel.DistributedDataParallel

_EXTRA_STATE = "_extra_state"
"""PyTorch's name in a state dict for the value of `get_extra_state`."""


def _option(name: str, text: str) -> Any:
    """A property for an option of the training steps."""
    return property(
        lambda self: getattr(self._options, name),
        lambda self, value: setattr(self._options, name, value),
        doc=text,
    )


@_TorchWrapper.register  # a virtual subclass: frameworks unwrap by isinstance
class DistributedDataParallel(nn.Module):
    """Data-parallel training of a module over any algorithm of bagua_comm.

    Collective. On construction, parameters, buffers and optimizer states become rank 0's, in place. Parameters
    may be tied, frozen, at the module's root, unused in a step, and of several dtypes. They may be frozen after
    wrapping, and unfrozen again, on all ranks in the same steps. A parameter that was frozen on construction may
    be unfrozen between two steps, and then be given to one of the optimizers: in the next training forward pass
    ranks agree on it, and it becomes rank 0's.

    `module` is the wrapped module; attributes that are missing here are looked up there. `isinstance` finds it to
    be PyTorch's wrapper, of which it has the attributes; those that it lacks raise an error that says what to
    use. A backward pass is averaged if it is the first one after a forward pass of this wrapper, or goes through
    a tensor that such a pass returned. Several passes may do so, as for two losses. `p.grad` is then the mean
    over ranks of the sum of their gradients; an average that rounds, as to eight bits, rounds in each pass.
    Weights are exchanged once in a step of the optimizers, whatever number of passes it has.
    `ddp.module(x).backward()` stays on this rank. An optimizer that is about to step by a gradient that was not
    averaged raises an error. As with PyTorch's wrapper, gradients must be accumulated by `backward()`:
    `torch.autograd.grad` of parameters raises, and gradients of `torch.distributed.autograd` are not averaged.
    Every rank makes the same number of forward and backward passes, or enters `join`.

    Buffers (the statistics of BatchNorm) become rank 0's at the end of every averaged backward pass, so that
    ranks are the same after every step, and evaluation needs no communication. With `every` and `DiLoCo` this
    happens in the steps in which weights are sent, with `AsyncModelAverage` only in `stop`, `average_weights` and
    `close`.

    The module is on the CPU or on the communicator's device, which `bagua_torch.connect` makes PyTorch's current
    one. There, over NCCL, training steps do not make the host wait for the device, unless parameters are frozen
    after wrapping. With other transports the host waits with `find_unused_parameters`, in `join`, and on rank 0
    if there are buffers.

    Construct it under the stream of the training (`torch.cuda.stream`): gradients are accumulated on the stream
    that was current on construction, and sent from there. On another stream the results are the same, but every
    gradient crosses streams in every step; PyTorch warns once, from 2.10 on.

    `state_dict()` includes the algorithm's state, which differs between ranks: save it on every rank. An
    algorithm without state (GradientAllReduce, except with ErrorFeedback) adds nothing: then the state dict has
    only tensors, and one of PyTorch's wrapper loads here. `module.state_dict()` is that of the plain module.
    Where an algorithm exchanges weights after the optimizer's step, they are written back when the module next
    runs, saves or loads.

    Args:
        module: The module to train. Its parameters stay the same objects.
        optimizers: All optimizers that step its parameters; None for none. Needed for algorithms that exchange
            weights or count steps. With algorithms that exchange gradients, a backward pass that reached no
            parameter is completed before they step.
        algorithm: What to exchange and when; `GradientAllReduce()` if None.
        comm: The ranks; if None, the default communicator, for which `bagua_torch.connect` is called if needed.
        bucket_bytes: The size at which a bucket is closed; 10 MiB if None.
        tuner: Searches during training for settings faster than `bucket_bytes` and `algorithm`: see
            `bagua_comm.Tuner`. A step lasts from one training forward pass to the next; during the search, the
            host waits for the device in every step. The search pauses in `join`; `switch` ends it.
        broadcast_buffers: Copy rank 0's buffers to all ranks in every step; see above.
        find_unused_parameters: Agree in every step on the parameters that no rank used, and leave them without a
            gradient, which is zero otherwise. Costs one small allreduce a step, on the host. Without it PyTorch's
            wrapper raises in the next forward pass; here unused parameters do no harm.
        static_graph: Declare that in every step the same parameters get a gradient on this rank, which is
            checked. The ranks then agree on unused parameters in the first step only. It has no other effect.
        params_and_buffers_to_ignore: Names of parameters and buffers that belong to this rank alone: they are
            neither compared nor copied nor averaged. PyTorch's attribute `_ddp_params_and_buffers_to_ignore` of
            the module adds names, and so does a part of the module whose `stays_on_rank` is True, as the experts
            of a `bagua_torch.moe.MoE`. An optimizer may step them too.
        init_sync: If False, copy nothing on construction: the ranks have the same weights already. Nothing is
            copied under `elastic.run` either, if its state has the module and the optimizers.
        bucket_cap_mb: `bucket_bytes` in MiB, by PyTorch's name.
        device_ids: The module's CUDA device, in a list, by PyTorch's name: inputs are moved there.
        forward_sync_buffers: PyTorch's new name for `broadcast_buffers`.
        gradient_as_bucket_view: Make `p.grad` a part of its bucket; by PyTorch's name, but True by default. A
            kept gradient does not change in the next step, but views of it do. If False, gradients have separate
            memory and are copied to the bucket and back, which takes more time and memory.
        others: Other arguments of PyTorch's wrapper, by name. `check_reduction`, `dim`,
            `skip_all_reduce_unused_params` and `batched_grad_copy` have no effect here; `output_device` and
            `process_group` must be the module's device and all ranks; others are refused, unless they are None.

    Close it, or delete it: a deleted wrapper exchanges nothing, but its communicator stays open until the end of
    the program. Wrapping a module again, as a second `fit` does, ends the older wrapper.

    Raises:
        ArrayError: The module has no parameter to train; the optimizers step other parameters, or do not fit the
            algorithm; an argument is out of range. It is a RuntimeError as well, where PyTorch's wrapper raises
            one.
        CommMismatch: The ranks' modules, optimizers or algorithms differ.
        UnsupportedError: The communicator or the algorithm cannot carry a parameter, or the parameter is on
            another device than the communicator's. The error names it.

    >>> from bagua_comm import ByteGrad
    >>> model = DistributedDataParallel(nn.Linear(2, 1), algorithm=ByteGrad())
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> model.module.bias.grad
    tensor([3.])
    >>> model.close()
    """

    @public_method("DistributedDataParallel")
    def __init__(
        self,
        module: nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = (),
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
        comm = communicator_of("DistributedDataParallel", comm)
        copies_buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self._options = StepOptions(copies_buffers, find_unused_parameters, static_graph)
        self.tuner = tuner
        algorithm = algorithm if algorithm is not None else GradientAllReduce()

        with errors_on_all(comm):
            checks.check_type(module)
            self.module = module
            listed = checks.listed(optimizers)
            bucket_bytes = bytes_of_cap(bucket_bytes, bucket_cap_mb, DEFAULT_BUCKET_BYTES)
            self._model = ModelState(module, checks.names_to_ignore(module, params_and_buffers_to_ignore))
            self._trained = self._model.trained
            device = checks.check_module(comm, self._model)
            checks.check_batch_norm(comm, module)
            self._inputs_to = device_of_inputs(device_ids, device)
            own = inspect.signature(DistributedDataParallel).parameters
            check_others(others, ranks=comm.size, device=device, own=own)
            self._process_group = others.get("process_group")
            vars(self).update(
                torch_names.settings(device, self._inputs_to, others, in_buckets=gradient_as_bucket_view)
            )
            checks.check_optimizers(listed, self._trained, algorithm)
            checks.check_memory(self._trained)
            check_fit(algorithm, pack(self._trained, algorithm, bucket_bytes, comm.size), comm.size)
        checks.check_ranks(comm, self._model, listed, tuned=tuner is not None)

        end_older(module, comm)
        registry = comm.engine_registry
        if init_sync and (registry is None or not registry.already_broadcast(module, *listed)):
            self._model.copy_all(comm, listed)
        if tuner is not None:
            best = tuner.start(comm, algorithm, specs_of(self._trained), bucket_bytes=bucket_bytes)
            bucket_bytes, algorithm = best.bucket_bytes, best.algorithm
        self._steps = TrainingSteps(
            comm,
            self._model,
            listed,
            algorithm,
            bucket_bytes,
            device,
            self._options,
            in_buckets=gradient_as_bucket_view,
        )
        self._steps.attach_to(self)
        self._has_hook = False  # of register_comm_hook
        self._timer = StepTimer(device)

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return self._steps.comm

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in use; `switch` and `replan` change it."""
        return self._steps.engine.algorithm

    @property
    def bucket_bytes(self) -> int:
        """The size at which a bucket is closed; `replan` changes it."""
        return self._steps.exchange.bucket_bytes

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that were given."""
        return list(self._steps.optimizers)

    @property
    def ignored_names(self) -> set[str]:
        """Names of the parameters and buffers that belong to this rank alone."""
        return self._model.ignored

    @property
    def parts_stay(self) -> bool:
        """Whether the module has parts that stay on their rank, as experts of a MoE; the same on all ranks."""
        return checks.parts_stay(self.module)

    broadcast_buffers = _option("copies_buffers", "Whether buffers are copied from rank 0 in every step.")
    forward_sync_buffers = _option("copies_buffers", "The new name of `broadcast_buffers`.")
    find_unused_parameters = _option("find_unused", "Whether ranks agree on unused parameters in every step.")
    static_graph = _option("static", "Whether the same parameters get a gradient in every step.")

    @property
    def engine(self) -> TorchEngine:
        """The engine that exchanges the buckets."""
        return self._steps.engine

    @property
    def counters(self) -> ExchangeCounters:
        """Exchanged bytes and waiting times of this rank, summed over all algorithms so far.

        `.as_dict()` returns plain numbers, as for TensorBoard. Buffers, and the agreement of `join` and of
        `find_unused_parameters`, are in `comm.counters`.
        """
        return self._steps.exchange.counters

    @property
    def weight(self) -> float | None:
        """The weight of this rank in the mean of this step's gradients: its tokens, or samples; None if not set.

        Set it on all ranks before the backward pass: with a loss that is the mean over a rank's own tokens,
        `p.grad` is then as of one process with the tokens of all ranks. See `bagua_comm.Engine.weight`. After
        the step of the optimizers it is None again; without that step, as a GradScaler leaves it out, in the
        next backward pass after the gradients were cleared. Where gradients are accumulated, in `no_sync` or
        not, it is that of the whole step: for a loss that is a sum over tokens divided by this rank's tokens of
        the step, their number. Each of the `microbatches` has its own. A rank without data sets 0, and makes
        its pass with an empty batch or calls `expect_backward` in place of it. A parameter of this name is
        `module.weight`.

        Raises:
            ArrayError: The backward pass has begun. If the weight was set after the backward pass, the step of
                the optimizer raises it; if the weight of a rank is missing or out of range, the backward pass
                does, on all ranks.
            UnsupportedError: The algorithm has no mean over all ranks.

        >>> model = DistributedDataParallel(nn.Linear(2, 1))
        >>> model.weight = 3
        >>> model(torch.ones(3, 2)).mean().backward()
        >>> model.close()
        """
        return self.engine.weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        self.engine.weight = weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Collective while training, where an algorithm exchanges before the backward pass."""
        if self._inputs_to is not None:
            args, kwargs = moved((args, kwargs), self._inputs_to)
        if torch.is_grad_enabled():
            self._before_forward()
        if self._steps.hooked:
            return self.module(*args, **kwargs)
        self._steps.before_running()
        output = self.module(*args, **kwargs)
        self._steps.returned(self.module, args, output)
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @public_method("DistributedDataParallel.forward")
    def _before_forward(self) -> None:
        self._steps.open(self._time_step)

    def _time_step(self) -> None:
        paused = self._steps.joined or self.engine.stopped
        self._timer.next_step(self.tuner, self.replan, paused=paused)

    @public_method("DistributedDataParallel.close")
    def close(self) -> None:
        """Finish the present step, remove the hooks and close the engine. Gradients keep their memory.

        Collective. Closing twice does nothing.
        """
        self._steps.close()

    # Control of the training ------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging: forward and backward passes in this context stay on this rank.

        The first backward pass after it averages all accumulated gradients.
        """
        before, self._steps.averaging = self._steps.averaging, False
        try:
            yield
        finally:
            self._steps.averaging = before

    def microbatches(self, *, shift: bool = False) -> Iterator[int]:
        """The numbers of this rank's microbatches in one step. Call it in each step.

        For `GradientAllReduce(Reproducible(addends=M))`: M microbatches, numbered from 0, are distributed over
        the ranks as by `bagua_comm.elastic.share`. Make one forward and one backward pass for each. The last
        backward pass leaves the mean over all M in `p.grad`: the same bits on any number of ranks, if each pass
        gives the same gradients on any rank (with the same number of threads, and deterministic operations).
        Buffers that a forward pass changes, such as BatchNorm's, follow rank 0's microbatches, so they depend on
        the number of ranks.

        Args:
            shift: Whether ranks that are slow for long get fewer microbatches, as by `bagua_comm.elastic.share`.

        Raises:
            ArrayError: The algorithm is another one; a RuntimeError as well. Or this rank is stopped, so that it
                averages nothing, and has several microbatches.

        >>> from bagua_comm import Reproducible
        >>> model = DistributedDataParallel(nn.Linear(1, 1), [], GradientAllReduce(Reproducible(addends=4)))
        >>> for i in model.microbatches():
        ...     model(torch.tensor([float(i)])).sum().backward()
        >>> model.module.weight.grad
        tensor([[1.5000]])
        >>> model.close()
        """
        addends = self.algorithm.average.addends if isinstance(self.algorithm, GradientAllReduce) else None
        if addends is None:
            raise MisuseError(
                f"microbatches: the algorithm is {self.algorithm}, expected {HOLD_HINT} with their number for M"
            )
        *others, last = share(addends, self.comm, shift=shift)
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
        """Train on uneven numbers of batches: a rank without data takes part in exchanges until all have ended.

        Collective: all ranks enter it around their training loops. In it every training step begins with one
        small allgather. A rank that has ended sends zeros for gradients, and keeps its `p.grad`; at the end all
        ranks get the weights, buffers and optimizer states of a rank that trained to the end. With algorithms
        that exchange weights, it continues to exchange its weights, and keeps them.

        Args:
            enable: If False, do nothing: all ranks have the same number of batches.
            throw_on_early_termination: As soon as a rank has no more batches, raise on all ranks: on this one at
                the end, on the others in their next forward pass.
            divide_by_initial_size: Divide sums of gradients by the number of all ranks; if False, by the number
                of ranks that still have data.
            divide_by_initial_world_size: PyTorch's name for `divide_by_initial_size`.

        Raises:
            CommError: A rank has ended before others, with `throw_on_early_termination`; a RuntimeError as well.
            UnsupportedError: `throw_on_early_termination` is False, and parts of the module stay on their ranks
                (`bagua_torch.moe`) or normalize over all ranks (`SyncBatchNorm`), or an optimizer is sharded, so
                that all ranks are needed in every step; or the mean of gradients is one over those that send.
        """
        if not enable:
            yield
            return
        if self.comm.size > 1 and not throw_on_early_termination:
            self._check_rank_may_end()
        if divide_by_initial_world_size is not None:
            divide_by_initial_size = divide_by_initial_world_size
        with self._steps.join(divide_by_initial_size=divide_by_initial_size, throws=throw_on_early_termination):
            yield

    def _check_rank_may_end(self) -> None:
        layer = sync_batchnorm.layer_over_ranks(self.module)
        what = None if layer is None else f"the module has a SyncBatchNorm, {layer!r}"
        if self.parts_stay:
            what = "the module has parts that stay on their ranks, such as the experts of a MoE"
        if any(map(is_sharded_optimizer, self.optimizers)):
            what = "a ZeroRedundancyOptimizer needs all ranks in every step"
        if what is not None:
            raise UnsupportedError(
                f"join: {what}; a rank that has ended would take part no longer, and the other ranks would wait "
                "for it. Give it empty batches instead, so that all ranks make the same number of steps, or "
                "enter join(throw_on_early_termination=True)"
            )
        for phase in self.algorithm.phases:
            average = getattr(core_of(phase), "average", None)
            if phase.payload == "grad" and isinstance(average, Average):
                average.check_weights("join")

    def expect_backward(self) -> None:
        """Average the next backward pass, even if it goes through no output of this wrapper.

        Collective. For losses that a module computes besides its outputs, if they have a separate backward pass.
        It does nothing if the next pass is averaged anyway, and in `no_sync`.
        """
        self._steps.expect_backward()

    def end_backward(self) -> None:
        """Complete a backward pass that reached no parameter on this rank, as the other ranks do.

        Collective. The optimizers' step does this as well, unless backward passes run in its closure.
        """
        self._steps.end_backward()

    @public_method("DistributedDataParallel.register_comm_hook")
    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Average gradients by `hook`, instead of `GradientAllReduce()`.

        Collective. Call it at most once, and before the first backward pass. It ends the search of a tuner.

        Args:
            state: The first argument of a hook function; unused with an Average.
            hook: An Average such as `Quantized(MinMaxUInt8())`. Or a hook function of PyTorch, called with
                `state` and a bucket that has the methods of `torch.distributed.GradBucket`, on the thread of the
                backward pass, for the buckets in the same order on all ranks. It returns a `torch.futures.Future`
                of the averaged tensor; the hook itself divides the sum over ranks.

        Raises:
            ArrayError: A hook was registered before, or there was a backward pass (a RuntimeError as well); the
                algorithm is not GradientAllReduce; the hook does not take (state, bucket).
            UnsupportedError: The hook is not callable, or the Average does not accept the dtype of a parameter.

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
        if hasattr(hook, "bind") and not isinstance(hook, type):
            self.switch(GradientAllReduce(hook))
        else:
            self.switch(HookAlgorithm(check_hook(hook), state, self._trained))
        self._has_hook = True

    @public_method("DistributedDataParallel.switch")
    def switch(self, algorithm: Algorithm) -> None:
        """Continue with another algorithm; the model stays the same.

        Collective. Call it between steps. If ranks' weights differ, because weights were exchanged until now,
        they become the mean of all ranks, and the optimizer states become rank 0's. The new algorithm counts its
        steps from this call.

        Raises:
            ArrayError: The optimizers do not fit the algorithm.
            UnsupportedError: The algorithm cannot carry a parameter, which the error names.
        """
        checks.check_optimizers(self.optimizers, self._trained, algorithm)
        check_fit(algorithm, self._steps.exchange.plan_to_switch(algorithm), self.comm.size)
        checks.check_backward_ended(self._steps.watch.unfinished)
        self._steps.complete()
        self._steps.resume()  # averages the steps that ranks made while stopped
        differed = exchanges_weights(self.algorithm)
        self.engine.stop()
        self.engine.close()  # without a note on steps since the last exchange, as weights become equal
        self.tuner = None
        if differed:
            self._steps.make_equal()
        log_on_root(_log, self.comm.rank, "switch: from %s to %s", self.algorithm, algorithm)
        self._steps.switch(algorithm)

    @public_method("DistributedDataParallel.replan")
    def replan(self, *, bucket_bytes: int | None = None, algorithm: Algorithm | None = None) -> None:
        """Continue with buckets of another size, or the same algorithm with other settings.

        Collective. Call it between steps. Gradients and the algorithm's state move along; meanwhile memory for
        both old and new buckets is needed.

        Args:
            bucket_bytes: The size at which a bucket is closed; unchanged if None.
            algorithm: The same algorithm with another average or codec, for example; unchanged if None.

        Raises:
            ArrayError: It is another algorithm, or its state cannot move to other buckets.
            UnsupportedError: The algorithm cannot carry a parameter, which the error names.
        """
        algorithm = algorithm if algorithm is not None else self.engine.algorithm
        bucket_bytes = bytes_of_cap(bucket_bytes, None, self.bucket_bytes)
        checks.check_optimizers(self.optimizers, self._trained, algorithm)
        checks.check_backward_ended(self._steps.watch.unfinished)
        self._steps.complete()
        self._steps.replan(bucket_bytes, algorithm)

    @public_method("DistributedDataParallel.average_weights")
    def average_weights(self) -> None:
        """Set weights to the mean of all ranks, and buffers to rank 0's, where an algorithm lets them differ.

        Collective.
        """
        self._steps.complete()
        self.engine.finish()
        self._steps.exchange.average_weights()
        self.copy_buffers()

    @public_method("DistributedDataParallel.copy_buffers")
    def copy_buffers(self) -> None:
        """Copy the buffers of rank 0 to all ranks now, as at the end of a step.

        Collective. Does nothing without `broadcast_buffers`.
        """
        self._steps.buffers.copy()

    @public_method("DistributedDataParallel.stop")
    def stop(self) -> None:
        """Finish the present step on all ranks, and exchange nothing until `resume`; see `Engine.stop`.

        Collective. Until then, each rank trains like a single process, and may make any number of steps; a
        `QAdamOptimizer` keeps its momentum itself. Resume before saving a state dict of uneven steps.
        """
        self._steps.stop()

    @public_method("DistributedDataParallel.resume")
    def resume(self) -> None:
        """Continue after `stop`, with the present weights; see `Engine.resume`.

        Collective. If a rank has made steps, and the algorithm exchanges gradients, the weights become the mean
        of all ranks, and buffers and optimizer states rank 0's, as by `switch`.
        """
        self._steps.resume()

    # State dicts and checkpoints ---------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, object]:
        """The algorithm's state, for `state_dict()`."""
        self._steps.complete()
        return self._steps.engine.state_tensors()

    def set_extra_state(self, state: dict[str, object]) -> None:
        """Load the result of `get_extra_state`, as called by `load_state_dict()`. Collective."""
        mine, saved = self.algorithm, None
        if self.tuner is not None:
            names = self.comm.allgather_object(str(state.get("algorithm")) if isinstance(state, dict) else "")
            saved = self.tuner.algorithm_named(names[0]) if len(set(names)) == 1 else None
        if saved not in (None, mine):  # the algorithm that a tuner was trying
            self._steps.engine.expect_state()  # another plan compares weights that were loaded before
            self.replan(algorithm=saved)
        try:
            self._steps.engine.load_state_tensors(state)
        except ArrayError:  # on all ranks
            if self.algorithm != mine:
                self.replan(algorithm=mine)
            raise
        if self.algorithm != mine:
            self.replan(algorithm=mine)
        self._steps.forget()

    def tree_of_engine(self) -> dict[str, object] | None:
        """The algorithm's state as a tree for `bagua_torch.Checkpoints`, for any number of ranks, or None.

        Exchanged weights are written back first.
        """
        self._steps.complete()
        self._steps.engine.settle()
        keeps_none = self.tuner is None and not self.keeps_state()
        return None if keeps_none else tree_of_engine(self._steps.engine)

    def load_tree(self, module: Mapping[str, object], engine: dict[str, object] | None) -> None:
        """Load the module's state dict and the result of `tree_of_engine`, on any number of ranks.

        Collective.

        Raises:
            ArrayError: The state of the algorithm was not saved, or was saved with another algorithm.
        """
        if engine is None:
            if self.tuner is None and self.keeps_state():
                raise ArrayError(
                    "load: the checkpoint is of an algorithm without state, but "
                    f"{self.algorithm} keeps state; to start from the saved weights alone, load into `.module`"
                )
            prefixed = OrderedDict((f"module.{name}", value) for name, value in module.items())
            self.load_state_dict(prefixed, strict=self.tuner is None)
            return
        state = state_of_tree(engine)
        self.module.load_state_dict(module)
        self.set_extra_state(state)  # replicas are made from the weights

    def keeps_state(self) -> bool:
        """Whether the algorithm has state, or counts steps.

        If so, `state_dict()` has the result of `get_extra_state`.
        """
        plain = isinstance(self.algorithm, (GradientAllReduce, HookAlgorithm))
        draws = any(codec.random_seed is not None for codec in codecs_in(self.algorithm))  # by the step
        return draws or not plain or any(has_saved_state(state) for state in self._steps.engine.states)

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.tuner is None and not self.keeps_state():  # a tuner may try an algorithm with state
            del destination[prefix + _EXTRA_STATE]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the result of `state_dict()`. Collective.

        Raises:
            ArrayError: With `strict`, it is that of the plain module. A RuntimeError as well.
        """
        names = [name for name, _ in self.module.named_parameters()]
        if strict and all(name in state_dict and f"module.{name}" not in state_dict for name in names):
            raise MisuseError(
                "DistributedDataParallel.load_state_dict: these are the names of the plain module, such as "
                f"{names[0]!r}, expected 'module.{names[0]}'; use ddp.module.load_state_dict, or "
                "save ddp.state_dict()"
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: Mapping[str, object], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        key, missing = prefix + _EXTRA_STATE, args[2]
        if key in missing and not self.keeps_state():
            missing.remove(key)
        if key not in state_dict:
            if self._steps.watch.unfinished:
                self._steps.engine.load_state_dict(self._steps.engine.state_dict())
            self._steps.forget()

    # Names of PyTorch's wrapper ----------------------------------------------------------------------------

    # PyTorch's functions mark the module and its parameters, which `checks.names_to_ignore` reads.
    _set_params_and_buffers_to_ignore_for_model = staticmethod(
        _TorchWrapper._set_params_and_buffers_to_ignore_for_model
    )
    _get_data_parallel_params = staticmethod(_TorchWrapper._get_data_parallel_params)
    _ddp_params_and_buffers_to_ignore = checks.refused_to_pytorchs_own

    def __getattr__(self, name: str) -> Any:
        """Look up missing attributes in the wrapped module, except those of PyTorch's wrapper."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = super().__getattr__("module")
        text = f"'{type(self).__name__}' object has no attribute '{name}'"
        if name in torch_names.INSTEAD or (hasattr(_TorchWrapper, name) and not name.startswith("__")):
            raise MissingError(
                f"{text}; PyTorch's has one: here, {torch_names.INSTEAD.get(name, torch_names.OWN_REDUCER)}"
            )
        try:
            return getattr(module, name)
        except AttributeError as exc:
            raise AttributeError(f"{text}, and neither has its module, a {type(module).__name__}") from exc

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the wrapper; one that would have no effect raises, unless it keeps its value."""
        instead = torch_names.SET_INSTEAD.get(name) or torch_names.INSTEAD.get(name)
        if instead is None and hasattr(_TorchWrapper, name) and not hasattr(type(self), name):
            instead = torch_names.OWN_REDUCER
        if instead is not None:
            plain, now = isinstance(value, (type(None), bool, int, str, torch.device)), getattr(self, name, ...)
            if value is not now and not (plain and value == now):
                raise MissingError(f"'{type(self).__name__}' object: '{name}' cannot be set; {instead}")
        else:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        if self.tuner is not None or self.keeps_state() or isinstance(self.algorithm, HookAlgorithm):
            raise UnsupportedError(
                f"DistributedDataParallel: a copy would lack the state of {self.algorithm}; copy its .module"
            )
        return reduced(self, self.comm, self.ignored_names)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward passes are averaged; a forward pass reads it. `no_sync` sets it to False."""
        return self._steps.averaging

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._steps.averaging = bool(value)

    @property
    def require_forward_param_sync(self) -> bool:
        """The same as `require_backward_grad_sync`, since buffers are sent after averaged backward passes."""
        return self._steps.averaging

    @property
    def bucket_bytes_cap(self) -> int:
        """PyTorch's name of `bucket_bytes`."""
        return self.bucket_bytes

    @property
    def parameters_to_ignore(self) -> set[str]:
        """PyTorch's name of `ignored_names`."""
        return set(self.ignored_names)

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The present buffers that are not ignored, by name."""
        return self._model.buffers()

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The present buffers that are not ignored."""
        return list(self._model.buffers().values())

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group of torch.distributed with the same ranks: the one given, or the default one."""
        group, world, mine = self._process_group, default_group(), (self.comm.size, self.comm.rank)
        if group is None and world is not None and mine == (world.size(), world.rank()):
            group = world
        if group is None:
            raise AttributeError("process_group")  # `__getattr__` says what to use
        return group  # type: ignore[no-any-return]

    @property
    def reducer(self) -> torch_names.Reducer:
        """The methods of PyTorch's reducer that frameworks call."""
        return torch_names.Reducer(self.expect_backward)

    def will_sync_module_buffers(self) -> bool:
        """Whether the next averaged step sends buffers."""
        return self._steps.averaging and self.broadcast_buffers and bool(self._model.buffers())

    def _set_static_graph(self) -> None:
        """See the argument `static_graph`."""
        self.static_graph = True

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing: outputs are returned as they are, so that a loss may be changed in place."""

    def _check_reducer_finalized(self) -> None:
        """Raise `CommError` if a backward pass has begun and not ended."""
        checks.check_backward_ended(self._steps.watch.unfinished)

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """The settings, by PyTorch's names; `counters` has what was exchanged."""
        trained, buckets = list(self._model.trained.values()), self._steps.engine.plan.buckets
        return {
            "world_size": self.comm.size,
            "rank": self.comm.rank,
            "module_name": type(self.module).__name__,
            "device_ids": ", ".join(map(str, self.device_ids or [])),
            "output_device": -1 if self.output_device is None else self.output_device,
            "is_multi_device_module": 0,
            "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trained})),
            "num_parameter_tensors": len(trained),
            "total_parameter_size_bytes": sum(p.nbytes for p in trained),
            "bucket_cap_bytes": self.bucket_bytes,
            "bucket_sizes": ", ".join(str(bucket.nbytes) for bucket in buckets),
            "broadcast_buffers": int(self.broadcast_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "has_sync_bn": int(any(isinstance(part, nn.SyncBatchNorm) for part in self.module.modules())),
            "comm_hook": str(self.algorithm),
        }
