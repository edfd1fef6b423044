"""The contract of a transport: former names of its hooks."""

import numpy as np
import pytest

from bagua_comm import CommError
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
