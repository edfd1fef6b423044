"""The residuals of a sharded model as `elastic.run` commits them, and restores them on any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.functional import pad

from bagua_comm import Communicator, Own

from ..arrays import as_array, as_tensor
from .collectives import FeedsBack


def keep_residuals(
    comm: Communicator, reductions: Mapping[str, FeedsBack], wait: Callable[[], None]
) -> list[Residuals]:
    """Let `elastic.run`, if it made `comm`, commit the residuals of these reductions, and restore them.

    Collective. On another number of ranks each rank gets the mean of all residuals, since later averages
    compensate the mean over the ranks. Residuals of a rank's shard of gradients, or of shards along another axis
    than the first, restart at zero.

    Args:
        comm: The communicator of the model.
        reductions: The reductions with a residual, by module.
        wait: Ends what is under way.

    Returns:
        What is committed, until the registry drops it.
    """
    registry = comm.engine_registry
    if registry is None or not reductions:
        return []
    movable = Residuals({name: each for name, each in reductions.items() if each.rows is not None}, wait)
    others = Residuals({name: each for name, each in reductions.items() if each.rows is None}, wait)
    registry.keep(Own(movable, "mean"))
    registry.keep(Own(others, "drop"))
    return [movable, others]


class Residuals:
    """An object with a state; see `keep_residuals`."""

    def __init__(self, reductions: Mapping[str, FeedsBack], wait: Callable[[], None]) -> None:
        self._reductions, self._wait = reductions, wait

    def state_dict(self) -> dict[str, tuple[torch.Tensor, int | None]]:
        """By module the residual, without the padding of shards, and the number of means since the last reset."""
        self._wait()
        return {name: (_unpadded(each), each.means) for name, each in self._reductions.items()}

    def load_state_dict(self, state: Mapping[str, tuple[torch.Tensor, int | None]]) -> None:
        """Continue from a result of `state_dict`; from zeros, with a warning, if it is of other modules."""
        self._wait()
        mine = {name: _unpadded(each).shape for name, each in self._reductions.items()}
        if mine != {name: x.shape for name, (x, _) in state.items()}:
            text = "elastic.run: the residuals of a sharded model restart at zero, as other ones were committed"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return
        for name, each in self._reductions.items():
            whole, means = state[name]
            each.continue_from(as_array(_padded(whole, each).to(each.device, each.dtype, copy=True)), means)


def _unpadded(reduction: FeedsBack) -> torch.Tensor:
    """The residual of the gradients of whole parameters, one after the other; as it is without `rows`."""
    flat = as_tensor(reduction.residual_or_zeros())
    if reduction.rows is None:
        return flat
    shards = torch.split_with_sizes(flat.view(reduction.ranks, -1), _widths(reduction.rows, reduction.ranks), 1)
    pairs = zip(shards, reduction.rows, strict=True)
    return torch.cat([shard.reshape(-1)[: rows * width] for shard, (rows, width) in pairs])


def _padded(whole: torch.Tensor, reduction: FeedsBack) -> torch.Tensor:
    """The opposite of `_unpadded`."""
    if reduction.rows is None:
        return whole
    ranks = reduction.ranks
    parts = torch.split_with_sizes(whole, [rows * width for rows, width in reduction.rows])
    pairs = zip(parts, _widths(reduction.rows, ranks), strict=True)
    padded = [pad(part, (0, ranks * width - part.numel())).view(ranks, width) for part, width in pairs]
    return torch.cat(padded, 1).reshape(-1)


def _widths(rows: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    """The elements of each parameter in the padded shards of a rank."""
    return [-(-count // ranks) * width for count, width in rows]
