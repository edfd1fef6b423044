"""Parameters that get no gradient on any rank, or that break the promise of a static graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import nn

from bagua_comm import Communicator

from .errors import MisuseError


class UnusedParameters:
    """Takes away gradients that no rank has computed, and checks a static graph.

    Args:
        comm: The ranks.
        parameters: The parameters that are trained, by name.
    """

    def __init__(self, comm: Communicator, parameters: Mapping[str, nn.Parameter]) -> None:
        self._comm, self._parameters = comm, parameters
        self._unused: set[str] | None = None
        """In a static graph: the parameters without a gradient on any rank."""
        self._first: set[str] | None = None
        """In a static graph: the parameters that got a gradient on this rank in the first step."""
        self._now: set[str] = set()
        """The same in this step, as far as it has come."""

    def forget(self, fresh: Sequence[str], *, static: bool, inner: bool) -> None:
        """Take away the zero gradients of parameters that had none before, on any rank.

        Collective.

        Args:
            fresh: The parameters that had no gradient before on this rank.
            static: Whether the ranks ask each other in the first step only.
            inner: Whether another backward pass started this one and goes on.
        """
        unused = self._unused
        if unused is None:
            mine = np.array([name not in fresh for name in self._parameters], np.uint8)
            somewhere = self._comm.allreduce(mine, op="max")
            unused = {name for name, used in zip(self._parameters, somewhere, strict=True) if not used}
            if static and not inner:
                self._unused = unused
        for name in unused.intersection(fresh):
            self._parameters[name].grad = None

    def compare(self, complete: set[str], *, inner: bool) -> None:
        """Compare a step with the first one on this rank. The exchange is over, so no rank waits.

        Args:
            complete: The parameters that got a gradient in this pass.
            inner: Whether another backward pass started this one and goes on.

        Raises:
            ArrayError: A parameter got a gradient in only one of the two steps. A RuntimeError as well.
        """
        self._now |= complete
        if inner:
            return
        now, self._now = self._now, set()
        if self._first is None:
            self._first = now
        elif now != self._first:
            name = min(now ^ self._first)
            raise MisuseError(
                f"DistributedDataParallel: static_graph is True, but {name!r} got {'a' if name in now else 'no'} "
                f"gradient in this step, unlike in the first one; give find_unused_parameters instead"
            )
