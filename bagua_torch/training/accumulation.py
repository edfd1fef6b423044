"""Accumulation of gradients over several passes, where weights are exchanged once in a step of the optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn


class AveragedGradients:
    """The gradients of a step whose backward pass has ended, and whether they were given up since.

    A further pass either accumulates into them, or belongs to the next step, after one that the optimizers have
    skipped, as a GradScaler does. Only the gradients tell: after a skipped step they are cleared. Of each bucket
    one gradient is observed, so that this costs little.

    Args:
        parameters: The parameters, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._marks: list[tuple[nn.Parameter, int, int]] = []
        """Parameters, and the identity and the version of their gradient."""

    def note(self, buckets: Sequence[Sequence[str]]) -> None:
        """Note the gradients at the end of a backward pass; `buckets` has the names of each bucket."""
        self._marks = []
        for names in buckets:
            for name in names:
                gradient = self._parameters[name].grad
                if gradient is not None:
                    self._marks.append((self._parameters[name], id(gradient), gradient._version))
                    break

    @property
    def cleared(self) -> bool:
        """Whether they are gone, or all zero. Waits for a device only if they have changed."""
        changed = not self._marks
        for parameter, identity, version in self._marks:
            gradient = parameter.grad
            if gradient is None:
                return True
            changed |= id(gradient) != identity or gradient._version != version
        return changed and not any(bool(each.any()) for each in self._values())

    def _values(self) -> list[torch.Tensor]:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        return [each._values() if each.is_sparse else each for each in gradients]
