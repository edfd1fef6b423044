"""The lengths of all samples, found by all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ..arrays import Array
from ..bootstrap import default
from ..comm import Communicator
from ..errors import ArrayError, CommMismatch
from .cache import Cache
from .stores import Store


class Dataset(Protocol):
    """A sequence of samples, such as a list or a map-style data set of PyTorch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> object: ...


def measure(
    dataset: Dataset,
    fn: Callable[[Any], float],
    comm: Communicator | None = None,
    *,
    store: Store | None = None,
    name: str = "lengths",
) -> Array:
    """Compute `fn(sample)` of all samples, for `BalancedSampler`; each rank calls it on its share.

    Collective.

    Args:
        dataset: The same on all ranks.
        fn: Returns the cost of a sample, such as its number of tokens.
        comm: The ranks; `bagua_comm.default()` if None.
        store: A store of the result for the next program; only rank 0 uses it.
        name: The name of the result in the store; change it with the data or `fn`.

    Returns:
        float64, (samples,), the same on all ranks.

    Raises:
        CommMismatch: Data sets differ in length.
        ArrayError: `fn` returned a value that is not a finite number from 0 on; raised on all ranks. Another
            error of `fn` or of the data set is raised unchanged on the first rank that has one, and with its
            text on others.

    >>> from bagua_comm.testing import run_ranks
    >>> run_ranks(2, lambda comm: measure(["a", "bcd", "ef"], len, comm))[1]
    array([1., 3., 2.])
    """
    comm = default() if comm is None else comm
    n = len(dataset)
    counts = comm.allgather_object(n)
    if len(set(counts)) > 1:
        raise CommMismatch(f"measure: the data set has {counts} samples on ranks 0 to {comm.size - 1}")
    cache = None
    if store is not None and comm.rank == 0:
        cache = Cache(store, name=f"measure/{name}", buffer_bytes=0)
    found = comm.broadcast_object(None if cache is None else cache.peek(str(n)), root=0)
    if isinstance(found, np.ndarray) and found.shape == (n,):
        return found
    mine = np.zeros(-(-n // comm.size))
    error: Exception | None = None
    try:
        for place, index in enumerate(range(comm.rank, n, comm.size)):
            mine[place] = _checked(index, fn(dataset[index]))
    except Exception as exc:
        error = exc
    failed = comm.allgather_object(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(failed):
        if text is not None:
            raise ArrayError(f"measure: rank {rank} failed: {text}")
    lengths: Array = comm.allgather(mine).T.reshape(-1)[:n].copy()
    if cache is not None:
        cache.put(str(n), lengths)
        cache.close()
    return lengths


def _checked(index: int, value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as exc:
        raise ArrayError(f"measure: fn returned {value!r} for sample {index}, expected a number") from exc
    if not (np.isfinite(number) and number >= 0):
        raise ArrayError(f"measure: fn returned {number} for sample {index}, expected a finite number from 0 on")
    return number
