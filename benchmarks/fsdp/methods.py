"""The ways in which a sharded model communicates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import bagua_torch.fsdp
from bagua_comm import (
    Algorithm,
    Average,
    Communicator,
    DiLoCo,
    ErrorFeedback,
    Exact,
    Int4,
    Quantized,
    SparseLoCo,
    StreamingDiLoCo,
)
from bagua_torch.fsdp import Attachment

EIGHT_BITS = Quantized(min_bytes=0)
FOUR_BITS = Quantized(Int4(), min_bytes=0)


@dataclass(frozen=True)
class Method:
    """How gradients are reduced, and parameters gathered; None for PyTorch's own."""

    reduce: Average | None = None
    gather: Exact | Quantized | None = None
    by_host: bool = False
    """Whether each host keeps the whole model in its shards."""
    replicas: Average | DiLoCo | StreamingDiLoCo | SparseLoCo | None = None
    overlap: bool = False
    muon: bool = False
    """Whether Muon steps the matrices of blocks, and AdamW the rest."""

    def attach(
        self, model: nn.Module, comm: Communicator, optimizer: torch.optim.Optimizer | None = None
    ) -> Attachment | None:
        """Let a sharded model communicate so. Collective."""
        if self.reduce is None:
            return None
        stepped = optimizer if isinstance(self.replicas, Algorithm) else None
        return bagua_torch.fsdp.attach(
            model,
            self.reduce,
            self.gather,
            comm,
            replicas=self.replicas,
            optimizers=stepped,
            overlap=self.overlap,
        )


METHODS = {
    "PyTorch": Method(),
    "exact": Method(Exact(), Exact()),
    "exact, overlap": Method(Exact(), Exact(), overlap=True),
    "gradients in eight bits": Method(EIGHT_BITS, Exact()),
    "eight bits": Method(EIGHT_BITS, EIGHT_BITS),
    "eight bits, overlap": Method(EIGHT_BITS, EIGHT_BITS, overlap=True),
    "four bits, overlap": Method(FOUR_BITS, FOUR_BITS, overlap=True),
    "PyTorch, replicas": Method(by_host=True),
    "eight bits, replicas": Method(Exact(), Exact(), by_host=True, replicas=EIGHT_BITS),
}
"""Those whose steps are timed; without overlap, computing waits for each exchange."""

TRAINED = {
    **{name: METHODS[name] for name in ("PyTorch", "exact", "gradients in eight bits", "eight bits")},
    "error feedback, exact parameters": Method(ErrorFeedback(), Exact()),
    "error feedback": Method(ErrorFeedback(), EIGHT_BITS),
}
"""Those whose losses are compared; overlap changes no bit."""

LOCAL_STEPS = {
    "DiLoCo, eight bits": DiLoCo(30, average=EIGHT_BITS),
    "StreamingDiLoCo, four bits": StreamingDiLoCo(30, 4, 5, average=FOUR_BITS),
    "SparseLoCo": SparseLoCo(30, whole_below=4096, divide="senders"),
}
"""Exchanges of weights between sites."""

BETWEEN_SITES = {
    "PyTorch": Method(by_host=True),
    "exact": Method(Exact(), Exact(), by_host=True, replicas=Exact()),
    **{
        f"{name}{', Muon' if muon else ''}": Method(
            Exact(), Exact(), by_host=True, replicas=replicas, overlap=True, muon=muon
        )
        for muon in (False, True)
        for name, replicas in LOCAL_STEPS.items()
    },
}
"""Those of `benchmarks.fsdp.sites`: on a mesh of two dimensions, with a replica at each site."""
