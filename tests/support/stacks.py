"""Adds the stacks of all threads to the report of a test that a time limit has ended."""

import threading

import pytest

from bagua_comm.errors import CommTimeout
from bagua_comm.flight.stacks import current_stacks


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance((CommTimeout, TimeoutError)):
        report.sections.append(("threads that still run", stacks_of_others()))
    return report


def stacks_of_others():
    """The stack of each thread but this one, with its name."""
    stacks = current_stacks()
    others = [each for each in threading.enumerate() if each is not threading.current_thread()]
    return "\n".join(
        f"{each.name}:\n" + "".join(f"  {call.frame()}\n" for call in reversed(stacks[each.ident]))
        for each in others
        if each.ident in stacks
    )
