"""Checkpoints in files: a training continues as if uninterrupted, also on another number of ranks."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from support.own_algorithms import Plain
from support.torch_training import (
    ALGORITHMS,
    ASYNC_ALGORITHMS,
    QADAM,
    WEIGHT_ALGORITHMS,
    Training,
    assert_same_on_all_ranks,
    batch,
    filled,
    loss_of,
    make_model,
    weights,
)
from torch import nn

from bagua_comm import (
    ArrayError,
    AsyncModelAverage,
    CheckpointError,
    ErrorFeedback,
    GradientAllReduce,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    Own,
    UnsupportedError,
)
from bagua_comm.testing import run_ranks
from bagua_torch import Checkpoints, DistributedDataParallel, moe
from bagua_torch.moe import MoE

REPEATABLE = [algorithm for algorithm in ALGORITHMS if algorithm not in ASYNC_ALGORITHMS]
FEEDBACK = GradientAllReduce(ErrorFeedback())
RING = LowPrecisionDecentralized()
STEPS = 7


def slow(*cases):
    """Cases that the default run leaves out."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases
    ]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)


def saved(folder, ranks, algorithm=None, *, start=None, at=4, make=None, ignored=(), **settings):
    """Train to step `at`, from a checkpoint if `start` is given, and save; returns weights, before and after."""

    def body(comm):
        training = Training(comm, algorithm, make, seed=0 if start is None else comm.rank + 1, **settings)
        with Checkpoints(folder, comm) as checkpoints:
            if start is not None:
                assert checkpoints.load(start, **training.objects).step == start
            before = weights(training.model)
            training.run(start or 0, at)
            checkpoints.save(at, **training.objects)
            after = weights(training.model)
            training.run(at, at + 1)  # leaves what was saved as it is
        training.close()
        return before, after

    return run_ranks(ranks, body, timeout_s=10)


def assert_restarts(folder, ranks, algorithm, make=None):
    def through(comm):
        training = Training(comm, algorithm, make)
        training.run(0, STEPS)
        return training.close()

    def restarted(comm):
        training = Training(comm, algorithm, make, seed=1 + comm.rank)
        with Checkpoints(folder, comm) as checkpoints:
            assert checkpoints.latest() == 4
            checkpoints.load(**training.objects)
        training.run(4, STEPS)
        return training.close()

    expected = run_ranks(ranks, through, timeout_s=10)
    saved(folder, ranks, algorithm, make=make)
    for rank, actual in enumerate(run_ranks(ranks, restarted, timeout_s=10)):
        for name, value in expected[rank].items():
            assert torch.equal(actual[name], value), f"{name} of rank {rank}"


# Restarts -------------------------------------------------------------------------------------------------


@pytest.mark.algorithms("all")
@pytest.mark.parametrize(
    ("ranks", "algorithm"),
    [
        *((3, algorithm) for algorithm in (QADAM, FEEDBACK)),
        *slow(*((2, algorithm) for algorithm in REPEATABLE)),
    ],
    ids=repr,
)
def test_a_restart_changes_nothing(tmp_path, ranks, algorithm):
    assert_restarts(tmp_path, ranks, algorithm)


@pytest.mark.parametrize("make", [*slow(sgd), adam])
@pytest.mark.parametrize("algorithm", [RING, *slow(GradientAllReduce(), FEEDBACK)], ids=repr)
def test_a_restart_with_other_optimizers(tmp_path, algorithm, make):
    assert_restarts(tmp_path, 2, algorithm, make)


def test_an_asynchronous_training_continues(tmp_path):
    algorithm = AsyncModelAverage(interval_s=0)
    saved(tmp_path, 2, algorithm)
    for loaded, _ in saved(tmp_path, 3, algorithm, start=4, at=6):
        assert loaded.isfinite().all()


# Other numbers of ranks -----------------------------------------------------------------------------------


def test_the_same_batches_train_the_same_on_another_number_of_ranks(tmp_path):
    """All ranks see the same data, so that the number of ranks does not matter: neither must the restart."""

    def same(comm, step):
        return batch(0, step)

    def body(comm, first, last):
        training = Training(comm, seed=comm.rank)
        with Checkpoints(tmp_path, comm) as checkpoints:
            if first:
                checkpoints.load(**training.objects)
            training.run(first, last, data=same)
            checkpoints.save(last, **training.objects)
        return training.close()

    (expected,) = run_ranks(1, lambda comm: body(comm, 0, STEPS))
    for ranks, first, last in ((4, 0, 3), (2, 3, 5), (3, 5, STEPS)):
        found = run_ranks(ranks, lambda comm, first=first, last=last: body(comm, first, last))
    for actual in found:
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "algorithm",
    [
        RING,
        *(pytest.param(a, marks=pytest.mark.slow) for a in (LowPrecisionOnePeer(), *WEIGHT_ALGORITHMS[-3:-1])),
    ],
    ids=repr,
)
def test_weights_that_differ_become_their_mean_and_replicas_are_recreated(tmp_path, algorithm):
    written = saved(tmp_path, 4, algorithm)
    mean = torch.stack([after.double() for _, after in written]).mean(0)
    for loaded, _ in saved(tmp_path, 3, algorithm, start=4, at=6):
        torch.testing.assert_close(loaded.double(), mean, rtol=1e-6, atol=1e-7)


def test_replicas_that_were_recreated_are_equal_on_the_ranks_that_hold_them(tmp_path):
    saved(tmp_path, 4, RING)

    def body(comm):
        training = Training(comm, RING, seed=comm.rank)
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.load(**training.objects)
        training.run(4, 6)
        training.ddp.engine.settle()
        states = [(s.weight.copy(), s.left.copy(), s.right.copy()) for s in training.ddp.engine.states]
        training.close()
        return states

    found = run_ranks(3, body)
    for rank, states in enumerate(found):
        for n, (weight, _, _) in enumerate(states):
            assert weight.tobytes() == found[rank - 1][n][2].tobytes()
            assert weight.tobytes() == found[(rank + 1) % 3][n][1].tobytes()


@dataclass
class Mine:
    secret: np.ndarray = field(default=None)


@dataclass(frozen=True)
class Secretive(Plain):
    """Its state is an array without a rule for another number of ranks."""

    def init(self, bucket, comm):
        return Mine(np.full(bucket.flat.size, comm.rank, np.float32))


def test_a_state_without_a_rule_is_refused_by_name(tmp_path):
    assert_restarts(tmp_path, 2, Secretive())
    with pytest.raises(ArrayError, match=r"load_engine: 'secret' of .* loads only on 2 ranks"):
        saved(tmp_path, 3, Secretive(), start=4)


# Per-rank state -------------------------------------------------------------------------------------------


def test_buffers_are_each_ranks_own_and_rank_0s_on_another_number(tmp_path):
    def body(comm):
        training = Training(comm, seed=comm.rank)
        with Checkpoints(tmp_path, comm) as checkpoints:
            if checkpoints.latest() is None:
                training.run(0, 3)
                with torch.no_grad():
                    training.model(batch(comm.rank, 3))  # no other rank knows of this
                checkpoints.save(3, **training.objects)
            else:
                checkpoints.load(**training.objects)
        return training.close()["0.running_mean"]

    written = run_ranks(2, body)
    assert not torch.equal(*written)
    for mine, theirs in zip(run_ranks(2, body), written, strict=True):
        assert torch.equal(mine, theirs)
    for mine in run_ranks(3, body):
        assert torch.equal(mine, written[0])


def test_ignored_parameters_stay_a_ranks_own(tmp_path):
    def body(comm):
        model = filled(nn.Linear(4, 2), seed=comm.rank)
        optimizer = sgd(model.parameters())
        ddp = DistributedDataParallel(model, optimizer, comm=comm, params_and_buffers_to_ignore=["bias"])
        with Checkpoints(tmp_path, comm) as checkpoints:
            if checkpoints.latest() is None:
                loss_of(ddp, batch(comm.rank, 0)).backward()
                optimizer.step()
                checkpoints.save(1, model=ddp, optimizer=optimizer)
            else:
                checkpoints.load(model=ddp, optimizer=optimizer)
        ddp.close()
        return model.bias.detach().clone(), optimizer.state[model.bias]["momentum_buffer"].clone()

    written = run_ranks(2, body)
    assert not torch.equal(written[0][0], written[1][0])
    for mine, theirs in zip(run_ranks(2, body), written, strict=True):
        assert all(map(torch.equal, mine, theirs))
    with pytest.raises(CheckpointError, match=r"\['ignored'\] is a rank's own"):
        run_ranks(3, body)


@pytest.mark.parametrize("experts", [1, 3], ids=["rank 0 has none", "rank 1 has more"])
def test_experts_continue_from_their_state(tmp_path, experts):
    """Ranks have other experts, so other names in their state dicts, and optimizers of other lengths."""

    def body(comm):
        layer = MoE(4, lambda: nn.Linear(4, 4), experts, 1, comm=comm, seed=0)
        model = filled(nn.Sequential(nn.Linear(4, 4), layer), seed=0)
        optimizer = adam(model.parameters())
        ddp = DistributedDataParallel(model, optimizer, comm=comm)

        def steps(first, last):
            for step in range(first, last):
                optimizer.zero_grad()
                ddp(batch(comm.rank, step)).square().sum().backward()
                optimizer.step()

        with Checkpoints(tmp_path, comm) as checkpoints:
            if checkpoints.latest() is None:
                steps(0, 2)
                checkpoints.save(2, model=ddp, optimizer=optimizer)
            else:
                checkpoints.load(model=ddp, optimizer=optimizer)
        steps(2, 4)
        ddp.close()
        return [p.detach().clone() for p in model.parameters()]

    written = run_ranks(2, body)
    for mine, theirs in zip(run_ranks(2, body), written, strict=True):
        assert all(map(torch.equal, mine, theirs))
    with pytest.raises(CheckpointError, match=r"\['ignored'\] is a rank's own"):
        run_ranks(3, body)


def test_the_experts_of_all_ranks_are_saved_for_another_number(tmp_path):
    """On five ranks, two have no expert."""

    def body(comm):
        layer = MoE(4, lambda: nn.Linear(4, 4), 3, 1, comm=comm, seed=0)
        model = filled(nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 2)), seed=0)
        optimizer = adam(model.parameters())
        with Checkpoints(tmp_path, comm) as checkpoints:
            if checkpoints.latest() is None:
                model(batch(comm.rank, 0)).sum().backward()
                optimizer.step()
            else:
                tree = checkpoints.load().tree
                moe.load_global_state_dict(model, tree["model"])
                moe.load_global_optimizer_state(model, optimizer, tree["optimizer"])
            whole = moe.global_state_dict(model)
            states = moe.global_optimizer_state(model, optimizer)
            checkpoints.save(comm.size, model=whole, optimizer=states)
        return whole, states["state"]

    first, first_states = run_ranks(1, body)[0]
    for ranks in (2, 5, 1):
        for whole, states in run_ranks(ranks, body):
            assert list(whole) == list(first)
            assert all(torch.equal(whole[name], value) for name, value in first.items())
            for name, state in first_states.items():
                assert all(torch.equal(states[name][key], value) for key, value in state.items())


class Sampler:
    """Anything with a state dict."""

    def __init__(self, seen):
        self.seen = seen

    def state_dict(self):
        return {"epoch": 3, "seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def test_other_objects_and_values_are_saved_by_their_names(tmp_path):
    def body(comm):
        generator = torch.Generator().manual_seed(comm.rank)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        plain = nn.Sequential(nn.BatchNorm1d(4))
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(
                1,
                sampler=Sampler((5, 6)),
                own_sampler=Own(Sampler(comm.rank)),
                scaler=scaler,
                plain=plain,
                generator=Own(generator.get_state()),
                epoch=2,
                best=float("nan"),
            )
            sampler, own_sampler, again = Sampler(0), Sampler(0), nn.Sequential(nn.BatchNorm1d(4))
            nn.init.ones_(again[0].bias)
            loaded = checkpoints.load(sampler=sampler, own_sampler=own_sampler, plain=again)
        assert (sampler.seen, own_sampler.seen) == ((5, 6), comm.rank)
        assert torch.equal(again[0].bias, plain[0].bias)
        assert torch.equal(loaded.tree["generator"], generator.get_state())
        assert (loaded.tree["epoch"], repr(loaded.tree["best"])) == (2, "nan")
        assert loaded.tree["scaler"] == scaler.state_dict()

    run_ranks(2, body)


TENSORS = [
    *(
        torch.arange(6).reshape(2, 3).to(kind)
        for kind in (torch.bfloat16, torch.float16, torch.complex64, torch.bool)
    ),
    torch.tensor(1.5),
    torch.empty(0, 3),
    torch.arange(12.0).reshape(3, 4).t()[::2],
    torch.tensor([1 + 2j]).conj(),
    nn.Parameter(torch.ones(2)),
]


def test_tensors_of_every_kind_come_back(tmp_path):
    def body(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(0, tensors=TENSORS, array=np.ones(3))
            loaded = checkpoints.load().tree
        for mine, theirs in zip(loaded["tensors"], TENSORS, strict=True):
            assert type(mine) is torch.Tensor
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(mine, theirs)
        assert type(loaded["array"]) is np.ndarray

    run_ranks(2, body)


# Mistakes of users ----------------------------------------------------------------------------------------


def test_slabs_of_a_tensor_load_evenly_or_in_the_lengths_of_like(tmp_path):
    whole = torch.arange(20, dtype=torch.bfloat16).reshape(2, 10)

    def body(comm):
        mine = whole[:, :3] if comm.rank == 0 else whole[:, 3:]
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(1, u=Own(mine, "concatenate", axis=1), fields=Own({"v": mine.T}, "concatenate"))
            even = checkpoints.load().tree
            length = [9, 1][comm.rank]
            like = {"u": Own(torch.empty(2, length, dtype=torch.bfloat16), "concatenate", axis=1)}
            return even["u"], even["fields"]["v"].T, checkpoints.load(like=like).tree["u"]

    (first, *firsts), (second, *seconds) = run_ranks(2, body)
    assert (first.shape, firsts[1].shape) == ((2, 5), (2, 9))
    for mine, other in zip((first, *firsts), (second, *seconds), strict=True):
        assert torch.equal(torch.cat([mine, other], 1), whole)


def test_a_state_that_does_not_fit_is_refused_by_name(tmp_path):
    def body(comm):
        training = Training(comm)
        with Checkpoints(tmp_path, comm) as checkpoints:
            with pytest.raises(ArrayError, match="give it without Own"):
                checkpoints.save(1, model=Own(training.ddp))
            with pytest.raises(UnsupportedError, match=r"tree\['hook'\]\['value'\] is a builtins.function"):
                checkpoints.save(1, hook=lambda: 0)
            with pytest.raises(UnsupportedError, match=r"tree\['x'\]\['value'\]: this torch.Tensor is sparse"):
                checkpoints.save(1, x=torch.eye(2).to_sparse())
            checkpoints.save(1, model=training.ddp, plain=training.model, epoch=1)
            with pytest.raises(ArrayError, match="has no 'optimiser', only 'model', 'plain', 'epoch'"):
                checkpoints.load(optimiser=training.optimizers[0])
            with pytest.raises(ArrayError, match=r"'epoch' was saved as a plain value, .* load into a SGD"):
                checkpoints.load(epoch=training.optimizers[0])
            with pytest.raises(ArrayError, match=r"'model' was saved as an object's state, .* into a int"):
                checkpoints.load(model=3)
            with pytest.raises(ArrayError, match="'plain' was saved from a plain module"):
                checkpoints.load(plain=training.ddp)
            with pytest.raises(RuntimeError, match=r"size mismatch|Missing key"):
                checkpoints.load(model=nn.Linear(4, 3))
            other = nn.Sequential(nn.BatchNorm1d(4), make_model(3))
            checkpoints.load(model=other)
            assert torch.equal(weights(other), weights(training.model))
        training.close()

    run_ranks(2, body)


@pytest.mark.parametrize(("first", "then"), [(GradientAllReduce(), RING), (RING, GradientAllReduce())], ids=repr)
def test_another_algorithm_is_refused_but_the_weights_load_alone(tmp_path, first, then):
    saved(tmp_path, 2, first)

    def body(comm):
        training = Training(comm, then)
        with Checkpoints(tmp_path, comm) as checkpoints:
            with pytest.raises(ArrayError, match=r"keeps state; to start from|but the algorithm is"):
                checkpoints.load(model=training.ddp)
            checkpoints.load(model=training.model)
        training.run(0, 2)
        training.close()

    run_ranks(2, body)


def test_plain_models_that_differ_are_noticed(tmp_path):
    def body(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(1, model=make_model(comm.rank))
            with pytest.raises(CheckpointError, match=r"\['\d.\w+'\] differs between rank . and rank ."):
                checkpoints.wait()

    run_ranks(2, body)


def test_ranks_that_train_alike_stay_alike(tmp_path):
    saved(tmp_path, 3)

    def body(comm):
        training = Training(comm, seed=comm.rank)
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.load(**training.objects)
        training.run(4, 6)
        assert_same_on_all_ranks(comm, training.model[1])
        training.close()

    run_ranks(4, body)


@pytest.mark.parametrize("other", [torch.optim.Adam, torch.optim.RMSprop], ids=lambda each: each.__name__)
def test_the_state_of_an_optimizer_of_another_class_is_refused_before_anything_is_loaded(other, tmp_path):
    def body(comm):
        model = torch.nn.Linear(2, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(sgd, 0.2, total_steps=3)
        ddp = DistributedDataParallel(model, sgd, comm=comm)
        with Checkpoints(tmp_path, comm) as kept:
            ddp(torch.ones(1, 2)).sum().backward()
            sgd.step()
            scheduler.step()
            kept.save(1, model=ddp, optimizer=sgd, wait=True)
            kept.load(optimizer=torch.optim.SGD(model.parameters(), lr=0.2))  # a scheduler has added keys
            before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().add_(1)
            torch.nn.utils.vector_to_parameters(before, model.parameters())
            mine = other(model.parameters()) if comm.rank else sgd
            with pytest.raises(
                ArrayError, match=f"'optimizer' was saved from .*'dampening'.*{other.__name__} has"
            ):
                kept.load(model=ddp, optimizer=mine)
            assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), before)
        ddp.close()

    run_ranks(2, body)
