"""The contract of a transport: former names of its hooks."""

import numpy as np
import pytest

from bagua_comm import CommError
from bagua_comm.testing import run_ranks
from bagua_comm.transports import LocalTransport


def test_a_hook_under_its_former_name_is_called_under_the_new_one():
    with pytest.warns(DeprecationWarning, match="Transport.shortcut is now Transport.fast_path"):

        class Own(LocalTransport):
            def shortcut(self, name, x, op="", root=None):
                return name

    assert Own().fast_path("allreduce", np.ones(1)) == "allreduce"


def test_a_call_of_a_hook_by_its_former_name_warns_and_works():
    transport = LocalTransport()
    for former, call in (
        ("tell", lambda: transport.tell("a group", CommError("an error"))),
        ("heard", lambda: transport.heard(["a group"])),
    ):
        with pytest.warns(DeprecationWarning, match=f"Transport.{former} is now"):
            assert call() is None


def test_a_hook_under_its_former_name_can_call_the_one_that_it_overrides():
    class Middle(LocalTransport):
        def fast_path(self, name, x, op="", root=None):
            return [name, super().fast_path(name, x, op, root)]

    with pytest.warns(DeprecationWarning, match="is now Transport"):

        class Own(Middle):
            def shortcut(self, name, x, op="", root=None):
                return [op, super().shortcut(name, x, op, root)]

            def heard(self, groups):
                return super().heard(groups)

            def tell(self, group, error):
                super().tell(group, error)

    transport, middle, x = Own(), Middle(), np.ones(1)
    with pytest.warns(DeprecationWarning, match="Transport.shortcut is now Transport.fast_path"):
        assert transport.fast_path("allreduce", x, "sum") == ["sum", ["allreduce", transport._copy_alone]]
    with pytest.warns(DeprecationWarning, match="Transport.tell is now Transport.notify_failure"):
        transport.notify_failure("a group", CommError("an error"))
    with pytest.warns(DeprecationWarning, match="Transport.heard is now Transport.poll_failures"):
        assert transport.poll_failures(["a group"]) is None
    with pytest.warns(DeprecationWarning, match="Transport.shortcut is now Transport.fast_path"):
        assert middle.shortcut("allreduce", x) == ["allreduce", middle._copy_alone]


def test_a_class_may_define_a_hook_under_both_names():
    class Own(LocalTransport):
        def fast_path(self, name, x, op="", root=None):
            return name

        shortcut = fast_path

    assert Own().fast_path("allreduce", np.ones(1)) == Own().shortcut("allreduce", np.ones(1)) == "allreduce"


def test_derived_collectives_under_their_former_names():
    def body(comm):
        (transport,), x = comm.transports, np.arange(4.0) + comm.rank
        table, whole, chunk, root = np.empty((2, 4)), np.empty(4), np.empty(2), np.empty(4)
        for name, arguments in (
            ("allreduce", (x, whole, "sum")),
            ("reduce_scatter", (list(x.reshape(2, 2)), chunk, "sum")),
            ("reduce", (x, root if comm.rank == 0 else None, 0, "sum")),
            ("allgather", (x, table)),
            ("alltoall", (x.reshape(2, 2), table[:, :2].copy())),
        ):
            getattr(transport, f"{name}_over")(transport.agree_on_call(name, x), *arguments)
        return whole.tolist(), chunk.tolist(), table.tolist(), comm.rank or root.tolist()

    total = [1, 3, 5, 7]
    table = [[0, 1, 2, 3], [1, 2, 3, 4]]
    with pytest.warns(DeprecationWarning, match=r"Transport\.\w+_over is now derived\.\w+$"):
        assert run_ranks(2, body) == [(total, total[:2], table, total), (total, total[2:], table, 1)]
