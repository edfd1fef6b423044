"""Golden trajectories of elastic training with DiLoCo and StreamingDiLoCo, in exact fractions.

    python tests/golden/make_outer_steps.py            write outer_steps.json next to this
    python tests/golden/make_outer_steps.py --check    exit 1 unless the file on disk has the same bytes

This file shares nothing with the library: it is a second reading of the papers and of docs/guides/elastic.md, in
fractions. All of them, and all results, are float64 numbers, so that a correct training has the same bits,
whichever the order of its additions: lr, mu and alpha are 1/2, and there are 1, 2 or 4 ranks.

The inner optimizer is given: in step t = 1, 2, ... it adds `updates[t - 1][r][name]` to a tensor of rank r.

DiLoCo, in the steps t that are multiples of H. a is the anchor, u the outer momentum, x_r the weights of rank r:

    d <- mean over r of (a - x_r)        u <- mu u + d        a <- a - lr (d + mu u)        x_r <- a

StreamingDiLoCo. Fragment p of P is sent in the steps t with t = round(p H / P) modulo H, and arrives in t + tau:

    step t          d, u and a as above
    step t + tau    x_r <- alpha x_r + (1 - alpha) a

Elastic training. Everything is committed after every third step. A failure is one of

    step      ranks die in a step, after the inner optimizer and before the exchange
    commit    ranks die in the commit after a step
    join      no rank dies: ranks join after the commit of a step, which is valid

and training continues from the last commit: from its step number, anchors, momenta, and what is under way. With a
spare for each dead rank, each rank has its own weights again. On another number of ranks, all begin with the mean
of the weights of the ranks that committed, and those that are left close ranks.

The file. The first entry of outer_steps.json has the weights at the start and the updates; each other one is a
training. It has runs, one more than failures: from which commit a run begins, on how many ranks, and its steps up
to its last valid commit. A step has the weights of each rank; one that is committed has anchors and momenta too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from golden_file import main
from numpy.typing import NDArray

FILE = Path(__file__).with_name("outer_steps.json")

HALF = Fraction(1, 2)
SHAPES = {"embedding": (2, 2), "layer": (3,), "head": (2,)}
STEPS, LOCAL_STEPS, COMMIT_EVERY = 14, 4, 3

Tensors = dict[str, NDArray[Any]]
"""Arrays of fractions, by name."""


def fractions(name: str, number: int) -> NDArray[Any]:
    """Return a tensor of quarters from -3/2 to 3/2."""
    shape, i = SHAPES[name], list(SHAPES).index(name)
    elements = [Fraction((number + 5 * i + 2 * j * j) % 13 - 6, 4) for j in range(int(np.prod(shape)))]
    return np.array(elements, dtype=object).reshape(shape)


INITIAL = {name: fractions(name, 4) for name in SHAPES}
UPDATES = [[{name: fractions(name, 7 * t + 3 * r) for name in SHAPES} for r in range(4)] for t in range(STEPS)]


class Settings(NamedTuple):
    """The settings of an algorithm; DiLoCo has no fragments."""

    fragments: dict[str, int] | None = None
    delay: int = 0
    mix: Fraction = Fraction(0)

    def is_due(self, name: str, t: int) -> bool:
        """Whether a tensor is sent in step t."""
        if self.fragments is None:
            return t % LOCAL_STEPS == 0
        offset = round(self.fragments[name] * LOCAL_STEPS / (1 + max(self.fragments.values())))
        return (t - offset) % LOCAL_STEPS == 0


class Failure(NamedTuple):
    """What ends a run of a training."""

    where: str
    step: int
    ranks: tuple[int, ...]
    """Those that die, or the new ranks of those that join."""


@dataclass
class Training:
    """All ranks of a training, in the middle of it."""

    weights: list[Tensors]
    anchor: Tensors = field(default_factory=lambda: dict(INITIAL))
    momentum: Tensors = field(default_factory=lambda: {name: 0 * value for name, value in INITIAL.items()})
    sent: dict[str, int] = field(default_factory=dict)
    """The step in which a tensor that is under way was sent."""
    step: int = 0

    def copy(self) -> "Training":
        """Return a copy; the arrays themselves are never changed."""
        rows = [dict(x) for x in self.weights]
        return Training(rows, dict(self.anchor), dict(self.momentum), dict(self.sent), self.step)

    def train(self, settings: Settings) -> None:
        """Make the next step."""
        self.step += 1
        for r, x in enumerate(self.weights):
            for name in x:
                x[name] = x[name] + UPDATES[self.step - 1][r][name]
        for name in SHAPES:
            if settings.is_due(name, self.step):
                changes = [self.anchor[name] - x[name] for x in self.weights]
                d = sum(changes[1:], changes[0]) / Fraction(len(changes))
                self.momentum[name] = HALF * self.momentum[name] + d
                self.anchor[name] = self.anchor[name] - HALF * (d + HALF * self.momentum[name])
                self.sent[name] = self.step
        for name in [name for name, step in self.sent.items() if step + settings.delay == self.step]:
            del self.sent[name]
            for x in self.weights:
                x[name] = settings.mix * x[name] + (1 - settings.mix) * self.anchor[name]

    def on(self, size: int) -> "Training":
        """Return what this number of ranks continue with."""
        new = self.copy()
        if size != len(self.weights):
            mean = {name: sum(x[name] for x in self.weights) / Fraction(len(self.weights)) for name in SHAPES}
            new.weights = [dict(mean) for _ in range(size)]
        return new

    def row(self) -> dict[str, Any]:
        """Return the entry of this step."""
        row: dict[str, Any] = {"step": self.step, "weights": [plain(x) for x in self.weights]}
        if self.step % COMMIT_EVERY == 0:
            row |= {"anchor": plain(self.anchor), "momentum": plain(self.momentum)}
        return row


def plain(tensors: Tensors) -> dict[str, Any]:
    """Return the same as lists of floats; each is exact."""
    for value in tensors.values():
        for x in value.flat:
            assert Fraction(float(x)) == x, f"{x} is no float64"
    return {name: value.astype(float).tolist() for name, value in tensors.items()}


def runs(settings: Settings, size: int, spares: int, failures: list[Failure]) -> Iterator[dict[str, Any]]:
    """Yield the runs of a training."""
    committed = Training([dict(INITIAL) for _ in range(size)])
    for failure in [*failures, None]:
        state, valid, rows = committed.copy(), 0, []
        began = {"from": state.step, "ranks": len(state.weights)}
        while state.step < STEPS:
            if failure is not None and (failure.where, failure.step) == ("step", state.step + 1):
                break
            state.train(settings)
            rows.append(state.row())
            if failure is not None and (failure.where, failure.step) == ("commit", state.step):
                break
            if state.step % COMMIT_EVERY == 0:
                committed, valid = state.copy(), len(rows)
            if failure is not None and (failure.where, failure.step) == ("join", state.step):
                size += len(failure.ranks)
                break
        else:
            valid = len(rows)
        if failure is not None and failure.where != "join":
            lost = max(0, len(failure.ranks) - spares)
            size, spares = size - lost, max(0, spares - len(failure.ranks))
        committed = committed.on(size)
        yield {**began, "steps": rows[:valid]}


# --- The cases -----------------------------------------------------------------------------------

STREAMING = Settings({"embedding": 0, "layer": 1, "head": 0}, delay=2, mix=HALF)
"""The fragment of the layer is sent in steps 2, 6, 10 and 14 and arrives in 4, 8 and 12; the other one is sent in
steps 4, 8 and 12, and arrives in 6, 10 and 14. So one is under way at each commit: after steps 3, 6, 9 and 12."""

ALGORITHMS = {"DiLoCo": Settings(), "StreamingDiLoCo": STREAMING}

CASES: dict[str, tuple[int, int, list[Failure]]] = {
    "no failure": (4, 0, []),
    "two ranks die between outer steps": (4, 0, [Failure("step", 7, (0, 2))]),
    "all but one die between outer steps": (2, 0, [Failure("step", 11, (0,))]),
    "a rank that dies before an exchange is replaced": (4, 1, [Failure("step", 8, (1,))]),
    "a rank that dies while a fragment is under way is replaced": (4, 1, [Failure("step", 11, (2,))]),
    "two ranks join": (2, 0, [Failure("join", 9, (2, 3))]),
    "a commit fails": (4, 0, [Failure("commit", 9, (1, 3))]),
    "a commit fails, and the rank that died is replaced": (4, 1, [Failure("commit", 9, (3,))]),
    "ranks die one after the other": (
        4,
        1,
        [Failure("commit", 6, (1,)), Failure("step", 8, (0, 2)), Failure("commit", 12, (1,))],
    ),
}


def all_cases() -> Iterator[dict[str, Any]]:
    """Yield the entries of the file."""
    updates = [[plain(of_rank) for of_rank in of_step] for of_step in UPDATES]
    yield {"initial": plain(INITIAL), "updates": updates}
    for algorithm, settings in ALGORITHMS.items():
        for name, (size, spares, failures) in CASES.items():
            yield {
                "name": name,
                "algorithm": algorithm,
                "local_steps": LOCAL_STEPS,
                **({} if settings.fragments is None else {"fragments": settings.fragments}),
                "delay": settings.delay,
                "mix": float(settings.mix),
                "outer_lr": 0.5,
                "outer_momentum": 0.5,
                "commit_every": COMMIT_EVERY,
                "ranks": size,
                "spares": spares,
                "failures": [failure._asdict() for failure in failures],
                "runs": list(runs(settings, size, spares, failures)),
            }


if __name__ == "__main__":
    raise SystemExit(main(FILE, all_cases()))
