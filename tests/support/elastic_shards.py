"""A sharded training on a fleet of threads, in which processes die; see bagua_torch/test_elastic_shards.py."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from bagua_comm import Average, CommAborted, ErrorFeedback, Exact, Quantized, Reproducible
from bagua_comm.elastic import State, run, share
from bagua_comm.testing.fleets import ThreadJob, run_fleet
from bagua_torch import Muon, fsdp

from . import thread_groups
from .waiting import until

REPRODUCIBLE = Reproducible(addends=12)
SGD = partial(torch.optim.SGD, momentum=0.9)


def muon(parameters, lr):
    groups = [{"params": [p for p in parameters if p.ndim == 2]}]
    return Muon([*groups, {"params": [p for p in parameters if p.ndim < 2], "algorithm": "adam"}], lr)


STEPS, MICROBATCHES = 3, 12
INPUTS = torch.linspace(-1, 1, STEPS * MICROBATCHES * 5).reshape(-1, 5)


class Net(nn.Module):
    """Rows that no number of ranks divides, and fewer rows than ranks."""

    def __init__(self, *, width=7, tied=False, frozen=False, buffers=False, half=False):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, width), nn.Linear(width, width), nn.Linear(width, 2)
        if tied:
            self.last = nn.Linear(width, width)
            self.last.weight = self.middle.weight
        if frozen:
            self.first.weight.requires_grad = False
        if buffers:
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("total", torch.zeros(3))
        if half:
            self.to(torch.bfloat16)

    def forward(self, x):
        if hasattr(self, "count"):
            self.count += 1
            self.total += x.detach().float().mean()
        x = x.to(self.first.bias.dtype)
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


@dataclass(frozen=True)
class Case:
    """A model, an optimizer, and how both are sharded and reduced."""

    model: dict[str, int] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    """Of `fully_shard`."""
    reduce: Average = REPRODUCIBLE
    replicas: Average | None = None
    """How an even number of ranks average their two replicas."""
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    def shard(self, comm):
        with thread_groups.LOCK:
            torch.manual_seed(0)
            model = Net(**self.model)
        settings, replicas = dict(self.settings), None if comm.size % 2 else self.replicas
        if replicas is not None:
            settings["mesh"] = init_device_mesh("cpu", (2, comm.size // 2), mesh_dim_names=("replicas", "shards"))
        fully_shard(model.first, **settings)
        fully_shard(model, **settings)
        return model, fsdp.attach(model, self.reduce, comm=comm, replicas=replicas)


CASES = {
    "AdamW": Case(),
    "tied and frozen, SGD": Case({"tied": True, "frozen": True}, optimizer=SGD),
    "mixed precision": Case(settings={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
    "bfloat16": Case({"half": True}, reduce=Exact()),
    "shards of columns": Case(
        {"width": 12},
        {"shard_placement_fn": lambda p: Shard(1) if p.shape == (12, 12) else Shard(0)},
        Exact(),
        optimizer=torch.optim.Adagrad,
    ),
    "replicas": Case(reduce=Exact(), replicas=Exact()),
    "error feedback": Case(reduce=ErrorFeedback(Quantized(min_bytes=0), reset_every=7)),
    "error feedback of replicas": Case(reduce=Exact(), replicas=ErrorFeedback(Quantized(min_bytes=0))),
    "buffers": Case({"buffers": True}),
    "Muon": Case(optimizer=muon),
}


class Record(NamedTuple):
    """The state of one rank after a commit or a restore, with sharded tensors as a whole."""

    step: int
    size: int
    entered: bool
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    residuals: dict[str, dict[str, torch.Tensor]]
    """Those of this rank, as its shards have them."""


class Training:
    """A program for a fleet; process n dies in step s, after its commit, for every (n, s).

    Args:
        case: What is trained.
        job: The fleet.
        deaths: See above.
        joins: The step at whose begin a new process joins.
    """

    def __init__(self, case, job, deaths=(), joins=None):
        self.case, self.job, self.due, self.joins = case, job, set(deaths), joins
        self.records = {}
        self.lock = threading.Lock()

    def run(self, limit_s=60):
        """The outcomes of the processes."""
        return run_fleet(self.job, self.body, limit_s=limit_s)

    def body(self, fleet):
        state = State(step=0)
        return run(state, fleet=fleet)(lambda comm: self.train(fleet, state, comm))

    def train(self, fleet, state, comm):
        thread_groups.renew(comm)
        case = self.case
        model, handle = case.shard(comm)
        optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad], lr=0.05)
        if isinstance(optimizer, Muon):
            optimizer.distribute(comm)
        state.register(model=model, optimizer=optimizer)
        self.note(fleet, state, comm, model, optimizer, handle, entered=True)
        while state.step < STEPS:
            if state.step == self.joins:
                self.let_join(fleet)
            optimizer.zero_grad()
            for number in share(MICROBATCHES, comm):
                model(INPUTS[state.step * MICROBATCHES + number].reshape(1, 5)).float().square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            self.note(fleet, state, comm, model, optimizer, handle, entered=False)
            for number, step in sorted(self.due):
                if step == state.step:
                    self.due.discard((number, step))
                    self.job.kill(*[n for n, s in [(number, step), *self.due] if s == step])
        return self.records[fleet.me][-1]

    def let_join(self, fleet):
        with self.lock:
            if self.joins is not None and fleet.me == min(self.job.alive):
                self.joins = None
                self.job.start(self.body, len(self.job.processes))
        until(lambda: self.job.joining)
        raise CommAborted("another waits to join")

    def note(self, fleet, state, comm, model, optimizer, handle, *, entered):
        moments = {
            f"{n} {key}": value
            for n, states in optimizer.state_dict()["state"].items()
            for key, value in states.items()
        }
        found = [whole(comm, each) for each in (model.state_dict(), moments)]
        residuals = handle.state_dict()
        self.records.setdefault(fleet.me, []).append(Record(state.step, comm.size, entered, *found, residuals))


def whole(comm, tensors):
    """Whole tensors of those of all ranks: of replicas the last one's."""
    found = {}
    for name, tensor in tensors.items():
        placement = getattr(tensor, "placements", [None])[-1]
        local = tensor if placement is None else tensor.to_local()
        rows = comm.allgather_object(local.detach().clone())
        if placement is not None:
            rows = rows[-tensor.device_mesh.size(tensor.device_mesh.ndim - 1) :]
        found[name] = rows[-1] if placement is None else torch.cat(rows, placement.dim)
    return found


def results(outcomes):
    """The results of the processes that trained to the end; an error of any is raised."""
    for outcome in outcomes:
        if "error" in outcome:
            raise outcome["error"]
    return [outcome["result"] for outcome in outcomes if outcome.get("result")]


def undisturbed(case, ranks=4):
    """The last record of a training in which nobody dies."""
    return results(Training(CASES[case], ThreadJob(ranks)).run())[0]
