"""Checks of an engine's plan, algorithm and state, with the same outcome on all ranks."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from ..algorithms.base import Algorithm, check_size
from ..bucket import Plan
from ..comm import Communicator
from ..errors import CommMismatch


def check_fit(algorithm: Algorithm, plan: Plan, size: int) -> None:
    """Raise unless the algorithm can exchange the tensors of `plan` over `size` ranks.

    Raises:
        ArrayError: It does not support this number of ranks, or these buckets.
        UnsupportedError: It cannot exchange the dtype of a tensor; the message names the tensor.
    """
    for bucket in plan.buckets:
        try:
            algorithm.check(bucket.dtype)
        except TypeError as exc:
            names = ", ".join(repr(tensor.name) for tensor in bucket.tensors[:3])
            raise type(exc)(f"tensor {names}: {exc}") from exc
    check_size(algorithm, size)
    algorithm.check_plan(plan)


def check_same_training(comm: Communicator, plan: Plan, algorithm: Algorithm, storage: object = None) -> str:
    """Raise unless all ranks have this plan and this algorithm; return a new token, the same on all ranks.

    Collective. The payloads in `storage` are compared as well, if it has several.

    Raises:
        CommMismatch: They differ.
    """
    payloads = sorted(map(str, storage)) if isinstance(storage, Mapping) else []
    mine = (plan.digest(), repr(algorithm), f"storage for {payloads}")
    rows = comm.allgather_object((mine, new_token()))
    for rank, (other, _) in enumerate(rows):
        if other != mine:
            i = next(i for i in range(3) if other[i] != mine[i])
            raise CommMismatch(
                f"rank {comm.rank} and rank {rank} have different {('plans', 'algorithms', 'storage')[i]}: "
                + (f"{mine[i]} and {other[i]}" if i else "the tensors differ")
            )
    token: str = rows[0][1]
    return token


def new_token() -> str:
    """A random string that identifies a training run."""
    return secrets.token_hex(8)
