"""Parameters that were frozen when the module was wrapped, and are unfrozen later.

All ranks unfreeze the same parameters between the same two steps. They agree on it in the next training forward
pass, where the engine exchanges buckets. A rank that has unfrozen nothing makes another call there, which is an
error on all ranks. The parameters get new buckets after the existing ones, so no state of the algorithm moves.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from bagua_comm import ArrayError, CommMismatch, UnsupportedError
from bagua_comm.algorithms.base import runs_in_rounds
from bagua_comm.engine import check_fit

from ..entry import errors_on_all
from ..errors import MismatchError
from ..tensors import checks
from .exchange import BucketExchange


def check(
    unfrozen: Mapping[str, nn.Parameter], exchange: BucketExchange, *, apart: bool, late: bool, opened: bool
) -> None:
    """Raise on all ranks unless all have unfrozen these parameters in the same step, and can train them.

    Collective, unless this rank cannot unfreeze any now.

    Args:
        unfrozen: The parameters, by name.
        exchange: The buckets of the parameters that are trained already.
        apart: Whether ranks may be in different steps.
        late: Whether a backward pass has begun.
        opened: Whether there was a forward pass whose backward pass has not ended.

    Raises:
        ArrayError: No optimizer steps one of them, a step has begun, or it is too late.
        CommMismatch: The ranks have unfrozen different ones, or not in the same step. A RuntimeError as well.
        UnsupportedError: Ranks may be in different steps; the algorithm cannot add parameters, or cannot train
            these.
    """
    name, engine = next(iter(unfrozen)), exchange.engine
    if late:
        raise ArrayError(
            f"DistributedDataParallel: {name!r} was unfrozen before a forward pass in evaluation mode; its "
            "gradients are averaged only from a forward pass in training mode on: call train() before it"
        )
    if apart or runs_in_rounds(engine.algorithm):
        raise UnsupportedError(
            f"DistributedDataParallel: {name!r} was unfrozen while ranks may be in different steps (in `join`, "
            "between `stop` and `resume`, or with AsyncModelAverage), but all must begin to train it together; "
            "wrap the module while it has requires_grad=True, and freeze it afterwards"
        )
    mine = [(n, tuple(p.shape), str(p.dtype), checks.in_memory(p)) for n, p in unfrozen.items()]
    rank = exchange.comm.rank
    try:
        rows = engine.agree(mine)
    except CommMismatch as exc:
        raise MismatchError(
            f"DistributedDataParallel: rank {rank} has unfrozen {_listed(mine)}, but not all ranks "
            f"have unfrozen parameters between the same two steps; {exc}"
        ) from exc
    for other_rank, theirs in enumerate(rows):
        if theirs != mine:
            raise MismatchError(
                f"DistributedDataParallel: rank {rank} has unfrozen {_listed(mine)}, but rank {other_rank} "
                f"{_listed(theirs)}; unfreeze the same parameters on all ranks, between the same two steps"
            )
    with errors_on_all(exchange.comm):
        checks.check_may_begin(name, engine.algorithm)
        checks.check_memory(unfrozen)
        for other, parameter in unfrozen.items():
            if parameter.device != engine.device:
                raise UnsupportedError(
                    f"DistributedDataParallel: {other!r} was unfrozen on {parameter.device}, expected "
                    f"{engine.device}, where the other parameters are"
                )
        trained = {**exchange.model.trained, **unfrozen}
        checks.check_optimizers(exchange.optimizers, trained, engine.algorithm)
        check_fit(engine.algorithm, exchange.extended_plan(unfrozen), exchange.comm.size)
        if engine.holds or (opened and engine.exchanging):
            raise ArrayError(
                f"DistributedDataParallel: {name!r} was unfrozen within a step, between a "
                "forward pass and its backward pass or between two microbatches; unfreeze it after the "
                "optimizer's step"
            )


def _listed(rows: list[tuple[str, tuple[int, ...], str, str]]) -> str:
    """The names and properties of parameters as text."""
    shown = ", ".join(f"{name!r} {shape} of {dtype}, {where}" for name, shape, dtype, where in rows[:3])
    return shown + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")
