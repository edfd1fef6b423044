"""`bagua trace`: text, JSON and a page of a timeline, and what it says about files that are none."""

import dataclasses
import gzip
import json

import pytest
from support.commands import output_of
from support.timelines import training

from bagua_comm import __main__ as cli
from bagua_comm.testing import run_ranks
from bagua_comm.timeline.chrome import chrome_trace, write_trace
from bagua_comm.timeline.reading import Timeline
from bagua_comm.timeline.summary import summarize


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(chrome_trace([training().spans, training().spans])))
    return path


def test_the_summary_is_printed(file, capsys):
    assert cli.main(["trace", str(file)]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("Mean of 4 steps:\n")
    assert "Buckets, on rank 0:" in output.out
    assert output.err == ""


def test_a_compressed_timeline_is_read_and_one_that_was_cut_off_is_an_error(file, tmp_path, capsys):
    packed = tmp_path / "trace.json.gz"
    write_trace(packed, json.loads(file.read_text()))
    data = packed.read_bytes()
    assert json.loads(gzip.decompress(data)) == json.loads(file.read_text())
    assert "waiting" in output_of(capsys, "trace", str(packed))
    for damaged in (data[:-20], data[:40] + b"damaged" + data[47:]):
        packed.write_bytes(damaged)
        assert "trace.json.gz: " in output_of(capsys, "trace", str(packed), code=2)


def test_all_numbers_as_json(file, capsys):
    numbers = json.loads(output_of(capsys, "trace", str(file), "--json"))
    expected = dataclasses.asdict(summarize(Timeline({0: training(), 1: training()})))
    assert numbers == {**expected, "notes": [], "advice": numbers["advice"]}


def test_a_page_is_written(file, tmp_path, capsys):
    assert cli.main(["trace", str(file), "--html", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr()
    assert "Mean of 4 steps" in printed.out
    assert printed.err == f"wrote {tmp_path / 'page.html'}\n"
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert "Is a directory" in output_of(capsys, "trace", str(file), "--html", str(tmp_path), code=2)


def test_a_page_does_not_replace_the_timeline(file, capsys):
    before = file.read_text()
    assert cli.main(["trace", str(file), "--html", str(file.parent / "." / file.name)]) == 2
    assert "that is the timeline itself" in capsys.readouterr().err
    assert file.read_text() == before


@pytest.mark.parametrize(("text", "says"), [("", "cut off"), ("loss 3", "is not JSON"), ("{}", "traceEvents")])
def test_a_file_that_is_none_is_an_error(file, capsys, text, says):
    file.write_text(text)
    error = output_of(capsys, "trace", str(file), code=2)
    assert says in error
    assert str(file) in error


def test_a_timeline_without_steps_has_calls_and_says_what_to_do(tmp_path, capsys):
    file, page = tmp_path / "trace.json", tmp_path / "page.html"
    run_ranks(2, lambda comm: [comm.barrier(), comm.trace(file)])
    output = output_of(capsys, "trace", str(file), "--html", str(page))
    assert "\nbarrier      1 " in output
    assert "after some training steps" in output
    assert "<th>barrier</th><td>1</td>" in page.read_text(encoding="utf-8")


def test_a_timeline_without_steps_and_calls_has_exit_code_1(tmp_path, capsys):
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(chrome_trace([[]])))
    assert cli.main(["trace", str(file)]) == 1
    assert "after some training steps" in capsys.readouterr().out
