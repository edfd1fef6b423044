"""The duration of training steps, as a tuner needs it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from bagua_comm import Tuner


class StepTimer:
    """Reports the duration of steps to a tuner, and applies the settings that it returns.

    Args:
        device: The device of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began_s: float | None = None

    def next_step(self, tuner: Tuner | None, replan: Callable[..., Any], *, paused: bool) -> None:
        """Report the step that ends here, and begin another one. Collective.

        Args:
            tuner: The tuner, if there is one.
            replan: Changes to other settings, as `DistributedDataParallel.replan` does.
            paused: Whether the duration of these steps does not count.
        """
        if tuner is None or not tuner.searching:
            return
        if paused:
            self._began_s = None
            return
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if self._began_s is not None:
            change = tuner.step(time.perf_counter() - self._began_s)
            if change is not None:
                replan(bucket_bytes=change.bucket_bytes, algorithm=change.algorithm)
        self._began_s = time.perf_counter()
