"""The buckets of an engine and their memory: creation, copies, averages, kernels, and a log line."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np

from .. import arrays
from ..algorithms.base import Algorithm, Payload, runs_in_rounds
from ..arrays import Array
from ..bucket import Bucket, Flats, Plan, make_buckets
from ..codecs.base import codecs_in
from ..comm import Communicator
from ..comm.arguments import as_argument, check_writable
from ..errors import ArrayError, shown
from ..logs import log_on_root, megabytes

Storage: TypeAlias = Sequence[Array] | Mapping[Payload, Sequence[Array]]
"""Memory of the buckets, one flat array each; by payload, if an algorithm exchanges gradients and weights in
turn."""


def buckets_over(plan: Plan, storage: Storage, algorithm: Algorithm) -> dict[Payload, list[Bucket]]:
    """Make buckets over `storage`, for every payload that the algorithm exchanges.

    Raises:
        ArrayError: `storage` does not fit the plan, or lacks a payload; or an array cannot be written to, or
            shares memory with another one.
        UnsupportedError: An item of `storage` is not an array.
    """
    given = storage if isinstance(storage, Mapping) else {algorithm.payload: storage}
    needed = {phase.payload for phase in algorithm.phases}
    if not needed <= set(given):
        wanted = " and ".join(map(repr, sorted(needed)))
        raise ArrayError(f"storage is for {', '.join(map(repr, given))}, but {algorithm} needs {wanted}")
    found = {f"storage[{payload!r}]": given[payload] for payload in sorted(needed)}
    _check_arrays(found)
    return {payload: make_buckets(plan, given[payload]) for payload in sorted(needed)}


def _check_arrays(storage: Mapping[str, Sequence[Array]]) -> None:
    """Check that each item is an array that can be written to, and shares no memory with another one.

    Args:
        storage: Sequences of arrays, by their names in errors.
    """
    placed: list[tuple[int, int, str, Array]] = []
    for name, flats in storage.items():
        if not hasattr(flats, "__len__") or not hasattr(flats, "__getitem__"):
            raise ArrayError(f"{name} is {shown(flats)}, expected a list of flat arrays, one for each bucket")
        for index in range(len(flats)):
            item, flat = f"{name}[{index}]", flats[index]
            value = as_argument("Engine", item, flat)
            check_writable("Engine", item, flat, value)
            placed.append((*arrays.extent(value), item, value))
    before: list[tuple[int, int, str, Array]] = []
    for start, end, item, value in sorted(placed, key=operator.itemgetter(0)):
        before = [each for each in before if each[1] > start]
        for *_, other, found in before:
            if arrays.share_elements(value, found):
                raise ArrayError(
                    f"Engine: {other} and {item} share memory, so that an exchange of one would change the other "
                    "one; give each bucket memory of its own"
                )
        before.append((start, end, item, value))


class GivenArrays:
    """The arrays that the user gave, which are those of the buckets as long as nobody replaces one.

    Args:
        storage: What the user gave; None if the engine has memory of its own.
        buckets: The buckets over it, by payload.
    """

    def __init__(self, storage: Storage | None, buckets: Mapping[Payload, Sequence[Bucket]]) -> None:
        self._storage = storage
        self._flats = {payload: [bucket.flat for bucket in each] for payload, each in buckets.items()}

    def check(self) -> None:
        """Raise if the user has put another array in place of one that is exchanged.

        Raises:
            ArrayError: An item was replaced, added or removed.
        """
        for payload, flats in self._flats.items():
            given = self._storage.get(payload) if isinstance(self._storage, Mapping) else self._storage
            if not isinstance(given, (list, tuple)) or (
                len(given) == len(flats) and all(map(operator.is_, given, flats))
            ):
                continue
            if len(given) != len(flats):
                found = f"the list has {len(given)} arrays now, and had {len(flats)} when it was given"
            else:
                index = next(i for i, flat in enumerate(flats) if given[i] is not flat)
                found = f"item {index} is another array than the one that was given"
            raise ArrayError(
                f"storage[{payload!r}]: {found}, which the engine exchanges; write into it, as by flats[0][...] "
                "= values or flats[0] -= values, or give other arrays by engine.replan(plan, storage)"
            )


def memory_of(buckets: Mapping[Payload, Sequence[Bucket]]) -> list[Array] | dict[Payload, list[Array]]:
    """The flat arrays of these buckets; by payload, if there are several."""
    flats: dict[Payload, list[Array]] = {p: Flats(bucket.flat for bucket in each) for p, each in buckets.items()}
    return flats if len(flats) > 1 else next(iter(flats.values()))


def allocate(plan: Plan, like: Mapping[Payload, Sequence[Bucket]]) -> dict[Payload, list[Array]]:
    """Zeroed memory for `plan`, for the payloads of the buckets `like` and in their array library."""
    flats = [bucket.flat for buckets in like.values() for bucket in buckets]
    run = arrays.namespace(flats[0]) if flats else np
    return {
        payload: [run.zeros(spec.size, arrays.dtype_named(spec.dtype)) for spec in plan.buckets]
        for payload in like
    }


def tensors_of(plan: Plan) -> set[object]:
    """The tensors of all buckets."""
    return {tensor for bucket in plan.buckets for tensor in bucket.tensors}


def copy_tensors(old: Sequence[Bucket], new: Sequence[Bucket]) -> None:
    """Copy the values of all tensors to the new buckets, which may be in the memory of the old ones."""
    views = {name: view for bucket in old for name, view in bucket.views.items()}
    if any(arrays.overlap(a.flat, b.flat) for a in old for b in new):
        views = {name: view.copy() for name, view in views.items()}
    for bucket in new:
        for name, view in bucket.views.items():
            view[...] = views[name]


def average_in_place(comm: Communicator, flats: Iterable[Array]) -> None:
    """Replace each array with its mean over all ranks.

    Collective.
    """
    for flat in flats:
        comm.allreduce(flat, out=flat, op="avg")


def prepare_codecs(algorithm: Algorithm, buckets: Mapping[Payload, Sequence[Bucket]]) -> None:
    """Load the kernels of codecs while the lane is idle.

    On the host, this starts to compile those that are not on disk. On a device, CUDA loads a kernel at its first
    launch, and may wait until the device is idle. If an NCCL call were running on the lane then, and its peer
    waited in another thread to launch the same kernel, both would hang. Kernels of sums, of optimizers and of
    CuPy itself are loaded at their first use.
    """
    for phase in algorithm.phases:
        for flat in {bucket.flat.dtype: bucket.flat for bucket in buckets[phase.payload]}.values():
            for codec in codecs_in(phase):
                codec.prepare(flat)


def log_plan(log: logging.Logger, rank: int, plan: Plan, algorithm: Algorithm, *, lane: str) -> None:
    """Log the algorithm, the sizes of the buckets, and the lane."""
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
        lane,
    )


def lane_kind(
    comm: Communicator, algorithm: Algorithm, buckets: Mapping[Payload, Sequence[Bucket]]
) -> Literal["thread", "stream"]:
    """Return "stream" if exchanges only enqueue work, else "thread": in `Rounds` the host waits for ranks."""
    flats = [bucket.flat for each in buckets.values() for bucket in each]
    transports = [comm.transport_for(flat, call="Engine", name="storage") for flat in flats]
    streamed = flats and not runs_in_rounds(algorithm) and all(t.enqueues for t in transports)
    return "stream" if streamed else "thread"
