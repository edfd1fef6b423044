"""Host arrays over MPI; `MPITransport` starts MPI, and `tuning` alone does not."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .transport import MPITransport

__all__ = ["MPITransport"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .transport import MPITransport

    return MPITransport
