"""Steps of an engine whose computation is a sleep, on emulated hosts: the simulator is checked on it.

    python -m benchmarks.netlab run --hosts 8 --rate 50mbit -m benchmarks.training.scaling --json scaling-8.json

What takes time is the links alone, so that eight ranks on a machine of two cores are eight hosts all the same.
The JSON file has rows as those of `benchmarks.training`, `alone` among them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import bagua_comm
from bagua_comm import Communicator, Engine, Plan
from bagua_comm.algorithms import Algorithm, Point, from_name
from bagua_comm.bucket import TensorSpec
from bagua_comm.planning.tuner.grid import period_of

from ..bench.arguments import add_json_argument, at_least, comma_list, parse_size
from ..bench.record import begin_record, header_lines, write_json
from ..bench.timing import Spread

ALGORITHMS = (
    "exact",
    "bytegrad",
    "int4",
    "decentralized",
    "low-precision-ring",
    "diloco-4",
    "hierarchical-bytes",
)
FORWARD_S, BACKWARD_S, OPTIMIZER_S = 0.1, 0.2, 0.02


def algorithm_of(name: str) -> Algorithm:
    """The algorithm of this name; `diloco-4` makes an outer step in one of 4 steps."""
    return from_name("diloco", local_steps=4) if name == "diloco-4" else from_name(name)


def step(engine: Engine, buckets: int) -> None:
    """Make one training step. Collective."""
    engine.at(Point.FORWARD)
    time.sleep(FORWARD_S)
    for index in range(buckets):
        time.sleep(BACKWARD_S / buckets)
        engine.ready_bucket(index)
    engine.at(Point.BACKWARD)
    time.sleep(OPTIMIZER_S)
    engine.at(Point.STEP)


def measure(comm: Communicator, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of an algorithm. Collective."""
    algorithm, buckets = algorithm_of(name), options.buckets
    count = options.model_bytes // 4 // buckets
    plan = Plan.pack([TensorSpec(str(i), (count,), "float32") for i in range(buckets)], bucket_bytes=4 * count)
    period, seconds, sent = period_of(algorithm), [], 0
    rng = np.random.default_rng(0)
    storage = [rng.standard_normal(bucket.size, np.float32) for bucket in plan.buckets]
    with Engine(comm, algorithm, plan, storage) as engine:
        for i in range(1 + options.rounds):
            comm.barrier()
            before, start = engine.counter.wire_bytes, time.perf_counter()
            for _ in range(period):
                step(engine, buckets)
            engine.settle()
            slowest_s = comm.allreduce(np.array(time.perf_counter() - start), op="max")
            if i:  # the first round warms up
                seconds.append(float(slowest_s) / period)
                sent += engine.counter.wire_bytes - before
    spread = Spread.of(np.array(seconds))
    return {
        "algorithm": name,
        "settings": repr(algorithm),
        "seconds": seconds,
        "median_s": spread.median,
        "q1_s": spread.q1,
        "q3_s": spread.q3,
        "wire_bytes": sent / options.rounds / period,
        "compute": None,
    }


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--algorithms", type=comma_list(str), default=list(ALGORITHMS), metavar="A,B")
    parser.add_argument("--model-bytes", type=parse_size, default=8 << 20, metavar="SIZE")
    parser.add_argument("--buckets", type=at_least(1), default=4)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--rate-mbit", type=at_least(1), required=True, help="of each link, for the record")
    add_json_argument(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all algorithms, and write the record."""
    options = parse_arguments(argv)
    with bagua_comm.connect() as comm:
        record = begin_record("scaling", options, comm=comm)
        same: dict[str, Any] = {
            "model": f"{options.buckets} buckets",
            "batch": 1,
            "hosts": comm.size // comm.local_size,
            "ranks_per_host": comm.local_size,
            "rate_mbit": options.rate_mbit,
            "model_bytes": options.model_bytes,
        }
        alone = {"forward_s": FORWARD_S, "backward_s": BACKWARD_S, "optimizer_s": OPTIMIZER_S}
        seconds = sum(alone.values())
        rows = [{**same, "algorithm": "alone", "median_s": seconds, "seconds": [seconds], "compute": alone}]
        for name in options.algorithms:
            if name.startswith("hierarchical") and comm.local_size in (1, comm.size):
                continue
            rows.append({**same, **measure(comm, name, options)})
        if comm.rank == 0:
            record["results"] = rows
            record["arguments"]["bucket_bytes"] = options.model_bytes // options.buckets
            print(*header_lines(record), sep="\n")
            for row in rows:
                print(f"{row['algorithm']:<24}{row['median_s']:>10.3f} s")
            if options.json:
                write_json(options.json, record)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
