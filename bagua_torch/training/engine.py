"""An engine on tensors, in the order of PyTorch's current stream.

Autograd runs hooks on threads and streams of its choice, and bagua_comm works in the order of CuPy's current
stream. A wrapper uses bagua_comm on a device only through this file, which sets the stream in every call. On a
CUDA device, an exchange begins after the work that PyTorch has enqueued on its stream. At the end of the backward
pass that stream waits for the lane's; the host does not wait.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch.autograd.graph import increment_version

from bagua_comm import Algorithm, Communicator, Engine
from bagua_comm.algorithms.base import Payload, State
from bagua_comm.algorithms.parts import PER_BUCKET
from bagua_comm.algorithms.state import (
    Saved,
    check_state,
    copy_numbers,
    load_state,
)
from bagua_comm.arrays import Array
from bagua_comm.engine import EngineCallbacks
from bagua_comm.engine.checks import check_same_training
from bagua_comm.engine.storage import buckets_over, prepare_codecs

from ..arrays import as_array, as_tensor, torch_stream
from ..tensors.broadcast import map_leaves
from ..tensors.flats import Flat, Layout
from ..tensors.memory import BucketMemory

Class = TypeVar("Class", bound=type)
P = ParamSpec("P")
T = TypeVar("T")


def _in_stream_order(cls: Class) -> Class:
    """Run every public method of `cls`, inherited ones included, in the order of PyTorch's current stream."""

    def ordered(method: Callable[Concatenate[TorchEngine, P], T]) -> Callable[Concatenate[TorchEngine, P], T]:
        @functools.wraps(method)
        def in_order(self: TorchEngine, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with torch_stream(self.device):
                return method(self, *args, **kwargs)

        return in_order

    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if not name.startswith("_"):
            setattr(cls, name, ordered(method))
    return cls


SMALL_BYTES = 2**20
"""Up to this size, copying a tensor to a common message costs less than a message of its own."""


class _SharedState(NamedTuple):
    """State that an algorithm shares with optimizers: its arrays, and tensors over their parts, by parameter."""

    arrays: list[Array]
    flats: list[Flat]  # so that a fused optimizer finds them
    addresses: list[int]
    tensors: dict[str, torch.Tensor]


@_in_stream_order
class TorchEngine(Engine):
    """An engine over the memory of a wrapper.

    Collective.

    Args:
        comm: The ranks.
        algorithm: What to exchange and when.
        memory: The memory of the buckets, with the payloads of the algorithm.
        device: The device of that memory.
        callbacks: Functions of the wrapper; see `Engine`.
    """

    _alone = False

    def __init__(
        self,
        comm: Communicator,
        algorithm: Algorithm,
        memory: BucketMemory,
        device: torch.device,
        callbacks: EngineCallbacks,
    ) -> None:
        self.device, self._memory = device, memory
        self._shared_state = _SharedState([], [], [], {})
        self._later: Saved = {}
        """Loaded state of parameters that are still frozen, for the time when they are unfrozen."""
        with torch_stream(device):
            super().__init__(comm, algorithm, memory.plan, _arrays_of(memory), callbacks=callbacks)

    def move(self, memory: BucketMemory, algorithm: Algorithm) -> None:
        """Continue with other memory, and the same algorithm with other settings; see `Engine.replan`.

        Collective.
        """
        super().replan(memory.plan, _arrays_of(memory), algorithm=algorithm)
        self._memory = memory

    def agree(self, mine: T) -> list[T]:
        """Gather `mine` of all ranks. Raises `CommMismatch` if other ranks exchange buckets instead.

        Collective. Waits for exchanges in progress, without writing back their results.
        """
        self._exchanges.wait()
        return self._comm.allgather_object(mine)

    @property
    def exchanging(self) -> bool:
        """Whether buckets were sent whose results are not written back yet."""
        return bool(self._exchanges.sent)

    @property
    def holds(self) -> bool:
        """Whether the engine keeps addends of this step; see `hold`."""
        return self._held

    def awaits(self, names: Iterable[str]) -> bool:
        """Whether a loaded checkpoint has the algorithm's state of all these parameters."""
        return set(names) <= self._later.keys()

    def extend(self) -> None:
        """Exchange buckets that were added to the memory as well.

        Collective. Other buckets and their states do not change. New ones get an initial state, or the state of
        the loaded checkpoint, and the same numbers of steps.
        """
        self.finish()
        plan = self._memory.plan
        self._training = check_same_training(self._comm, plan, self.algorithm)
        for payload, made in buckets_over(plan, _arrays_of(self._memory), self.algorithm).items():
            buckets = self._buckets[payload]
            buckets += made[len(buckets) :]
        self.plan = plan
        prepare_codecs(self.algorithm, self._buckets)
        states = list(self.states)
        for bucket in self._buckets[self.payload][len(states) :]:
            states.append(self._phase.init(bucket, self._comm))
            if self._later.keys() >= bucket.views.keys():
                later = self._reordered(self._later, to_memory=True)
                check_state(bucket, states[-1], later, self._comm)
                load_state(bucket, states[-1], later, self._comm)
            copy_numbers(states[-1], states[0])
        self._begin_phase(self._exchanges.began, states)

    def expect_state(self) -> None:
        """Record that the algorithm's state is about to be loaded: weights that are loaded now belong to it."""
        self._replacements.belong()

    def keep_weights(self) -> None:
        """Record that ranks have averaged their weights: their mean, on which algorithms depend, is unchanged."""
        self._replacements.keep()

    def state_tensors(self) -> dict[str, object]:
        """The result of `Engine.state_dict`, with tensors for arrays."""
        return map_leaves(self.state_dict(), _to_tensor)  # type: ignore[no-any-return]

    def load_state_tensors(self, state: object) -> None:
        """Load the result of `state_tensors`; see `Engine.load_state_dict`.

        Collective.
        """
        self._memory.reclaim()  # replicas are made from the weights
        self.load_state_dict(map_leaves(state, self._to_array))

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """See `Engine.load_state_dict`. State of parameters that are still frozen is kept for them.

        Collective.
        """
        super().load_state_dict(saved)
        extra = {name: pieces for name, pieces in saved["tensors"].items() if name not in self._names}
        self._later = extra if saved["phase_began"] == self._exchanges.began else {}

    def shared_state(self) -> dict[str, torch.Tensor]:
        """The tensors that the algorithm shares with optimizers in this step, by parameter; empty if none.

        They are the same in every step, unless user code moves them.
        """
        phase = self.phase
        if not phase.lends:
            return {}
        arrays = [phase.lent(state) for state in self.states]
        shared = self._shared_state
        same = len(shared.arrays) == len(arrays) and all(map(is_, shared.arrays, arrays))
        if not same or list(map(torch.Tensor.data_ptr, shared.tensors.values())) != shared.addresses:
            flats = [Flat(as_tensor(array)) for array in arrays]
            tensors = self._memory.parts(flats)
            self._shared_state = _SharedState(
                arrays, flats, list(map(torch.Tensor.data_ptr, tensors.values())), tensors
            )
        return self._shared_state.tensors

    def _follow(self, known: bool) -> None:
        self._memory.reclaim()  # the program may have given parameters other memory
        super()._follow(known)

    def _saved(self) -> Saved:
        return self._reordered(super()._saved(), to_memory=False)

    def _begin_phase(self, began: int, states: list[State] | None = None) -> None:
        super()._begin_phase(began, states)
        if states is None:
            self._later = {}

    def _load(self, saved: Mapping[str, Mapping[str, object]]) -> None:
        super()._load(self._reordered(saved, to_memory=True))

    def _reordered(self, saved: Any, *, to_memory: bool) -> Saved:
        """Convert between the order of indices, in saved arrays, and the order of memory, in buckets."""
        reordered: Saved = dict(saved)
        for name, layout in self._memory.layouts.items():
            if name in saved and not layout.is_contiguous:
                reordered[name] = {
                    path: _in_other_order(value, layout, to_memory=to_memory)
                    if hasattr(value, "dtype") and value.ndim and path + PER_BUCKET not in saved[name]
                    else value
                    for path, value in saved[name].items()
                }
        return reordered

    def _to_array(self, value: object) -> object:
        try:
            return as_array(value.to(self.device)) if isinstance(value, torch.Tensor) else value
        except Exception:  # the engine refuses it, on all ranks
            return value


def average_tensors(comm: Communicator, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Set tensors on `device` to their mean over all ranks, in place.

    Collective. Small tensors share one message; a large one is not copied.
    """
    with torch_stream(device):
        small = []
        for tensor in tensors:
            values = as_array(tensor)
            if tensor.nbytes <= SMALL_BYTES:
                small.append(values)
            else:
                comm.allreduce(values, out=values, op="avg")
            increment_version(tensor)
        if small:
            comm.allreduce_many(small, small, op="avg")


def _in_other_order(piece: Array, layout: Layout, *, to_memory: bool) -> Array:
    """Reorder the (..., n) elements of a tensor from the order of indices to that of memory, or back."""
    order = list(layout.order)
    extents = [layout.size[d] for d in range(len(layout.size)) if layout.size[d] != 1]
    axes = [sorted(order).index(d) for d in order]  # of the tensor without its extents of 1
    if not to_memory:
        extents, axes = [extents[axis] for axis in axes], [axes.index(axis) for axis in range(len(axes))]
    ahead = piece.ndim - 1
    whole = piece.reshape(*piece.shape[:-1], *extents)
    return whole.transpose(*range(ahead), *(ahead + axis for axis in axes)).reshape(piece.shape)


def _arrays_of(memory: BucketMemory) -> dict[Payload, list[Array]]:
    return {payload: [as_array(flat) for flat in flats] for payload, flats in memory.flats.items()}


def _to_tensor(value: object) -> object:
    return as_tensor(value) if hasattr(value, "dtype") else value
