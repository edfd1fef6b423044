"""The parts of collectives: chunks and pieces of arrays, and the order of a pipeline's stages."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_comm.transports.pipeline import LAG, chunk_bounds, cut, pipeline

examples = settings(deadline=None, derandomize=True, max_examples=50)
COUNTS = st.one_of(st.integers(0, 300), st.integers(2**31 - 2, 2**45))


def assert_covers(slices, count):
    """Together the slices are all of 0 to `count` - 1, in order."""
    assert slices[0].start == 0
    assert [s.stop for s in slices[:-1]] == [s.start for s in slices[1:]]
    assert slices[-1].stop == count


def lengths(slices):
    return [s.stop - s.start for s in slices]


@examples
@given(COUNTS, st.integers(1, 70))
def test_every_rank_gets_a_chunk_and_none_is_longer_than_an_equal_share_rounded_up(count, chunks):
    bounds = chunk_bounds(count, chunks)
    assert len(bounds) == chunks
    assert_covers(bounds, count)
    longest = max(lengths(bounds))
    assert (longest - 1) * chunks < count <= longest * chunks or longest == count == 0
    # Whole chunks, then at most one short one, then empty ones: sorted, with one length between.
    assert lengths(bounds) == sorted(lengths(bounds), reverse=True)
    assert sum(0 < length < longest for length in lengths(bounds)) <= 1


@pytest.mark.parametrize(
    ("count", "chunks", "expected"),
    [
        (6, 3, [2, 2, 2]),
        (5, 3, [2, 2, 1]),
        (5, 4, [2, 2, 1, 0]),
        (2, 4, [1, 1, 0, 0]),
        (0, 2, [0, 0]),
        (7, 1, [7]),
    ],
)
def test_lengths_of_chunks(count, chunks, expected):
    assert lengths(chunk_bounds(count, chunks)) == expected


@examples
@given(st.integers(0, 5000), st.sampled_from([1, 2, 4, 8]), st.integers(1, 9000), st.integers(1, 700))
def test_pieces_begin_at_multiples_of_the_granule_and_are_about_as_long_as_asked_for(
    count, itemsize, piece_bytes, granule
):
    pieces = cut(count, count * itemsize, piece_bytes, granule)
    assert_covers(pieces, count)
    *whole, last = lengths(pieces)
    assert len(set(whole)) <= 1
    assert all(last <= length for length in whole)
    assert last > 0 or count == 0
    assert all(piece.start % granule == 0 for piece in pieces)
    # Rounded up, first to a whole element and then to a whole granule.
    assert all(length * itemsize < piece_bytes + granule * itemsize for length in lengths(pieces))
    # Never more pieces than are needed, each being as long as asked for.
    assert len(pieces) <= max(1, -(-count * itemsize // piece_bytes))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((10, 40, None), [10]),
        ((10, 40, 40), [10]),
        ((10, 40, 39), [5, 5]),
        ((10, 40, 16), [4, 4, 2]),
        ((10, 40, 1), [1] * 10),  # no piece is shorter than an element
        ((10, 40, 16, 8), [8, 2]),  # and none but the last shorter than a granule
        ((10, 40, 16, 100), [10]),
        ((0, 0, 16), [0]),  # nothing to send is one empty piece
        ((0, 0, None, 8), [0]),
        ((2**33, 2**35, 2**34), [2**32, 2**32]),
    ],
)
def test_lengths_of_pieces(arguments, expected):
    assert lengths(cut(*arguments)) == expected


def run_stages(count, stages):
    """The calls of a pipeline, in order, as (stage, piece)."""
    calls = []
    pipeline(count, *(lambda i, stage=stage: calls.append((stage, i)) for stage in range(stages)))
    return calls


@examples
@given(st.integers(0, 25), st.integers(0, 4))
def test_every_stage_takes_every_piece_once_in_order_and_after_the_stage_before_it(count, stages):
    calls = run_stages(count, stages)
    for stage in range(stages):
        assert [i for s, i in calls if s == stage] == list(range(count))
    assert len(calls) == stages * count
    when = {call: position for position, call in enumerate(calls)}
    assert all(when[stage - 1, i] < when[stage, i] for stage, i in calls if stage)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_stage_follows_the_one_before_it_by_the_lag(stages):
    """Exactly that many: fewer overlap less, and more use the memory of a piece too early."""
    count, calls = 3 * LAG, run_stages(3 * LAG, stages)
    for position, (stage, i) in enumerate(calls):
        if stage:
            taken = sum(s == stage - 1 for s, _ in calls[:position])
            assert taken == min(i + LAG + 1, count)


def test_a_stage_that_raises_ends_the_pipeline():
    calls = []

    def fail(i):
        raise ValueError(f"piece {i}")

    with pytest.raises(ValueError, match="piece 0"):
        pipeline(20, calls.append, fail)
    assert calls == list(range(LAG + 1))
