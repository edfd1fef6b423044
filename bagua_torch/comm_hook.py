"""The averages of bagua_comm for PyTorch's own DistributedDataParallel.

ddp = torch.nn.parallel.DistributedDataParallel(model)
ddp.register_comm_hook(None, bagua_torch.comm_hook(Quantized(MinMaxUInt8())))
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

import bagua_comm
from bagua_comm import Average, Bucket, BucketSpec, Communicator, TensorSpec
from bagua_comm.algorithms.base import check_average, check_average_argument
from bagua_comm.algorithms.state import load_state, save_state
from bagua_comm.collectives import InPlace

from .arrays import as_array, cupy_stream, dtype_name, torch_stream

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def comm_hook(average: Average, comm: Communicator | None = None) -> Hook:
    """A communication hook that averages gradients by `average`, on a lane beside the backward pass.

    Collective. Give it to `DistributedDataParallel.register_comm_hook`, with None as the state. The hook belongs
    to one model. What an average keeps (the residual of `ErrorFeedback`) stays with its parameters when PyTorch
    forms other buckets after the first step. CUDA gradients must be on the communicator's device; over NCCL the
    host waits for none of them.

    Args:
        average: `Exact()`, `Quantized(codec)`, `ErrorFeedback(inner)`, `Hierarchical(inner)`.
        comm: The ranks, the same as the model's; the default communicator if None.

    Raises:
        ArrayError: `average` is none.
        UnsupportedError: In the first backward pass, if `average` does not take the dtype of a parameter.
    """
    check_average_argument("comm_hook", average)
    comm = comm if comm is not None else bagua_comm.default()
    enqueues = comm.device is not None and any(transport.enqueues for transport in comm.transports)
    lane = comm.lane("stream" if enqueues else "thread")
    names: dict[int, str] = {}  # of parameters, by identity
    numbers = itertools.count()
    bound: dict[int, tuple[Bucket, InPlace]] = {}  # by the index of the bucket
    saved: dict[str, dict[str, Any]] = {}  # what averages kept for buckets that are no more

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
        """The bound average of this bucket; a new one where PyTorch has formed other buckets."""
        known = bound.get(bucket.index)
        if known is not None and known[0].spec == bucket.spec:
            return known[1]
        for old, kept in bound.values():
            saved.update(save_state(old, kept))
        bound.pop(bucket.index, None)
        function = average.bind(lane.comm)
        if all(name in saved for name in bucket.views):
            load_state(bucket, function, saved)
        bound[bucket.index] = bucket, function
        return function

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average the bucket's gradients in place."""
        device = bucket.buffer().device
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[device] if device.type == "cuda" else None
        )

        def exchange(ours: Bucket) -> None:
            try:
                averaging(ours)(ours.flat)
            except Exception as exc:
                future.set_exception(exc)  # type: ignore[arg-type]
                raise
            with cupy_stream(device):  # whoever waits for the future waits for this stream
                future.set_result(bucket.buffer())

        with torch_stream(device):
            ours = bucket_of(bucket)
            check_average(average, ours.spec.dtype)
            lane.submit(exchange, ours)
        return future

    # PyTorch looks at these two, which are text here.
    hook.__annotations__ |= {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return hook
