"""The table in terminals of any width, and what it says is wrong."""

import pytest

from bagua_comm.live.findings import findings
from bagua_comm.live.status import SIGTERM, Status
from bagua_comm.live.table import COLUMNS, lines


def rank(number, **facts):
    facts = {"state": "training", "step": 100, "step_s": 0.04, "own_s": 0.02, "waiting_s": 0.02} | facts
    return Status("job", number, 3, "node1", 40 + number, **facts)


TEXT = "rank 2 has been slow since step 70, 1.5 times as long as the other ranks"
SLOW = [rank(0), rank(1, slow=TEXT), rank(2, own_s=0.03, waiting_s=0.01, slow=TEXT)]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal_and_the_rank_and_its_state_are_always_there(width):
    found = lines(SLOW, width)
    assert max(map(len, found)) <= width
    (header,) = [line for line in found if line.startswith("rank") and line.split()[1:][-1:] == ["state"]]
    assert header.split()[0] == "rank"
    if width == 200:
        assert header.split() == list(COLUMNS)
    if width == 40:
        assert header.split() == ["rank", "step", "state"]


def test_ranks_are_sorted_by_what_is_asked_for():
    def ranks(order):
        table = lines(SLOW, 200, order)
        return [line.split()[0] for line in table[3:6]]

    assert ranks("rank") == ["0", "1", "2"]
    assert ranks("slowest") == ["2", "0", "1"]
    assert ranks("waiting") == ["0", "1", "2"]
    assert lines([rank(0), rank(1, call="barrier #1", call_s=9.0)], 200, "waiting")[3].split()[0] == "1"


def test_what_ranks_know_to_be_slow_is_said_once():
    assert findings(SLOW) == [TEXT]
    assert findings([rank(0), rank(1), rank(2, own_s=0.03)]) == []


def test_ranks_that_wait_and_the_one_that_has_not_come_are_named_with_the_line_where_it_is():
    waits = {"state": "in a call", "call": "allreduce #7", "call_s": 34.0, "members": (0, 1, 2), "own_s": None}
    late = rank(1, last="barrier #6", last_s=34.1, line="train.py:8, in load: time.sleep(60)", own_s=None)
    assert findings([rank(0, **waits), late, rank(2, **waits)]) == [
        "ranks 0, 2 wait in allreduce #7 for 34 s; rank 1 has not come: in no call, the last was barrier #6, 34 "
        "s ago, at train.py:8, in load: time.sleep(60)"
    ]
    assert "in barrier #8 for 30 s" in findings([rank(0, **waits), rank(1, call="barrier #8", call_s=30.0)])[0]
    assert findings([rank(0, **waits | {"call_s": 1.0}), late]) == []


def test_a_rank_that_has_left_a_call_is_not_said_to_be_missing():
    waits = {"state": "in a call", "call": "broadcast #7", "call_s": 34.0, "members": (0, 1, 2)}
    left = rank(0, last="broadcast #7", last_s=34.1)  # the root need not wait for the others
    assert findings([left, rank(1, last="barrier #6", last_s=40.0), rank(2, **waits)]) == [
        "rank 2 waits in broadcast #7 for 34 s; rank 0 has left it: in no call, the last was broadcast #7, 34 s "
        "ago; rank 1 has not come: in no call, the last was barrier #6, 40 s ago"
    ]


def test_a_rank_is_not_missed_in_a_call_of_a_communicator_that_it_does_not_belong_to():
    waits = {"state": "in a call", "call": "barrier #2 of world.1", "call_s": 9.0, "members": (0, 2)}
    inside, other = rank(0, **waits), rank(1, last="barrier #1", last_s=9.0)
    assert findings([inside, other, rank(2, last="barrier #1 of world.1", last_s=9.0)]) == [
        "rank 0 waits in barrier #2 of world.1 for 9 s; rank 2 has not come: in no call, the last was barrier #1 "
        "of world.1, 9 s ago"
    ]
    namesake = rank(1, **waits | {"members": (1,)})  # of another communicator of this name
    assert findings([inside, namesake, rank(2, **waits)]) == [
        "ranks 0, 2 wait in barrier #2 of world.1 for 9 s",
        "rank 1 waits in barrier #2 of world.1 for 9 s",
    ]


def test_messages_of_equal_number_are_not_taken_for_one_call_that_others_have_not_made():
    waits = {"state": "in a call", "call": "recv #7", "call_s": 9.0}
    assert findings([rank(0, **waits), rank(1, **waits), rank(2, last="send #7", last_s=9.0)]) == [
        "rank 0 waits in recv #7 for 9 s",
        "rank 1 waits in recv #7 for 9 s",
    ]


def test_a_rank_that_died_comes_before_those_that_failed_or_were_ended_because_of_it():
    lost = rank(0, state="failed", reason="RankFailed: rank 1 has died", own_s=None)
    ended = rank(2, state="failed", reason=SIGTERM, own_s=None)
    died, failed, text = findings([lost, rank(1, state="died", own_s=None), ended])
    assert died.startswith("rank 1 died: process 41 on node1 ended without notice")
    assert "SIGTERM, as torchrun sends" in died  # of which no process of torchrun can tell
    assert failed == "rank 0 failed: RankFailed: rank 1 has died"
    assert text.startswith("rank 2 was ended by SIGTERM")
    cause, *_ = findings([rank(0, state="died"), rank(1, state="failed", reason="ValueError: no more data")])
    assert cause == "rank 1 failed: ValueError: no more data"
