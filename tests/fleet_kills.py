"""Kill or stop random processes of a fleet over MPI at random moments; the others train to the end.

    python tests/fleet_kills.py --runs 30 --seed 1

Each run trains on some of the processes while others stand by. One or two of them die, or stop, at any moment
after the start: in a collective, in a rendezvous, while they connect or restore, or while they stand by. A run is
well if all others end with the weights of an undisturbed run.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time

import numpy as np

from bagua_comm import Engine, GradientAllReduce, Plan, Point, TensorSpec, elastic
from bagua_comm.elastic.start import start as start_fleet

STEPS, TIMEOUT_S, LIMIT_S = 60, 12, 150
PAUSE_S = 0.015
"""What a step waits: tests have processes die and stop up to 0.2 s after training has begun, and a fast machine
would nearly be through by then."""
SPECS = [TensorSpec(f"t{i}", (40, i + 1), "float32") for i in range(3)]
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def gradients(step):
    """The gradients of a step, alike on all ranks: so the weights do not depend on how many ranks there are."""
    rng = np.random.default_rng(step)
    return {spec.name: rng.integers(-8, 8, spec.shape).astype(np.float32) for spec in SPECS}


def expected():
    """The weights of an undisturbed run."""
    return {spec.name: sum(gradients(step)[spec.name] for step in range(STEPS)) for spec in SPECS}


def train_with_an_engine(state, timers):
    """A function to train with, over an engine whose buckets hold the gradients; it starts the timers."""

    def train(comm):
        while timers:
            timers.pop().start()
        plan = Plan.pack(SPECS, bucket_bytes=500, alignment=8 * comm.size)
        grads, weights = plan.allocate(), plan.allocate()
        views = plan.cut(grads)
        with Engine(comm, GradientAllReduce(), plan, {"weight": weights, "grad": grads}) as engine:
            while state.step < STEPS:
                mine = gradients(state.step)
                engine.at(Point.FORWARD)
                for name, view in views.items():
                    view[...] = mine[name]
                    engine.ready(name)
                engine.at(Point.BACKWARD)
                for name, view in views.items():
                    getattr(state, name)[...] += view
                engine.at(Point.STEP)
                large = comm.allreduce(np.full(1 << 18, comm.rank, np.float32))  # through shared memory
                assert large[-1] == comm.size * (comm.size - 1) / 2
                time.sleep(PAUSE_S)  # sleeps: the length of a step
                state.step += 1
                state.commit()

    return train


def take_part(options):
    """One process of one run."""
    fleet, timers = start_fleet(TIMEOUT_S), []
    for victim in options.victims.split(","):
        number, kind, since, after_s = victim.split(":")
        if int(number) == fleet.me:
            timer = threading.Timer(float(after_s), os.kill, (os.getpid(), SIGNALS[kind]))
            timer.daemon = True
            if since == "start":
                timer.start()
            else:
                timers.append(timer)
    state = elastic.State(step=0, **{spec.name: np.zeros(spec.shape, np.float32) for spec in SPECS})
    elastic.run(state, timeout_s=TIMEOUT_S, fleet=fleet)(train_with_an_engine(state, timers))
    trained = state.step == STEPS
    right = trained and all((getattr(state, name) == value).all() for name, value in expected().items())
    recovered = [change.recovery_s for change in state.history]
    line = {"process": fleet.me, "trained": trained, "right": right, "recovered": recovered}
    print(json.dumps(line), flush=True)


def run_once(processes, spares, victims):
    """Do one run; returns its problem, if it has one, the recovery times in seconds, and a text about it."""
    text = ",".join(":".join(map(str, victim)) for victim in victims)
    command = [sys.executable, "-m", "bagua_comm", "run", "--ulfm", "-n", str(processes), __file__]
    start = time.monotonic()
    process = subprocess.Popen(
        [*command, "--victims", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "BAGUA_SPARES": str(spares)},
    )
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return f"did not end in {LIMIT_S} s", [], out + err
    said = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    survivors = set(range(processes)) - {number for number, *_ in victims}
    missing = survivors - {each["process"] for each in said}
    wrong = [each["process"] for each in said if each["trained"] and not each["right"]]
    trained = sum(each["trained"] for each in said)
    times = [max(times) for times in zip(*(e["recovered"] for e in said if e["recovered"]), strict=False)]
    text = f"{time.monotonic() - start:.1f} s, exit code {process.returncode}, recovered in {times}"
    if missing or wrong or trained < min(len(survivors), processes - spares):
        return f"missing {sorted(missing)}, wrong {wrong}, {trained} trained", times, f"{text}\n{out}{err}"
    return None, times, text


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run")
    parser.add_argument(
        "--victims", help="of one process: number:kill or stop:start or training:seconds after it,..."
    )
    options = parser.parse_args()
    if options.victims is not None:
        take_part(options)
        return 0
    wrong, all_times = 0, []
    for run in range(options.first, options.first + options.runs):
        chance = random.Random(f"{options.seed} {run}")
        spares = chance.choice([0, 1, 1, 2])
        processes = 3 + spares
        how_many = chance.choice([1, 2])
        first_s = chance.uniform(0, 4)
        victims = [
            (
                number,
                "stop" if chance.random() < 0.15 else "kill",
                "start" if chance.random() < 0.3 else "training",
                round(first_s + place * chance.choice([0, 0.01, 0.1, 0.5]), 3),
            )
            for place, number in enumerate(chance.sample(range(processes), how_many))
        ]
        problem, times, text = run_once(processes, spares, victims)
        wrong += problem is not None
        all_times += times
        who = f"{processes} processes, {spares} of them spares, {victims}"
        print(f"{run:3} {who}: {problem or 'well'}; {text}", flush=True)
    print(f"{options.runs - wrong} of {options.runs} ended well")
    if all_times:
        print(f"recovery: median {statistics.median(all_times):.3f} s, longest {max(all_times):.3f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
