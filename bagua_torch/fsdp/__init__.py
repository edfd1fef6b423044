"""PyTorch's FSDP2 (`fully_shard`) with the gathers and reductions of this library.

    fully_shard(model)
    handle = bagua_torch.fsdp.attach(model, reduce=Quantized(), gather=Quantized())

Sharding, optimizer and checkpoints stay PyTorch's. Each module's parameters are gathered by one allgather, and
its gradients reduced by one reduce-scatter, exactly or in eight bits, over MPI, gloo or NCCL.
"""

from ..process_group import renew_group
from .attachment import Attachment, attach

__all__ = ["Attachment", "attach", "renew_group"]
