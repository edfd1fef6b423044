"""The likely cause of a slow rank."""

from dataclasses import replace

import pytest

from bagua_comm.health.rows import BUSY, Row, StepTimes, Usage

USUAL = Row.of(100, 0, [StepTimes(0.1, 0.02, 0.01)] * 5, Usage(0.0, 0, 0))
SLOW = replace(USUAL, own_s=0.2, seconds=1.1)


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({}, ""),
        ({"queued_s": 0.4}, BUSY),
        ({"queued_s": 0.01}, ""),
        ({"page_faults": 300}, "its memory is swapped: it reads pages from disk"),
        ({"throttled": 2}, "its processor is slowed down for its temperature"),
        ({"between_s": 0.09}, "it is late between steps, as when data is loaded"),
    ],
)
def test_a_cause_is_named_if_it_explains_the_time(facts, cause):
    assert replace(SLOW, **facts).cause([USUAL, USUAL]) == cause


def test_what_all_ranks_have_is_no_cause():
    busy = replace(USUAL, queued_s=0.4, between_s=0.09)
    assert replace(SLOW, queued_s=0.4, between_s=0.09).cause([busy, busy]) == ""


def test_a_rank_that_is_not_slower_has_no_cause():
    assert replace(USUAL, queued_s=0.5).cause([USUAL]) == ""


def test_usage_counts_since_a_time_before():
    before = Usage.now()
    assert all(count >= 0 for count in Usage.now().since(before))
    assert Usage(3.0, 5, 2).since(Usage(1.0, 5, 1)) == (2.0, 0, 1)
