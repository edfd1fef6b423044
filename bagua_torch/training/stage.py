"""How far a training step is: its stage, and the gradients that it accumulates over several passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from bagua_comm.engine.mean_weights import MeanWeights


@dataclass
class StepOptions:
    """The options of a user, which may change between steps."""

    copies_buffers: bool = True
    """Whether buffers are the same on all ranks after a step."""
    find_unused: bool = False
    """Whether ranks agree on parameters without a gradient, and remove their gradients."""
    static: bool = False
    """Whether the same parameters get a gradient in every step."""


class Stage(Enum):
    """The stage of this rank's training step.

    A training forward pass opens a step, the end of its backward pass averages it, and the optimizers end it:

        IDLE -> OPEN -> AVERAGED -> IDLE

    Gradients may be averaged several times before the optimizers step: AVERAGED -> REOPENED -> AVERAGED. If the
    optimizers step before the second backward pass, REOPENED -> ANNOUNCED, and the next forward pass opens the
    step. A backward pass through another output of the last forward pass opens the step when it begins.
    """

    IDLE = "no training forward pass since the optimizers stepped"
    OPEN = "a forward pass was announced to the other ranks; its backward pass has not ended"
    AVERAGED = "the backward pass has ended; the optimizers may step"
    REOPENED = "averaged, and another forward pass was announced"
    ANNOUNCED = "the optimizers stepped after a forward pass that was announced for the next step"
    CLOSED = "the wrapper was closed"


class Accumulation:
    """Passes that accumulate into the gradients of a step, where weights are exchanged once in a step.

    A further pass either accumulates into averaged gradients, or belongs to the next step, after one that the
    optimizers have skipped, as a GradScaler does. Only the gradients tell: after a skipped step they are cleared.
    Of each bucket one gradient is observed, so that this costs little. Where gradients are exchanged, they tell
    for how many passes the weight of a rank is.

    Args:
        parameters: The parameters, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._marks: list[tuple[nn.Parameter, int, int]] = []
        """Parameters, and the identity and the version of their gradient."""
        self.reset()

    def reset(self) -> None:
        """Begin a new step."""
        self.stays = False
        """Whether a backward pass since the last step was not averaged."""
        self.continued = False
        """Whether a forward pass has continued the averaged step."""
        self.cleared = False
        """Whether the gradients of that step were cleared, and others accumulated."""
        self.late = False
        """Whether the last step was skipped, which the present pass of the next one has found."""

    def average(self, buckets: Sequence[Sequence[str]]) -> None:
        """Record that all gradients so far are averaged; note one of each bucket, whose names `buckets` has."""
        self.stays = self.cleared = False
        self._marks = []
        for names in buckets:
            for name in names:
                gradient = self._parameters[name].grad
                if gradient is not None:
                    self._marks.append((self._parameters[name], id(gradient), gradient._version))
                    break

    @property
    def given_up(self) -> bool:
        """Whether the noted gradients are gone, or all zero. Waits for a device only if they have changed."""
        changed = not self._marks
        for parameter, identity, version in self._marks:
            gradient = parameter.grad
            if gradient is None:
                return True
            changed |= id(gradient) != identity or gradient._version != version
        return changed and not any(bool(each.any()) for each in self._values())

    def begin_averaging(self, weights: MeanWeights) -> None:
        """Before an averaged backward pass: decide whose weight the one is that is set now."""
        if not self.late:  # else the skipped step ends after the pass
            weights.of_last_pass = None
        self.forget_weight(weights)

    def forget_weight(self, weights: MeanWeights) -> None:
        """Forget the weight of a step that the optimizers have skipped, before a gradient of the next one."""
        if weights.used and weights.now is not None and self.given_up:
            weights.forget_used()

    def _values(self) -> list[torch.Tensor]:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        return [each._values() if each.is_sparse else each for each in gradients]
