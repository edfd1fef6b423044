"""Solve a Poisson problem by conjugate gradients, with residuals that are the same bits on any number of ranks.

    bagua run -n 3 examples/conjugate_gradient.py
    python examples/conjugate_gradient.py --plain

Each rank has a slab of rows of the grid, and gets the nearest row of either neighbour for each product with the
matrix. Elements are computed by the same expression on every rank. So the slabs can change only the dot products,
and `reproducible_sum` gives these the same bits in any order. With --plain, each rank adds up its own elements
first, and the last digits depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator

import numpy as np

import bagua_comm
from bagua_comm import Communicator, topology

Dot = Callable[[Communicator, np.ndarray, np.ndarray], float]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--size", type=int, default=64, help="rows and columns of unknowns; at least a row a rank"
    )
    parser.add_argument("--tolerance", type=float, default=1e-8, help="of the residual, relative to the first")
    parser.add_argument("--plain", action="store_true", help="add up in floats, whose order depends on the slabs")
    return parser.parse_args()


def reproducible_dot(comm: Communicator, x: np.ndarray, y: np.ndarray) -> float:
    return float(bagua_comm.reproducible_sum(comm, x * y))


def plain_dot(comm: Communicator, x: np.ndarray, y: np.ndarray) -> float:
    return float(comm.allreduce((x * y).sum()))


def residuals(comm: Communicator, size: int, dot: Dot) -> Iterator[float]:
    """Yield the norm of the residual of zeros, and after each step. Collective."""
    rows = topology.share(size, comm.rank, comm.size)
    up = comm.rank - 1 if comm.rank > 0 else None
    down = comm.rank + 1 if comm.rank + 1 < comm.size else None
    padded = np.zeros((len(rows) + 2, size + 2))  # the direction, with its halo, or the zeros at the edge
    direction = padded[1:-1, 1:-1]

    def product() -> np.ndarray:
        comm.exchange([(up, padded[1]), (down, padded[-2])], [(up, padded[0]), (down, padded[-1])])
        neighbours = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
        return 4 * direction - neighbours

    # The right-hand side of a row depends on the row, not on the rank.
    residual = np.stack([np.random.default_rng(row).standard_normal(size) for row in rows])
    solution = np.zeros_like(residual)
    direction[...] = residual
    square = dot(comm, residual, residual)
    while True:
        yield math.sqrt(square)
        image = product()
        step = square / dot(comm, direction, image)
        solution += step * direction
        residual -= step * image
        before, square = square, dot(comm, residual, residual)
        direction[...] = residual + square / before * direction


def solve(comm: Communicator, options: argparse.Namespace) -> None:
    first = 0.0
    for step, norm in enumerate(residuals(comm, options.size, plain_dot if options.plain else reproducible_dot)):
        first = first or norm
        done = norm <= options.tolerance * first
        if comm.rank == 0 and (done or step % 20 == 0):
            print(f"step {step:3}: residual {norm!r}", flush=True)
        if done:
            break


if __name__ == "__main__":
    options = parse_arguments()
    with bagua_comm.connect(timeout_s=120) as comm:
        if options.size < comm.size:
            raise SystemExit(f"--size is {options.size}, expected at least a row for each of {comm.size} ranks")
        solve(comm, options)
