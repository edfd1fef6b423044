"""Models of published shapes, in plain torch.nn, and random data for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
"""Inputs, and for each sample the number of the output that should be largest."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a batch on one rank."""

    batch: int = 1
    image: int = 224
    """Height and width of an image, in pixels."""
    sequence: int = 128
    """Tokens of a sequence."""


@dataclass(frozen=True)
class Model:
    """A model to train.

    Args:
        make: Makes its module.
        inputs: Makes random inputs of these sizes.
        outputs: How many outputs it has for each sample.
        samples: What its samples are called.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[Sizes], Tensor]
    outputs: int
    samples: str

    def make_batch(self, sizes: Sizes, seed: int) -> Batch:
        """Random inputs and targets, the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.inputs(sizes), torch.randint(self.outputs, (sizes.batch,))


def images(sizes: Sizes) -> Tensor:
    return torch.randn(sizes.batch, 3, sizes.image, sizes.image)


def tokens(sizes: Sizes) -> Tensor:
    return torch.randint(VOCABULARY, (sizes.batch, sizes.sequence))


def stacked(layers: Iterable[nn.Module]) -> nn.Sequential:
    """The layers in sequence; convolutions are initialized as by He et al., arXiv 1502.01852."""
    model = nn.Sequential(*layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


# VGG16 ------------------------------------------------------------------------------------------------

CLASSES = 1000


def make_vgg16() -> nn.Module:
    """Configuration D of Simonyan and Zisserman, arXiv 1409.1556."""
    layers: list[nn.Module] = []
    channels = 3
    for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    features = channels * 7 * 7
    for width in (4096, 4096):
        layers += [nn.Linear(features, width), nn.ReLU(inplace=True), nn.Dropout()]
        features = width
    return stacked([*layers, nn.Linear(features, CLASSES)])


# ResNet-50 --------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """Three convolutions, of which the second has the stride, and a shortcut around them."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            *convolved(channels, width, 1),
            nn.ReLU(inplace=True),
            *convolved(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolved(width, outputs, 1),
        )
        same = channels == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolved(channels, outputs, 1, stride))
        self.end = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """From (n, channels, h, w) to (n, 4 width, h / stride, w / stride)."""
        return self.end(self.path(x) + self.shortcut(x))


def convolved(channels: int, width: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """A convolution without bias, and its BatchNorm."""
    convolution = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(width)


def make_resnet50() -> nn.Module:
    """ResNet-50 of He et al., arXiv 1512.03385, with strides in the 3 x 3 convolutions, as is usual today."""
    layers = [*convolved(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for width, blocks, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(channels, width, 1 if number else first_stride))
            channels = 4 * width
    return stacked([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)])


# BERT-Large -------------------------------------------------------------------------------------------

VOCABULARY, POSITIONS, TYPES = 30522, 512, 2


class Bert(nn.Module):
    """The encoder of Devlin et al., arXiv 1810.04805, with the pooler: from (n, sequence) to (n, width)."""

    def __init__(self, *, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(POSITIONS, width)
        self.types = nn.Embedding(TYPES, width)
        self.norm = nn.Sequential(nn.LayerNorm(width), nn.Dropout(0.1))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.pooler = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        """The pooled first token; all tokens are of the first type."""
        embedded = self.tokens(x) + self.positions.weight[: x.shape[1]] + self.types.weight[0]
        return self.pooler(self.encoder(self.norm(embedded))[:, 0])


def make_bert_large() -> nn.Module:
    return Bert(width=1024, layers=24, heads=16)


# Small, for tests -------------------------------------------------------------------------------------


def make_tiny() -> nn.Module:
    return stacked(
        [
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(8),
            nn.Flatten(),
            nn.Linear(1024, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        ]
    )


MODELS = {
    "vgg16": Model(make_vgg16, images, CLASSES, "images"),
    "resnet50": Model(make_resnet50, images, CLASSES, "images"),
    "bert-large": Model(make_bert_large, tokens, 1024, "sequences"),
    "tiny": Model(make_tiny, images, 10, "images"),
}


def count_parameters(model: nn.Module) -> int:
    """Number of trained parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())
