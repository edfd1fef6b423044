"""The report of the benchmark of convergence: rows over the seeds, Markdown tables, and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..bench.report import markdown_table, or_dash
from ..bench.timing import allreduce_factor
from .methods import METHODS, STREAMING, TORCH, TORCH_ADAM, Method
from .tasks import ALL, OPTIMIZERS, TASKS, Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NODES = 2
"""Emulated nodes, on which the ranks are; only the hierarchical average depends on them."""

# ---------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------


def summarize(record: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each task and algorithm: its seeds together, and beside the baseline."""
    runs: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for result in record["results"]:
        runs.setdefault((result["task"], result["algorithm"]), {})[result["seed"]] = result
    rows = []
    for task_name in record["tasks"]:
        task = TASKS[task_name]
        for name, method in task.methods().items():
            mine = runs.get((task_name, name), {})
            if mine:
                baseline = task.baseline_of(method)
                rows.append(
                    {
                        "task": task_name,
                        "algorithm": name,
                        **_joined(mine),
                        "baseline": baseline,
                        **_compared(task, method, mine, runs.get((task_name, baseline), {})),
                    }
                )
    return rows


def _joined(mine: dict[int, dict[str, Any]]) -> dict[str, Any]:
    first = next(iter(mine.values()))
    return {
        "object": first["object"],
        "steps": first["steps"],
        "metric": _mean([run["metric"] for run in mine.values()]),
        "spread": _spread([run["metric"] for run in mine.values()]),
        "metrics": {str(seed): mine[seed]["metric"] for seed in sorted(mine)},
        "per_step": {
            key: None if value is None else _mean([run["per_step"][key] for run in mine.values()])
            for key, value in first["per_step"].items()
        },
    }


def _compared(task: Task, method: Method, mine: dict[int, Any], theirs: dict[int, Any]) -> dict[str, Any]:
    """The difference of the means over the seeds that both have; None without any."""
    seeds = sorted(mine.keys() & theirs.keys())
    if not seeds:
        return {"difference": None, "differences": {}, "ratio": None, "ratio_spread": None, "within": None}
    pairs = {seed: (mine[seed]["metric"], theirs[seed]["metric"]) for seed in seeds}
    ratios = [ours / exact for ours, exact in pairs.values()] if task.relative else []
    difference = task.difference(*(_mean(side) for side in zip(*pairs.values(), strict=True)))
    return {
        "difference": difference,
        "differences": {str(seed): task.difference(*pair) for seed, pair in pairs.items()},
        "ratio": _mean(ratios) if ratios else None,
        "ratio_spread": _spread(ratios),
        "within": abs(difference) <= task.tolerance if method.exact else None,
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _spread(values: Sequence[float]) -> float | None:
    """The standard deviation of a sample; None for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


# ---------------------------------------------------------------------------------------------------
# Markdown
# ---------------------------------------------------------------------------------------------------


def command_of(record: dict[str, Any]) -> str:
    """The command that makes this record."""
    results, tasks = record["results"], record["tasks"]
    seeds = sorted({result["seed"] for result in results})
    names = {result["algorithm"] for result in results}
    steps = {task["steps"] for task in tasks.values()}
    arguments = ["--task", "all" if tuple(tasks) == ALL else ",".join(tasks)]
    if names != {name for task in tasks for name in TASKS[task].compared_methods()}:
        arguments += ["--algorithms", ",".join(name for name in METHODS if name in names)]
    if seeds != [0, 1, 2]:
        arguments += ["--seeds", ",".join(map(str, seeds))]
    if any(TASKS[name].steps != task["steps"] for name, task in tasks.items()):
        arguments += ["--steps", str(steps.pop())]
    arguments += [
        f"--device-time {task['device_ms']:g}ms" for task in list(tasks.values())[:1] if "device_ms" in task
    ]
    launcher = f"bagua_comm run -n {record['ranks']}"
    if "network" in record:
        launcher = f"benchmarks.netlab run {record['network']['arguments']}"
    return f"python -m {launcher} -m benchmarks.convergence {' '.join(arguments)}"


def markdown(record: dict[str, Any], picture: str | None) -> str:
    """The report, with the name of its figure if there is one."""
    machine, ranks = record["machine"], record["ranks"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [
        "# Where the algorithms end, and what they send",
        "",
        f"    {command_of(record)}",
        "",
        f"* Machine: {machine['cpu']}, {machine['cores']} cores, {ranks} ranks.",
        f"* Versions: {versions}.",
        *([f"* Network: {record['network']['text']}."] if "network" in record else []),
        "* For one seed, all algorithms of a task begin with the same weights and see the same batches in the",
        "  same order. Optimizer, learning rate, schedule and bucket size are the same too, but for what an",
        "  algorithm itself needs, which stands in its row.",
        "* The metric is that of one model: the mean of the ranks' weights, where these differ.",
        "* Bytes are those of rank 0, averaged over the steps: *payload* is the size of the buckets that were",
        "  exchanged, with their padding, and *wire* what left for other ranks. Those of torch DDP are computed,",
        f"  not measured: 2 (p - 1) / p = {allreduce_factor(ranks):g} times the gradients' size, as in a ring.",
        "* *Spread* is the standard deviation over the seeds. The *ratio* to the metric of torch DDP is the mean",
        "  over the seeds of both, with the standard deviation.",
        "* *Exact?* says, of those that should end where exact averaging does, whether they do: whether their",
        "  mean over the seeds is close enough.",
    ]
    if picture is not None:
        lines += ["", f"![Differences to torch DDP, bytes on the wire, and training curves]({picture})"]
    for name in record["tasks"]:
        lines += ["", *_section(record, name)]
    return "\n".join(lines) + "\n"


def _section(record: dict[str, Any], name: str) -> list[str]:
    """A task: its settings, the table, and remarks."""
    task, said = TASKS[name], record["tasks"][name]
    rates = ", ".join(f"{lr:g} for {OPTIMIZERS[kind]}" for kind, lr in said["lr"].items())
    lines = [
        f"## {task.title}",
        "",
        f"* Data: {said['data']} (digest {said['digest']}).",
        f"* Model: {said['model']}; {said['parameters']:,} parameters.",
        f"* Training: {said['steps']} steps of {OPTIMIZERS[said['optimizer']]}, batches of {said['batch_size']} "
        "a rank.",
        f"* Learning rate: {rates}; {said['schedule']}.",
        f"* Buckets: {said['bucket_bytes']:,} bytes.",
        *(
            [f"* Each step sleeps {said['device_ms']:g} ms, as if a device computed."]
            if "device_ms" in said
            else []
        ),
        f"* Difference: of the means, to torch DDP, in {task.unit}; {task.better} is better. *Exact?* allows "
        f"{task.tolerance:g} {task.unit}.",
    ]
    if TORCH_ADAM in task.methods():
        lines.append("* QAdam is compared with torch DDP with Adam.")
    if _is_timed(rows_of(record, name)):
        lines += [
            "* *Most B in a step*: of all steps, the most wire bytes of exchanges that ended in it. *Time* is",
            "  that of a step, beside the baseline's in the same run. *Waiting* is the share of it in which",
            "  training waited for exchanges: the communication that was not hidden.",
        ]
    return [*lines, "", *_table(record, name), *(line for note in notes(record, name) for line in ("", note))]


def rows_of(record: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The rows of a task, in the order of the methods."""
    return [row for row in record["summary"] if row["task"] == name]


def _table(record: dict[str, Any], name: str) -> list[str]:
    task, rows = TASKS[name], rows_of(record, name)
    timed = _is_timed(rows)
    seeds = sorted({seed for row in rows for seed in row["metrics"]}, key=int)
    titles = [
        "algorithm",
        f"{task.metric}: mean",
        "spread",
        f"seeds {', '.join(seeds)}",
        f"difference ({task.unit})",
        *(["ratio"] if task.relative else []),
        "exact?",
        "steps",
        "payload B/step",
        "wire B/step",
        *(["most B in a step", "time", "waiting (%)"] if timed else []),
        "object",
    ]
    cells = [
        [
            METHODS[row["algorithm"]].title,
            f"{row['metric']:.{task.decimals}f}",
            or_dash(row["spread"], f"{{:.{task.decimals}f}}"),
            ", ".join(f"{row['metrics'][s]:.{task.decimals}f}" if s in row["metrics"] else "-" for s in seeds),
            _difference(row),
            *([_ratio(row)] if task.relative else []),
            {True: "yes", False: "**no**", None: ""}[row["within"]],
            str(row["steps"]),
            *(f"{row['per_step'][key]:,.0f}" for key in ("payload_bytes", "wire_bytes")),
            *(_times(row, rows) if timed else []),
            f"`{row['object']}`",
        ]
        for row in rows
    ]
    return markdown_table(titles, cells, "lrrrr" + "r" * task.relative + "lrrr" + "rrr" * timed + "l")


def _is_timed(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether the table has times: it has if one of the methods is meant to hide communication."""
    return any(row["algorithm"] in STREAMING for row in rows)


def _times(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """The most bytes of a step, the time of a step beside that of the baseline, and the share of waiting."""
    base = next((other["per_step"]["ms"] for other in rows if other["algorithm"] == row["baseline"]), None)
    ratio = None if base is None else row["per_step"]["ms"] / base
    return [f"{row['per_step']['most_wire_bytes']:,.0f}", or_dash(ratio, "{:.2f}"), waiting(row["per_step"])]


def waiting(per_step: dict[str, Any]) -> str:
    """The share of the time of a step in which training waits for exchanges, in per cent.

    >>> waiting({"ms": 20.0, "waited_ms": 5.0}), waiting({"ms": 20.0, "waited_ms": None})
    ('25.0', '-')
    """
    waited = per_step.get("waited_ms")
    return "-" if waited is None else f"{100 * waited / per_step['ms']:.1f}"


def _difference(row: dict[str, Any]) -> str:
    if row["difference"] is None or row["algorithm"] == row["baseline"]:
        return ""
    return f"{row['difference']:+.2f}"


def _ratio(row: dict[str, Any]) -> str:
    if row["ratio"] is None or row["algorithm"] == row["baseline"]:
        return ""
    spread = "" if row["ratio_spread"] is None else f" ± {row['ratio_spread']:.4f}"
    return f"{row['ratio']:.4f}{spread}"


def notes(record: dict[str, Any], name: str) -> list[str]:
    """The remarks below the table of a task."""
    said = list(dict.fromkeys(METHODS[row["algorithm"]].note for row in rows_of(record, name)))
    return [*verdicts(record, name), *_across_nodes(record, name), *_added(record, name), *filter(None, said)]


def _added(record: dict[str, Any], name: str) -> list[str]:
    """Rows that were trained later, their versions, and the result of the baseline beside them."""
    task, found = TASKS[name], []
    for added in record.get("added", ()):
        titles = ", ".join(METHODS[algorithm].title for algorithm in added["algorithms"])
        versions = ", ".join(f"{library} {version}" for library, version in added["versions"].items())
        beside = "; ".join(
            f"{METHODS[algorithm].title}, {', '.join(f'{metric:.{task.decimals}f}' for metric in metrics)}"
            for algorithm, metrics in added["beside"][name].items()
        )
        found.append(
            f"The row of {titles} was added later: on {added['machine']['cpu']}, with {versions}. Beside it, in "
            f"the same run, by seed: {beside}."
        )
    return found


def verdicts(record: dict[str, Any], name: str) -> list[str]:
    """Whether all methods that should equal exact averaging do."""
    task = TASKS[name]
    judged = [row for row in rows_of(record, name) if row["within"] is not None]
    outside = [row for row in judged if not row["within"]]
    if not judged:
        return []
    listed = "; ".join(f"{METHODS[row['algorithm']].title} ({_difference(row)} {task.unit})" for row in outside)
    return [
        f"{len(judged) - len(outside)} of the {len(judged)} algorithms that should end where exact averaging "
        f"does end within {task.tolerance:g} {task.unit} of it." + (f" Outside: {listed}." if outside else "")
    ]


def _across_nodes(record: dict[str, Any], name: str) -> list[str]:
    """Bytes of the hierarchical average that travel between nodes."""
    found = [row["per_step"] for row in rows_of(record, name) if row["algorithm"] == "hierarchical"]
    local_size, rest = divmod(record["ranks"], NODES)
    if not found or rest:
        return []
    inside = allreduce_factor(local_size) * found[0]["payload_bytes"]
    return [
        f"The hierarchical average runs on {NODES} emulated nodes of {local_size}: of its wire bytes, "
        f"{inside:,.0f} stay inside a node (computed), and {found[0]['wire_bytes'] - inside:,.0f} cross."
    ]


# ---------------------------------------------------------------------------------------------------
# The figure
# ---------------------------------------------------------------------------------------------------

COLOURS = {
    "torch": "0.25",
    "gradients, every step": "#1f77b4",
    "weights, with neighbours or all": "#d95f02",
    "weights, now and then": "#2a9d5c",
}
"""The colours of the families of methods."""

CURVES = {
    TORCH: "-",
    "bytegrad": "-",
    "shift-one": "-",
    "low-precision-one-peer": "--",
    "diloco-10": "-",
    "diloco-10-bytes": "--",
}
"""The methods whose training is drawn, and their line styles."""


FAR = 20
"""Differences of more than this many tolerances are written at the edge, so that the others can be seen."""


def draw(record: dict[str, Any]) -> Figure:
    """For every task: differences, bytes on the wire, and training loss over bytes sent."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    tasks = list(record["tasks"])
    heights = [0.27 * max(8, len(rows_of(record, name))) + 1.1 for name in tasks]
    figure = Figure(figsize=(15, sum(heights) + 0.4), layout="constrained")
    grid = figure.add_gridspec(len(tasks), 3, width_ratios=[3, 2, 3], height_ratios=heights)
    for i, name in enumerate(tasks):
        rows = rows_of(record, name)
        left = figure.add_subplot(grid[i, 0])
        _draw_differences(left, TASKS[name], rows)
        _draw_bytes(figure.add_subplot(grid[i, 1], sharey=left), rows)
        _draw_curves(figure.add_subplot(grid[i, 2]), record, name, rows)
    families = [Patch(color=colour, label=family) for family, colour in COLOURS.items()]
    figure.legend(handles=families, loc="outside upper center", ncols=len(families), frameon=False)
    return figure


def _draw_differences(axes: Any, task: Task, rows: Sequence[dict[str, Any]]) -> None:
    axes.axvspan(-task.tolerance, task.tolerance, color="0.92")
    axes.axvline(0, color="0.6", linewidth=0.8)
    far = FAR * task.tolerance
    for y, row in enumerate(rows):
        if row["difference"] is None or row["algorithm"] == row["baseline"]:
            continue
        colour = COLOURS[METHODS[row["algorithm"]].family]
        if abs(row["difference"]) > far:
            _write_at_edge(axes, y, row["difference"], colour)
            continue
        seeds = [difference for difference in row["differences"].values() if abs(difference) <= far]
        axes.plot(seeds, [y] * len(seeds), "o", color=colour, markersize=4, alpha=0.4, markeredgewidth=0)
        axes.plot([row["difference"]], [y], "D", color=colour, markersize=6)
    axes.set_yticks(range(len(rows)), [METHODS[row["algorithm"]].title for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(COLOURS[METHODS[row["algorithm"]].family])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_title(f"{task.title}: {task.metric}", loc="left", fontweight="bold")
    axes.set_xlabel(
        f"difference to torch DDP ({task.unit}; {task.better} is better): mean and seeds\n"
        f"grey: within {task.tolerance:g} {task.unit}"
    )
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)


def _write_at_edge(axes: Any, y: int, difference: float, colour: str) -> None:
    left = difference < 0
    text = f"\N{LEFTWARDS ARROW} {difference:.0f}" if left else f"{difference:+.0f} \N{RIGHTWARDS ARROW}"
    axes.text(
        0.01 if left else 0.99,
        y,
        text,
        transform=axes.get_yaxis_transform(),
        ha="left" if left else "right",
        va="center",
        color=colour,
    )


def _draw_bytes(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    wire = [row["per_step"]["wire_bytes"] for row in rows]
    axes.barh(range(len(rows)), wire, height=0.6, color=[COLOURS[METHODS[r["algorithm"]].family] for r in rows])
    positive = [value for value in wire if value > 0]
    if positive:
        axes.set_xscale("log")
        axes.set_xlim(min(positive) / 3, max(positive) * 6)
    for y, value in enumerate(wire):
        if value > 0:
            axes.text(value * 1.1, y, _short(value), va="center", fontsize=8)
    axes.tick_params(labelleft=False)
    axes.set_xlabel("bytes on the wire, a step of a rank")
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)


def _draw_curves(axes: Any, record: dict[str, Any], task: str, rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        name, per_step = row["algorithm"], row["per_step"]
        if name not in CURVES or not per_step["wire_bytes"]:
            continue
        results = [r for r in record["results"] if r["task"] == task and r["algorithm"] == name]
        loss = np.mean([result["train_loss"] for result in results], axis=0)
        steps = row["steps"] * (np.arange(len(loss)) + 0.5) / len(loss)
        method = METHODS[name]
        axes.plot(
            steps * per_step["wire_bytes"], loss, CURVES[name], color=COLOURS[method.family], label=method.title
        )
    axes.set_xlabel("bytes on the wire of a rank, so far")
    axes.set_title("training loss, mean over ranks and seeds", loc="left", fontsize=10)
    axes.grid(color="0.9")
    if axes.lines:
        axes.set_xscale("log")
        lows, highs = zip(*((min(line.get_ydata()), max(line.get_ydata())) for line in axes.lines), strict=True)
        if max(highs) > 30 * min(lows):
            axes.set_yscale("log")
        axes.legend(fontsize=8, frameon=False)


def _short(nbytes: float) -> str:
    """A number of bytes with a decimal suffix.

    >>> _short(998.0), _short(12345.0), _short(1.5e6)
    ('998', '12 k', '1.5 M')
    """
    for limit, unit in ((1e6, " M"), (1e3, " k")):
        if nbytes >= limit:
            return f"{nbytes / limit:.{0 if nbytes >= 10 * limit else 1}f}{unit}"
    return f"{nbytes:.0f}"
