"""Parameters without a gradient on any rank, frozen parameters, and checks of a static graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from bagua_comm import Algorithm, Communicator, GradientAllReduce

from ..errors import MismatchError, MisuseError
from ..tensors.checks import check_may_freeze
from .engine import TorchEngine
from .stage import StepOptions


def keeps_zeros(algorithm: Algorithm) -> bool:
    """Whether this algorithm averages zero gradients of all ranks to zero."""
    return isinstance(algorithm, GradientAllReduce) and algorithm.average.keeps_zeros


class UnusedParameters:
    """Removes gradients that no rank has computed, and checks a static graph.

    Args:
        comm: The ranks.
        parameters: The parameters that are trained, by name.
        options: They say whether ranks agree on unused parameters, and whether the graph is static.
    """

    def __init__(self, comm: Communicator, parameters: Mapping[str, nn.Parameter], options: StepOptions) -> None:
        self._comm, self._parameters, self._options = comm, parameters, options
        self._unused: dict[int, set[str]] = {}
        """In a static graph: the parameters without a gradient on any rank, by the pass of the step."""
        self._first: dict[int, set[str]] = {}
        """In a static graph: the parameters with a gradient on this rank in the first step, by the same key."""
        self._now: set[str] = set()
        """The parameters with a gradient so far in the present pass."""

    def restart(self) -> None:
        """Treat the next step of a static graph as its first: more parameters are trained."""
        self._unused.clear()
        self._first.clear()

    def end_pass(
        self, fresh: Sequence[str], number: int, engine: TorchEngine, *, freezes: bool | None, inner: bool
    ) -> None:
        """Remove zero gradients that no rank has computed, or whose parameters are frozen.

        Collective, if ranks look for unused parameters, or if some parameters are frozen and averages round.

        Args:
            fresh: The parameters that had no gradient before on this rank.
            number: The number of earlier backward passes of the same step.
            engine: The engine that has exchanged the gradients.
            freezes: Whether any rank has frozen parameters in this step; None if all ranks have frozen the same.
            inner: Whether this pass runs within another backward pass.
        """
        frozen = [name for name in fresh if not self._parameters[name].requires_grad]
        if frozen:
            check_may_freeze(frozen[0], engine.phase)
        if engine.stopped or engine.payload == "weight":
            # As in a single process. Zero gradients would move weights by momentum and decay.
            self._remove(() if engine.phase.lends else fresh)
            return
        static = self._options.static
        finds = static or self._options.find_unused
        if finds:
            self._remove_unused(fresh, number, static=static, inner=inner)
        must_agree = self._must_agree(engine, freezes=bool(frozen) if freezes is None else freezes)
        if must_agree:
            self._remove_unused(frozen, number, static=False, inner=False)
        agreed = must_agree or (finds and engine.communicates)
        self._remove_frozen(frozen, agreed=agreed)

    def follow_pass(self, number: int, engine: TorchEngine, *, freezes: bool) -> None:
        """Take part in the agreement of `end_pass` on a rank without data. Collective, as `end_pass`."""
        every = list(self._parameters)
        static = self._options.static
        if engine.payload == "grad" and (static or self._options.find_unused):
            self._remove_unused(every, number, static=static, inner=False)
        if self._must_agree(engine, freezes=freezes):
            self._remove_unused(every, number, static=False, inner=False)

    def _must_agree(self, engine: TorchEngine, *, freezes: bool) -> bool:
        """Whether ranks must agree on which frozen parameters got a gradient, as values do not show it."""
        if not freezes or self._options.find_unused or self._options.static or self._comm.size == 1:
            return False
        return engine.payload == "grad" and engine.communicates and not keeps_zeros(engine.phase)

    def _remove_unused(self, fresh: Sequence[str], number: int, *, static: bool, inner: bool) -> None:
        """Remove the zero gradients of parameters that had none before on any rank. Collective.

        With `static`, the ranks agree in the first step only.
        """
        unused = self._unused.get(number)
        if unused is None:
            mine = np.array([name not in fresh for name in self._parameters], np.uint8)
            somewhere = self._comm.allreduce(mine, op="max")
            unused = {name for name, used in zip(self._parameters, somewhere, strict=True) if not used}
            if static and not inner:
                self._unused[number] = unused
        self._remove(unused.intersection(fresh))

    def _remove(self, names: Iterable[str]) -> None:
        """Remove the gradients of these parameters."""
        for name in names:
            self._parameters[name].grad = None

    def _remove_frozen(self, frozen: Sequence[str], *, agreed: bool) -> None:
        """Remove the zero gradients of frozen parameters, so that no optimizer steps them.

        Args:
            frozen: The parameters that had no gradient before on this rank, and are frozen here.
            agreed: Whether ranks have agreed, so that a remaining gradient comes from another rank.

        Raises:
            CommMismatch: Another rank has computed a gradient. A RuntimeError as well.
        """
        gradients = {name: self._parameters[name].grad for name in frozen}
        computed = [name for name, gradient in gradients.items() if gradient is not None]
        if computed and not agreed:  # one synchronization with the device
            some = torch.stack([gradient.any() for gradient in gradients.values() if gradient is not None])
            computed = [name for name, one in zip(computed, some.tolist(), strict=True) if one]
        if computed:
            raise MismatchError(
                f"DistributedDataParallel: {computed[0]!r} is frozen on rank {self._comm.rank}, but another rank "
                "has computed a gradient of it; freeze and unfreeze it on all ranks in the same steps"
            )
        self._remove(frozen)

    def compare(self, complete: set[str], number: int, *, inner: bool) -> None:
        """Compare a step with the first one on this rank. Call it after the exchange, so that no rank waits.

        Args:
            complete: The parameters that got a gradient in this pass.
            number: The number of earlier backward passes of the same step.
            inner: Whether this pass runs within another backward pass.

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
