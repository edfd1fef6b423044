"""The diagnosis: stories that are made up, and stories that ranks on threads have lived through."""

import threading
import time

import numpy as np
import pytest

from bagua_comm import CommError, Engine, GradientAllReduce, Plan, Point, TensorSpec
from bagua_comm.flight import Entry, FlightRecorder, RankRecord, diagnose
from bagua_comm.flight.entries import LEFT_WELL, RecordedFailure
from bagua_comm.flight.stacks import Frame, ThreadStack
from bagua_comm.testing import run_ranks

SECOND = 10**9
TWO_GROUPS = {"world": (0, 1), "world.1": (0, 1)}


def calls(*names, group="world", start=0, open_last=False, number=1, size=4, **fields):
    """Entries of calls of 0.1 s each, which begin a second apart."""
    made = []
    for i, name in enumerate(names):
        begin = start + i * SECOND
        end = None if open_last and i == len(names) - 1 else begin + SECOND // 10
        made.append(
            Entry(group, number + i, True, name, "float32", (size,), start_ns=begin, end_ns=end, **fields)
        )
    return made


def record(rank, entries, *, size=3, groups=None, at_s=20, **fields):
    groups = groups or {"world": tuple(range(size))}
    return RankRecord("job", rank, size, "host", 1, at_s * SECOND, groups, tuple(entries), **fields)


def records(*entries, groups=None):
    """The records of all ranks, which made these calls."""
    return [record(rank, calls, size=len(entries), groups=groups) for rank, calls in enumerate(entries)]


def only(records):
    """The one thing that was found."""
    (finding,) = diagnose(records).findings
    return finding


def test_nothing_wrong_is_found_where_nothing_is():
    same = [record(rank, calls("allreduce", "barrier")) for rank in range(3)]
    diagnosis = diagnose(same)
    assert diagnosis.findings == ()
    assert str(diagnosis).startswith("Nothing wrong was found.")
    assert diagnosis.ranks[1] == "rank 1: in no call; the last was barrier(float32[4]) #2"


def test_no_records_have_no_story():
    assert diagnose([]).findings == ()


STEP = ["allreduce", "allgather"]
USUAL, SKIPPED = (calls(*STEP, *STEP, name, open_last=True) for name in STEP)
ONE, MORE = calls(*STEP, open_last=True), calls("allreduce", "barrier", "allgather", open_last=True)
FIRST, SWAPPED, COUNTED = calls("reduce", "broadcast"), calls("broadcast", "reduce"), {"counts": [2, 1, 1]}
COUNTS = calls("alltoall", detail=COUNTED)
DIFFERENCES = {
    "skipped": ([USUAL, SKIPPED, USUAL], "skipped", (1,), 5, "rank 1 left out allreduce"),
    "skipped by the majority": ([SKIPPED, USUAL, SKIPPED], "skipped", (0, 2), 5, "ranks 0, 2 left out allreduce"),
    "one too many": ([ONE, MORE, ONE], "skipped", (1,), 2, "rank 1 made one call too many"),
    "the other order": ([FIRST, SWAPPED, FIRST], "swapped", (1,), 1, "in the other order"),
    "neither is blamed": ([calls("reduce"), calls("scan")], "different", (0, 1), 1, ""),
    "size": ([FIRST, calls("reduce", size=5), FIRST], "unlike", (1,), 1, "sizes differ (4 and 5 elements)"),
    "root": ([FIRST, calls("reduce", detail={"root": 1}), FIRST], "unlike", (1,), 1, "root differs (None and 1)"),
    "counts": ([COUNTS, calls("alltoall"), COUNTS], "unlike", (1,), 1, "only one has counts"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_calls_that_differ_are_told_from_each_other_by_those_of_earlier_steps(name):
    entries, kind, ranks, number, words = DIFFERENCES[name]
    finding = only(records(*entries))
    assert (finding.kind, finding.ranks, finding.group, finding.number) == (kind, ranks, "world", number)
    assert words in finding.text


@pytest.mark.parametrize(("name", "root"), [("alltoall", {}), ("gather", {"root": 1}), ("scatter", {"root": 1})])
def test_arrays_may_differ_in_size_where_there_are_counts(name, root):
    def made(has_counts):
        details = [root | ({"counts": [0, 1, 2]} if has_counts(rank) else {}) for rank in range(3)]
        return [record(rank, calls(name, size=rank, detail=detail)) for rank, detail in enumerate(details)]

    assert diagnose(made(lambda rank: not root or rank == 1)).findings == ()
    if root:  # rank 1 is late, and so are its counts
        waiting = [record(rank, calls(name, size=rank, detail=root, open_last=True)) for rank in (0, 2)]
        assert only([waiting[0], record(1, ()), waiting[1]]).ranks == (1,)
    assert "sizes differ (0 and 1 elements)" in only(made(lambda rank: False)).text


def test_a_rank_that_died_is_named_by_its_peers_and_so_is_its_last_call():
    failure = RecordedFailure("RankFailed", "rank 2 died", (2,))
    entries = calls("allreduce", "barrier", open_last=True)
    finding = only([record(rank, entries, failures=(failure,)) for rank in range(2)])
    assert (finding.kind, finding.ranks) == ("died", (2,))
    assert "allreduce #1" in finding.text


def test_a_rank_without_a_record_died_or_hangs():
    entries = calls("allreduce", "barrier", open_last=True)
    diagnosis = diagnose([record(rank, entries) for rank in (0, 2)])
    (finding,) = diagnosis.findings
    assert (finding.kind, finding.ranks, finding.number) == ("behind", (1,), 2)
    assert "ranks 0, 2 wait; it left no record: it died, or hangs outside of any call" in finding.text
    assert diagnosis.ranks[1] == "rank 1: left no record"


def test_a_rank_that_left_is_reported_once():
    entries = calls("allreduce", "barrier", open_last=True)
    finding = only([record(0, entries), record(1, entries[:1], left="ValueError: no data"), record(2, entries)])
    assert (finding.kind, finding.ranks) == ("left", (1,))
    assert "rank 1 left: ValueError: no data; its last call was allreduce #1" in finding.text


UNEVEN = "rank 1 made 5 steps and left; ranks 0, 2 wait in their 6th step: fewer batches? use `with ddp.join():`"


def test_a_rank_that_left_after_fewer_steps_had_fewer_batches():
    entries = calls("allreduce", "allreduce", open_last=True, bucket=0, step=5)
    waiting = [record(rank, entries, steps={"world": 6 + (rank > 0)}) for rank in (0, 2)]
    diagnosis = diagnose([*waiting, record(1, entries[:1], left=LEFT_WELL, steps={"world": 5})])
    (finding,) = diagnosis.findings
    assert (finding.kind, finding.ranks) == ("uneven", (1,))
    assert finding.text.startswith(UNEVEN)
    assert "no record" not in str(diagnosis)


@pytest.mark.parametrize(("left", "steps"), [("ValueError: no data", 5), (LEFT_WELL, 6)])
def test_a_rank_that_left_with_an_error_or_after_as_many_steps_had_enough_batches(left, steps):
    entries = calls("allreduce", "allreduce", open_last=True, bucket=0, step=5)
    waiting = [record(rank, entries, steps={"world": 6}) for rank in (0, 2)]
    finding = only([*waiting, record(1, entries[:1], left=left, steps={"world": steps})])
    assert finding.kind == "left"
    assert "batches" not in finding.text


def test_a_rank_that_went_on_to_evaluate_had_fewer_batches():
    evaluating = calls("barrier", open_last=True)
    training = calls("allreduce", group="world.1", number=6, open_last=True, bucket=0, step=5)
    finding = only(
        [
            record(0, evaluating, groups=TWO_GROUPS, size=2, steps={"world.1": 5}),
            record(1, training, groups=TWO_GROUPS, size=2, steps={"world.1": 6}),
        ]
    )
    assert (finding.kind, finding.ranks) == ("uneven", (0,))
    assert finding.text.startswith("rank 0 made 5 steps and is in barrier #1; rank 1 waits in its 6th step: ")


def test_a_method_that_only_some_ranks_call_is_named():
    save = {"error": "CommTimeout", "method": "Checkpoints.save"}
    saving = calls("allgather_object", group="world.1", open_last=True, **save)
    finding = only(records(saving, calls("barrier", open_last=True), groups=TWO_GROUPS))
    assert finding.text.startswith("rank 0 is in Checkpoints.save (allgather_object #1 of world.1), and rank 1 ")
    assert finding.text.endswith("Checkpoints.save is collective: all ranks must make the same calls")


def test_arguments_are_shown_once_and_not_in_the_brief_text():
    entries = calls("allreduce", "allreduce", open_last=True)
    diagnosis = diagnose([record(rank, entries[: rank or None]) for rank in range(3)])
    assert str(diagnosis).count("float32[4]") == 3  # a line for each rank
    assert "float32[4]" not in diagnosis.brief()


def test_the_line_of_the_program_in_which_a_rank_was_is_shown_and_with_stacks_all_of_them():
    frames = (
        Frame("/lib/threading.py", 7, "wait", "", is_users=False),
        Frame("train.py", 8, "load", "sleep(9)", is_users=True),
    )
    stacks = (ThreadStack("MainThread", frames),)
    records = [record(0, calls("barrier", open_last=True), size=2), record(1, [], size=2, stacks=stacks)]
    diagnosis = diagnose(records)
    for text in (str(diagnosis), diagnosis.brief()):
        assert text.endswith("rank 1: has made no call\n  at train.py:8, in load: sleep(9)")
    assert diagnosis.with_stacks().endswith(
        'rank 1:\nThread "MainThread"\n    wait (/lib/threading.py:7)\n  > load (train.py:8)'
    )
    assert diagnosis.as_dict()["lines"] == {"1": "train.py:8, in load: sleep(9)"}


def test_a_slow_rank_is_reported_although_the_others_aborted_and_it_continued():
    waited = calls("barrier", "allreduce", open_last=True)
    late = [*calls("barrier"), *calls("allreduce", "barrier", start=6 * SECOND, number=2, open_last=True)]
    finding = only([record(0, waited, at_s=4), record(1, late), record(2, waited, at_s=4)])
    assert (finding.kind, finding.ranks, finding.number) == ("slow", (1,), 2)
    assert "5.0 s after all others" in finding.text


def test_clocks_that_differ_make_no_rank_slow():
    usual = calls("barrier", "barrier", "allreduce", open_last=True)
    ahead = calls("barrier", "barrier", "allreduce", open_last=True, start=100 * SECOND)
    assert diagnose([record(0, usual), record(1, ahead, at_s=120), record(2, usual)]).findings == ()


def test_calls_of_two_communicators_in_another_order():
    first, second = calls("barrier", open_last=True), calls("barrier", group="world.1", open_last=True)
    finding = only(records(first, second, groups=TWO_GROUPS))
    assert (finding.kind, finding.ranks) == ("crossed", (0, 1))
    assert "rank 0 is in barrier #1, and rank 1 in barrier #1 of world.1" in finding.text


@pytest.mark.parametrize(
    ("name", "peers", "circle", "words"),
    [
        ("send", (1, 0, 0), (0, 1), "ranks 0, 1 both send to each other: use sendrecv or exchange"),
        ("recv_object", (2, 0, 0), (0, 2), "ranks 0, 2 both receive from each other"),
        ("send", (1, 2, 0), (0, 1, 2), "ranks 0, 1, 2 all send to the next one, in a circle: use sendrecv"),
        ("send", (0, 2, 0), (0,), "rank 0 sends to itself: use sendrecv or exchange"),
        ("recv_object", (0, 2, 0), (0,), "rank 0 receives from itself: use a lane, or allgather_object"),
    ],
)
def test_ranks_that_all_send_or_all_receive_wait_for_each_other(name, peers, circle, words):
    finding = only(records(*(message(name, peer) for peer in peers)))
    assert (finding.kind, finding.ranks) == ("crossed", circle)
    assert finding.text.startswith(words)


def message(name, peer, group="world", end_ns=None, **fields):
    way = "dest" if name.startswith("send") else "source"
    return [Entry(group, 1, False, name, "float32", (4,), {way: peer}, start_ns=0, end_ns=end_ns, **fields)]


def test_a_message_that_is_received_in_another_communicator_is_named():
    groups = {"world.1": (0, 1), "world.2": (0, 1)}
    finding = only(records(message("send", 1, "world.2"), message("recv", 0, "world.1"), groups=groups))
    assert (finding.kind, finding.ranks) == ("crossed", (0, 1))
    assert "rank 0 sends to rank 1 in world.2, and rank 1 receives from it in world.1" in finding.text


def test_failed_calls_without_a_cause_are_not_called_right():
    text = str(diagnose(records(message("send", 1, end_ns=1, error="CommError"), [])))
    assert text.startswith("No cause of the failed calls was found.")


@pytest.mark.parametrize(("sent", "received"), [("send", "recv_object"), ("send_object", "recv")])
def test_an_object_that_is_received_as_an_array_is_named_and_vice_versa(sent, received):
    right = "recv_object" if received == "recv" else "recv"
    left = record(0, message(sent, 1, end_ns=1), left=LEFT_WELL, size=2)
    finding = only([left, record(1, message(received, 0), size=2)])
    assert finding.text.endswith(f"its last call was {sent} #1; {right} receives it, not {received}")


def test_the_last_call_of_a_rank_has_its_bucket_its_step_and_the_tasks_of_its_lane():
    entry = calls("allreduce", open_last=True, bucket=3, step=7)
    waiting = Entry("world", 0, True, "exchange", bucket=4, step=7)
    line = diagnose([record(0, entry, queued=(waiting,), size=1)]).ranks[0]
    assert "in allreduce(float32[4]) #1 (bucket 3, step 7), for 20.0 s" in line
    assert "queued on a lane: exchange() (bucket 4, step 7)" in line


# Stories of ranks on threads


def lived(size, body, *, timeout_s=0.5):
    """The records of ranks that ran `body`, each until its first error."""
    hubs = [FlightRecorder(rank, size) for rank in range(size)]
    done = threading.Barrier(size)

    def run(comm):
        comm.flight = hubs[comm.rank]
        error = None
        try:
            body(comm)
        except CommError as exc:
            error = exc
        finally:
            comm.flight.failed(error or CommError("none"))
            found = comm.flight.record()
            done.wait(20)
        return found

    return run_ranks(size, run, timeout_s=timeout_s)


def test_a_rank_on_a_thread_skips_a_call():
    def body(comm):
        for step in range(4):
            if not (step == 3 and comm.rank == 1):
                comm.allreduce(np.ones(8, np.float32), op="sum")
            comm.allgather(np.ones(2))

    finding = only(lived(3, body))
    assert (finding.kind, finding.ranks, finding.number) == ("skipped", (1,), 7)
    assert "rank 1 left out allreduce" in finding.text


@pytest.mark.slow
def test_a_rank_on_a_thread_comes_late():
    def body(comm):
        comm.barrier()
        if comm.rank == 1:
            time.sleep(1.2)  # sleeps: a rank is late
        comm.allreduce(np.ones(8, np.float32))

    finding = only(lived(2, body))
    assert (finding.kind, finding.ranks, finding.number) == ("slow", (1,), 2)


def test_ranks_on_threads_use_two_communicators_in_another_order():
    def body(comm):
        other = comm.dup()
        for each in (comm, other) if comm.rank else (other, comm):
            each.barrier()

    finding = only(lived(2, body))
    assert (finding.kind, finding.ranks) == ("crossed", (0, 1))


def test_the_bucket_that_an_engine_exchanged_last_is_named():
    specs = [TensorSpec("a", (4,), "float32"), TensorSpec("b", (4,), "float32")]

    def body(comm):
        plan = Plan.pack(specs, bucket_bytes=16)
        with Engine(comm, GradientAllReduce(), plan, plan.allocate()) as engine:
            for _ in range(2):
                engine.at(Point.FORWARD)
                engine.ready("a")
                engine.ready("b")
                engine.at(Point.BACKWARD)
                engine.at(Point.STEP)
        return comm.flight.entries()

    entries = [entry for entry in run_ranks(2, body)[0] if entry.bucket is not None]
    assert [(entry.bucket, entry.step) for entry in entries] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert {entry.group for entry in entries} == {"world.1"}
    assert all(entry.state == "ended" and entry.name == "allreduce" for entry in entries)
