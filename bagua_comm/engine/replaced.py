"""Weights that the program replaces in the middle of training, as by a checkpoint.

Some algorithms keep copies of the weights between steps, such as the anchor of DiLoCo or replicas of neighbours'
weights, and exchanges that outlive a step. The program reports that it has replaced the weights, see
`Engine.weights_replaced`. Each rank then begins anew from them by itself, and ranks compare later what they have
replaced, and when. Changes that are not reported show in samples of the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from .. import arrays
from ..arrays import Array
from ..bucket import Bucket
from ..comm import Communicator
from ..comm.agreement import are_equal, equality_terms
from ..errors import CommMismatch, warn

History: TypeAlias = Sequence[tuple[int, str]]
"""The numbers of steps after which a rank has replaced its weights, and hashes of the new ones."""

ROUNDING = 2**-7
"""Relative changes up to this size are no new weights: evaluating a model in bfloat16, and back, makes them."""

SAMPLES = 8
"""How many elements of each tensor are compared, from one step to the next."""


class Replacements:
    """The weights that the program has replaced on this rank, and those that it has changed without a report.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._warned = self._warned_lost = False
        self._belong = False  # whether weights that are loaded now belong to the algorithm's state
        self.begin("", ())

    def begin(self, name: str, buckets: Sequence[Bucket], *, copies: bool = False) -> None:
        """Begin with the weights in `buckets`, and without earlier reports.

        Args:
            name: The algorithm that exchanges them; "" for none.
            buckets: The weights.
            copies: Whether it keeps something of earlier weights between steps.
        """
        self._name, self._buckets, self._copies = name, buckets, copies
        self._history: list[tuple[int, str]] = []
        self._before: str | None = None  # the hash of the weights before a load that may be in progress
        self._samples = WeightSamples(buckets if copies else ())
        self._due = copies and not self._belong  # whether the next forward pass looks at the samples
        self._stepped = False  # whether an optimizer has stepped since `begin`
        self._first: str | None = None  # what changed after the first step, "" for nothing; None before
        self._always = False  # whether weights have changed after every step so far
        self._looks = 0

    # Reported ---------------------------------------------------------------------------------------

    @property
    def expected(self) -> bool:
        """Whether a load has begun since `note`."""
        return self._before is not None

    def expect(self) -> None:
        """Record that the program is about to load weights, which may be the present ones in the end."""
        if self._name and self._before is None and not self._belong:
            self._before = _digest_of(self._buckets)

    def belong(self) -> None:
        """Record that the algorithm's state is loaded: weights loaded before the next pass belong to it."""
        self._before, self._belong, self._due = None, True, False

    def note(self, step: int, *, known: bool = False) -> bool:
        """Note the weights after `step` steps; return whether they were replaced, as those `known` to be are."""
        before, self._before = self._before, None
        now = _digest_of(self._buckets)
        if now == before and not known:  # others were there for a while, as for an evaluation
            return False
        self._history.append((step, now))
        self._due = False
        return True

    def take_history(self) -> History:
        """Return what was noted since the last call; all ranks `compare` it."""
        taken, self._history = self._history, []
        return taken

    def forget_since(self, step: int) -> None:
        """Forget what was replaced after `step` steps: no step begins from it, as in a test on one rank."""
        self._history = [each for each in self._history if each[0] < step]

    # Changed without a report -----------------------------------------------------------------------

    def keep(self, *, stepped: bool = False) -> None:
        """Take samples of the weights as training has made them; `stepped` if an optimizer has stepped."""
        if self._copies:
            self._samples.keep()
            if stepped:
                self._due = self._stepped = True

    def look(self, step: int) -> None:
        """Warn once if weights have changed since `keep`, unless they do so after every step.

        What changes after every step belongs to it, as a projection does; so does what changes between the
        passes of one step.
        """
        self._belong = False
        if not self._due or self._warned:
            return
        self._due = False
        found = self._samples.changed()
        if self._stepped:
            self._looks += 1
            if self._looks == 1:  # nobody knows yet whether it belongs to the step
                self._first, self._always = found, bool(found)
                return
            if found and self._always:
                return
            if self._looks == 2 and self._first:
                found, step = self._first, step - 1
            self._always = False
        if found:
            self._warned = True
            self.warn(
                f"{found} changed after step {step}, and neither an optimizer nor an exchange did that: "
                f"{self._name} goes on with its copies of the weights before. If the weights were replaced, call "
                "weights_replaced() of the engine or the handle on all ranks, or use load_state_dict instead; "
                "what belongs to training, such as a projection in some steps, may stay as it is"
            )

    def before_writing(self) -> list[Array]:
        """The samples now, before an exchange writes to the weights; none if nothing has changed since `keep`."""
        return self._samples.take() if self._copies and self._samples.changed() else []

    def written(self, before: list[Array]) -> None:
        """Keep the weights that an exchange has written; warn once if changes were lost, see `before_writing`."""
        if before or self._due:
            self.keep()
        if before and not self._warned_lost and (found := self._samples.changed(before)):
            self._warned_lost = True
            self.warn(
                f"{found} changed while an exchange was under way, whose result has replaced that change. Under "
                f"{self._name} change weights before the optimizer steps, or call engine.settle() first, which "
                "waits for the exchange"
            )

    def warn(self, text: str) -> None:
        """Warn at the line of the program."""
        warn(f"rank {self._rank}: {text}")


class WeightSamples:
    """A few elements of each tensor on the host. Weights on a device have none, as their host would wait.

    Args:
        buckets: The weights.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._parts: list[tuple[Array, Array, list[tuple[str, int, int]]]] = []
        for bucket in buckets:
            if isinstance(bucket.flat, np.ndarray):
                indices: list[int] = []
                tensors = []
                for name, where in bucket.spec.slices().items():
                    count = min(SAMPLES, where.stop - where.start)
                    tensors.append((name, len(indices), len(indices) + count))
                    indices += [where.start + i * (where.stop - where.start) // count for i in range(count)]
                self._parts.append((bucket.flat, np.array(indices, np.intp), tensors))
        self._kept = self.take()

    def take(self) -> list[Array]:
        """The samples of each bucket now."""
        return [flat.take(indices) for flat, indices, _ in self._parts]

    def keep(self) -> None:
        """Take samples, to compare later ones with."""
        self._kept = self.take()

    def changed(self, now: list[Array] | None = None) -> str:
        """The name of a tensor whose samples all differ from those kept, or "".

        A tensor of few elements counts only if all tensors have changed: a projection may reach a few elements.
        """
        now = self.take() if now is None else now
        if all(x.tobytes() == y.tobytes() for x, y in zip(now, self._kept, strict=True)):
            return ""
        first, together = "", True
        for x, y, (_, _, tensors) in zip(now, self._kept, self._parts, strict=True):
            present, past = x.astype(np.float64), y.astype(np.float64)
            with np.errstate(invalid="ignore"):  # infinities
                differ = np.abs(present - past) > ROUNDING * np.abs(past)
            differ |= np.isfinite(present) != np.isfinite(past)
            for name, begin, end in tensors:
                whole = bool(differ[begin:end].all())
                together = together and whole
                if whole and end - begin == SAMPLES:
                    return repr(name)
                first = first or repr(name)
        return first if together else ""


def compare(comm: Communicator, history: History) -> None:
    """Raise on all ranks unless they have replaced their weights after the same steps, with the same values.

    Collective.

    Raises:
        CommMismatch: They have not.
    """
    if comm.size == 1 or are_equal(comm.allreduce(equality_terms(repr(history).encode()), op="max")):
        return
    rows = comm.allgather_object(list(history))
    for rank, row in enumerate(rows):
        if row != rows[0]:
            steps, others = ([step for step, _ in each] for each in (rows[0], row))
            part = ""
            what = f"{_after(steps)} on rank 0, and {_after(others)} on rank {rank}"
            if steps == others:
                what = f"by different ones on rank 0 and rank {rank}, after step {others[-1]}"
                part = "; load a part where they are equal: after an outer step, or ddp.average_weights()"
            raise CommMismatch(
                f"the weights were replaced {what}, so that the ranks' copies of them differ: load the same "
                "weights on all ranks between the same two steps; to load on one rank, broadcast them, and then "
                f"call weights_replaced() of the engine or the handle on all{part}"
            )


def _after(steps: Sequence[int]) -> str:
    return f"after step {', '.join(map(str, steps))}" if steps else "never"


def _digest_of(buckets: Sequence[Bucket]) -> str:
    """A hash of all weights in these buckets."""
    found = hashlib.blake2b(digest_size=16)
    for bucket in buckets:
        found.update(arrays.digest(bucket.flat[: bucket.flat.size - bucket.padding.size]))
    return found.hexdigest()
