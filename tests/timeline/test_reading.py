"""Files of timelines: whole, damaged, of other programs, and of ranks whose clocks differ."""

import json

import pytest

from bagua_comm.timeline.chrome import chrome_trace
from bagua_comm.timeline.reading import TimelineError, read_timeline
from bagua_comm.trace import Span, Value


def exchanges(shift_ns=0, n=5):
    return [
        Span("exchange", "lane", 1000 * i + shift_ns, 1000 * i + 400 + shift_ns, {"bucket": 0, "step": i})
        for i in range(n)
    ]


def write(path, ranks, values=()):
    path.write_text(json.dumps(chrome_trace(ranks, values)))
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "trace.json"


def test_what_is_written_is_read(file):
    spans = [Span("step", "main", 10, 2_000_017, {"step": 0}), Span("exchange", "lane", 33, 44, {"bucket": 1})]
    values = [Value("loss", 20, 0.5), Value("loss", 30, float("nan"))]
    timeline = read_timeline(write(file, [spans, []], [values]))
    assert timeline.notes == []
    assert {rank: sorted(each.rows) for rank, each in timeline.ranks.items()} == {0: ["lane", "main"], 1: []}
    assert timeline.ranks[0].spans == [
        Span("step", "main", 0, 2_000_007, {"step": 0}),
        Span("exchange", "lane", 23, 34, {"bucket": 1}),
    ]
    found = [(value.time_ns, str(value.number)) for value in timeline.ranks[0].values]
    assert found == [(10, "0.5"), (20, "nan")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is not JSON, or was cut off"),
        ("step 1: loss 2", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("{}", 'no list "traceEvents"'),
        ("3", 'no list "traceEvents"'),
        ('{"traceEvents": 3}', 'no list "traceEvents"'),
        ('{"traceEvents": []}', "none of its 0 events belongs to a rank"),
        (
            '{"traceEvents": [{"ph": "X", "name": "aten::add", "pid": 7, "tid": 7, "ts": 1, "dur": 2}]}',
            "not one of another profiler",
        ),
        ('{"traceEvents": [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "pyth', "not JSON"),
    ],
)
def test_what_is_no_timeline_is_an_error_that_says_what_it_is(file, text, says):
    file.write_text(text)
    with pytest.raises(TimelineError, match=rf"trace\.json: .*({says})"):
        read_timeline(file)


def test_a_file_that_is_not_there_or_binary(tmp_path):
    for path, says in [(tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")]:
        with pytest.raises(TimelineError, match=says):
            read_timeline(path)
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    with pytest.raises(TimelineError, match="not JSON"):
        read_timeline(tmp_path / "binary")


def test_damaged_events_are_left_out_and_counted(file):
    whole = chrome_trace([exchanges()])
    pid = whole["traceEvents"][0]["pid"]
    bad = [
        3,
        None,
        {},
        {"ph": "X", "name": "a", "pid": pid, "tid": 1, "ts": "soon", "dur": 1},
        {"ph": "X", "name": "a", "pid": pid, "tid": 1, "ts": 1, "dur": -1},
        {"ph": "X", "name": "a", "pid": pid, "tid": 1, "ts": 1, "dur": 1e999},
        {"ph": "X", "name": "a", "pid": pid, "tid": 1, "ts": 1, "dur": 1, "args": [1]},
        {"ph": "C", "name": "a", "pid": pid, "ts": 1, "args": {}},
    ]
    whole["traceEvents"][3:3] = bad
    file.write_text(json.dumps(whole))
    timeline = read_timeline(file)
    assert timeline.notes == [f"{len(bad)} events are damaged and left out."]
    assert len(timeline.ranks[0].spans) == 5


@pytest.mark.parametrize("about", [{}, {"format": "other", "version": 1}, {"version": 2}])
def test_a_file_of_another_version_or_program_is_read_with_a_note(file, about):
    whole = chrome_trace([exchanges()])
    whole["otherData"] = whole["otherData"] | about if len(about) == 1 else about
    file.write_text(json.dumps(whole))
    (note,) = read_timeline(file).notes
    assert note.startswith("The file is of another program or version, and this is written for version 1: ")


@pytest.mark.parametrize("shift_ns", [-7_000_000, 1_000_000])
def test_clocks_that_differ_are_corrected(file, shift_ns):
    timeline = read_timeline(write(file, [exchanges(), exchanges(100), exchanges(shift_ns)]))
    side = "ahead of" if shift_ns > 0 else "behind"
    assert timeline.notes == [
        f"The clock of rank 2 is {abs(shift_ns) / 1e6:.1f} ms {side} that of rank 0; its times are corrected."
    ]
    times = [[span.start_ns for span in each.spans] for each in timeline.ranks.values()]
    assert times[2] == times[0]
    assert times[1] == [time + 100 for time in times[0]]


def test_clocks_are_left_alone_where_ranks_are_late_or_little_is_known(file):
    late = [*exchanges(500)[:3], *exchanges()[3:]]
    assert read_timeline(write(file, [exchanges(), late])).notes == []
    assert read_timeline(write(file, [exchanges(n=2), exchanges(10**9, n=2)])).notes == []
