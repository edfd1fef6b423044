"""Time for which training stops while its state is saved: beside training, blocking, and by torch.save.

    python -m benchmarks.checkpoint --megabytes 100 -n 9 --ranks 1 --folder runs/checkpoints

Every way saves the same tensors, in turn, in one run. "stands still" is the time until the call returns; "on
disk" is the time until the state is there and survives a loss of power, while training continues. torch.save does
not wait for the disk, so it is timed with and without fsync. "a step beside" is the extra time of a step of work
(products of matrices, on one thread of each rank) right after the call. The checkpoint is loaded and compared at
the end. Ranks are threads of this process, which share the cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bagua_comm import Communicator
from bagua_comm.arrays import Array
from bagua_comm.testing import run_ranks
from bagua_torch import Checkpoints

from .bench.record import begin_record, header_lines, write_json
from .bench.table import Column, Table, number
from .bench.timing import Spread

TABLE = Table(
    (
        Column("way", width=22),
        Column("stands still", "(ms)", 12),
        Column("on disk", "(ms)", 8),
        Column("of a copy", "", 9),
        Column("of torch.save", "", 13),
        Column("a step beside", "", 13),
    )
)
WAYS = ("copy", "torch.save", "torch.save + fsync", "blocking", "beside training")
TENSORS = 50


def main() -> None:
    """Run the benchmark."""
    options = parse_arguments()
    torch.set_num_threads(1)
    record = begin_record("checkpoint", options, packages=["torch"])
    print(*header_lines(record), sep="\n")
    print(f"# state     : {options.megabytes} MB in {TENSORS} tensors; figures are medians of {options.iters}")
    print(*TABLE.header(), sep="\n")
    record["results"] = measured(options)
    for result in record["results"]:
        print(TABLE.row(cells(result)), flush=True)
    if options.json:
        write_json(options.json, record)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the state (100)")
    parser.add_argument("-n", "--iters", type=int, default=9, help="saves of each way (9)")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks, threads of this process (1)")
    parser.add_argument("--folder", help="where checkpoints go (a folder for temporary files)")
    parser.add_argument("--json", type=Path, help="write a record to this file")
    return parser.parse_args(argv)


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time all ways in turn; one result for each."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = run_ranks(options.ranks, lambda comm: Ways(comm, Path(folder), options).run(), timeout_s=300)
    times: dict[str, Array] = {way: np.max([row[way] for row in rows], axis=0) for way in WAYS}  # (iters, 3)
    medians = {way: np.median(samples, axis=0) for way, samples in times.items()}
    return [
        {
            "way": way,
            "still_ms": vars(Spread.of(times[way][:, 0] * 1e3)),
            "disk_ms": vars(Spread.of(times[way][:, 1] * 1e3)),
            "of_copy": float(medians[way][0] / medians["copy"][0]),
            "of_torch_save": float(medians[way][0] / medians["torch.save"][0]),
            "step_beside": float(medians[way][2]),
        }
        for way in WAYS
    ]


class Ways:
    """The ways to save on one rank.

    Args:
        comm: The ranks.
        folder: Where files go.
        options: The arguments.
    """

    def __init__(self, comm: Communicator, folder: Path, options: argparse.Namespace) -> None:
        self._comm, self._folder, self._iters = comm, folder, options.iters
        count = int(options.megabytes * 1e6 / 4 / TENSORS)
        generator = torch.Generator().manual_seed(0)
        self._state = {f"{n}.weight": torch.randn(count, generator=generator) for n in range(TENSORS)}
        self._copy = {name: torch.empty_like(value) for name, value in self._state.items()}
        self._factor = torch.randn(300, 300, generator=generator)

    def run(self) -> dict[str, list[list[float]]]:
        """(stands still, on disk, a step beside) of every save, in seconds and as a ratio, by the way."""
        found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        with Checkpoints(self._folder / "ours", self._comm, keep=1) as checkpoints:
            ways: dict[str, tuple[Callable[[int], None], Callable[[], None] | None]] = {
                "copy": (lambda step: self._copy_all(), None),
                "torch.save": (lambda step: self._torch_save(durable=False), None),
                "torch.save + fsync": (lambda step: self._torch_save(durable=True), None),
                "blocking": (lambda step: checkpoints.save(step, wait=True, model=self._state), None),
                "beside training": (lambda step: checkpoints.save(step, model=self._state), checkpoints.wait),
            }
            for turn in range(self._iters + 1):
                for number_, way in enumerate(WAYS):
                    times = self._timed(*ways[way], turn * len(WAYS) + number_)
                    if turn:  # the first is a warm-up
                        found[way].append(times)
            loaded = checkpoints.load().tree["model"]
        for name, value in self._state.items():
            if not torch.equal(loaded[name], value):
                raise SystemExit(f"{name} came back with other bytes")
        return found

    def _timed(self, save: Callable[[int], None], wait: Callable[[], None] | None, step: int) -> list[float]:
        alone = min(self._work() for _ in range(5))
        self._comm.barrier()
        start = time.perf_counter()
        save(step)
        still = on_disk = time.perf_counter() - start
        beside = float(np.median([self._work() for _ in range(5)])) / alone
        if wait is not None:
            wait()
            on_disk = time.perf_counter() - start
        return [still, on_disk, beside]

    def _work(self) -> float:
        start = time.perf_counter()
        for _ in range(10):
            torch.mm(self._factor, self._factor)
        return time.perf_counter() - start

    def _copy_all(self) -> None:
        for name, value in self._state.items():
            self._copy[name].copy_(value)

    def _torch_save(self, *, durable: bool) -> None:
        if self._comm.rank == 0:
            with open(self._folder / "torch.pt", "wb") as file:
                torch.save(self._state, file)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
        self._comm.barrier()


def cells(result: dict[str, Any]) -> list[str]:
    """One row of the table."""
    return [
        result["way"],
        number(result["still_ms"]["median"]),
        number(result["disk_ms"]["median"]),
        number(result["of_copy"]),
        number(result["of_torch_save"]),
        number(result["step_beside"]),
    ]


if __name__ == "__main__":
    main()
