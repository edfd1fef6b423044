"""Writes the spans of all ranks to a file, for `Communicator.trace`."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from .. import trace
from ..errors import ArrayError
from ..timeline.chrome import chrome_trace, write_trace
from ..trace import Recorder
from .objects import ObjectCalls
from .public_methods import public_method


class Traced:
    """The result of `Communicator.trace`: a `with` block whose spans alone are written when it ends."""

    def __init__(self, comm: ObjectCalls, path: str | Path) -> None:
        self._comm, self._path = comm, path
        self._start_ns = 0

    def __enter__(self) -> Traced:
        if isinstance(self._comm.tracer, Recorder):
            self._start_ns = self._comm.tracer.now_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:  # otherwise the other ranks may not come
            write_spans(self._comm, self._path, self._start_ns)


@public_method("trace")
def write_spans(comm: ObjectCalls, path: str | Path, start_ns: int = 0) -> None:
    """Write the spans and values of all ranks that began at `start_ns` or later; see `Communicator.trace`.

    Collective.
    """
    mine: tuple[list[trace.Span], list[trace.Value], str | None] = ([], [], None)
    try:
        if isinstance(comm.tracer, Recorder):
            spans = [span for span in comm.tracer.spans() if span.start_ns >= start_ns]
            values = [value for value in comm.tracer.values() if value.time_ns >= start_ns]
            mine = (trace.plain(spans), trace.plain_values(values), None)
    except Exception as exc:  # raised below, on all ranks
        mine = ([], [], f"rank {comm.rank} has a span that JSON cannot hold: {exc!r}")
    rows = comm.allgather_object(mine)
    failure: ArrayError | OSError | None = None
    if comm.rank == 0:
        try:
            problem = next((text for *_, text in rows if text is not None), None)
            if problem is not None:
                raise ArrayError(f"trace: {str(path)!r} is not written: {problem}")
            write_trace(path, chrome_trace([row[0] for row in rows], [row[1] for row in rows]))
        except ArrayError as exc:
            failure = exc
        except OSError as exc:
            failure = OSError(exc.errno, exc.strerror or str(exc), str(path))
        except Exception as exc:
            failure = ArrayError(f"trace: {path!r} cannot be written: {exc!r}")
    error: Exception | None = comm.broadcast_object(failure, root=0)
    if error is not None:
        raise error
