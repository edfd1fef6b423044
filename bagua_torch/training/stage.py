"""The stages of a training step."""

from __future__ import annotations

from enum import Enum


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
