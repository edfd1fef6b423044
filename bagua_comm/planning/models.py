"""Layers of well-known models, for the cost model."""

from __future__ import annotations

from typing import NamedTuple


class Layer(NamedTuple):
    """Tensors whose gradients are complete together."""

    nbytes: int
    share: float
    """The fraction of the backward pass that computes them, in any unit."""


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
