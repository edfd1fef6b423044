"""Communication hooks: averages of bagua_comm in PyTorch's DistributedDataParallel, and PyTorch's hooks in ours.

An average of bagua_comm in PyTorch's wrapper:

    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(None, bagua_torch.comm_hook(Quantized(MinMaxUInt8())))
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from bagua_comm import (
    Algorithm,
    ArrayError,
    Average,
    Bucket,
    BucketSpec,
    Communicator,
    Point,
    TensorSpec,
    UnsupportedError,
    Window,
)
from bagua_comm.algorithms.base import TRANSIENT
from bagua_comm.algorithms.state import Saved, load_state, save_state
from bagua_comm.averages import InPlace
from bagua_comm.averages.base import check_average_argument
from bagua_comm.comm.weights import agree_by, check_weight_argument, mean_in_place

from ..arrays import as_array, as_tensor, cupy_stream, dtype_name, torch_stream
from ..entry import communicator_of, errors_on_all
from ..process_group.bootstrap import default_group
from ..tensors.flats import layout_of, views

Hook = Callable[[object, GradBucket], torch.futures.Future[torch.Tensor]]


def comm_hook(
    average: Average, comm: Communicator | None = None, *, weight: Callable[[], float | None] | None = None
) -> Hook:
    """A communication hook that averages gradients by `average`, on a lane beside the backward pass.

    Collective. Pass it to `DistributedDataParallel.register_comm_hook`, with None as the state. A hook is for one
    model. The state of an average (the residual of `ErrorFeedback`) follows its parameters when PyTorch rebuilds
    buckets after the first step. CUDA gradients must be on the communicator's device; over NCCL the host does not
    wait for them.

    Args:
        average: `Exact()`, `Quantized(codec)`, `ErrorFeedback(inner)`, `Hierarchical(inner)`.
        comm: The ranks, the same as the model's; if None, the default communicator; `bagua_torch.connect` makes
            it, and is called if it was not yet.
        weight: A function that returns the weight of this rank in the mean of this step's gradients, as its
            tokens, given on all ranks; see `BackendOptions`.

    Raises:
        ArrayError: `average` is not an Average, or `weight` no function. In a backward pass, on all ranks: the
            weight of a rank is missing or out of range.
        UnsupportedError: There is a `weight`, and `average` divides by the ranks that send an element, on all
            ranks. In the first backward pass, if `average` does not take the dtype of a parameter.
        CommError: In a backward pass, if an exchange failed in it or before. In the first step of a static graph
            PyTorch raises a RuntimeError instead.
    """
    comm = communicator_of("comm_hook", comm)
    with errors_on_all(comm):
        check_average_argument("comm_hook", average)
        check_weight_argument("comm_hook", weight)
        if weight is not None:
            average.check_weights()
    enqueues = comm.device is not None and any(transport.enqueues for transport in comm.transports)
    lane = comm.lane("stream" if enqueues else "thread")
    names: dict[int, str] = {}  # names of parameters, by id
    numbers = itertools.count()
    bound: dict[int, tuple[Bucket, InPlace]] = {}  # by the index of the bucket
    saved: Saved = {}  # states of averages for buckets that PyTorch has replaced
    watched = -1  # PyTorch's id of the backward pass whose end waits for the lane

    def bucket_of(given: GradBucket) -> Bucket:
        flat = as_array(given.buffer())
        specs = tuple(
            TensorSpec(
                names.setdefault(id(p), f"parameter {next(numbers)}"), tuple(p.shape), dtype_name(given.buffer())
            )
            for p in given.parameters()
        )
        return Bucket(given.index(), BucketSpec(specs[0].dtype, specs, flat.size), flat)

    def averaging(bucket: Bucket) -> InPlace:
        """The bound average of this bucket; a new one if PyTorch has rebuilt buckets."""
        known = bound.get(bucket.index)
        if known is not None and known[0].spec == bucket.spec:
            return known[1]
        for old, kept in bound.values():
            saved.update(save_state(old, kept, lane.comm))
        bound.pop(bucket.index, None)
        function = average.bind(lane.comm)
        if all(name in saved for name in bucket.views):
            load_state(bucket, function, saved, lane.comm)
        bound[bucket.index] = bucket, function
        return function

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average the bucket's gradients in place."""
        nonlocal watched
        task = torch._C._current_graph_task_id()
        if task not in (-1, watched):
            # PyTorch waits for futures without a time limit, and loses the class of an error: wait before it.
            watched = task
            torch.autograd.Variable._execution_engine.queue_callback(lane.wait)
        device = bucket.buffer().device
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[device] if device.type == "cuda" else None
        )

        def exchange(ours: Bucket) -> None:
            mean, weighting = averaging(ours), agree_by(lane.comm, weight)
            mean_in_place(weighting, ours.flat, mean, shrinks=not average.has_residual)
            with cupy_stream(device):  # a wait for the future waits for this stream
                future.set_result(bucket.buffer())

        def ended(done: Future[None]) -> None:
            error = done.exception()
            if error is not None and not future.done():  # the task failed, or was refused by the lane
                future.set_exception(error)  # type: ignore[arg-type]

        with torch_stream(device):
            ours = bucket_of(bucket)
            average.check(ours.spec.dtype)
            lane.submit(exchange, ours).add_done_callback(ended)
        return future

    # PyTorch checks these two annotations, which are strings in this file.
    hook.__annotations__ |= {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return hook


class HookBucket:
    """The bucket that `bagua_torch.DistributedDataParallel.register_comm_hook` passes to a hook.

    Its methods are those of `torch.distributed.GradBucket`.
    """

    def __init__(
        self,
        index: int,
        spec: BucketSpec,
        flat: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        layout: _Layout,
    ) -> None:
        self._index, self._spec, self._parameters, self._layout = index, spec, list(parameters), layout
        self._buffer = flat[: sum(tensor.size for tensor in spec.tensors)]  # without the padding

    def index(self) -> int:
        """The index of this bucket. All ranks get the buckets in the order of their indices."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients of the bucket in one flat tensor."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Set the result of `buffer()`."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Views of `buffer()`, one for each parameter."""
        return views(self._buffer, list(map(layout_of, self._parameters)))

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of their gradients."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether no bucket of this step comes after it."""
        return self._index == self._layout.buckets - 1


@dataclass
class _Layout:
    buckets: int = 0


@dataclass
class _Running:
    """The future of the hook for a bucket in this step."""

    future: Any = field(default=None, metadata=TRANSIENT)
    buffer: Any = field(default=None, metadata=TRANSIENT)


@dataclass(frozen=True, eq=False)
class HookAlgorithm(Algorithm):
    """Gradients averaged by a hook, each bucket as soon as it is complete.

    The hook is called on the thread of the backward pass; the lane waits for its future.

    Args:
        hook: Called with `state` and a `HookBucket`; returns a future of the averaged buffer.
        state: The hook's first argument.
        parameters: The parameters of the model, by name.
        group: The default process group, which hooks use, and callbacks of their futures refer to. A thread of
            gloo that released it last would wait for itself, and end the process.
    """

    hook: Callable[[object, HookBucket], Any]
    state: object
    parameters: Mapping[str, torch.Tensor]
    layout: _Layout = field(default_factory=_Layout)
    group: dist.ProcessGroup | None = field(default_factory=default_group)

    payload = "grad"
    window = Window(Point.GRADIENT, Point.BACKWARD)

    def __repr__(self) -> str:
        return f"HookAlgorithm({getattr(self.hook, '__qualname__', type(self.hook).__qualname__)})"

    def check(self, dtype: str) -> None:
        """Accept every dtype, since the hook decides."""

    def init(self, bucket: Bucket, comm: Communicator) -> _Running:
        """See `Algorithm.init`. Collective."""
        self.layout.buckets = bucket.index + 1  # the last bucket sets the final number
        return _Running()

    def begin(self, bucket: Bucket, state: _Running) -> None:
        """Call the hook."""
        parameters = [self.parameters[name] for name in bucket.views]
        given = HookBucket(bucket.index, bucket.spec, as_tensor(bucket.flat), parameters, self.layout)
        state.buffer = given.buffer()
        state.future = self.hook(self.state, given)
        if not hasattr(state.future, "wait"):
            raise UnsupportedError(
                f"register_comm_hook: the hook returned a {type(state.future).__name__}, expected a "
                "torch.futures.Future of a tensor"
            )

    def exchange(self, bucket: Bucket, comm: Communicator, state: _Running) -> None:
        """Wait for the hook, and put its result into the bucket. Collective."""
        future, buffer, state.future, state.buffer = state.future, state.buffer, None, None
        with cupy_stream(buffer.device):
            result = future.wait()
            if isinstance(result, (list, tuple)) and len(result) == 1:
                result = result[0]
            if not isinstance(result, torch.Tensor) or result.numel() != buffer.numel():
                raise ArrayError(
                    f"register_comm_hook: the hook's future gave {_described(result)}, expected a tensor of "
                    f"{buffer.numel()} elements, as many as the bucket's buffer"
                )
            if result.data_ptr() != buffer.data_ptr():
                buffer.copy_(result.detach().reshape(buffer.shape))


def check_hook(hook: object) -> Callable[[object, HookBucket], Any]:
    """Return `hook` if it can serve as a communication hook.

    Raises:
        ArrayError: It does not take (state, bucket), or its annotations say that it takes or returns something
            else.
        UnsupportedError: It cannot be called.
    """
    if not callable(hook):
        raise UnsupportedError(f"register_comm_hook: hook is {hook!r}, expected an Average or a function")
    if isinstance(hook, type) or hasattr(getattr(hook, "func", None), "bind"):
        check_average_argument("register_comm_hook", hook, "hook")
    signature = inspect.signature(hook)
    places = list(signature.parameters.values())
    if len(places) < 2:
        raise ArrayError(f"register_comm_hook: hook takes {signature}, expected (state, bucket)")
    bucket = signature.parameters.get("bucket", places[1]).annotation
    if bucket not in (inspect.Parameter.empty, GradBucket, HookBucket) and not isinstance(bucket, str):
        raise ArrayError(
            f"register_comm_hook: bucket annotation is {bucket}, expected torch.distributed.GradBucket"
        )
    result = signature.return_annotation
    future = torch.futures.Future[torch.Tensor]
    if result not in (inspect.Signature.empty, future) and not isinstance(result, str):
        raise ArrayError(
            f"register_comm_hook: return annotation is {result}, expected torch.futures.Future[torch.Tensor]"
        )
    return hook


def _described(value: object) -> str:
    return f"a tensor of {value.numel()}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
