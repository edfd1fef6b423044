"""What the optimizers have in common: ranges of their settings, and states that are saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..arrays import Array
from ..errors import ArrayError
from .newton_schulz import ADJUSTMENTS


class Saved:
    """The state of an optimizer for one array, which `elastic.State` and `Checkpoints` can hold."""

    def state_dict(self) -> dict[str, Array | int]:
        """Its fields by name; the arrays are its own, not copies."""
        return dict(vars(self))

    def load_state_dict(self, saved: Mapping[str, Array | int]) -> None:
        """Continue from the result of `state_dict`, whose arrays are copied.

        Raises:
            ArrayError: It is of another optimizer, or for an array of another shape.
        """
        fields = vars(self)
        if set(saved) != set(fields):
            raise ArrayError(
                f"{type(self).__name__}: the saved state has {', '.join(sorted(saved)) or 'nothing'}, expected "
                f"{', '.join(sorted(fields))}; load it into the optimizer that saved it"
            )
        for name, value in fields.items():
            ours, shape = np.shape(value), np.shape(saved[name])
            if ours != shape:
                raise ArrayError(f"{type(self).__name__}: {name} has shape {ours}, but {shape} was saved")
        for name, value in fields.items():
            if isinstance(value, int):
                setattr(self, name, int(saved[name]))
            else:
                value[...] = saved[name]


_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("lr", "eps", "weight_decay"), ("a number of at least 0", lambda value: value >= 0)),
    "momentum": ("a number of at least 0 and below 1", lambda value: 0 <= value < 1),
    "betas": ("two numbers of at least 0 and below 1", lambda value: all(0 <= value[i] < 1 for i in (0, 1))),
    "adjust_lr_fn": (f"one of {', '.join(ADJUSTMENTS)}", lambda value: value in ADJUSTMENTS),
    "warmup_steps": ("an integer of at least 1", lambda value: value in range(1, 2**63)),
}
"""For each setting, the values that are valid, as text and as a test."""


def check_settings(optimizer: object) -> None:
    """Raise `ArrayError` if a setting of an optimizer is out of its range."""
    for name, (expected, fits) in _RANGES.items():
        if not hasattr(optimizer, name):
            continue
        value = getattr(optimizer, name)
        try:
            fine = bool(fits(value))
        except (TypeError, IndexError):
            fine = False
        if not fine:
            raise ArrayError(f"{type(optimizer).__name__}: {name} is {value!r}, expected {expected}")
