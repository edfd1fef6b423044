"""Tables and a plot of what benchmarks/network.py measured.

python benchmarks/network_report.py benchmarks/results --out benchmarks/results/network
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import header_lines

NAMES = {
    "ours": "ours",
    "gloo": "gloo",
    "mpi": "MPI's own",
    "ring": "ring",
    "halving_doubling": "halving-doubling",
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="of JSON files of benchmarks/network.py, network-*.json")
    parser.add_argument("--out", type=Path, required=True, metavar="STEM")
    options = parser.parse_args(argv)
    records = [json.loads(path.read_text()) for path in sorted(options.folder.glob("network-*.json"))]
    records.sort(key=lambda record: record["arguments"]["label"].rjust(10))  # 1gbit before 10gbit
    options.out.with_suffix(".md").write_text("\n".join(markdown(records)) + "\n")
    plot(records, options.out.with_suffix(".png"))


def markdown(records: Sequence[dict[str, Any]]) -> list[str]:
    """A table for each record: bus bandwidth of all contenders, and ours over gloo's."""
    lines = [
        "# Collectives on slow networks",
        "",
        "Bus bandwidth in GB/s, from the median time of calls in turn, in one run; float32. A quantized "
        "allreduce counts the float32 elements, not the bytes sent.",
    ]
    for record in records:
        lines += ["", f"## {record['arguments']['label']}", "", "```"]
        lines += [line.removeprefix("# ") for line in header_lines(record)[1:4]]
        lines += ["```", "", "| operation | bytes | " + " | ".join(NAMES.values()) + " | ours / gloo |"]
        lines += ["| --- | ---: |" + " ---: |" * (len(NAMES) + 1)]
        for (operation, nbytes), found in cells(record).items():
            figures = [f"{found[name]:.4f}" if name in found else "-" for name in NAMES]
            ratio = f"{found['ours'] / found['gloo']:.2f}" if "gloo" in found else "-"
            lines.append(f"| {operation} | {nbytes} | " + " | ".join(figures) + f" | {ratio} |")
    return lines


def cells(record: dict[str, Any]) -> dict[tuple[str, int], dict[str, float]]:
    """By operation and size: bus bandwidth by contender."""
    table: dict[tuple[str, int], dict[str, float]] = {}
    for row in record["results"]:
        if not row["right"]:
            raise SystemExit(f"{row['contender']} gave a wrong result: {row}")
        table.setdefault((row["operation"], row["bytes"]), {})[row["contender"]] = row["busbw_gbs"]
    return table


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Bus bandwidth over size: a row for each record, a panel for each operation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    operations = list(dict.fromkeys(row["operation"] for record in records for row in record["results"]))
    figure, axes = pyplot.subplots(
        len(records), len(operations), figsize=(3.2 * len(operations), 2.9 * len(records)), squeeze=False
    )
    for panels, record in zip(axes, records, strict=True):
        for axis, operation in zip(panels, operations, strict=True):
            for name, label in NAMES.items():
                points = [
                    (nbytes, found[name])
                    for (measured, nbytes), found in cells(record).items()
                    if measured == operation and name in found
                ]
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.set_title(f"{operation}, {record['arguments']['label']}", fontsize=9)
            axis.set_xlabel("bytes")
    axes[0][0].set_ylabel("bus bandwidth (GB/s)")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
