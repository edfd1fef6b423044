"""Run a program, and keep its weights after every step of an optimizer.

    python -m benchmarks.programs.recorded FOLDER PROGRAM

The program is not changed: a hook that PyTorch calls after the step of any optimizer copies the parameters. At
the end this rank writes them to `FOLDER/PID.pt`, by the number of its rank.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    """Run the program that the arguments name."""
    folder, program = Path(sys.argv[1]), sys.argv[2]
    ranks: set[int] = set()
    steps: list[list[torch.Tensor]] = []

    def record(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        ranks.add(dist.get_rank() if dist.is_initialized() else 0)
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        steps.append([p.detach().clone() for p in parameters])

    register_optimizer_step_post_hook(record)
    sys.argv = [program]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as exc:
        if exc.code:
            raise
    torch.save({"ranks": ranks, "steps": steps}, folder / f"{os.getpid()}.pt")


if __name__ == "__main__":
    main()
