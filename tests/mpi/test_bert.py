"""Gradients of a BERT in the course of training, beside PyTorch's own. Run by tests/test_mpirun.py."""

import pytest
import torch
from support.torch_training import assert_gradients_match_those_of_torch
from transformers import BertConfig, BertForSequenceClassification

pytestmark = pytest.mark.mpi


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


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def test_gradients_match_those_of_torch_in_every_step(comm, gloo):
    assert_gradients_match_those_of_torch(comm, bert, loss_of_bert, adamw, tolerance=1e-5)
