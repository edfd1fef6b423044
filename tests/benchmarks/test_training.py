"""The benchmark of training: what it measures and writes, the shapes of its models, and its report."""

import pytest
import torch

from benchmarks.training import models


@pytest.mark.parametrize(
    ("name", "parameters"), [("vgg16", 138_357_544), ("resnet50", 25_557_032), ("bert-large", 335_141_888)]
)
def test_models_have_the_published_numbers_of_parameters(name, parameters):
    with torch.device("meta"):
        assert models.count_parameters(models.MODELS[name].make()) == parameters
