"""The state of an algorithm over shards, as sharded tensors: it loads on any mesh on which the model is sharded.

    {"facts":            the algorithm, the number of steps, and what is counted
     "shared":           anchors and momenta, equal in all replicas
     "replica 0":        what a replica has of its own, as the residuals of SparseLoCo}

Tensors are by the name of their parameter, and sharded as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from bagua_comm import ArrayError
from bagua_comm.algorithms.diloco import OuterAlgorithm
from bagua_comm.algorithms.state import MOVED, StateHeader, rules_of, with_tensors
from bagua_comm.arrays import Array, zeros_like
from bagua_comm.checkpoint.engines import tree_of_engine
from bagua_comm.errors import shown

from ..arrays import as_array, as_tensor
from ..tensors.broadcast import map_leaves
from ..training.engine import TorchEngine
from .torch_names import DTensor, TrainedShard

_TOGETHER = "of one checkpoint"
"""In place of the digest by which ranks see that they saved together: here each array is one of all ranks."""


def outer_state(
    engine: TorchEngine,
    shards: Mapping[str, TrainedShard],
    own: str,
    place: Callable[[object], object] = lambda tensor: tensor,
) -> dict[str, object]:
    """The state of an engine over these shards; call it between steps.

    Args:
        engine: The engine.
        shards: The shards of this rank, by name.
        own: The key of what belongs to this replica alone.
        place: Gives the tensors of this replica another mesh than that of the parameters.
    """
    engine.complete_step()
    tree = tree_of_engine(engine)
    own_tensors = {name: dict(pieces) for name, pieces in tree["mean"].value.items()}
    assert isinstance(engine.algorithm, OuterAlgorithm)
    if engine.algorithm.mean.has_residual:  # which there is none of before the first mean
        for bucket, state in zip(engine.buckets, engine.states, strict=True):
            (path,) = (path for path in rules_of(state) if path.endswith("residual"))
            for name, view in bucket.views.items():
                own_tensors.setdefault(name, {}).setdefault(path, zeros_like(view))

    def sharded(part: Mapping[str, Mapping[str, Array]]) -> dict[str, dict[str, DTensor]]:
        return {
            name: {path: shards[name].sharded(as_tensor(x)) for path, x in pieces.items()}
            for name, pieces in part.items()
        }

    facts = {key: value for key, value in tree["facts"].value.items() if key not in ("rank", "digest")}
    found: dict[str, object] = {"facts": facts, "shared": sharded(tree["alike"])}
    mine: dict[str, object] = map_leaves(sharded(own_tensors), place)
    return {**found, own: mine} if mine else found


def engine_state(shards: Mapping[str, TrainedShard], own: str, state: Mapping[str, object]) -> dict[str, object]:
    """The argument of `Engine.load_state_dict` from a result of `outer_state`, sharded as these shards are.

    Raises:
        ArrayError: It is of other parameters, or lacks something.
    """
    try:
        facts = dict(_inside(state["facts"]))
        tensors = {name: dict(_inside(found)) for name, found in _inside(facts.pop("numbers")).items()}
        for part in (state["shared"], state.get(own, {})):
            for name, pieces in _inside(part).items():
                for path, x in _inside(pieces).items():
                    tensors[name][path] = as_array(_padded(shards[name], x))
    except (KeyError, RuntimeError, TypeError) as exc:
        raise ArrayError(
            f"bagua_torch.fsdp: this is no state of local steps of this model ({type(exc).__name__}: {exc}); "
            "expected what state_dict() of a handle has, loaded by torch.distributed.checkpoint"
        ) from exc
    header = {key: facts.get(key, 0) for key in StateHeader._fields}
    return with_tensors({**header, "digest": _TOGETHER, MOVED: True}, tensors)


def _inside(state: object) -> Mapping[str, object]:
    if not isinstance(state, Mapping):
        raise TypeError(f"a {type(state).__name__} in place of a dict")
    return state


def _padded(shard: TrainedShard, tensor: object) -> torch.Tensor:
    """The elements of a sharded tensor on this rank, flat, with padding."""
    if not isinstance(tensor, DTensor) or tensor.shape != shard.parameter.shape:
        raise TypeError(f"{shown(tensor)} in place of a tensor sharded as one of {tuple(shard.parameter.shape)}")
    flat = torch.zeros_like(shard.padded, memory_format=torch.contiguous_format)
    shard.unpadded(flat).copy_(tensor.to_local())
    return flat.view(-1)
