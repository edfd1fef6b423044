"""Streaming DiLoCo: the model in fragments, each with its own outer step, which communicates beside local steps.

Fragment p of P is due in the steps t with t = round(p H / P) modulo H, where t = 1, 2, ... counts the steps. With
a the weights of the fragment after its last outer step (the anchor), x its weights now, and u its outer momentum:

    step t          d <- a - x
    beside          d <- mean of d over the ranks        u <- mu u + d        a <- a - lr (d + mu u)
    step t + tau    x <- alpha x + (1 - alpha) a

Training waits for the mean in step t + tau only. The paper trains language models with AdamW in the local steps,
H = 30 or 100, lr = 0.7, mu = 0.9, tau up to 5 and alpha = 0.5, and sends d in four bits.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch",
arXiv 2501.18512.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from .. import arrays, kernels
from ..arrays import Array
from ..averages import Average, Exact
from ..bucket import Bucket, Plan, TensorSpec
from ..comm import Communicator
from ..errors import ArrayError, CommMismatch, shown
from .base import TRANSIENT, Pending, Point, Window, check_integer
from .diloco import Outer, OuterAlgorithm
from .residuals import bind_average


@dataclass
class OuterFragment(Outer):
    """State of `StreamingDiLoCo`, of a bucket. The anchor and the momentum have the same bytes on all ranks."""

    pending: Pending = field(default_factory=Pending)
    offset: int = field(default=0, metadata=TRANSIENT)
    """The inner step, modulo the period, in which the fragment of this bucket is due."""
    delta: Array | None = field(default=None, metadata=TRANSIENT)
    """The change that is being averaged; None if no exchange is under way."""


@dataclass(frozen=True)
class StreamingDiLoCo(OuterAlgorithm):
    """DiLoCo whose outer steps take one part of the model at a time, and communicate while training continues.

    The model is divided into fragments. Each makes an outer step every `local_steps` steps, in steps of its own,
    so that the largest message is one fragment. It is averaged beside the next `delay` steps. Weights differ
    between ranks. The inner optimizer is that of the training loop, AdamW in the paper; its state stays on its
    rank. Besides weights and gradients, the anchors and momenta need memory, twice that of the weights, and the
    fragments under way that of their weights.

    With `delay=0`, `fragments=1` and `mix=0` it is `DiLoCo`.

    Args:
        local_steps: Number of inner steps between two outer steps of a fragment.
        fragments: The number of fragments, at most that of tensors. They are of whole tensors and about equal
            bytes: the largest tensors first, each joins the fragment that has the fewest bytes. Or a function
            that returns the fragment of a tensor by its name, from 0 on; all ranks give the same one. Buckets are
            packed with `groups`: see `Plan.pack`.
        delay: Number of inner steps that an exchange may take before training waits for it; below `local_steps`.
        mix: The weight of this rank's weights, against those of the outer step, when these arrive. At 0, inner
            steps that were made meanwhile are lost.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Nesterov momentum of the outer optimizer.
        average: How the changes are averaged; `Quantized(Int4())` sends an eighth of the bytes.

    Raises:
        ArrayError: An argument is out of range.

    >>> StreamingDiLoCo(local_steps=30, fragments=3).offsets(3)
    [0, 10, 20]
    """

    local_steps: int = 30
    fragments: int | Callable[[str], int] = 4
    delay: int = 1
    mix: float = 0.5
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    average: Average = field(default_factory=Exact)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.fragments):
            check_integer("StreamingDiLoCo", "fragments", self.fragments, least=1)
        check_integer("StreamingDiLoCo", "delay", self.delay, least=0)
        if self.delay >= self.local_steps:
            raise ArrayError(
                f"StreamingDiLoCo: delay is {self.delay} and local_steps {self.local_steps}, so that a fragment "
                "would be due again before its exchange ends; expected delay < local_steps"
            )
        if not isinstance(self.mix, (int, float)) or isinstance(self.mix, bool) or not 0 <= self.mix < 1:
            raise ArrayError(f"StreamingDiLoCo: mix is {shown(self.mix)}, expected a number from 0 to below 1")

    def __repr__(self) -> str:
        values = {entry.name: repr(getattr(self, entry.name)) for entry in fields(self)}
        if callable(self.fragments):  # without its address, which differs between ranks and runs
            values["fragments"] = getattr(self.fragments, "__qualname__", type(self.fragments).__qualname__)
        return f"StreamingDiLoCo({', '.join(f'{name}={value}' for name, value in values.items())})"

    @property
    def window(self) -> Window:  # type: ignore[override]
        """From an optimizer step until the forward pass after `delay` further ones."""
        return Window(Point.STEP, Point.FORWARD, self.delay)

    def check_plan(self, plan: Plan) -> None:
        """Raise `ArrayError` unless each bucket belongs to one fragment, and there are enough of them."""
        self._of_buckets(plan)

    def groups(self, tensors: Sequence[TensorSpec]) -> list[int]:
        """The fragment of each tensor: tensors of different fragments share no bucket."""
        if not callable(self.fragments):
            return _divide([(tensor.nbytes, tensor.name) for tensor in tensors], self.fragments)
        return [self._named(tensor.name) for tensor in tensors]

    def offsets(self, fragments: int) -> list[int]:
        """The inner step, modulo `local_steps`, in which each of this number of fragments is due."""
        return [round(p * self.local_steps / fragments) % self.local_steps for p in range(fragments)]

    def init(self, bucket: Bucket, comm: Communicator) -> OuterFragment:
        """See `Algorithm.init`. Collective.

        Raises:
            CommMismatch: The fragments of the ranks differ.
        """
        numbers = [0] * (bucket.index + 1) if bucket.plan is None else self._of_buckets(bucket.plan)
        mine = numbers[bucket.index], max(numbers) + 1
        if callable(self.fragments):  # the engine compares other settings
            for rank, (number, count) in enumerate(comm.allgather(np.array(mine)).tolist()):
                if (number, count) != mine:
                    raise CommMismatch(
                        f"StreamingDiLoCo: {bucket.spec.tensors[0].name!r} is in fragment {mine[0]} of {mine[1]} "
                        f"on rank {comm.rank}, and in fragment {number} of {count} on rank {rank}; expected the "
                        "same function on all ranks"
                    )
        average = bind_average(self.average, comm, bucket)
        anchor, momentum = bucket.flat.copy(), arrays.zeros_like(bucket.flat)
        return OuterFragment(anchor, momentum, average, offset=self.offsets(mine[1])[mine[0]])

    def communicates(self, step: int, state: OuterFragment) -> bool:
        """Whether the fragment is due in the next step."""
        return (state.steps + 1) % self.local_steps == state.offset

    def begin(self, bucket: Bucket, state: OuterFragment) -> None:
        """Count a step; d <- a - x if the fragment is due."""
        due = self.communicates(bucket.step, state)
        state.steps = (state.steps + 1) % self.local_steps
        if due:
            state.delta = arrays.empty(bucket.flat.shape, bucket.flat.dtype, like=bucket.flat)
            kernels.of(bucket.flat).subtract(state.anchor, bucket.flat, out=state.delta)

    def exchange(self, bucket: Bucket, comm: Communicator, state: OuterFragment) -> None:
        """Make the outer step of a fragment that is due. Collective."""
        if state.delta is not None:
            self._average(state.delta, bucket, comm, state)
            self._step_outer(state, state.delta)

    def commit(self, bucket: Bucket, state: OuterFragment) -> None:
        """x <- alpha x + (1 - alpha) a, after an outer step."""
        if state.delta is None and not state.pending.steps:
            return
        state.delta = None
        if self.mix:
            kernels.of(bucket.flat).blend(bucket.flat, state.anchor, self.mix, out=bucket.flat)
        else:
            bucket.flat[...] = state.anchor

    def restart(self, bucket: Bucket, state: OuterFragment) -> None:
        """a <- x, u <- 0; no change is under way."""
        state.delta = None
        super().restart(bucket, state)

    def _of_buckets(self, plan: Plan) -> list[int]:
        """The fragment of each bucket.

        Raises:
            ArrayError: A bucket has tensors of several fragments, or there are fewer buckets than fragments.
        """
        if not callable(self.fragments):
            if len(plan.buckets) < self.fragments:
                raise ArrayError(
                    f"StreamingDiLoCo: fragments is {self.fragments}, but the tensors are in {len(plan.buckets)} "
                    "buckets; expected at most one fragment per bucket: give fewer, or pack smaller buckets, by "
                    "Plan.pack(tensors, groups=algorithm.groups(tensors))"
                )
            tensors = [tensor for bucket in plan.buckets for tensor in bucket.tensors]
            of_tensor = dict(zip([tensor.name for tensor in tensors], self.groups(tensors), strict=True))
            packed = [{of_tensor[tensor.name] for tensor in bucket.tensors} for bucket in plan.buckets]
            if all(len(numbers) == 1 for numbers in packed):
                return [number for numbers in packed for number in numbers]
            sizes = [(bucket.nbytes, bucket.tensors[0].name) for bucket in plan.buckets]
            return _divide(sizes, self.fragments)  # packed without `groups`
        found: list[int] = []
        for bucket in plan.buckets:
            numbers: dict[int, str] = {}
            for tensor in bucket.tensors:
                numbers.setdefault(self._named(tensor.name), tensor.name)
            if len(numbers) > 1:
                (one, first), (other, second), *_ = numbers.items()
                raise ArrayError(
                    f"StreamingDiLoCo: {first!r} of fragment {one} and {second!r} of fragment {other} share a "
                    "bucket; pack tensors by Plan.pack(tensors, groups=algorithm.groups(tensors))"
                )
            found += numbers
        return found

    def _named(self, name: str) -> int:
        """The fragment of a tensor, by its name."""
        choose: Any = self.fragments
        number = choose(name)
        if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < 0:
            raise ArrayError(
                f"StreamingDiLoCo: fragments({name!r}) is {shown(number)}, expected an integer of at least 0"
            )
        return int(number)


def _divide(items: Sequence[tuple[int, str]], parts: int) -> list[int]:
    """Divide items, of bytes and a name, into parts of about equal size: the number of each item's part.

    The largest first, each joins the smallest part, so that two parts differ by one item at most. The order of
    the items does not matter. No part is empty; there are fewer parts if there are fewer items.

    >>> _divide([(50, "a"), (10, "b"), (10, "c"), (10, "d"), (10, "e"), (10, "f")], 4)
    [0, 1, 2, 3, 1, 2]
    """
    sizes = [(0, 0)] * max(1, min(parts, len(items)))
    """Bytes and items of each part: an empty item joins the part with the fewest."""
    numbers = [0] * len(items)
    for i in sorted(range(len(items)), key=lambda i: (-items[i][0], items[i][1])):
        numbers[i] = sizes.index(min(sizes))
        nbytes, count = sizes[numbers[i]]
        sizes[numbers[i]] = nbytes + items[i][0], count + 1
    return numbers
