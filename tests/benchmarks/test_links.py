"""The benchmark of several connections between two ranks: how it merges runs, and its table."""

import pytest

from benchmarks.training import links


def run_of(**seconds):
    rows = [
        {"algorithm": name, "settings": f"{name}()", "wire_bytes": 8e8, "seconds": [value]}
        for name, value in seconds.items()
    ]
    machine = {"cpu": "a processor", "cores": 2}
    return {"benchmark": "training", "machine": machine, "versions": {}, "ranks": 4, "results": rows}


def test_the_steps_of_all_rounds_are_compared_with_those_of_one_link():
    options = links.parse_arguments(["--links", "1,auto", "--algorithms", "exact,bytegrad"])
    one = [(run_of(exact=seconds, bytegrad=6.0), 1) for seconds in (20.0, 30.0, 40.0)]
    auto = [(run_of(exact=seconds, bytegrad=5.0), taken) for seconds, taken in ((9.0, 9), (10.0, 5), (11.0, 9))]
    text = links.markdown(links.merged({"1": one, "auto": auto}, options))
    table = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert table == [
        "| 1 | 1, 1, 1 | exact | 30 | 25 to 35 | 1.00 | 800.0 |",
        "| 1 | 1, 1, 1 | bytegrad | 6 | 6 to 6 | 1.00 | 800.0 |",
        "| auto | 9, 5, 9 | exact | 10 | 9.5 to 10.5 | 3.00 | 800.0 |",
        "| auto | 9, 5, 9 | bytegrad | 5 | 5 to 5 | 1.20 | 800.0 |",
    ]


def test_the_choice_of_auto_is_not_guessed():
    with pytest.raises(RuntimeError, match="did not say how many links it took:\nnothing"):
        links.chosen("auto", "nothing")
