"""Solve the heat equation on a cylinder, with a result that has the same bits on any number of ranks.

    bagua run -n 4 examples/heat.py
    python examples/heat.py

The surface is a grid of points, and each rank has a block of it. One edge is hot, the other cold; the two other
sides are joined. In each step a rank gets the points around its block from its neighbours, and computes its own
by the same expression as any other rank. The mean is a `reproducible_sum`, which has the same bits in any order.
"""

from __future__ import annotations

import argparse

import numpy as np

import bagua_comm
from bagua_comm import Communicator, Grid, topology


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=96, help="points along either direction; at least one a rank")
    parser.add_argument("--steps", type=int, default=400)
    return parser.parse_args()


def solve(comm: Communicator, options: argparse.Namespace) -> np.ndarray | None:
    """Return the temperatures after all steps on rank 0, None elsewhere. Collective."""
    grid = Grid(comm, (0, 0), periodic=(False, True))
    rows, columns = (topology.share(options.size, *place) for place in zip(grid.coords, grid.dims, strict=True))
    block = np.zeros((len(rows) + 2, len(columns) + 2))  # with a halo of one point
    if rows.start == 0:
        block[0] = 1.0  # no neighbour fills the halo beyond the hot edge
    inner = block[1:-1, 1:-1]
    for step in range(1, options.steps + 1):
        grid.exchange_halos(block)
        neighbours = block[:-2, 1:-1] + block[2:, 1:-1] + block[1:-1, :-2] + block[1:-1, 2:]
        inner += 0.2 * (neighbours - 4 * inner)
        if step % 100 == 0:
            mean = float(bagua_comm.reproducible_sum(comm, inner)) / options.size**2
            if comm.rank == 0:
                print(f"step {step:4}: mean temperature {mean!r}", flush=True)

    blocks = comm.gather_object((rows, columns, inner), root=0)
    if blocks is None:
        return None
    whole = np.empty((options.size, options.size))
    for rows, columns, values in blocks:
        whole[rows.start : rows.stop, columns.start : columns.stop] = values
    return whole


if __name__ == "__main__":
    options = parse_arguments()
    with bagua_comm.connect(timeout_s=120) as comm:
        if options.size < comm.size:
            raise SystemExit(f"--size is {options.size}, expected at least a point for each of {comm.size} ranks")
        temperatures = solve(comm, options)
        if temperatures is not None:
            print(f"halfway: {float(temperatures[options.size // 2].mean())!r}")
