"""The memory of buckets of shards: of each parameter of a sharded model, the part that this rank keeps.

Shards are parts of buckets, as the weights of `bagua_torch.DistributedDataParallel` are, so that the engine
exchanges them in place. They have their padding there: all ranks have the same buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from bagua_comm import Algorithm, ArrayError, Plan, StreamingDiLoCo, TensorSpec
from bagua_comm.algorithms.diloco import OuterAlgorithm
from bagua_comm.bucket import DEFAULT_BUCKET_BYTES

from ..arrays import dtype_name
from ..tensors.memory import BucketMemory, pack
from .torch_names import TrainedShard


class Fragments:
    """The fragments of `StreamingDiLoCo`, of whole parameters: the same on any mesh, and without shards.

    Args:
        algorithm: The algorithm, with a number of fragments.
        shards: The shards of the parameters that are trained, by name.
    """

    def __init__(self, algorithm: StreamingDiLoCo, shards: Mapping[str, TrainedShard]) -> None:
        wholes = [
            TensorSpec(name, tuple(each.parameter.shape), dtype_name(each.local)) for name, each in shards.items()
        ]
        self._of = dict(zip(shards, algorithm.groups(wholes), strict=True))
        self.__qualname__ = str(algorithm.fragments)
        """How they are shown in the settings of the algorithm: by their number, as the user gave it."""

    def __call__(self, name: str) -> int:
        """The fragment of a parameter."""
        return self._of[name]


def for_shards(algorithm: OuterAlgorithm, shards: Mapping[str, TrainedShard]) -> OuterAlgorithm:
    """The same algorithm, which divides shards as it divides whole parameters."""
    if isinstance(algorithm, StreamingDiLoCo) and not callable(algorithm.fragments):
        return replace(algorithm, fragments=Fragments(algorithm, shards))
    return algorithm


def plan_of(shards: Mapping[str, TrainedShard], algorithm: Algorithm, ranks: int) -> Plan:
    """The buckets in which these shards are packed for this algorithm, padded for this number of ranks."""
    return pack(_memory_of(shards), algorithm, DEFAULT_BUCKET_BYTES, ranks)


def _memory_of(shards: Mapping[str, TrainedShard]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(each.padded.detach(), requires_grad=False) for name, each in shards.items()}


class ShardMemory(BucketMemory):
    """The tensors behind the buckets of a plan: the shards of this rank.

    Args:
        shards: The shards of the parameters that are trained, by name. All are on one device.
        plan: The buckets.
    """

    def __init__(self, shards: Mapping[str, TrainedShard], plan: Plan) -> None:
        super().__init__(_memory_of(shards), plan)
        self._shards = shards
        self.provide({"weight"})

    @torch.no_grad()
    def reclaim(self) -> None:
        """Move shards back into the buckets that the program has moved: replaced, or converted and back.

        Raises:
            ArrayError: A shard has another shape, dtype or device.
        """
        super().reclaim()
        for name, shard in self._shards.items():
            kept, local = self.parameters[name].detach(), shard.local
            if not local.numel() or local.data_ptr() == kept.data_ptr():
                continue
            mine = shard.unpadded(kept)
            if (mine.shape, mine.dtype, mine.device) != (local.shape, local.dtype, local.device):
                raise ArrayError(
                    f"bagua_torch.fsdp: the shard of {name!r} is {tuple(local.shape)} of {local.dtype} on "
                    f"{local.device} now, expected {tuple(mine.shape)} of {mine.dtype} on {mine.device} as when "
                    "attach was called; close its handle, and call it again"
                )
            mine.copy_(local)
            shard.move_to(kept)
