"""The programs, and the smallest changes that make them use this library.

A change is a table of lines: each stands in the program as it is, and is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

LOOPS = Path(__file__).parent / "loops"

LAUNCHERS = ("torchrun", "bagua", "mpirun")


@dataclass(frozen=True)
class Change:
    """A way to use this library in a program.

    Attributes:
        name: Its name in the report.
        lines: What stands in the program, and what replaces it.
        launchers: What can start the changed program.
        alone: Whether its weights are those of one process that has all batches, and not of as many ranks.
        tolerance: The largest relative difference of weights that is allowed; 0 for equal bits.
    """

    name: str
    lines: Mapping[str, str]
    launchers: tuple[str, ...] = ("torchrun", "bagua")
    alone: bool = False
    tolerance: float = 0.0

    def apply(self, program: str) -> str:
        """The changed text of a program.

        Raises:
            ValueError: A line does not stand in it.
        """
        for old, new in self.lines.items():
            if old not in program:
                raise ValueError(f"{self.name}: {old!r} is not in the program")
            program = program.replace(old, new, 1)
        return program


WRAPPER = Change(
    "wrapper",
    {
        "from torch.nn.parallel import DistributedDataParallel as DDP": (
            "from bagua_torch import DistributedDataParallel as DDP"
        )
    },
)
BACKEND = Change(
    "backend", {"import torch\n": "import bagua_torch\nimport torch\n", '"gloo"': '"bagua"'}, LAUNCHERS
)
SYNC_BATCH_NORM = Change(
    "sync batch norm",
    {
        **WRAPPER.lines,
        "    model = Network()\n": (
            "    import bagua_torch\n\n"
            "    model = bagua_torch.sync_batchnorm.convert(Network(), bagua_torch.connect())\n"
        ),
    },
    alone=True,
    tolerance=1e-4,
)

CHANGES: dict[str, tuple[Change, ...]] = {
    "nanogpt": (WRAPPER, BACKEND),
    "mingpt_ddp": (WRAPPER, BACKEND),
    "imagenet": (WRAPPER, BACKEND, SYNC_BATCH_NORM),
    "gan": (WRAPPER, BACKEND),
    "dino": (WRAPPER, BACKEND),
    "dlrm": (WRAPPER, BACKEND),
    "ppo": (BACKEND,),
    "accelerate_loop": (BACKEND,),
    "transformers_loop": (BACKEND,),
    "dcp": (WRAPPER, BACKEND),
}


def chosen(programs: list[str], launchers: list[str]) -> Iterator[tuple[str, Change, str]]:
    """Each program with each of its changes and each launcher that can start it."""
    for program in programs:
        for change in CHANGES[program]:
            for launcher in change.launchers:
                if launcher in launchers:
                    yield program, change, launcher
