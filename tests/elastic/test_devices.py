"""Elastic training with device arrays, over NCCL and through host memory, on the model of CUDA.

A rank dies, the others give their communicators up, and make new ones over the ranks that are left.
"""

import numpy as np
import pytest
from cuda_on_cpu import fake_nccl
from support.device_ranks import device_job
from support.launch import TIME_FACTOR
from support.waiting import until

from bagua_comm import ByteGrad, Decentralized, Engine, GradientAllReduce, Plan, Point, TensorSpec, kernels
from bagua_comm.elastic import State, run
from bagua_comm.testing.fleets import run_fleet

STEPS = 6
PATIENCE_S = 20.0
"""How long a call may wait for its peers; a wait for a dead rank ends before."""

PARTS = 6
"""Of the data; dealt to 1, 2, 3 or 6 ranks, their mean is the same."""
SPECS = [TensorSpec("a", (40,), "float32"), TensorSpec("b", (600,), "float32")]
PLAN = Plan.pack(SPECS, bucket_bytes=512, alignment=24)


class Model:
    """Weights and gradients on this device; the mean gradient does not depend on how many ranks there are."""

    def __init__(self):
        import cupy

        self.weights = [cupy.asarray(flat) for flat in PLAN.allocate()]
        self.grads = [cupy.asarray(flat) for flat in PLAN.allocate()]

    def parts(self):
        return {f"weight{number}": flat for number, flat in enumerate(self.weights)}

    def step(self, engine, comm, step):
        import cupy

        engine.at(Point.FORWARD)
        mine = [float((step + 1) * (part + 1)) for part in range(comm.rank, PARTS, comm.size)]
        for grad in self.grads:
            grad[...] = cupy.asarray(np.full(grad.shape, sum(mine) / len(mine), np.float32))
        for spec in SPECS:
            engine.ready(spec.name)
        engine.at(Point.BACKWARD)
        for weight, grad in zip(self.weights, self.grads, strict=True):
            kernels.of(weight).subtract(weight, grad, out=weight)
        engine.at(Point.STEP)


def training(job, algorithm, deaths=(), each_step=lambda comm, step: None):
    """A program in which process n dies in step s, for every (n, s); the others wait for it on their devices."""
    due = set(deaths)

    def body(fleet):
        import cupy

        cupy.cuda.Device(fleet.me).use()
        model = Model()
        state = State(**model.parts(), step=0)

        @run(state, fleet=fleet)
        def train(comm):
            engine = Engine(comm, algorithm, PLAN, {"weight": model.weights, "grad": model.grads})
            while state.step < STEPS:
                if (fleet.me, state.step) in due:
                    due.discard((fleet.me, state.step))
                    job.kill(fleet.me)
                each_step(comm, state.step)
                model.step(engine, comm, state.step)
                state.step += 1
                state.commit()
            engine.close()
            assert all(change.recovery_s < PATIENCE_S / 2 for change in state.history)
            return comm.rank, comm.size, [weight.get() for weight in model.weights]

        return train

    return body


def results(outcomes):
    for outcome in outcomes:
        if "error" in outcome:
            raise outcome["error"]
    return {rank: (size, weights) for rank, size, weights in (o["result"] for o in outcomes if o.get("result"))}


one_policy = pytest.mark.parametrize("device", ["lazy"], indirect=True)
both_kinds = pytest.mark.parametrize("kind", ["nccl", "staged"])


def trained(device, kind, size, algorithm, deaths=(), each_step=lambda comm, step: None, **options):
    """The weights of every rank at the end of such a training, by rank."""
    job = device_job(device, kind, size, timeout_s=PATIENCE_S, **options)
    return results(run_fleet(job, training(job, algorithm, deaths, each_step), limit_s=100 * TIME_FACTOR))


def assert_alike(got, expected):
    assert got.keys() == expected.keys()
    for rank, (_, weights) in got.items():
        for one, other in zip(weights, expected[rank][1], strict=True):
            np.testing.assert_array_equal(one, other)


@both_kinds
@one_policy
def test_a_spare_replaces_a_rank_that_dies(device, kind):
    undisturbed = trained(device, kind, 3, GradientAllReduce())
    assert_alike(trained(device, kind, 4, GradientAllReduce(), [(1, 3)], wanted=3), undisturbed)


@pytest.mark.slow
@both_kinds
@pytest.mark.parametrize("algorithm", [ByteGrad(), Decentralized("all")], ids=repr)
@pytest.mark.parametrize("device", ["lazy", "side-first"], indirect=True)
def test_rank_after_rank_may_die(device, kind, algorithm):
    undisturbed = trained(device, kind, 3, algorithm)
    assert_alike(trained(device, kind, 5, algorithm, [(0, 2), (3, 4)], wanted=3), undisturbed)


@both_kinds
@one_policy
def test_the_others_continue_with_fewer_down_to_one(device, kind):
    got = trained(device, kind, 3, GradientAllReduce(), [(0, 2), (2, 4)])
    assert [size for size, _ in got.values()] == [1]
    expected = -sum((step + 1) * 3.5 for step in range(STEPS))  # of the mean of the parts
    assert all((weight[:40] == np.float32(expected)).all() for weight in got[0][1][:1])


@one_policy
def test_ranks_that_all_wait_for_their_devices_learn_of_a_death(device):
    def wait(comm, step):
        import cupy

        comm.allreduce(cupy.zeros(3)).get()

    assert trained(device, "nccl", 3, GradientAllReduce(), [(1, 3)], wait, wanted=2).keys() == {0, 1}


@one_policy
def test_nothing_is_left_of_aborted_communicators(device, monkeypatch):
    from bagua_comm.transports.nccl import watchdog

    made, watchdogs = [], []
    enter, begin = fake_nccl.NcclCommunicator._enter, watchdog.Watchdog.__init__
    monkeypatch.setattr(
        fake_nccl.NcclCommunicator, "_enter", lambda *given: (made.append(given[0]), enter(*given))
    )
    monkeypatch.setattr(
        watchdog.Watchdog, "__init__", lambda *given: (watchdogs.append(given[0]), begin(*given))[1]
    )

    def also_elsewhere(comm, step):
        """Make objects beside the engine, and never close them."""
        if step == 1:
            comm.lane()
            comm.dup()

    dead = {1, 2}  # 2 took the place of 1
    trained(device, "nccl", 4, GradientAllReduce(), [(1, 2), (2, 4)], also_elsewhere, wanted=2)
    assert {comm._device for comm in made} == {0, 1, 2, 3}
    until(lambda: not [comm for comm in made if comm.comm and comm._device not in dead])
    assert [each for each in watchdogs if each.watches and each.device not in dead] == []


@one_policy
def test_a_graph_of_an_aborted_communicator_is_refused_and_a_new_one_runs(device):
    graphs, seen = {}, []

    def capture(comm, step):
        import cupy

        mine = graphs.setdefault(comm.device, [])
        if not mine or mine[-1][0] is not comm:
            x, stream = cupy.asarray(np.ones(3, np.float32)), cupy.cuda.Stream(non_blocking=True)
            comm.allreduce(x, out=x)  # connects
            x.get()
            with stream:
                stream.begin_capture()
                comm.allreduce(x, out=x)
                mine.append((comm, stream.end_capture(), stream, x))
        for epoch, (_, graph, stream, x) in enumerate(mine):
            if epoch == len(mine) - 1:
                graph.launch(stream)
                stream.synchronize()
                seen.append(x.get().tolist())
            else:
                with pytest.raises(AssertionError, match="uses a communicator that was given up"):
                    graph.launch(stream)

    trained(device, "nccl", 3, GradientAllReduce(), [(1, 3)], capture, wanted=2)
    assert seen[-1] == [2.0 ** (1 + STEPS - 3)] * 3
