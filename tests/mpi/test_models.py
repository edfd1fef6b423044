"""Gradients of whole models in the course of training, beside PyTorch's own. Run by tests/test_mpirun.py."""

import copy

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from bagua_torch import DistributedDataParallel, as_array

pytestmark = pytest.mark.mpi

STEPS = 20


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


def bert():
    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def loss_of_bert(model, data):
    tokens, labels = torch.randint(0, 100, (4, 12), generator=data), torch.randint(0, 3, (4,), generator=data)
    mask = (torch.arange(12) < torch.randint(6, 13, (4, 1), generator=data)).long()
    return model(input_ids=tokens, attention_mask=mask, labels=labels).loss


def loss_of_resnet(model, data):
    images, labels = torch.randn(8, 3, 32, 32, generator=data), torch.randint(0, 10, (8,), generator=data)
    return nn.functional.cross_entropy(model(images.to(next(model.parameters()).dtype)), labels)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


# A ResNet amplifies a difference of one rounding by orders of magnitude in every step, through ReLUs that switch
# and the statistics of small batches: in float64 there is room for that, in float32 every step begins alike.
@pytest.mark.parametrize(
    ("make", "dtype", "loss_of", "make_optimizer", "aligned", "tolerance"),
    [
        pytest.param(bert, torch.float32, loss_of_bert, adamw, False, 1e-5, id="bert"),
        pytest.param(ResNet18, torch.float64, loss_of_resnet, sgd, False, 1e-6, id="resnet18-float64"),
        pytest.param(ResNet18, torch.float32, loss_of_resnet, sgd, True, 1e-6, id="resnet18-float32"),
    ],
)
def test_gradients_match_those_of_torch_in_every_step(
    make, dtype, loss_of, make_optimizer, aligned, tolerance, comm, gloo
):
    torch.manual_seed(0)
    mine = make().to(dtype)
    theirs = copy.deepcopy(mine)
    my_optimizer, their_optimizer = make_optimizer(mine.parameters()), make_optimizer(theirs.parameters())
    my_ddp = DistributedDataParallel(mine, my_optimizer, comm=comm, bucket_bytes=16_384)
    their_ddp = nn.parallel.DistributedDataParallel(theirs)
    assert len(my_ddp.engine.buckets) > 3

    for step in range(STEPS):
        if aligned:
            theirs.load_state_dict(mine.state_dict())
        for ddp, optimizer in ((my_ddp, my_optimizer), (their_ddp, their_optimizer)):
            torch.manual_seed(100 * step + comm.rank)  # dropout
            optimizer.zero_grad()
            loss_of(ddp, torch.Generator().manual_seed(100 * step + comm.rank)).backward()
        largest = max(parameter.grad.abs().max().item() for parameter in theirs.parameters())
        for (name, parameter), expected in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            what = f"{name} in step {step}"
            torch.testing.assert_close(
                parameter.grad,
                expected.grad,
                rtol=0,
                atol=tolerance * largest,
                msg=lambda text, what=what: f"{what}: {text}",
            )
        my_optimizer.step()
        their_optimizer.step()

    my_ddp.close()
    for parameter in mine.parameters():
        comm.check_consistency(as_array(parameter))
    for (name, value), expected in zip(mine.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(
            value, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
