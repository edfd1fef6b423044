"""The names that errors show: those of the methods that users call."""

import numpy as np
import pytest

from bagua_comm import Checkpoints, CommTimeout, Float16, connect
from bagua_comm.comm.public_methods import current_method, public_method
from bagua_comm.testing import run_ranks


def test_the_outermost_method_is_named_and_none_after_an_error():
    @public_method("inner")
    def inner():
        return current_method()

    @public_method("outer")
    def outer(fails=False):
        if fails:
            raise ValueError("no data")
        return inner()

    assert (inner(), outer(), current_method()) == ("inner", "outer", "")
    with pytest.raises(ValueError, match="no data"):
        outer(fails=True)
    assert current_method() == ""


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.send(np.ones(1), 1),
        lambda comm: comm.scatter(),
        lambda comm: comm.allreduce(np.ones(1), operation="max"),
        lambda comm: comm.allreduce_many(1, 2, 3, 4),
        lambda comm: comm.broadcast_object(1),
        lambda comm: comm.transport_for(),
        lambda comm: comm.lane(None, None),
        lambda comm: comm.close(1),
        lambda comm: comm.Allreduce,
        lambda comm: comm.alreduce,
    ],
)
def test_errors_of_python_name_the_class_that_users_know(call):
    """They named 'World', 'PointToPoint', 'GatherScatter'."""
    with connect() as comm, pytest.raises((TypeError, AttributeError), match=r"^'?Communicator\b"):
        call(comm)
    with pytest.raises(TypeError, match=r"^Codec\.steps\(\)"):
        Float16().steps()


def first_error(body):
    """The text of the error that rank 0 of two gets in `body`, which rank 1 does not call."""

    def run(comm):
        if comm.rank == 0:
            with pytest.raises(CommTimeout) as caught:
                body(comm)
            return str(caught.value)
        return None

    return run_ranks(2, run, timeout_s=0.2)[0]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (lambda comm: comm.lane(), "lane (dup() #1): "),
        (lambda comm: comm.by_node(), "by_node (split() #1): "),
        (lambda comm: comm.check_consistency(np.ones(2)), "check_consistency (allreduce("),
        (lambda comm: Checkpoints("folder", comm), "Checkpoints (dup() #1): "),
        (lambda comm: comm.barrier(), "barrier() #1: "),
    ],
)
def test_an_error_names_the_method_that_the_user_called(body, text):
    found = first_error(body)
    assert found.startswith(text)
    assert "before it" not in found


def test_a_save_by_one_rank_alone_is_named_once_with_one_numbering(tmp_path):
    def run(comm):
        checkpoints = Checkpoints(tmp_path, comm)
        comm.barrier()
        if comm.rank == 0:
            with pytest.raises(CommTimeout) as caught:
                checkpoints.save(1, {})
            return str(caught.value), comm.flight.entries()[-1]
        return None

    text, entry = run_ranks(2, run, timeout_s=0.5)[0]
    assert text.startswith("Checkpoints.save (allgather_object() #2 of world.1): ")
    assert text.endswith("before it: allgather_object #1 of world.1")
    assert text.count("Checkpoints") == 1
    assert (entry.method, entry.name, entry.number) == ("Checkpoints.save", "allgather_object", 2)
