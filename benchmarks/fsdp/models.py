"""The models that are sharded, their sizes and their batches."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy


class Linear(nn.Module):
    """A stack of linear layers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        """From (n, width) to (n, width)."""
        result: Tensor = self.layers(x)
        return result

    @staticmethod
    def batch(rank: int, options: argparse.Namespace) -> Callable[[nn.Module], Tensor]:
        """The loss of a model on a batch of this rank."""
        x = torch.randn(options.batch_size, options.width, generator=torch.Generator().manual_seed(rank))
        return lambda model: model(x).square().mean()


class GPT(nn.Module):
    """The decoder of Radford et al., "Language Models are Unsupervised Multitask Learners", 2019."""

    VOCABULARY, CONTEXT = 8192, 32

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(self.VOCABULARY, width), nn.Embedding(self.CONTEXT, width)
        make = partial(nn.TransformerEncoderLayer, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(make(width, width // 64, 4 * width, 0.0) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """From (n, context) tokens to (n, context, vocabulary) logits of the next ones."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @classmethod
    def batch(cls, rank: int, options: argparse.Namespace) -> Callable[[nn.Module], Tensor]:
        """The loss of a model on a batch of this rank."""
        shape, generator = (options.batch_size, cls.CONTEXT + 1), torch.Generator().manual_seed(rank)
        rows = torch.randint(cls.VOCABULARY, shape, generator=generator)
        return lambda model: cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


MODELS: dict[str, Any] = {"linear": Linear, "gpt": GPT, "gpt-120m": GPT}

SIZES = {"linear": (1024, 4), "gpt": (512, 8), "gpt-120m": (768, 16)}
"""The width and the layers of each, unless arguments say otherwise: "gpt" has 30 million parameters."""


def sharded(options: argparse.Namespace, mesh: DeviceMesh | None) -> nn.Module:
    """The model of `options`, with each layer sharded."""
    model = MODELS[options.model](options.width, options.layers)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
