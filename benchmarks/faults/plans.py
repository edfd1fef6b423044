"""The trials: drawn from a seed, so that each can be repeated alone.

A trial is a training and its blows. Trials use the algorithms in turn; everything else is random.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from .means import Means
from .model import MICROBATCHES

Kind = Literal["spare", "fewer", "too few", "host"]
"""The expected result of a death: a spare replaces the rank; fewer ranks continue; all end; all are
started again on the hosts that are alive."""

LinkFault = Literal["slow sender", "slow reader", "half-open, out", "half-open, in", "split brain"]
"""What happens to a host's link: it sends or is sent one byte a millisecond; what it sends or is sent is lost;
half of the hosts are cut off from the others. It ends after a while."""

Phase = (
    Literal["construct", "step", "commit", "recover", "leave", "save", "unsaved"]
    | Literal["dead host", "cut host"]
    | LinkFault
)
"""When a blow falls: while an engine is made, in a step, in a commit, in a recovery, after the last step, while a
checkpoint is saved, after that has failed; or in a step on all processes of a host, or on its link."""

RANKS = 3
STEPS = 60
LIMIT_S = 60.0
"""Time limit of a trial once training has begun."""

SIGKILL, SIGSTOP = int(signal.SIGKILL), int(signal.SIGSTOP)


@dataclass(frozen=True)
class Case:
    """An algorithm.

    Args:
        text: The Python expression.
        alike: Whether all ranks have the same weights after each step.
        repeats: Whether a step depends on nothing but the state before it, so that it can be repeated.
        reproducible: Whether the bytes equal those of an undisturbed training.
        framework: The framework of the training; "sharded" is PyTorch's `fully_shard`.
        steps: The steps of the training.
        optimizer: In PyTorch, one of `torch_model.OPTIMIZERS`.
        extras: In PyTorch, further parts: "batchnorm" (with statistics of each rank), "syncbn", "scaler" (a
            GradScaler), "sampler" (batches come from a sampler, and depend on the number of ranks).
    """

    text: str
    alike: bool = True
    repeats: bool = True
    reproducible: bool = False
    framework: Literal["numpy", "torch", "sharded"] = "numpy"
    optimizer: str = "sgd"
    extras: tuple[str, ...] = ()
    steps: int = STEPS

    @property
    def name(self) -> str:
        """Its name in tables."""
        if self.framework == "numpy":
            return self.text
        if self.framework == "sharded":
            return f"fsdp.attach({self.text})"
        return ", ".join([self.text, *([self.optimizer] if self.optimizer != "sgd" else []), *self.extras])


CASES = [
    Case("GradientAllReduce(Reproducible(addends=12))", reproducible=True),
    Case("GradientAllReduce()"),
    Case("ByteGrad()"),
    Case("GradientAllReduce(ErrorFeedback(Quantized()))"),
    Case("GradientAllReduce(Hierarchical(Quantized()))"),
    Case("QAdam(warmup_steps=20)"),
    Case("Decentralized()", alike=False),
    Case("Decentralized('one_peer_exponential')", alike=False),
    Case("every(4, Decentralized())", alike=False),
    Case("LowPrecisionDecentralized()", alike=False),
    Case("LowPrecisionOnePeer()", alike=False),
    Case("AsyncModelAverage(interval_s=0.01, warmup_steps=20)", alike=False, repeats=False),
    Case("DiLoCo(local_steps=10)", alike=False),
    Case("after(20, GradientAllReduce(), DiLoCo(local_steps=10))", alike=False),
    Case("GradientAllReduce(Reproducible(addends=12))", reproducible=True, framework="torch"),
]

"""Trials take these in turn."""


def _torch(text: str, optimizer: str = "sgd", *extras: str, **facts: bool) -> Case:
    return Case(text, framework="torch", optimizer=optimizer, extras=extras, **facts)


TORCH_CASES = [
    _torch("GradientAllReduce(Reproducible(addends=12))", reproducible=True),
    _torch("GradientAllReduce(Reproducible(addends=12))", "fused adam", "scaler", reproducible=True),
    _torch("GradientAllReduce()", "fused adam", "scaler", "sampler"),
    _torch("GradientAllReduce()", "sgd", "batchnorm", alike=False),
    _torch("ByteGrad()", "fused sgd", "syncbn", "scaler"),
    _torch("GradientAllReduce(ErrorFeedback(Quantized()))", "adam", "syncbn"),
    _torch("GradientAllReduce(Hierarchical(Quantized()))", "fused sgd", "sampler"),
    _torch("QAdam(warmup_steps=20)", "qadam"),
    _torch("QAdam(warmup_steps=20)", "fused qadam", "sampler"),
    _torch("Decentralized()", alike=False),
    _torch("Decentralized('one_peer_exponential')", "fused adam", "sampler", alike=False),
    _torch("every(4, Decentralized())", "adam", alike=False),
    _torch("LowPrecisionDecentralized()", "sgd", "sampler", alike=False),
    _torch("LowPrecisionDecentralized()", "fused adam", alike=False),
    _torch("LowPrecisionOnePeer()", alike=False),
    _torch("AsyncModelAverage(interval_s=0.01, warmup_steps=20)", "fused sgd", alike=False, repeats=False),
    _torch("DiLoCo(local_steps=10)", "adam", "scaler", alike=False),
    _torch("after(20, GradientAllReduce(), DiLoCo(local_steps=10))", "fused sgd", "sampler", alike=False),
]
"""Trials of DistributedDataParallel take these in turn."""


@dataclass(frozen=True)
class Blow:
    """One or two processes are killed or stopped.

    Args:
        phase: The phase of training in which it falls.
        step: The first step in which it may fall.
        delay_s: Seconds after a process has reported the phase.
        whom: The victim: a training "rank", a "spare", or all processes of a "host".
        choices: A number from 0 to 1 for each victim, which selects it among the candidates.
        signal: SIGKILL or SIGSTOP.
        resume_s: After SIGSTOP, seconds until SIGCONT; None for never.
        means: How the victim is harmed; see `means`.
        seconds: How long the GIL is kept, or a link is bad; by how much the clock is set.
        room: Bytes that stay free on a full disk.
    """

    phase: Phase
    step: int
    delay_s: float
    whom: Literal["rank", "spare", "host"] = "rank"
    choices: tuple[float, ...] = (0.0,)
    signal: int = SIGKILL
    resume_s: float | None = None
    means: Means = "signal"
    seconds: float = 0.0
    room: int = 0


@dataclass(frozen=True)
class Trial:
    """A training and its blows."""

    name: str
    kind: Kind
    case: Case
    spares: int
    min_ranks: int
    steps: int
    commit_every: int
    blows: tuple[Blow, ...]
    timeout_s: float = 15.0
    ranks: int = RANKS
    microbatches: int = MICROBATCHES
    limit_s: float = LIMIT_S
    fault: str = ""
    """The class of the fault, in tables; by default that of its kind."""

    def uses(self, means: Means) -> bool:
        """Whether a process is harmed by these means."""
        return any(blow.means == means for blow in self.blows)

    def flags(self) -> list[str]:
        """Arguments of `run`."""
        return ["--spares", str(self.spares), "--min-ranks", str(self.min_ranks)]

    def as_dict(self) -> dict[str, Any]:
        """All of it, for a record."""
        return asdict(self)


TWO_AT_ONCE, TWO_SHARDS_AT_ONCE = 0.05, 0.2
"""The share of trials in which two ranks die at once; more where they may hold all copies of a shard."""

_DELAYS = {
    "construct": 0.02,
    "step": 0.02,
    "commit": 0.004,
    "save": 0.01,
    "recover": 0.03,
    "leave": 0.05,
}
"""Longest duration of a phase: delays are drawn from 0 to this."""


def kills(count: int, seed: int) -> Iterator[Trial]:
    """Trials with SIGKILL."""
    for number in range(count):
        yield draw(f"kill-{seed}-{number}", CASES[number % len(CASES)])


def torch_kills(count: int, seed: int) -> Iterator[Trial]:
    """Trials of DistributedDataParallel with SIGKILL."""
    for number in range(count):
        yield draw(f"torch-{seed}-{number}", TORCH_CASES[number % len(TORCH_CASES)])


SHARDED = Case("Reproducible(addends=12)", reproducible=True, repeats=False, framework="sharded", steps=24)


def sharded_kills(count: int, seed: int) -> Iterator[Trial]:
    """Trials of sharded models with SIGKILL, on four ranks, where not all pairs of ranks are buddies."""
    for number in range(count):
        trial = draw(f"sharded-{seed}-{number}", SHARDED, TWO_SHARDS_AT_ONCE)
        least = {"too few": 4}.get(trial.kind, max(1, trial.min_ranks))
        yield replace(trial, ranks=4, min_ranks=least)


def stops(count: int, seed: int) -> Iterator[Trial]:
    """Trials with SIGSTOP, longer than the timeout."""
    for number in range(count):
        name = f"stop-{seed}-{number}"
        chance = random.Random(name)
        phase: Phase = chance.choice(["step", "commit", "construct"])
        step = chance.randrange(1, STEPS // 2)
        stop = Blow(
            phase,
            0 if phase == "construct" else step,
            chance.uniform(0, 0.01),
            choices=(chance.random(),),
            signal=SIGSTOP,
            resume_s=chance.choice([None, 5.0, 10.0]),
        )
        kind, spares = chance.choice([("spare", 1), ("fewer", 0)])
        yield Trial(name, kind, CASES[number % len(CASES)], spares, 1, STEPS, 1, (stop,), timeout_s=3.0)


def draw(name: str, case: Case, two_at_once: float = TWO_AT_ONCE) -> Trial:
    """The trial of this name."""
    chance = random.Random(name)
    kind: Kind = chance.choices(["spare", "fewer", "too few"], [50, 30, 20])[0]
    phase: Phase = chance.choices(["step", "commit", "construct", "recover", "leave"], [40, 20, 15, 20, 5])[0]
    first: Phase = "step" if phase == "recover" else phase
    step = 0 if first == "construct" else chance.randrange(1, case.steps - 10)
    spare_dies = kind == "spare" and phase == "step" and chance.random() < 0.2
    pair = chance.random() < two_at_once
    blows = [
        Blow(
            first,
            step,
            chance.uniform(0, _DELAYS[first]),
            "spare" if spare_dies else "rank",
            tuple(chance.random() for _ in range(2 if pair else 1)),
        )
    ]
    if phase != first and (kind == "spare" or not pair):  # somebody must be left
        blows.append(Blow(phase, 0, chance.uniform(0, _DELAYS[phase]), "rank", (chance.random(),)))
    deaths = sum(len(blow.choices) for blow in blows)
    spares = 1 if kind == "spare" else 0
    least = RANKS if kind == "too few" else max(1, RANKS + spares - deaths)
    return Trial(name, kind, case, spares, least, case.steps, chance.choice([1, 1, 3]), tuple(blows))


# Classes of faults --------------------------------------------------------------------------------------------

LONG_GIL_S, SHORT_GIL_S = 60.0, 1.0
"""How long a process keeps the GIL: longer than the timeout of a trial, or not."""

DAY_S = 86400.0

CHECKPOINT_BYTES = 3 * 14_000
"""What a full disk has room for at most: less than a checkpoint, of the weights of each rank."""


def classes(count: int, seed: int) -> Iterator[Trial]:
    """Trials of every class of faults, `count` times each, on one host."""
    for number in range(count):
        for fault in ("GIL, long", "GIL, short", "SIGSEGV", "out of memory", *_WITH_A_DEATH, "full disk"):
            name = f"{fault.replace(', ', '-').replace(' ', '-')}-{seed}-{number}"
            chance = random.Random(name)
            step, choices = chance.randrange(5, STEPS // 2), (chance.random(),)
            delay_s = chance.uniform(0, _DELAYS["step"])
            kind: Kind = (
                "spare"
                if fault in ("GIL, short", "descriptors", "full disk")
                else chance.choice(["spare", "fewer"])
            )
            if fault.startswith("GIL"):
                seconds = LONG_GIL_S if fault == "GIL, long" else SHORT_GIL_S
                blows = [Blow("step", step, delay_s, choices=choices, seconds=seconds, means="GIL")]
            elif fault == "SIGSEGV":
                blows = [Blow("step", step, delay_s, choices=choices, signal=int(signal.SIGSEGV))]
            elif fault == "out of memory":
                blows = [Blow("step", step, delay_s, choices=choices, means="out of memory")]
            elif fault == "full disk":
                room, later_s = chance.randrange(CHECKPOINT_BYTES), chance.uniform(0, 0.1)
                blows = [
                    Blow("save", step, chance.uniform(0, _DELAYS["save"]), means="full disk", room=room),
                    Blow("unsaved", 0, later_s, means="free disk"),
                ]
            else:  # and then a rank dies, so that the others have to recover in that state
                blows = [
                    Blow(
                        "step",
                        step,
                        delay_s,
                        choices=choices,
                        means=_WITH_A_DEATH[fault][0],
                        seconds=_WITH_A_DEATH[fault][1],
                    ),
                    Blow("step", step + 5, delay_s, choices=(chance.random(),)),
                ]
            spares = int(kind == "spare")
            case = draw_numpy_case(chance)
            yield Trial(name, kind, case, spares, 1, STEPS, 1, tuple(blows), timeout_s=5.0, fault=fault)


def draw_numpy_case(chance: random.Random) -> Case:
    """An algorithm, without PyTorch, which takes long to import."""
    case = CASES[chance.randrange(len(CASES))]
    return case if case.framework == "numpy" else CASES[0]


_WITH_A_DEATH: dict[str, tuple[Means, float]] = {
    "descriptors": ("descriptors", 0.0),
    "full memory": ("full memory", 0.0),
    "clock, ahead": ("clock", DAY_S),
    "clock, back": ("clock", -DAY_S),
}
"""Faults by which no process dies: their means, and by how many seconds the clock is set."""
