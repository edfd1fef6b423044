"""Gradients of a ResNet in the course of training, beside PyTorch's own. Run by tests/test_mpirun.py."""

import pytest
import torch
from support.torch_training import assert_gradients_match_those_of_torch, sgd
from torch import nn

pytestmark = pytest.mark.mpi


class ResNet18(nn.Module):
    """He et al., "Deep Residual Learning for Image Recognition", arXiv 1512.03385, table 1; narrow."""

    def __init__(self, width=8, classes=10):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = []
        for stage in range(4):
            blocks.append(Block(widths[stage], widths[stage + 1], stride=1 if stage == 0 else 2))
            blocks.append(Block(widths[stage + 1], widths[stage + 1], stride=1))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        return torch.relu(self.residual(x) + self.shortcut(x))


def loss_of_resnet(model, data):
    images, labels = torch.randn(8, 3, 32, 32, generator=data), torch.randint(0, 10, (8,), generator=data)
    return nn.functional.cross_entropy(model(images.to(next(model.parameters()).dtype)), labels)


# It amplifies a difference of one rounding by orders of magnitude in every step, through ReLUs that switch and
# the statistics of small batches: in float64 there is room for that, in float32 every step begins alike.
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "steps", "aligned"), [(torch.float64, 20, False), (torch.float32, 5, True)])
def test_gradients_match_those_of_torch_in_every_step(dtype, steps, aligned, comm, gloo):
    assert_gradients_match_those_of_torch(
        comm, ResNet18, loss_of_resnet, sgd, dtype=dtype, steps=steps, aligned=aligned, tolerance=1e-6
    )
