"""What an engine checks and prepares when it begins, and when its plan, algorithm, phase or state changes."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from .. import arrays
from ..algorithms.base import Algorithm, Around, Payload, check_size, complete, phases_of
from ..arrays import Array
from ..bucket import Bucket, Plan
from ..codecs.base import codecs_in
from ..comm import Communicator
from ..errors import ArrayError, CommMismatch
from ..logs import log_on_root, megabytes

T = TypeVar("T")


def kind_of(phase: Algorithm) -> tuple[Any, ...]:
    """The types of an algorithm and of those that it is made of, whatever their settings."""
    inner = kind_of(phase.algorithm) if isinstance(phase, Around) else ()
    return (type(phase), phase.payload, *inner)


def kinds_of(algorithm: Algorithm) -> list[tuple[Any, ...]]:
    """The types of an algorithm's phases, whatever their settings."""
    return [kind_of(phase) for phase in phases_of(algorithm)]


def tensors_of(plan: Plan) -> set[Any]:
    """The tensors of all buckets."""
    return {tensor for bucket in plan.buckets for tensor in bucket.tensors}


def copy_tensors(old: Sequence[Bucket], new: Sequence[Bucket]) -> None:
    """Copy the values of all tensors to the new buckets."""
    views = {name: view for bucket in old for name, view in bucket.views.items()}
    for bucket in new:
        for name, view in bucket.views.items():
            view[...] = views[name]


def average_in_place(comm: Communicator, flats: Iterable[Array]) -> None:
    """Make arrays their mean over all ranks.

    Collective.
    """
    for flat in flats:
        comm.allreduce(flat, out=flat, op="avg")


def check_fit(algorithm: Algorithm, plan: Plan, size: int) -> None:
    """Raise unless the algorithm can exchange the tensors of `plan` over `size` ranks.

    Raises:
        ArrayError: It does not support this number of ranks.
        UnsupportedError: It cannot exchange the dtype of a tensor; the message names the tensor.
    """
    for bucket in plan.buckets:
        try:
            complete(algorithm).check(bucket.dtype)
        except TypeError as exc:
            names = ", ".join(repr(tensor.name) for tensor in bucket.tensors[:3])
            raise type(exc)(f"tensor {names}: {exc}") from exc
    check_size(algorithm, size)


def compared(comm: Communicator, plan: Plan, algorithm: Algorithm) -> str:
    """Raise unless all ranks have this plan and this algorithm; returns a new token, the same on all ranks.

    Collective.

    Raises:
        CommMismatch: They differ.
    """
    mine = (plan.digest(), repr(algorithm))
    rows = comm.allgather_object((mine, new_token()))
    for rank, (other, _) in enumerate(rows):
        if other != mine:
            what = "plan" if other[0] != mine[0] else "algorithm"
            raise CommMismatch(
                f"rank {comm.rank} and rank {rank} have different {what}s: "
                + (f"{mine[1]} and {other[1]}" if what == "algorithm" else "the tensors differ")
            )
    token: str = rows[0][1]
    return token


def together(comm: Communicator, check: Callable[[], T]) -> list[T]:
    """What `check` returns on every rank; an error on one rank is an ArrayError on all.

    Collective.
    """
    outcome: tuple[T | None, str | None] = (None, None)
    cause: Exception | None = None
    try:
        outcome = (check(), None)
    except ArrayError as exc:
        outcome, cause = (None, str(exc)), exc
    except Exception as exc:  # if it were raised here, the other ranks would wait for this one
        outcome, cause = (None, f"the state cannot be read: {exc!r}"), exc
    outcomes: list[Any] = comm.allgather_object(outcome)
    for rank, (_, problem) in enumerate(outcomes):
        if problem is not None:
            raise ArrayError(f"load_state_dict: rank {rank}: {problem}") from cause
    return [value for value, _ in outcomes]


def new_token() -> str:
    """Random letters, by which trainings are told apart."""
    return secrets.token_hex(8)


def allocated(plan: Plan, like: Mapping[Payload, Sequence[Bucket]]) -> dict[Payload, list[Array]]:
    """Zeroed memory for `plan`, of the library of the buckets `like`, for the payloads that these have."""
    flats = [bucket.flat for buckets in like.values() for bucket in buckets]
    run = arrays.namespace(flats[0]) if flats else np
    return {
        payload: [run.zeros(spec.size, arrays.dtype_named(spec.dtype)) for spec in plan.buckets]
        for payload in like
    }


def prepare_codecs(algorithm: Algorithm, buckets: Mapping[Payload, Sequence[Bucket]]) -> None:
    """Load the kernels of codecs now, while no lane works.

    On the host, this begins to compile them where they are not on disk. On a device, CUDA loads a kernel when
    it is first launched, and may wait until the device is idle. A call of NCCL on the lane may be running then,
    whose peer waits in another thread to launch the same kernel. Kernels of sums, of optimizers and of CuPy
    itself are loaded when they are first used.
    """
    for phase in phases_of(algorithm):
        for flat in {bucket.flat.dtype: bucket.flat for bucket in buckets[phase.payload]}.values():
            for codec in codecs_in(phase):
                codec.prepare(flat)


def tell_plan(log: logging.Logger, rank: int, plan: Plan, algorithm: Algorithm, *, on: str) -> None:
    """Log what is exchanged from now on, on this lane."""
    buckets = plan.buckets
    log_on_root(
        log,
        rank,
        "%s: %d tensors in %d buckets, %s, the largest %s; on a %s",
        algorithm,
        sum(len(bucket.tensors) for bucket in buckets),
        len(buckets),
        megabytes(sum(bucket.nbytes for bucket in buckets)),
        megabytes(max((bucket.nbytes for bucket in buckets), default=0)),
        on,
    )
