"""The program of a rank: it trains the smallest model, and rank 0 writes what all ranks have measured.

`benchmarks.many` starts it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import bagua_comm

from ..faults.model import Data
from ..faults.numpy_model import NumpyModel
from ..soak.resources import use_of

ALGORITHMS = {
    "exact": "GradientAllReduce()",
    "bytegrad": "ByteGrad()",
    "hierarchical": "GradientAllReduce(Hierarchical())",
    "decentralized": "Decentralized()",
}
"""By name, the Python expression."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train with each algorithm in turn; rank 0 writes the measurements after each."""
    options = parse_arguments(argv)
    start = {"imported_s": time.monotonic() - options.began}
    with bagua_comm.connect(timeout_s=options.timeout_s) as comm:
        start["connected_s"] = time.monotonic() - options.began
        found: dict[str, Any] = {"start": comm.allgather_object(start), "trained": {}}
        for name in options.algorithms.split(","):
            found["trained"][name] = comm.allgather_object(trained(comm, name, options))
            if comm.rank == 0:
                options.out.write_text(json.dumps(found))
    return 0


def trained(comm: bagua_comm.Communicator, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train with an algorithm; what this rank has measured. Collective."""
    algorithm = eval(ALGORITHMS[name], vars(bagua_comm))
    data = Data(options.data, microbatches=comm.size)
    model = NumpyModel(data, algorithm, alike=name != "decentralized")
    loss = loss_of(model)
    began_s = time.monotonic()
    steps = model.connect(comm)
    constructed_s = time.monotonic() - began_s
    step_s = [timed(functools.partial(steps.take, step)) for step in range(options.steps)]
    steps.engine.settle()
    steps.close()
    ones = np.ones(1024, np.float32)
    call_s = [timed(lambda: comm.allreduce(ones, op="sum")) for _ in range(options.steps)]
    model.average(comm)
    comm.check_consistency(*model.weights())
    if comm.rank == 0:
        np.savez(options.out.with_name(f"{name}.npz"), *model.weights())
    use = use_of(os.getpid(), 0.0)
    assert use is not None
    measured = {"constructed_s": constructed_s, "step_s": step_s, "call_s": call_s}
    used = {"mib": use.mib, "threads": use.threads, "descriptors": use.descriptors}
    return {**measured, **used, "loss": (loss, loss_of(model))}


def timed(call: Any) -> float:
    """Seconds that a call takes."""
    began_s = time.monotonic()
    call()
    return time.monotonic() - began_s


def loss_of(model: NumpyModel) -> float:
    """The mean cross entropy over all images."""
    weight, x, y = model.weight, model.data.images, model.data.labels
    hidden = np.maximum(x @ weight["hidden.weight"] + weight["hidden.bias"], 0)
    scores = hidden @ weight["output.weight"] + weight["output.bias"]
    scores = scores - scores.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(len(y)), y]))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments, which `benchmarks.many` makes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--algorithms", required=True, help="names of `ALGORITHMS`, with commas between")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--began", type=float, required=True, help="time.monotonic() when the job was started")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
