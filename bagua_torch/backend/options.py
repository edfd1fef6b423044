"""`BackendOptions`: what a group of the backend "bagua" does differently from others."""

from __future__ import annotations

from dataclasses import dataclass

from bagua_comm import ArrayError, ErrorFeedback, Hierarchical
from bagua_comm.averages import Average


@dataclass(frozen=True)
class BackendOptions:
    """Options of a process group of the backend "bagua", the same on all its ranks.

    Give them to `init_process_group` or `new_group` as `pg_options`.

    Args:
        average: How `all_reduce` and `reduce_scatter` add and average floats: by `Quantized(codec)`,
            `Reproducible()`, or another average without a residual; if None, exactly. It applies to every such
            call of the group with SUM or AVG of a dtype that the average takes, except to a `reduce_scatter` of
            parts that differ in size. `Reproducible()` takes no float64, and a sum of those warns. The
            time limit is that of the group, whatever the call says.
            Make a group for the gradients alone:
            `DistributedDataParallel(model, process_group=dist.new_group(pg_options=...))`.

    Raises:
        ArrayError: `average` is no average, or keeps a residual, which belongs to one array.

    >>> from bagua_comm import MinMaxUInt8, Quantized
    >>> BackendOptions(average=Quantized(MinMaxUInt8())).average
    Quantized(codec=MinMaxUInt8(...), ...)
    """

    average: Average | None = None

    def __post_init__(self) -> None:
        if self.average is not None and not (hasattr(self.average, "bind") and hasattr(self.average, "check")):
            raise ArrayError(
                f"BackendOptions: average is {self.average!r}, expected an average such as Reproducible() or "
                "Quantized(MinMaxUInt8()), or None for the exact one"
            )
        inner = self.average.inner if isinstance(self.average, Hierarchical) else self.average
        if isinstance(inner, ErrorFeedback):
            raise ArrayError(
                f"BackendOptions: average is {self.average}, which keeps a residual of one array, but a group "
                f"averages many; use {inner.inner}, or bagua_torch.DistributedDataParallel"
            )
