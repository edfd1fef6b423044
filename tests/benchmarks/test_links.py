"""The benchmark of several connections between two ranks: how it merges runs, and its table."""

import argparse
import doctest

import pytest

from benchmarks.training import links


def run_of(**seconds):
    rows = [
        {"algorithm": name, "settings": f"{name}()", "wire_bytes": 8e8, "seconds": [value]}
        for name, value in seconds.items()
    ]
    machine = {"cpu": "a processor", "cores": 2}
    return {"benchmark": "training", "machine": machine, "versions": {}, "ranks": 4, "results": rows}


@pytest.fixture
def record(tmp_path):
    options = links.parse_arguments(
        ["--links", "1,auto", "--algorithms", "exact,bytegrad", "--out", f"{tmp_path}/l"]
    )
    one = [(run_of(exact=seconds, bytegrad=6.0), 1) for seconds in (20.0, 30.0, 40.0)]
    auto = [(run_of(exact=seconds, bytegrad=5.0), taken) for seconds, taken in ((9.0, 9), (10.0, 5), (11.0, 9))]
    return links.merged({"1": one, "auto": auto}, options)


def test_the_steps_of_all_rounds_are_compared_with_those_of_one_link(record):
    table = [line for line in links.markdown(record).splitlines() if line.startswith("|")][2:]
    assert table == [
        "| 1 | 1, 1, 1 | exact | 30 | 25 to 35 | 1.00 | 800.0 |",
        "| 1 | 1, 1, 1 | bytegrad | 6 | 6 to 6 | 1.00 | 800.0 |",
        "| auto | 9, 5, 9 | exact | 10 | 9.5 to 10.5 | 3.00 | 800.0 |",
        "| auto | 9, 5, 9 | bytegrad | 5 | 5 to 5 | 1.20 | 800.0 |",
    ]
    assert "links of 1gbit, and each flow 100mbit" in links.markdown(record)
    assert "out" not in record["arguments"]


def test_examples():
    assert doctest.testmod(links).failed == 0


def test_the_choice_of_auto_is_not_guessed():
    with pytest.raises(RuntimeError, match="did not say how many links it took:\nnothing"):
        links.chosen("auto", "nothing")


def test_wrong_numbers_of_links_are_refused(capsys):
    with pytest.raises(SystemExit):
        links.parse_arguments(["--links", "1,many"])
    assert "there is no number of links 'many'" in capsys.readouterr().err
    assert isinstance(links.parse_arguments([]), argparse.Namespace)
