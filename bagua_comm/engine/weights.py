"""The weights of an engine: compared before the first step, and averaged where ranks have trained apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from .. import arrays
from ..algorithms.base import Algorithm, Payload
from ..arrays import Array
from ..bucket import Bucket, Plan
from ..comm import Communicator
from ..comm.agreement import are_equal, equality_terms
from ..errors import CommMismatch, warn
from .storage import Storage, average_in_place

Buckets: TypeAlias = Mapping[Payload, Sequence[Bucket]]
"""The buckets that an engine exchanges, by payload."""


_SAME_START = (
    "give all ranks the same weights before the engine is constructed: "
    "for flat in weights: comm.broadcast(flat, root=0)"
)
_SAME_STEPS = (
    "step by the optimizer that the algorithm needs, with the same settings on all ranks; for QAdam it is "
    "optim.QAdam, with the same warmup_steps and the momentum in engine.states"
)


class EngineWeights:
    """Whether the weights are the same on all ranks, as most algorithms need them.

    Args:
        comm: The communicator of the lane; it is used while the lane is idle.
        storage: The memory of the engine, with the weights if it has them.
        compare: Whether to compare the weights before the first step. A program that broadcasts them need not.
    """

    def __init__(self, comm: Communicator, storage: Storage, *, compare: bool) -> None:
        self._comm = comm
        self._given: list[Array] = []
        """The weights in the storage, also if the algorithm exchanges gradients alone."""
        self.use(storage)
        self._compare = compare and comm.size > 1
        self._copied: dict[str, str] = {}
        """Digests of the weights that the first algorithm copied to its state, as DiLoCo does."""
        self.differ = False
        """Whether they may differ between ranks; while the engine is stopped, as far as this rank knows."""
        self.unchecked = self._compare
        """Whether they are compared when the next step begins; the same on all ranks."""
        self._again_at = -1
        """The number of steps after which they are compared once more."""

    def use(self, storage: Storage | None) -> None:
        """Use the weights in `storage` from now on, if it has them."""
        if isinstance(storage, Mapping) and "weight" in storage:
            given = storage["weight"]
            self._given = given if isinstance(given, list) else list(given)  # the user may replace its arrays

    def note_copies(self, phase: Algorithm, plan: Plan, buckets: Buckets) -> None:
        """Note the weights that `phase`, the first algorithm, may have copied when its state was made."""
        if self._compare and phase.payload == "weight" and phase.equal_start:
            self._copied = self._digests(plan, buckets)

    def load(self, *, differ: bool) -> None:
        """Record that a checkpoint was loaded, and whether its weights differ between ranks."""
        self.differ, self.unchecked, self._copied = differ, self._compare, {}

    def compare_at(self, step: int) -> None:
        """Compare the weights once more when `step` begins: a wrong optimizer shows one step into a phase."""
        if self._compare:
            self._again_at = step

    def is_due(self, step: int) -> bool:
        """Whether the weights are compared when `step` begins; the same on all ranks.

        After the first comparison, one step after a new algorithm began, and at steps 16, 32, 64 and so on, where
        a wrong optimizer shows.
        """
        doubled = step >= 16 and not step & (step - 1)
        return self.unchecked or (self._compare and (step == self._again_at or doubled))

    def must_be_equal(self, phase: Algorithm, buckets: Buckets) -> bool:
        """Whether there are weights that must be the same on all ranks now, under `phase`, this step's algorithm.

        It is the same on all ranks. What is due is over where there are none.
        """
        found = not self.differ and phase.equal_start and bool(self._flats(buckets))
        if not found:
            self.unchecked, self._again_at = False, -1
        return found

    def check(self, phase: Algorithm, plan: Plan, buckets: Buckets) -> None:
        """Raise if the weights differ between ranks, where they must be equal.

        Collective. The lane is idle.

        After the first steps it warns instead, once: processors of different types may round differently.

        Raises:
            CommMismatch: They differ when training begins, or did when `phase` copied them.
        """
        trained, self.unchecked, self._again_at = not self.unchecked, False, -1
        comm, mine = self._comm, _Digests(self._digests(plan, buckets), self._copied)
        if are_equal(comm.allreduce(equality_terms(repr(mine).encode()), op="max")):
            return
        first: _Digests = comm.broadcast_object(mine, root=0)
        rank = int(comm.allreduce(np.array(comm.rank if mine != first else comm.size), op="min"))
        if rank < comm.size:
            other = comm.broadcast_object(mine, root=rank)
            found = _difference(first, other, rank)
            if not trained:
                raise CommMismatch(f"at: {phase} begins, but {found}; {_SAME_START}")
            self._compare = False
            if comm.rank == 0:
                warn(f"at: {phase} keeps weights equal, but {found}; {_SAME_STEPS}")

    def average(self, buckets: Buckets, make_equal: Callable[[], None] | None) -> None:
        """Replace the weights with their mean over all ranks; by `make_equal`, see `EngineCallbacks`, if given.

        Collective.
        """
        if make_equal is not None:
            make_equal()
        else:
            average_in_place(self._comm, self._flats(buckets))
        self.differ = False

    def _flats(self, buckets: Buckets) -> list[Array]:
        return [bucket.flat for bucket in buckets.get("weight", ())] or self._given

    def _digests(self, plan: Plan, buckets: Buckets) -> dict[str, str]:
        """Hashes of the tensors, by name; of the flat arrays, by number, if they do not fit `plan`."""
        flats = self._flats(buckets)
        fit = [x.shape for x in flats] == [(spec.size,) for spec in plan.buckets]
        named = plan.cut(flats) if fit else {str(i): x for i, x in enumerate(flats)}
        return {name: arrays.digest(x).hex() for name, x in named.items()}


class _Digests(NamedTuple):
    """Hashes of the weights of a rank, by name."""

    now: dict[str, str]
    copied: dict[str, str]


def _difference(first: _Digests, other: _Digests, rank: int) -> str:
    """Describe how the weights of `rank` differ from those of rank 0."""
    copied = first.now == other.now
    ours, theirs = (first.copied, other.copied) if copied else (first.now, other.now)
    unlike = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    names = repr(unlike[0]) + (f" and {len(unlike) - 1} more" if len(unlike) > 1 else "")
    found = f"rank {rank} and rank 0 have different weights ({names})"
    if copied:
        found = f"its state has a copy of weights that were different on rank {rank} and rank 0 ({names})"
    return found
