"""DistributedDataParallel whose ranks die at random moments: in steps, commits, rendezvous, and while it is made.

With spares, every algorithm but asynchronous averaging ends with the bytes of an undisturbed training; so do
reproducible sums without spares.
"""

import functools
import random

import pytest
import torch
from torch import nn

from bagua_comm import (
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    DiLoCo,
    ErrorFeedback,
    GradientAllReduce,
    Hierarchical,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    QAdam,
    Quantized,
    Reproducible,
    StreamingDiLoCo,
)
from bagua_comm.data import PlainSampler
from bagua_comm.elastic import State, run
from bagua_comm.testing.fleets import ThreadJob, run_fleet
from bagua_torch import DistributedDataParallel, QAdamOptimizer, fuse, sync_batchnorm

STEPS = 5
SAMPLES = 40
INPUTS = torch.linspace(-1, 1, SAMPLES * 5).reshape(SAMPLES, 5)

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.05)
WARMED = functools.partial(QAdamOptimizer, lr=0.05, warmup_steps=2)


def fused(kind):
    return lambda parameters: fuse(kind(parameters))


CASES = {
    "exact, fused Adam, scaler, sampler": (GradientAllReduce(), fused(ADAM), {"scaler", "sampler"}),
    "exact, BatchNorm": (GradientAllReduce(), SGD, {"batchnorm"}),
    "ByteGrad, fused SGD, SyncBatchNorm, scaler": (ByteGrad(), fused(SGD), {"syncbn", "scaler"}),
    "hierarchical": (GradientAllReduce(Hierarchical(Quantized())), SGD, {"sampler"}),
    "error feedback, SyncBatchNorm": (GradientAllReduce(ErrorFeedback(Quantized())), ADAM, {"syncbn"}),
    "QAdam": (QAdam(warmup_steps=2), WARMED, {"sampler"}),
    "QAdam, fused": (QAdam(warmup_steps=2), fused(WARMED), set()),
    "decentralized, fused SGD": (Decentralized("all"), fused(SGD), set()),
    "one peer, sampler": (Decentralized("one_peer_exponential"), ADAM, {"sampler"}),
    "low precision, scaler": (LowPrecisionDecentralized(), SGD, {"scaler"}),
    "low precision, one peer": (LowPrecisionOnePeer(), fused(ADAM), set()),
    "DiLoCo": (DiLoCo(local_steps=2), ADAM, set()),
    "streaming DiLoCo": (StreamingDiLoCo(local_steps=3, fragments=2, delay=2), ADAM, set()),
    "reproducible": (GradientAllReduce(Reproducible(addends=12)), SGD, set()),
    "reproducible, fused Adam, scaler": (GradientAllReduce(Reproducible(addends=12)), fused(ADAM), {"scaler"}),
    "asynchronous": (AsyncModelAverage(interval_s=0.005, warmup_steps=2), SGD, set()),
}
MOVING = {"asynchronous"}
ALIKE = {each for each in CASES if each.startswith(("exact, fused", "ByteGrad", "hier", "QAdam", "repro"))}
"""Algorithms without per-rank state. Others lose that if a rank and its buddy die at about the same time."""


class Training:
    """The objects of the user's program: a model, an optimizer, and what belongs to them."""

    def __init__(self, algorithm, optimizer, extras):
        self.algorithm, self.extras = algorithm, extras
        between = [nn.BatchNorm1d(4)] if {"batchnorm", "syncbn"} & extras else []
        self.model = nn.Sequential(nn.Linear(5, 4), *between, nn.Tanh(), nn.Linear(4, 1))
        for number, parameter in enumerate(self.model.parameters()):  # PyTorch's generator is one for all threads
            parameter.data = torch.linspace(-0.5, 0.5, parameter.numel()).roll(number).reshape(parameter.shape)
        self.optimizer = optimizer(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=2, enabled="scaler" in extras)
        self.sampler = PlainSampler(SAMPLES, batch_size=2, size=1, rank=0) if "sampler" in extras else None

    def parts(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        return parts if self.sampler is None else {**parts, "sampler": self.sampler}

    def train(self, comm, state):
        if "syncbn" in self.extras:
            sync_batchnorm.convert(self.model, comm)
        ddp = DistributedDataParallel(self.model, [self.optimizer], self.algorithm, comm=comm, bucket_bytes=64)
        batches = iter(self.sampler if self.sampler is not None else ())
        holds = isinstance(getattr(self.algorithm, "average", None), Reproducible)
        while state.step < STEPS:
            self.optimizer.zero_grad()
            if holds:
                for number in ddp.microbatches():
                    self.backward(ddp, INPUTS[(state.step * 12 + number) % SAMPLES].reshape(1, 5))
            else:
                batch = next(batches) if self.sampler is not None else range(state.step * 8, state.step * 8 + 8)
                self.backward(ddp, INPUTS[list(batch)].roll(comm.rank, dims=1))
            self.scaler.step(self.optimizer)
            self.scaler.update()
            state.step += 1
            state.commit()
        ddp.close()
        return comm.rank, {name: value.clone() for name, value in self.model.state_dict().items()}

    def backward(self, ddp, batch):
        loss = (ddp(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.scaler.scale(loss).backward()


def trained(case, job):
    """The state dicts that ranks end with, by rank."""

    def body(fleet):
        training = Training(*CASES[case])
        state = State(**training.parts(), step=0)
        return run(state, fleet=fleet)(lambda comm: training.train(comm, state))

    outcomes = run_fleet(job, body, limit_s=60)
    for outcome in outcomes:
        if "error" in outcome:
            raise outcome["error"]
    return dict(outcome["result"] for outcome in outcomes if outcome.get("result"))


def trained_with_deaths(case, chance, size, wanted):
    """As `trained`, where one or two of the processes that begin to train die, at moments that chance chooses."""
    job = ThreadJob(size, wanted=wanted)
    victims = chance.sample(range(wanted), chance.choice([1, 1, 2]) if case in ALIKE else 1)
    together = chance.random() < 0.5
    due = {victim: chance.randrange(1, MOMENTS[case]) for victim in victims}
    counts = dict.fromkeys(due, 0)

    def watch(number, what):
        if number in due:
            counts[number] += 1
            if counts[number] == due[number]:
                for victim in victims if together else [number]:
                    job.kill(victim)

    job.watch = watch
    return trained(case, job), f"victims {due}, together {together}"


MOMENTS = {}
"""By case, how many calls a process of an undisturbed training makes."""


@functools.cache
def undisturbed(case):
    job, calls = ThreadJob(3), []
    job.watch = lambda number, what: calls.append(what) if number == 1 else None
    expected = trained(case, job)
    MOMENTS[case] = len(calls)
    return expected


def check(case, seed, *, spares):
    expected, chance = undisturbed(case), random.Random(f"{case} {seed} {spares}")
    got, how = trained_with_deaths(case, chance, 3 + spares, 3)
    assert got, how
    if case in MOVING:
        return
    exact = got.keys() == expected.keys() or "reproducible" in case
    for rank, values in got.items():
        for name, value in values.items():
            assert value.isfinite().all(), how
            assert not exact or torch.equal(value, expected[rank][name]), f"{how}: rank {rank}: {name}"


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES)
def test_with_spares_nothing_differs_whenever_ranks_die(case, seed):
    check(case, seed, spares=2)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", CASES)
def test_without_spares_the_others_continue_whenever_ranks_die(case):
    check(case, 1, spares=0)


def test_reproducible_sums_give_the_same_bytes_on_fewer_ranks():
    check("reproducible", 0, spares=0)
