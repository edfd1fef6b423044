"""Layers of well-known models, and calls of models that communicate, for the cost model."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..codecs import Codec


class Layer(NamedTuple):
    """Tensors whose gradients are complete together."""

    nbytes: int
    share: float
    """The fraction of the backward pass that computes them, in any unit."""


class Blocking(NamedTuple):
    """A call within a forward or backward pass, for which the pass waits."""

    call: Literal["allreduce", "allgather", "alltoall", "reduce_scatter"]
    nbytes: int
    """Bytes of a rank's array; for "alltoall", the same number of bytes for each rank, itself included."""
    times: int = 1
    """Number of these calls in a step."""
    codec: Codec | None = None
    """The encoding of "allgather" and "reduce_scatter", as in `quantized_allgather`; None if they are exact."""


def sync_batchnorm(channels: int, *, layers: int = 1) -> tuple[Blocking, ...]:
    """The calls of `bagua_torch.SyncBatchNorm`, in float64.

    Forward, the ranks gather a count, the number of the layer, whether it runs backward, and a mean and a sum of
    squares for each channel. Backward, they add two gradients for each channel.
    """
    return (
        Blocking("allgather", 8 * (3 + 2 * channels), layers),
        Blocking("allreduce", 8 * 2 * channels, layers),
    )


def sharded(
    nbytes: int,
    ranks: int,
    *,
    modules: int = 1,
    reduce: Codec | None = None,
    gather: Codec | None = None,
    reshard_after_forward: bool = True,
) -> tuple[Blocking, ...]:
    """The calls of a model whose parameters are sharded, as by `bagua_torch.fsdp`, if nothing hides them.

    Each module's parameters are gathered in the forward pass, in the backward pass again if they were resharded,
    and its gradients are reduced. `held_up_s` of a job with these calls is the communication of a step.

    Args:
        nbytes: Bytes of all parameters, and of all gradients.
        ranks: The number of ranks that share them.
        modules: The number of modules that are sharded one by one.
        reduce: The encoding of gradients; None if they are sent exactly.
        gather: The encoding of parameters; None if they are sent exactly.
        reshard_after_forward: Whether parameters are gathered again in the backward pass.

    >>> from bagua_comm import MinMaxUInt8
    >>> from bagua_comm.planning.costmodel import Cluster, Job, held_up_s
    >>> def seconds(codec):
    ...     calls = sharded(4 << 20, 4, reduce=codec, gather=codec)
    ...     return held_up_s(Job(1, blocking=calls), Cluster(4, bandwidth_gbit=0.1))
    >>> round(seconds(None) / seconds(MinMaxUInt8()))
    4
    """
    module = -(-nbytes // modules)
    gathers = 2 if reshard_after_forward else 1
    return (
        Blocking("allgather", -(-module // ranks), gathers * modules, gather),
        Blocking("reduce_scatter", module, modules, reduce),
    )


def mixture_of_experts(
    tokens: int, hidden: int, experts: int, *, k: int = 2, layers: int = 1, itemsize: int = 4
) -> tuple[Blocking, ...]:
    """The calls of `bagua_torch.moe.MoE`, if experts are equally busy.

    Forward, the ranks gather the number of the layer and the number of tokens of each expert, and tokens travel
    to their experts and back. Backward, their gradients do.

    Args:
        tokens: Tokens of a rank in a step.
        hidden: Elements of a token.
        experts: Number of experts on all ranks together.
        k: Number of experts of each token.
        layers: Number of such layers.
        itemsize: Bytes of an element on the wire.
    """
    return (
        Blocking("allgather", 8 * (1 + experts), layers),
        Blocking("alltoall", tokens * k * hidden * itemsize, 4 * layers),
    )


def layers_of(*forward: tuple[int, int, float]) -> tuple[Layer, ...]:
    """Layers in float32 in the order of their gradients, from those in the order of the forward pass.

    Args:
        forward: (count, parameters, work) of groups of equal layers; the work of a layer is in any unit.

    >>> layers_of((1, 100, 0), (2, 50, 1))
    (Layer(nbytes=200, share=1), Layer(nbytes=200, share=1), Layer(nbytes=400, share=0))
    """
    return tuple(Layer(4 * n, work) for count, n, work in reversed(forward) for _ in range(count))


MODELS: dict[str, tuple[Layer, ...]] = {
    "vgg16": layers_of(
        (1, 1_792, 87),
        (1, 36_928, 1850),
        (1, 73_856, 925),
        (1, 147_584, 1850),
        (1, 295_168, 925),
        (2, 590_080, 1850),
        (1, 1_180_160, 925),
        (2, 2_359_808, 1850),
        (3, 2_359_808, 462),
        (1, 102_764_544, 103),
        (1, 16_781_312, 17),
        (1, 4_097_000, 4),
    ),
    "resnet50": layers_of(
        (1, 9_536, 118),
        (1, 75_008, 231),
        (2, 70_400, 218),
        (1, 379_392, 372),
        (3, 280_064, 218),
        (1, 1_512_448, 372),
        (5, 1_117_184, 218),
        (1, 6_039_552, 372),
        (2, 4_462_592, 218),
        (1, 2_049_000, 2),
    ),
    "vit-b16": layers_of((1, 742_656, 116), (12, 7_087_872, 1455), (1, 770_536, 1)),
    "bert-large": layers_of((1, 31_782_912, 0), (24, 12_596_224, 1), (1, 1_049_600, 0)),
    "gpt2": layers_of((1, 39_383_808, 0), (12, 7_087_872, 7.1), (1, 1_536, 38.6)),
    "gpt2-xl": layers_of((1, 82_049_600, 0), (48, 30_740_800, 30.7), (1, 3_200, 80.4)),
}
"""Layers of well-known models in float32: bytes, and millions of multiplications, per image or per token.

Those of BERT are in equal shares. GPT-2's embedding is also the matrix of its output: its multiplications come
first in the backward pass, and its gradient is complete last.
"""
