"""How far a rank is in a training step."""

from __future__ import annotations

from enum import Enum


class Stage(Enum):
    """How far this rank is in a training step.

    A training forward pass opens a step, the end of its backward pass averages it, and the optimizers end it:

        IDLE -> OPEN -> AVERAGED -> IDLE

    Gradients may be averaged several times before the optimizers step: AVERAGED -> OPEN_AGAIN -> AVERAGED. If the
    optimizers step before that further backward pass, OPEN_AGAIN -> TOLD; the next forward pass opens the step.
    A backward pass that comes without a forward pass of its own, through another output, opens when it begins.
    """

    IDLE = "no training forward pass since the optimizers stepped"
    OPEN = "the other ranks know of a forward pass; its backward pass has not ended"
    AVERAGED = "the backward pass has ended; the optimizers may step"
    OPEN_AGAIN = "averaged, and the other ranks know of a further forward pass"
    TOLD = "the optimizers stepped; the other ranks know of a forward pass that this rank made before"
    CLOSED = "this wrapper exchanges nothing any more"
