"""Pictures of timelines for the documentation, from two trainings between emulated hosts.

    python -m benchmarks.timelines            # writes docs/guides/timeline-waiting.svg and timeline-hidden.svg

Both train the same model over the same link: one with a single bucket and exact averages, the other with several
buckets and ByteGrad. Each picture shows the step whose time is the median, on one scale. It needs what
`benchmarks.netlab` needs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

from bagua_comm.timeline.reading import RankTimeline, Timeline, read_timeline
from bagua_comm.timeline.summary import Summary, summarize

from . import netlab

GUIDES = Path(__file__).parent.parent / "docs" / "guides"

COLORS = {
    "forward": "#4c8bd6",
    "backward": "#3a6cb0",
    "optimizer": "#8a63c9",
    "wait for exchanges": "#e0483e",
    "exchange": "#3f9d5f",
}
"""The spans that are drawn, and their colors."""

PICTURES = {
    "timeline-waiting.svg": ("exact", 1 << 30, "One bucket, exact averages"),
    "timeline-hidden.svg": ("bytegrad", 1 << 20, "Buckets of 1 MiB, ByteGrad"),
}
"""The algorithm, the size of buckets and the title of each picture."""


def train(path: Path, algorithm: str, bucket_bytes: int, steps: int = 12) -> None:
    """Train on this rank, and write the timeline of all ranks."""
    import torch

    import bagua_torch
    from bagua_comm.algorithms import from_name

    torch.set_num_threads(1)
    comm = bagua_torch.connect()
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ddp = bagua_torch.DistributedDataParallel(
        model, optimizer, from_name(algorithm), comm=comm, bucket_bytes=bucket_bytes
    )
    x, y = torch.randn(512, 512), torch.randint(10, (512,))
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        comm.tracer.value("loss", loss.item())
    comm.trace(path)
    ddp.close()
    comm.close()


def median_step(summary: Summary) -> tuple[float, float]:
    """When the step with the median time begins and ends on the first rank, in seconds."""
    ends = summary.ranks[0].step_ends_s
    steps = sorted(pairwise(ends), key=lambda step: step[1] - step[0])
    return steps[len(steps) // 2]


def draw(timeline: Timeline, title: str, seconds: float) -> str:
    """Return a picture of the median step of all ranks, in SVG; `seconds` are as wide as it."""
    summary = summarize(timeline)
    begin_s, end_s = median_step(summary)
    scale = WIDTH / seconds
    lines, y = [], 52
    for rank, each in timeline.ranks.items():
        for name, exchanges in (("training", False), ("lane", True)):
            lines.append(f'<text x="8" y="{y + 15}">{"rank " + str(rank) if not exchanges else ""}</text>')
            lines.append(f'<text class="soft" x="64" y="{y + 15}">{name}</text>')
            lines += _bars(each, begin_s, end_s, scale, y, exchanges=exchanges)
            y += 26
        y += 8
    waiting, hidden = summary.mean["waiting_s"] / summary.mean["step_s"], summary.mean["hidden"]
    text = f"{100 * waiting:.0f} % of a step waits, {100 * hidden:.0f} % of communication is hidden"
    for i, (name, color) in enumerate(COLORS.items()):
        lines.append(f'<rect x="{LEFT + 136 * i}" y="{y + 2}" width="11" height="11" rx="2" fill="{color}"/>')
        lines.append(f'<text class="soft" x="{LEFT + 16 + 136 * i}" y="{y + 12}">{name}</text>')
    return _PAGE.format(
        width=LEFT + WIDTH + 8, height=y + 22, title=escape(title), text=text, body="\n".join(lines)
    )


LEFT, WIDTH = 112, 640


def _bars(
    rank: RankTimeline, begin_s: float, end_s: float, scale: float, y: int, *, exchanges: bool
) -> list[str]:
    bars = []
    for span in sorted(rank.spans, key=lambda span: span.start_ns):
        if span.name not in COLORS or (span.name == "exchange") != exchanges:
            continue
        a, b = max(span.start_ns / 1e9, begin_s), min(span.end_ns / 1e9, end_s)
        if a < b:
            x, width = LEFT + (a - begin_s) * scale, max(0.5, (b - a) * scale - 0.5)
            box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="20" rx="2"'
            bars.append(f'<rect {box} fill="{COLORS[span.name]}"><title>{escape(span.name)}</title></rect>')
    return bars


_PAGE = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"
viewBox="0 0 {width} {height}" role="img" aria-labelledby="t">
<title id="t">{title}; {text}</title>
<style>
.paper {{ fill: #ffffff; stroke: #d0d7de; }}
text {{ font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1f2328; }}
.head {{ font-weight: 600; }} .soft {{ fill: #57606a; font-size: 12px; }}
@media (prefers-color-scheme: dark) {{ .paper {{ fill: #16191d; stroke: #3d444d; }} text {{ fill: #e6edf3; }}
.soft {{ fill: #9198a1; }} }}
</style>
<rect class="paper" x="0.5" y="0.5" width="99.8%" height="99.5%" rx="6"/>
<text class="head" x="8" y="20">{title}</text>
<text class="soft" x="8" y="38">{text}</text>
{body}
</svg>
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Train twice, and draw both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", default="200mbit", help="of each host's link")
    parser.add_argument("--to", type=Path, default=GUIDES, help="the folder of the pictures")
    parser.add_argument("--train", nargs=3, metavar=("FILE", "ALGORITHM", "BYTES"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.train:
        path, algorithm, size = options.train
        train(Path(path), algorithm, int(size))
        return 0
    found: dict[str, Timeline] = {}
    with netlab.build(2, options.rate) as lab, tempfile.TemporaryDirectory() as folder:
        for name, (algorithm, bucket_bytes, _) in PICTURES.items():
            path = Path(folder, name).with_suffix(".json")
            program = ["-m", "benchmarks.timelines", "--train", str(path), algorithm, str(bucket_bytes)]
            if lab.run(lab.mpirun(program), timeout_s=300):
                print(f"the training with {algorithm} failed", file=sys.stderr)
                return 1
            found[name] = read_timeline(path)
    steps = {name: median_step(summarize(timeline)) for name, timeline in found.items()}
    longest_s = max(end - begin for begin, end in steps.values())
    for name, timeline in found.items():
        (options.to / name).write_text(draw(timeline, PICTURES[name][2], longest_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
