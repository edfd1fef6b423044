"""Parameters that get no gradient on any rank, that are frozen, or that break the promise of a static graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from bagua_comm import Algorithm, Communicator, Exact, GradientAllReduce, Hierarchical, Reproducible
from bagua_comm.algorithms.base import with_defaults

from ..checks import check_may_freeze
from ..engine import TorchEngine
from ..errors import MismatchError, MisuseError


def keeps_zeros(algorithm: Algorithm) -> bool:
    """Whether gradients that are zero on all ranks are zero when this algorithm has averaged them.

    Codecs may round a zero to something else, and error feedback adds what it kept.
    """
    average = getattr(algorithm, "average", None)
    inner = average.inner if isinstance(average, Hierarchical) else average
    return isinstance(algorithm, GradientAllReduce) and isinstance(inner, (Exact, Reproducible))


class UnusedParameters:
    """Takes away gradients that no rank has computed, and checks a static graph.

    Args:
        comm: The ranks.
        parameters: The parameters that are trained, by name.
        find: Whether ranks agree on those that none has used, and take away their gradients.
        static: Whether the same parameters get a gradient in every step.
    """

    def __init__(
        self, comm: Communicator, parameters: Mapping[str, nn.Parameter], *, find: bool, static: bool
    ) -> None:
        self._comm, self._parameters = comm, parameters
        self.find, self.static = find, static
        self._unused: dict[int, set[str]] = {}
        """In a static graph, by the number of the pass in its step: the parameters without a gradient on any
        rank."""
        self._first: dict[int, set[str]] = {}
        """In a static graph, by the same number: the parameters that got a gradient here in the first step."""
        self._now: set[str] = set()
        """The same in this pass, as far as it has come."""

    def begin_anew(self) -> None:
        """More parameters are trained from now on: the next step of a static graph is its first one."""
        self._unused.clear()
        self._first.clear()

    def end_pass(
        self, fresh: Sequence[str], number: int, engine: TorchEngine, *, freezes: bool | None, inner: bool
    ) -> None:
        """Take away zero gradients that no rank has computed, or whose parameters are frozen.

        Collective, if unused parameters are to be found, or some are frozen and averages round.

        Args:
            fresh: The parameters that had no gradient before on this rank.
            number: How many backward passes of the same step came before.
            engine: What has exchanged the gradients.
            freezes: Whether ranks know that some have frozen parameters in this step; None if each knows of its
                own alone, which all have frozen alike.
            inner: Whether another backward pass started this one and goes on.
        """
        frozen = [name for name in fresh if not self._parameters[name].requires_grad]
        if frozen:
            check_may_freeze(frozen[0], engine.phase)
        if engine.stopped or engine.payload == "weight":
            # As in a single process, which has none. Zeros would move a weight by momentum and decay.
            self._forget_all(() if with_defaults(engine.phase).lends else fresh)
            return
        if self.find or self.static:
            self._forget(fresh, number, static=self.static, inner=inner)
        asks = self._asks(engine, freezes=bool(frozen) if freezes is None else freezes)
        if asks:
            self._forget(frozen, number, static=False, inner=False)
        agreed = asks or (engine.communicates and (self.find or self.static))
        self._forget_frozen(frozen, agreed=agreed)

    def follow_pass(self, number: int, engine: TorchEngine, *, freezes: bool) -> None:
        """Take part in what other ranks ask at the end of a backward pass, on a rank that has no data left.

        Collective, as `end_pass`.
        """
        every = list(self._parameters)
        if engine.payload == "grad" and (self.find or self.static):
            self._forget(every, number, static=self.static, inner=False)
        if self._asks(engine, freezes=freezes):
            self._forget(every, number, static=False, inner=False)

    def _asks(self, engine: TorchEngine, *, freezes: bool) -> bool:
        """Whether ranks ask each other which frozen parameters got a gradient, since values do not tell."""
        if not freezes or self.find or self.static or self._comm.size == 1:
            return False
        return engine.payload == "grad" and engine.communicates and not keeps_zeros(engine.phase)

    def _forget(self, fresh: Sequence[str], number: int, *, static: bool, inner: bool) -> None:
        """Take away the zero gradients of parameters that had none before, on any rank. Collective.

        With `static`, the ranks ask each other in the first step only.
        """
        unused = self._unused.get(number)
        if unused is None:
            mine = np.array([name not in fresh for name in self._parameters], np.uint8)
            somewhere = self._comm.allreduce(mine, op="max")
            unused = {name for name, used in zip(self._parameters, somewhere, strict=True) if not used}
            if static and not inner:
                self._unused[number] = unused
        self._forget_all(unused.intersection(fresh))

    def _forget_all(self, names: Iterable[str]) -> None:
        """Take away the gradients of these parameters."""
        for name in names:
            self._parameters[name].grad = None

    def _forget_frozen(self, frozen: Sequence[str], *, agreed: bool) -> None:
        """Take away the zero gradients of frozen parameters, so that no optimizer steps them.

        Args:
            frozen: The parameters that had no gradient before on this rank, and are frozen here.
            agreed: Whether ranks have agreed, so that a gradient which is still there comes from another rank.

        Raises:
            CommMismatch: Another rank has computed a gradient. A RuntimeError as well.
        """
        gradients = {name: self._parameters[name].grad for name in frozen}
        computed = [name for name, gradient in gradients.items() if gradient is not None]
        if computed and not agreed:  # a device is asked once: the host waits for the answer
            some = torch.stack([gradient.any() for gradient in gradients.values() if gradient is not None])
            computed = [name for name, one in zip(computed, some.tolist(), strict=True) if one]
        if computed:
            raise MismatchError(
                f"DistributedDataParallel: {computed[0]!r} is frozen on rank {self._comm.rank}, but another rank "
                "has computed a gradient of it; freeze and unfreeze it on all ranks in the same steps"
            )
        self._forget_all(frozen)

    def compare(self, complete: set[str], number: int, *, inner: bool) -> None:
        """Compare a step with the first one on this rank. The exchange is over, so no rank waits.

        Args:
            complete: The parameters that got a gradient in this pass.
            number: How many backward passes of the same step came before.
            inner: Whether another backward pass started this one and goes on.

        Raises:
            ArrayError: A parameter got a gradient in only one of the two steps. A RuntimeError as well.
        """
        self._now |= complete
        if inner:
            return
        now, self._now = self._now, set()
        first = self._first.setdefault(number, now)
        if now != first:
            name = min(now ^ first)
            raise MisuseError(
                f"DistributedDataParallel: static_graph is True, but {name!r} got {'a' if name in now else 'no'} "
                f"gradient in this step, unlike in the first one; give find_unused_parameters instead"
            )
