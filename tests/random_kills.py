"""Kill a random rank of a training at a random moment, again and again; the others shrink, rebuild, and end.

    python tests/random_kills.py --runs 50 --seed 1

Each run trains with one of the algorithms over MPI with ULFM. It ends well if every survivor trains to the last
step, in the same world, and mpirun ends within the limit without killing a process itself.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np

import bagua_comm
from bagua_comm import Engine, Point, RankFailed, TensorSpec
from bagua_comm.algorithms.base import pack

ALGORITHMS = [
    "GradientAllReduce()",
    "ByteGrad()",
    "GradientAllReduce(ErrorFeedback(Quantized()))",
    "GradientAllReduce(Hierarchical(Quantized()))",
    "QAdam(warmup_steps=50)",
    "Decentralized()",
    "Decentralized('shift_one')",
    "Decentralized('one_peer_exponential')",
    "every(4, Decentralized())",
    "LowPrecisionDecentralized()",
    "LowPrecisionOnePeer()",
    "AsyncModelAverage(interval_s=0.01, warmup_steps=20)",
    "DiLoCo(local_steps=10)",
    "SparseLoCo(local_steps=10)",
    "after(50, GradientAllReduce(), DiLoCo(local_steps=10))",
    "StreamingDiLoCo(local_steps=10, fragments=2, delay=2)",
]
RANKS, STEPS, LIMIT_S = 4, 150, 100
SPECS = [TensorSpec(f"t{i}", (50, i + 1), "float32") for i in range(6)]


def train(comm, algorithm, values, start):
    """Train in place from step `start` to the last; each step moves `values` towards zero."""
    plan = pack(algorithm, SPECS, bucket_bytes=2000, alignment=8 * comm.size)
    weights, grads = plan.allocate(), plan.allocate()
    weight, grad = plan.cut(weights), plan.cut(grads)
    for name, view in weight.items():
        view[...] = values[name]
        values[name] = view
    for flat in weights:  # a death may have come in the middle of a step
        comm.broadcast(flat, root=0)
    with Engine(comm, algorithm, plan, {"weight": weights, "grad": grads}) as engine:
        for step in range(start, STEPS):
            engine.at(Point.FORWARD)
            for name, view in grad.items():
                view[...] = weight[name] + comm.rank
                engine.ready(name)
            engine.at(Point.BACKWARD)
            for name, view in weight.items():
                view -= 0.01 * grad[name]
            engine.at(Point.STEP)
            values["step"] = step + 1


def take_part(options):
    """One rank of one run."""
    comm = bagua_comm.connect(timeout_s=15)
    algorithm = eval(options.algorithm, vars(bagua_comm))
    if comm.rank == options.victim:
        threading.Timer(options.after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    values = {spec.name: np.full(spec.shape, comm.rank, np.float32) for spec in SPECS} | {"step": 0}
    failures = 0
    while True:
        try:
            if "shift_one" in options.algorithm and comm.size % 2:
                algorithm = bagua_comm.Decentralized("all")  # it pairs ranks
            train(comm, algorithm, values, int(comm.allreduce(np.array(values["step"]), op="min")))
            break
        except RankFailed:
            failures += 1
            comm = comm.shrink()
    print(json.dumps({"rank": comm.rank, "size": comm.size, "step": values["step"], "failures": failures}))
    comm.close()


def run_once(algorithm, victim, after_s):
    """Do one run; returns its problem, if it has one, and a text about it."""
    arguments = ["--algorithm", algorithm, "--victim", victim, "--after-s", after_s]
    command = [sys.executable, "-m", "bagua_comm", "run", "--ulfm", "-n", RANKS, __file__, *arguments]
    start = time.monotonic()
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return f"did not end in {LIMIT_S} s", out + err
    said = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    ended = [each for each in said if each["step"] == STEPS]
    text = f"{time.monotonic() - start:.1f} s, exit code {process.returncode}"
    if len({each["size"] for each in ended}) != 1 or len(ended) < RANKS - 1:
        return f"{len(ended)} ranks trained to the end: {said}", text + "\n" + out + err
    return None, text


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=len(ALGORITHMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algorithm", help="of a rank")
    parser.add_argument("--victim", type=int)
    parser.add_argument("--after-s", type=float)
    options = parser.parse_args()
    if options.algorithm is not None:
        take_part(options)
        return 0
    chance, wrong = random.Random(options.seed), 0
    for run in range(options.runs):
        algorithm, victim = ALGORITHMS[run % len(ALGORITHMS)], chance.randrange(RANKS)
        after_s = round(chance.uniform(0, 1.5), 3)
        problem, text = run_once(algorithm, victim, after_s)
        wrong += problem is not None
        print(f"{run:3} {algorithm}, rank {victim} after {after_s} s: {problem or 'well'}; {text}", flush=True)
    print(f"{options.runs - wrong} of {options.runs} ended well")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
