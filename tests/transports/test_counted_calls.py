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


def test_calls_between_two_ranks_are_not_counted_as_zero_calls_before():
    calls = CountedCalls()
    calls.rank = 0
    calls.publish(memoryview(bytearray(2)))
    for name in ("barrier", "allgather", "broadcast"):
        calls.begin_call(name, collective=True)
        calls.end_call()
    calls.begin_call("recv", collective=False)
    ends = {3: "broadcast", 2: "allgather, the one before this", 1: "barrier, 2 collective calls before this one"}
    for begun, end in ends.items():
        calls.begun_by_rank[1] = begun
        assert calls.last_call_of(1) == f", whose last collective call was {end}"
