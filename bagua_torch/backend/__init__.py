"""The backend "bagua" of torch.distributed: process groups whose calls are those of a communicator."""

import torch.distributed as dist


def register() -> None:
    """Register the backend, unless this PyTorch was built without torch.distributed."""
    if dist.is_available():
        from .start import register_backend

        register_backend()
