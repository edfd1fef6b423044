"""How a `with` block ends: closed or left."""

import sys

import pytest
from support.children import forked

from bagua_comm.objects.closing import Closing


class Ends(Closing):
    """Notes how it ends."""

    def __init__(self):
        self.ended = []

    def close(self):
        self.ended.append("closed")

    def _leave(self, error):
        self.ended.append(type(error).__name__)


@pytest.mark.parametrize(
    ("leave", "ended"),
    [
        (lambda: None, "closed"),
        (lambda: sys.exit(), "closed"),
        (lambda: sys.exit(0), "closed"),
        (lambda: sys.exit(1), "SystemExit"),
        (lambda: sys.exit("no data"), "SystemExit"),
        (lambda: int("x"), "ValueError"),
    ],
)
def test_an_exit_with_code_0_ends_a_block_as_its_last_line_does(leave, ended):
    ends = Ends()
    try:
        with ends:
            leave()
    except (SystemExit, ValueError):
        pass
    assert ends.ended == [ended]


def test_in_a_forked_child_the_end_of_the_block_does_nothing():
    ends = Ends()

    def child():
        ends.__exit__(SystemExit, SystemExit(0), None)
        assert ends.ended == []

    with ends:
        assert forked(child) == 0
    assert ends.ended == ["closed"]
