"""A child that dies or does not end makes its test fail."""

import faulthandler
import os
import select
import signal
import subprocess
import sys

import pytest

from support import tidy
from support.children import Forked, forked, started


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda: None, 0),
        (lambda: 3, 3),
        (lambda: sys.exit(4), 4),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    ],
)
def test_the_exit_code_of_a_forked_child_is_that_of_its_function(end, code):
    assert forked(end) == code


def test_a_child_that_raises_an_exception_ends_with_code_1_and_its_traceback(capfd):
    assert forked(lambda: int("x")) == 1
    assert "invalid literal for int()" in capfd.readouterr().err


def test_a_child_that_does_not_end_is_killed_after_the_limit():
    child = Forked(select.select, [], [], [])
    with pytest.raises(AssertionError):
        child.code(limit_s=0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_a_program_must_end_with_the_code_that_was_said():
    with pytest.raises(AssertionError), started([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE):
        pass  # its input ends, which is an EOFError


def test_the_stack_of_a_forked_child_that_crashes_is_a_failure_of_the_test():
    before = tidy.state()
    assert forked(faulthandler._sigsegv) == -signal.SIGSEGV
    (said,) = tidy.differences(before)
    assert "a child crashed: Fatal Python error: Segmentation fault" in said
    assert "in test_the_stack_of_a_forked_child_that_crashes" in said
    assert tidy.differences(before) == []
