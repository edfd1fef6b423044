"""Device arrays over NCCL, through CuPy."""

from .transport import NcclTransport

__all__ = ["NcclTransport"]
