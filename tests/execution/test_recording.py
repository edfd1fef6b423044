"""Recordings of steps, and the one that is current."""

import pytest
from support.interrupts import interrupted_everywhere

from bagua_comm.execution import recording


def test_no_recording_stays_current_after_an_interruption():
    def record():
        recording.recorded(lambda: recording.unrecorded(int))

    def check():
        assert recording.current() is None

    assert interrupted_everywhere(record, check) > 3


def test_a_recording_within_another_is_one_of_its_own():
    seen = []

    def body():
        recording.unrecorded(lambda: seen.append(recording.current()))
        seen.append(recording.recorded(lambda: seen.append(recording.current())))
        seen.append(recording.current())

    outer = recording.recorded(body)
    assert seen == [None, seen[2], seen[2], outer]
    assert seen[2] is not outer
    assert recording.current() is None


def test_a_replay_makes_all_steps_in_order():
    made = []

    def body():
        recording.current().steps += [lambda: made.append(1), lambda: made.append(2)]

    found = recording.recorded(body)
    found.replay()
    found.replay()
    assert made == [1, 2, 1, 2]


def test_an_exception_ends_the_recording():
    with pytest.raises(ZeroDivisionError):
        recording.recorded(lambda: 1 / 0)
    assert recording.current() is None
