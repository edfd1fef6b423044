"""Which call another rank has reached, as the error about a missing rank says."""

from bagua_comm.transports.counted_calls import CountedCalls


def test_a_rank_whose_first_call_was_refused_is_described_as_such():
    calls = CountedCalls()
    calls.rank = 0
    calls.publish(memoryview(bytearray(2)))
    calls.begin_call("reduce_scatter", collective=True)
    assert "a call refused for its arguments does not count" in calls.last_call_of(1)
    calls.begun_by_rank[1] = 1
    assert "refused" not in calls.last_call_of(1)
