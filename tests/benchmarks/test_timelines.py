"""The pictures of timelines in the documentation."""

from xml.etree import ElementTree

from support.timelines import training

from bagua_comm.timeline.reading import Timeline
from bagua_comm.timeline.summary import summarize
from benchmarks import timelines


def bars_of(picture):
    svg = ElementTree.fromstring(picture)
    found = {}
    for rect in svg.iter("{http://www.w3.org/2000/svg}rect"):
        for title in rect:
            found.setdefault(title.text, []).append((float(rect.get("x")), float(rect.get("width"))))
    return found


def test_a_picture_shows_the_median_step_of_each_rank_on_the_scale_of_all():
    example = Timeline({0: training(), 1: training()})
    begin_s, end_s = timelines.median_step(summarize(example))
    assert round(end_s - begin_s, 6) == 0.040
    half = bars_of(timelines.draw(example, "Half & half", 0.080))
    assert {name: len(bars) for name, bars in half.items()} == {
        "forward": 2,
        "backward": 2,
        "wait for exchanges": 2,
        "optimizer": 2,
        "exchange": 4,
    }
    # 2 ms after the end of the step before; 8 of 80 ms of 640 pixels.
    assert half["forward"][0] == (timelines.LEFT + 16, 63.5)
    assert all(
        x >= timelines.LEFT and x + width <= timelines.LEFT + 320 for bars in half.values() for x, width in bars
    )


def test_the_pictures_of_the_documentation_are_of_a_training_that_waits_and_one_that_does_not():
    waits = {}
    for name in timelines.PICTURES:
        bars = bars_of((timelines.GUIDES / name).read_text())
        assert bars.keys() == timelines.COLORS.keys()
        waits[name] = sum(width for _, width in bars["wait for exchanges"])
    assert waits["timeline-hidden.svg"] < waits["timeline-waiting.svg"] / 2
