"""What pages say in words and is known elsewhere is the same there."""

import re

from support.pages import ROOT, read

README = (ROOT / "README.md").read_text()


def test_the_first_page_is_short_and_begins_with_commands():
    assert README.count("\n") <= 120
    first, second = [block.code for block in read(ROOT / "README.md").blocks][:2]
    assert first.endswith("&& python -m bagua_comm run -n 4 examples/train.py\n")
    assert second.endswith("&& python -m pytest\n")
    tests = re.search(r"pip install .*", (ROOT / ".ci" / "run").read_text())[0]
    assert second.partition("pip install ")[2].partition("&&")[0].split()[-1] in tests


def test_speed_ups_are_those_that_were_measured():
    rates = r"(\S+) times as fast .* at 500 Mbit/s, (\S+) times at 1 Gbit/s and (\S+) times at 10 Gbit/s"
    said = re.search(rates, " ".join(README.split()))
    assert said.groups() == tuple(speed_up("vgg16", rate) for rate in (500, 1000, 10000))
    performance = (ROOT / "docs" / "how-it-works" / "performance.md").read_text()
    assert f"trains {said[1]} times as fast at 500 Mbit/s, {said[2]} times at 1 Gbit/s" in performance
    assert f"BERT-Large trains {speed_up('bert-large', 1000)} times as fast" in performance


def speed_up(model, rate_mbit):
    table = (ROOT / "benchmarks" / "results" / "training.md").read_text()
    rows = table.partition(f"## {model}, 4 hosts at {rate_mbit} Mbit/s")[2].partition("\n## ")[0]
    measured = re.search(r"^\| bytegrad \|[^|]*\|[^|]*\|[^|]*\| ([\d.]+) \|", rows, re.MULTILINE)
    return f"{float(measured[1]):.1f}"


def test_everything_in_the_layout_exists():
    table = (ROOT / "docs" / "how-it-works" / "layout.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.MULTILINE)
    assert len(rows) > 20
    for where, what in rows:
        folders = [ROOT / name for name in re.findall(r"`([^`]+)`", where)]
        for folder in folders:
            assert folder.exists(), folder
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", what):
            near = folders[0] if folders[0].is_dir() else folders[0].parent
            assert (near / name).exists() or (ROOT / name).exists(), f"{where}: {name}"
