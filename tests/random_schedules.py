"""Programs of several ranks, with the order of their threads, delays and failures drawn from a seed.

    python tests/random_schedules.py --seeds 10000             # seeds 0 to 9999, each with one of the programs
    python tests/random_schedules.py --seeds 10000 --json benchmarks/results/schedules.json
    python tests/random_schedules.py --program elastic --seeds 500
    python tests/random_schedules.py --first 4711 --seeds 1    # a seed again: the same run, step by step

`bagua_comm.testing.simulate` lets the threads take turns, and time is virtual. A program draws from the seed what
it does and who fails when, and checks what must hold in every order:

* A call that returns has the right result, whatever has failed before. Ranks that ended well have equal bytes.
* No call takes longer than its limit, and no thread is left.
* A commit is made on all ranks or on none, and no rank trains with the weights of another step.
"""

import argparse
import logging
import sys
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from random_calls import RandomCalls
from support import fake_gloo, references

from bagua_comm import (
    AsyncModelAverage,
    CommError,
    CommMismatch,
    Communicator,
    DiLoCo,
    Engine,
    GradientAllReduce,
    Own,
    Plan,
    Point,
    TensorSpec,
    elastic,
)
from bagua_comm.testing import ThreadJob, run_fleet, run_ranks, simulate
from bagua_torch import DistributedDataParallel
from bagua_torch.process_group import transport

TIMEOUT_S = 5.0
"""The limit of a call, in virtual seconds."""
SLACK_S = 0.5
"""What the steps of all threads may take meanwhile."""
PACKAGES = ("random_calls", "support")
"""Modules of tests that wait."""


class Limits:
    """Notes the calls of communicators that take longer than they may."""

    def __init__(self):
        self.exceeded = []

    def watch(self, comm):
        """Watch a communicator, and those derived from it; return it."""

        def note(call):
            if call.seconds > TIMEOUT_S + SLACK_S:
                self.exceeded.append(f"{call} on rank {comm.rank} took {call.seconds:.3f} s")

        comm.on(after=note, failed=note)
        return comm

    def check(self):
        """Raise AssertionError if a call has taken longer than its limit."""
        assert not self.exceeded, f"the limit is {TIMEOUT_S} s, but {'; '.join(self.exceeded)}"


def assert_equal_bytes(results, what):
    """All arrays of a list have the same bytes."""
    different = [rank for rank, x in enumerate(results) if x.tobytes() != results[0].tobytes()]
    assert not different, f"{what}: the bytes of {different} are not those of the first"


# Calls ------------------------------------------------------------------------------------------------


def calls(sim):
    """Random calls on a world, on groups of its ranks and on a lane, against NumPy; none fails."""
    limits = Limits()

    def body(comm):
        with RandomCalls(limits.watch(comm), sim.seed, sizes=(101, 600)) as made:
            made.run(range(count))

    size, count = sim.random.randint(1, 4), sim.random.randint(1, 6)
    run_ranks(size, body, timeout_s=TIMEOUT_S)
    limits.check()


def failing_calls(sim):
    """A rank leaves, is late, fails or calls something else: what other calls return is right, and none hangs."""
    size, count = sim.random.randint(2, 4), sim.random.randint(2, 6)
    victim, moment = sim.random.randrange(size), sim.random.randrange(count)
    fault = sim.random.choice(["leaves", "late", "raises", "another", "lost"])
    names = [sim.random.choice(["allreduce", "broadcast", "ring", "group", "lane"]) for _ in range(count)]
    limits, errors, well = Limits(), {}, {}
    if fault == "lost":
        usual, lost = sim.delay_s, set(sim.random.sample(range(size), 2))
        since_s = sim.random.random() * 0.01
        sim.delay_s = lambda *pair: 3 * TIMEOUT_S if set(pair) == lost and sim.now_s > since_s else usual(*pair)

    def check(got, expected, number):
        np.testing.assert_array_equal(got, expected, err_msg=f"call {number}, {names[number]}")

    def call(comm, number):
        mine, x = 100.0 * number + comm.rank, np.empty(3)
        total = sum(100.0 * number + rank for rank in range(size))
        name = "barrier" if (fault, comm.rank, number) == ("another", victim, moment) else names[number]
        if name == "barrier":
            comm.barrier()
        elif name == "allreduce":
            check(comm.allreduce(np.full(3, mine)), np.full(3, total), number)
        elif name == "broadcast":
            x[...] = mine
            check(comm.broadcast(x, root=number % size), np.full(3, 100.0 * number + number % size), number)
        elif name == "ring":
            left, right = (comm.rank - 1) % size, (comm.rank + 1) % size
            check(comm.sendrecv(np.full(3, mine), dest=right, source=left, out=x), 100.0 * number + left, number)
        elif name == "group":
            with comm.split(comm.rank % 2) as group:
                expected = sum(100.0 * number + rank for rank in range(comm.rank % 2, size, 2))
                check(group.allreduce(np.full(3, mine)), np.full(3, expected), number)
        else:
            with comm.lane() as lane:
                future = lane.submit(lane.comm.allreduce, np.full(3, mine))
                check(comm.allreduce(np.full(2, mine)), np.full(2, total), number)
                check(lane.result(future), np.full(3, total), number)

    def body(comm):
        limits.watch(comm)
        for number in range(count):
            if (comm.rank, number) == (victim, moment):
                if fault == "leaves":
                    return
                if fault == "raises":
                    raise InjectedError
                if fault == "late":
                    sim.sleep(sim.random.choice([0.5, 1.0, 1.5, 4.0]) * TIMEOUT_S)
            try:
                call(comm, number)
                well.setdefault(number, set()).add(comm.rank)
            except CommError as exc:
                errors.setdefault(comm.rank, []).append((number, exc))
                if sim.random.random() < 0.5:
                    return  # or goes on, and each call must fail or be right

    try:
        run_ranks(size, body, timeout_s=TIMEOUT_S)
    except InjectedError:
        assert fault == "raises"
    limits.check()


class InjectedError(Exception):
    """What a rank raises in `failing_calls`."""


def plans(sim):
    """Calls over gloo repeat until some ranks make others: no sum has foreign data, and if one raises, all do.

    Ranks begin some of the calls that follow the plan ahead.
    """
    size, step = sim.random.randint(2, 4), sim.random.choices([8, 9, 10, 1], k=sim.random.randint(1, 4))
    odd = set(sim.random.sample(range(size), sim.random.randint(0, size)))
    moment = sim.random.randint(0, 5 * len(step))
    other = sim.random.choice([8, 9, 10, 1, 2, "closes", "ends its plan"])
    limits, network, errors = Limits(), fake_gloo.Network(size, sim.random), {}

    ahead = [sim.random.choice([0, 1, 3]) for _ in range(size)]

    def begin(comm, x):
        known = comm.call_cache.get(("allreduce", ("sum",), x.dtype, x.shape))
        return known is not None and known.begin(x, "sum")  # though `limits` has a hook, which makes no calls

    def body(local):
        comm, rank = limits.watch(Communicator([fake_gloo.connected(network, local.rank, TIMEOUT_S)])), local.rank
        end, begun = moment if other == "closes" and rank in odd else moment + 3, 0
        counts = [step[number % len(step)] for number in range(end)]
        if rank in odd and isinstance(other, int):
            counts[moment] = other
        xs = [np.full(count, 100.0 * number + rank) for number, count in enumerate(counts)]
        try:
            for number, x in enumerate(xs):
                if (number, other) == (moment, "ends its plan") and rank in odd:  # alone, which is no error here
                    comm.host.plan.end()
                while begun < min(number + ahead[rank] + 1, end) and begin(comm, xs[begun]):
                    begun += 1
                begun = max(begun, number + 1)
                comm.allreduce(x, out=x)
                np.testing.assert_array_equal(x, sum(100.0 * number + each for each in range(size)))
        except CommError as exc:
            errors[rank] = number, type(exc)
        comm.close()

    with mock.patch.multiple(transport, AT_ONCE_BYTES=32, RING_CHUNK_BYTES=8):
        run_ranks(size, body, timeout_s=TIMEOUT_S)
    limits.check()
    differ = 0 < len(odd) < size and other not in ("ends its plan", step[moment % len(step)])
    raising = set(range(size)) - (odd if other == "closes" else set())
    assert errors == (dict.fromkeys(raising, (moment, CommMismatch)) if differ else {})


# Training ---------------------------------------------------------------------------------------------


def gradients(sim):
    """An engine averages gradients that become ready in another order on each rank."""
    size, steps = sim.random.randint(2, 4), 3
    specs = [TensorSpec(name, (2, 3), "float32") for name in "abcd"]
    orders = [[sim.random.sample("abcd", 4) for _ in range(steps)] for _ in range(size)]
    limits = Limits()

    def body(comm):
        plan = Plan.pack(specs, bucket_bytes=sim.seed % 3 * 24 + 8, alignment=8 * size)
        grads = plan.allocate()
        views, sums = plan.cut(grads), []
        with Engine(limits.watch(comm), GradientAllReduce(), plan, grads) as engine:
            for step in range(steps):
                engine.at(Point.FORWARD)
                for name in orders[comm.rank][step]:
                    views[name][...] = size * (ord(name) + 10 * step + comm.rank)
                    engine.ready(name)
                engine.at(Point.BACKWARD)
                for name, view in views.items():
                    expected = sum(ord(name) + 10 * step + rank for rank in range(size))
                    np.testing.assert_array_equal(view, np.full((2, 3), expected, "f4"), err_msg=f"step {step}")
                sums.append(np.concatenate(grads))
                engine.at(Point.STEP)
        return np.concatenate(sums)

    assert_equal_bytes(run_ranks(size, body, timeout_s=TIMEOUT_S), "gradients")
    limits.check()


def diloco(sim):
    """DiLoCo follows its equations; after outer steps all ranks have equal bytes."""
    size, local_steps = sim.random.randint(2, 3), sim.random.randint(1, 4)
    limits = Limits()

    def body(comm):
        plan = references.make_plan(size)
        with references.Trainer(limits.watch(comm), DiLoCo(local_steps, 0.6, 0.8), plan) as training:
            trajectory = []
            for _ in range(6):
                sim.sleep(pauses[comm.rank])
                trajectory.append(training.step())
            return trajectory

    pauses = [sim.random.choice([0.0, 0.0, 1e-4, 1.0]) for _ in range(size)]
    results = run_ranks(size, body, timeout_s=4 * TIMEOUT_S)
    references.assert_follows(
        results,
        lambda xs, gradient: references.diloco(xs, gradient, local_steps, 0.6, 0.8),
        ranks=size,
        start=references.common_start,
    )
    for step in range(0, 6, local_steps):
        everyones = [np.concatenate([x.reshape(-1) for x in result[step].values()]) for result in results]
        assert_equal_bytes(everyones, f"the weights of step {step}")


def async_average(sim):
    """Ranks that train at their own speeds, for different numbers of steps, keep the sum of all their changes."""
    size = sim.random.randint(2, 4)
    counts = [sim.random.randint(0, 12) for _ in range(size)]
    pauses = [sim.random.choice([0.0, 1e-4, 1e-2]) for _ in range(size)]
    interval_s = sim.random.choice([0.0, 1e-3, 0.1])
    twice = sim.random.random() < 0.5
    limits = Limits()
    plan = Plan.pack([TensorSpec("a", (5,), "float64"), TensorSpec("b", (4,), "float64")], bucket_bytes=40)

    def body(comm):
        weights = plan.allocate()
        for x in weights:
            x[...] = comm.rank
        results = []
        with Engine(limits.watch(comm), AsyncModelAverage(interval_s), plan, weights) as engine:
            for _ in range(1 + twice):
                for _ in range(counts[comm.rank]):
                    engine.at(Point.FORWARD)
                    engine.at(Point.BACKWARD)
                    for x in weights:
                        x += comm.rank + 1
                    sim.sleep(pauses[comm.rank])
                    engine.at(Point.STEP)
                engine.stop()
                results.append(np.concatenate(weights))
                engine.resume()
        return results

    results = run_ranks(size, body, timeout_s=TIMEOUT_S)
    for round_ in range(1 + twice):
        changes = sum((round_ + 1) * counts[rank] * (rank + 1) for rank in range(size))
        expected = (sum(range(size)) + changes) / size
        for rank in range(size):
            np.testing.assert_allclose(results[rank][round_], expected, rtol=1e-12, err_msg=f"rank {rank}")
    limits.check()


def join(sim):
    """Ranks with different numbers of batches join: the sum over all of them, and equal bytes at the end."""
    size = sim.random.randint(2, 4)
    batches = [sim.random.randint(0, 4) for _ in range(size)]
    pauses = [sim.random.choice([0.0, 1e-4, 1e-2]) for _ in range(size)]
    of_active = sim.random.random() < 0.5
    limits = Limits()

    def body(comm):
        module = torch.nn.Linear(3, 2, bias=False)
        torch.nn.init.zeros_(module.weight)
        sgd = torch.optim.SGD(module.parameters(), lr=1.0)
        ddp = DistributedDataParallel(module, [sgd], GradientAllReduce(), comm=limits.watch(comm))
        with ddp.join(divide_by_initial_size=not of_active):
            for step in range(batches[comm.rank]):
                sim.sleep(pauses[comm.rank])
                sgd.zero_grad()
                ddp(torch.full((1, 3), float(size * 12 * (comm.rank + step + 1)))).sum().backward()
                sgd.step()
        ddp.close()
        return module.weight.detach().numpy().copy()

    results = run_ranks(size, body, timeout_s=TIMEOUT_S)
    assert_equal_bytes(results, "weights after join")
    expected = 0.0
    for step in range(max(batches)):
        active = [rank for rank in range(size) if step < batches[rank]]
        total = sum(size * 12 * (rank + step + 1) for rank in active)
        expected -= total / (len(active) if of_active else size)
    np.testing.assert_allclose(results[0], np.full((2, 3), expected), rtol=1e-5)
    limits.check()


# Elastic training -------------------------------------------------------------------------------------

STEPS = 3


class Warnings(logging.Handler):
    """Collects what the library logs in a block."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def has(self, text):
        return any(text in each for each in self.texts)

    def __enter__(self):
        logging.getLogger("bagua_comm").addHandler(self)
        return self

    def __exit__(self, *error):
        logging.getLogger("bagua_comm").removeHandler(self)


def elastic_training(sim):
    """Processes of a fleet die at any moment; the others train to the end with the right weights."""
    trainers, spares = sim.random.randint(2, 4), sim.random.randint(0, 3)
    victims = sim.random.sample(range(trainers + spares), min(trainers, sim.random.choice([0, 1, 1, 2, 2, 3])))
    moments = [(victim, sim.random.randint(1, 60)) for victim in victims]
    hosts = [f"host {n % 2}" for n in range(trainers + spares)] if sim.random.random() < 0.3 else None
    job = ThreadJob(trainers + spares, wanted=trainers, hosts=hosts, timeout_s=TIMEOUT_S)
    job.kill_at(moments)
    limits, committed, warnings = Limits(), {}, Warnings()

    def body(fleet):
        shared, own = np.zeros(5), np.zeros(3)
        state = elastic.State(shared=shared, own=Own(own, "sum"), log=[], step=0)

        @elastic.run(state, fleet=fleet)
        def train(comm):
            limits.watch(comm)
            # A commit of ranks that have all died since may be undone, but none before it.
            least = max([0, *(step - (n not in job.alive) for n, step in committed.items())])
            assert state.step >= least, f"step {state.step} is restored, but {committed} was committed"
            while state.step < STEPS:
                steps = comm.allgather(np.array([state.step]))
                assert (steps == state.step).all(), f"ranks train in steps {steps.tolist()}"
                expected = sum(step + r + 1 for step, size in enumerate(state.log) for r in range(size))
                np.testing.assert_array_equal(shared, np.full(5, float(expected)), err_msg=f"step {state.step}")
                own[...] += comm.rank + 1
                shared[...] += comm.allreduce(np.full(5, state.step + comm.rank + 1.0))
                state.step += 1
                state.log = [*state.log, comm.size]
                state.commit()
                committed[fleet.me] = state.step
            return comm.rank, shared.copy(), own.copy(), state.log

        return train

    with warnings:
        outcomes = run_fleet(job, body, limit_s=1000)
    limits.check()
    for number, outcome in enumerate(outcomes):
        if "error" in outcome:
            lost = len(victims) >= 2 and "no snapshot" in str(outcome["error"])
            too_few = len(victims) >= trainers + spares
            if not (lost or too_few):
                outcome["error"].add_note(f"process {number}")
                raise outcome["error"]
    ended = [outcome["result"] for outcome in outcomes if outcome.get("result")]
    if not ended:
        return
    assert_equal_bytes([shared for _, shared, _, _ in ended], "shared state")
    assert all(log == ended[0][3] for *_, log in ended)
    ranks = sorted(rank for rank, *_ in ended)
    if ranks == list(range(ended[0][3][-1])) and not warnings.has("the private state of ranks"):
        total = sum(own[0] for _, _, own, _ in ended)
        expected = sum(sum(range(1, size + 1)) for size in ended[0][3])
        assert abs(total - expected) < 1e-9, f"the sum of private state is {total}, expected {expected}"


PROGRAMS = {
    "calls": calls,
    "failing_calls": failing_calls,
    "plans": plans,
    "gradients": gradients,
    "diloco": diloco,
    "async_average": async_average,
    "elastic": elastic_training,
    "join": join,
}
"""By name; seed n runs program n modulo their number."""


def program_of(seed):
    """The name of the program that a seed runs."""
    return list(PROGRAMS)[seed % len(PROGRAMS)]


def run_seed(seed, program=None, limit_s=60.0):
    """Run the program of a seed, or another one; return the digest of its course."""

    def run(sim):
        PROGRAMS[program or program_of(seed)](sim)
        return sim.digest

    return simulate(run, seed, packages=PACKAGES, limit_s=limit_s)


def main():
    parser = argparse.ArgumentParser(description="Run programs in orders drawn from seeds.")
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--program", choices=PROGRAMS, help="run this one with every seed")
    parser.add_argument("--digests", action="store_true", help="print the digest of each run")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of real time for each run")
    parser.add_argument("--json", type=Path, help="write the seeds that failed, and what was run, to this file")
    options = parser.parse_args()
    failed, start_s = [], time.monotonic()
    for seed in range(options.first, options.first + options.seeds):
        name = options.program or program_of(seed)
        try:
            digest = run_seed(seed, options.program, options.limit)
            if options.digests:
                print(seed, name, digest)
        except Exception as exc:
            failed.append(seed)
            notes = "".join(f"\n  {note}" for note in getattr(exc, "__notes__", ()))
            print(f"seed {seed}, {name}: {type(exc).__name__}: {exc}{notes}", flush=True)
            if options.seeds == 1:
                raise
    print(f"{options.seeds - len(failed)} of {options.seeds} seeds are well, {time.monotonic() - start_s:.0f} s")
    if failed:
        print(f"failed: {' '.join(map(str, failed))}")
    if options.json is not None:
        sys.path.append(str(Path(__file__).parents[1]))  # benchmarks is not installed
        from benchmarks.bench.record import begin_record, write_json

        record = begin_record("schedules", options, packages=["torch"])
        counts = Counter(options.program or program_of(seed) for seed in range(options.first, seed + 1))
        results = {"programs": dict(counts), "failed": failed, "seconds": round(time.monotonic() - start_s)}
        write_json(options.json, {**record, "results": results})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
