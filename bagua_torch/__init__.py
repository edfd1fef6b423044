"""PyTorch on bagua_comm: tensors by DLPack, and a DistributedDataParallel over any algorithm."""

from bagua_comm.elastic.start import register_torchrun_fleet
from bagua_comm.trace import listen

try:
    import torch as _torch  # noqa: F401 - imported here, for the message below
except ModuleNotFoundError as exc:
    if exc.name != "torch":
        raise
    raise ModuleNotFoundError(
        "bagua_torch needs PyTorch: pip install 'bagua-comm[torch]', or before that its smaller build for the "
        "CPU, by the command on PyTorch's installation page",
        name="torch",
    ) from exc

from . import backend, functional
from .arrays import as_array, as_tensor, torch_stream
from .backend.averaging import BackendOptions
from .backend.precheck import precheck
from .ddp import DistributedDataParallel, comm_hook
from .ddp.checkpoint import Checkpoints
from .lightning.names import register_names
from .moe import MoE
from .optimizers import Muon, QAdamOptimizer, fuse
from .process_group import ProcessGroupTransport, connect
from .process_group.fleet import start_fleet
from .sync_batchnorm import SyncBatchNorm
from .tensors.broadcast import broadcast_optimizer, broadcast_tensors
from .training import profiler

listen(profiler.RANGES)
register_names()
register_torchrun_fleet(start_fleet)
backend.register()

__all__ = [
    "BackendOptions",
    "Checkpoints",
    "DistributedDataParallel",
    "MoE",
    "Muon",
    "ProcessGroupTransport",
    "QAdamOptimizer",
    "SyncBatchNorm",
    "as_array",
    "as_tensor",
    "broadcast_optimizer",
    "broadcast_tensors",
    "comm_hook",
    "connect",
    "functional",
    "fuse",
    "precheck",
    "torch_stream",
]
