"""What pages say in words and is known elsewhere is the same there."""

import ast
import json
import re
import statistics
from contextlib import nullcontext
from types import ModuleType

import numpy as np
from support.pages import ROOT, pages, read

from bagua_comm import Checkpoints
from bagua_comm.planning.advise import expression
from bagua_comm.planning.costmodel import Cluster, Job, Rates
from bagua_comm.planning.sites import most_communication
from bagua_comm.testing import ThreadJob, run_fleet, run_ranks
from bagua_torch.lightning import names

README = (ROOT / "README.md").read_text()


def record(name):
    """What benchmarks have measured."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def section_on(title):
    """A section of the page on performance."""
    page = (ROOT / "docs" / "how-it-works" / "performance.md").read_text()
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def words_of(page):
    return " ".join((ROOT / "docs" / page).read_text().split())


def test_the_first_page_is_short_and_begins_with_commands():
    assert README.count("\n") <= 120
    first, second = [block.code for block in read(ROOT / "README.md").blocks][:2]
    assert first.endswith("&& bagua run -n 4 examples/train.py\n")
    assert second.endswith("&& python -m pytest\n")
    tests = re.search(r"pip install .*", (ROOT / ".ci" / "run").read_text())[0]
    assert second.partition("pip install ")[2].partition("&&")[0].split()[-1] in tests


def test_speed_ups_are_those_that_were_measured():
    rates = r"(\S+) times as fast .* at its best at 1 Gbit/s, and (\S+) times at 10 Gbit/s"
    said = re.search(rates, " ".join(README.split()))
    of_bytes = [row_of("vgg16, 4 hosts", rate, "bytegrad")[0] for rate in (1000, 10000)]
    assert said.groups() == tuple(f"{speed_up:.1f}" for speed_up in of_bytes)
    assert f" gains a factor of {of_bytes[1]:.1f};" in words_of("guides/slow-networks.md")
    performance = (ROOT / "docs" / "how-it-works" / "performance.md").read_text()
    names = {"VGG16": "vgg16", "ResNet-50": "resnet50", "BERT-Large": "bert-large"}
    line = r"^\| (\S+), (\S+) ([GM])bit/s(, .*)? \| (\S+) \| (\S+) \| (?:(\d+) % )?\|$"
    rows = re.findall(line, performance, re.MULTILINE)
    assert len(rows) >= 7
    for model, rate, unit, more, exact, of_bytes, limit in rows:
        ours = ("hierarchical", "hierarchical-bytes") if "2 x 2" in more else ("exact", "bytegrad")
        hosts = "2 hosts of 2 ranks" if "2 x 2" in more else "4 hosts"
        where = f"{names[model]}, {hosts}", int(rate) * (1000 if unit == "G" else 1)
        (first, _), (second, of_limit) = (row_of(*where, name) for name in ours)
        assert (exact, of_bytes) == (f"{first:.2f}", f"{second:.2f}")
        assert (limit or "-") == of_limit.rstrip("%")
    front = (ROOT / "docs" / "index.md").read_text()
    for name, model in names.items():
        speed_ups = [row_of(f"{model}, 4 hosts", rate, "bytegrad")[0] for rate in (500, 1000, 10000)]
        assert f"| {name} | " + " | ".join(f"{speed_up:.2f}" for speed_up in speed_ups) + " |" in front


def test_the_figures_of_the_largest_changes_are_those_that_were_measured():
    rows = record("sparse")["results"]
    found = {"sparseloco": [], "diloco": []}
    for task in ("digits", "digits-adam"):
        for name in ("sparseloco-10", "sparseloco-30", "diloco-10", "diloco-10-mean"):
            metrics = [row["metric"] for row in rows if (row["task"], row["algorithm"]) == (task, name)]
            assert len(metrics) == 3
            found[name.partition("-")[0]].append(sum(metrics) / 3)
    sparse, dense = (f"{min(each):.1f} to {max(each):.1f} %" for each in found.values())
    text = words_of("guides/choose.md")
    assert f"ends after 400 steps at {sparse} where DiLoCo has {dense}" in text


def test_the_figures_of_four_bits_are_those_that_were_measured():
    four_bits = section_on("Four bits")
    for codec, name in (("MinMaxUInt8", "eight bits"), ("Int4", "four bits")):
        for mib in (8, 32):
            cells = []
            for rate in ("100mbit", "500mbit", "1gbit", "10gbit"):
                rows = record(f"few_bits-network-{rate}")["results"]
                of_codec = [
                    row for row in rows if row["codec"].startswith(codec) and row["size_bytes"] == mib << 20
                ]
                gloo = [row["forms"]["out-of-place"]["beside"]["gloo"]["ratio"]["median"] for row in of_codec]
                cells.append(f"{1 / max(gloo):.1f} to {1 / min(gloo):.1f}")
            assert f"| {name}, {mib} MiB | {' | '.join(cells)} |" in four_bits
    for model, name in (("vgg16", "VGG16"), ("bert-large", "BERT-Large")):
        for rate in (100, 500):
            rows = record(f"few_bits-training-{model}-{rate}")["results"]
            step = {row["algorithm"]: row["median_s"] for row in rows}
            ups = [f"{step['ddp'] / step[other]:.2f}" for other in ("ddp-fp16", "bytegrad", "int4")]
            assert f"| {name}, {rate} Mbit/s | {step['ddp']:.1f} s | {' | '.join(ups)} |" in four_bits


def test_the_figures_between_sites_are_those_that_were_measured():
    section, loss, most = section_on("Between sites"), {}, {}
    rows = record("streaming")["summary"]
    for task, decimals in (("text", 4), ("digits", 2)):
        for name in (
            "torch",
            "diloco-30",
            "streaming-30-at-once",
            "streaming-30",
            "streaming-30-int4",
            "sparseloco-30",
        ):
            (row,) = [row for row in rows if (row["task"], row["algorithm"]) == (task, name)]
            assert len(row["metrics"]) == 3
            loss[task, name] = row["metric"]
            times, shares, runs = [], [], []
            for rate in ("50mbit", "200mbit"):
                found = record(f"streaming-{task}-{rate}")
                assert found["network"]["text"] == f"4 emulated hosts, links of {rate}, latency 50 ms one way"
                steps = [run["per_step"] for run in found["results"] if run["algorithm"] == name]
                assert len(steps) == (1 if (task, name) == ("digits", "torch") else 3)  # seeds
                times.append(f"{np.mean([step['ms'] for step in steps]):,.0f} ms")
                waited = [step["waited_ms"] / step["ms"] for step in steps if name != "torch"]
                shares.append(f"{100 * np.mean(waited):.1f} %" if waited else "-")
                most[task, name] = steps[0]["most_wire_bytes"]
                runs += steps
            cells = [*times, *shares, f"{most[task, name]:,.0f}", f"{loss[task, name]:.{decimals}f}"]
            assert f" | {' | '.join(cells)} |" in section
            if name in ("streaming-30", "streaming-30-int4"):
                assert max(run["waited_ms"] for run in runs) < 0.05 * min(run["ms"] for run in runs)
    assert most["text", "streaming-30"] <= 1.05 * most["text", "diloco-30"] / 4  # the goal that the CNN misses
    assert most["digits", "streaming-30"] > 1.05 * most["digits", "diloco-30"] / 4
    more = {
        name: 100 * (loss["text", name] / loss["text", "diloco-30"] - 1)
        for name in ("streaming-30", "sparseloco-30")
    }
    assert more["streaming-30"] < 0.5
    assert f"| reached, {more['streaming-30']:.2f} % | reached, more accurate |" in section
    less = loss["digits", "diloco-30"] - loss["digits", "sparseloco-30"]
    assert f"| missed, {more['sparseloco-30']:.1f} % | reached, {less:.2f} points |" in section
    assert loss["digits", "streaming-30"] > loss["digits", "diloco-30"]
    text = " ".join(section.split())
    rows = record("streaming-256")["summary"]
    (more_sent,) = [row["metric"] for row in rows if row["algorithm"] == "sparseloco-30-256"]
    assert (
        f"With `keep=256` the transformer ends {100 * (more_sent / loss['text', 'diloco-30'] - 1):.1f} % above"
        in text
    )
    runs = record("streaming-1600")["results"]
    dense, sparse, more_sent = (run["metric"] for run in runs)
    assert (
        f"it ends {100 * (sparse / dense - 1):.1f} % above DiLoCo, and {100 * (more_sent / dense - 1):.1f} % with"
        in text
    )


def test_the_figures_of_sparse_changes_at_equal_bytes_are_those_that_were_measured():
    page, found, sent = section_on("Between sites"), {}, {}
    for run in [
        run for name in ("sparse-text", "sparse-text-seeds", "streaming") for run in record(name)["results"]
    ]:
        if run["task"] == "text":
            found.setdefault(run["algorithm"], {})[run["seed"]] = run["metric"]
            sent.setdefault(run["algorithm"], run["per_step"]["wire_bytes"])
    longer = {row["algorithm"]: row for row in record("sparse-text-1600")["summary"]}
    assert all(len(row["metrics"]) == 3 for row in longer.values())
    first = {run["algorithm"] for run in record("sparse-text")["results"]} - {"torch"}
    assert len(first) == 11
    assert longer.keys() < first
    for name in first:
        loss, dense = (statistics.fmean(found[each][seed] for seed in range(3)) for each in (name, "diloco-30"))
        row = f"| {sent[name]:,.0f} | {sent['diloco-30'] / sent[name]:.1f} | {loss:.4f} | "
        row += f"{100 * (loss / dense - 1):+.1f} % | "
        if name in longer:
            row += f"{100 * (longer[name]['metric'] / longer['diloco-30']['metric'] - 1):+.1f} % |"
        assert row in page
    ends = {run["algorithm"]: run["metric"] for run in record("sparse-text-10000")["results"]}
    text, dense = " ".join(page.split()), ends["diloco-30"]
    for name, its in (("sparseloco-30-both", f"with {dense:.4f}"), ("sparseloco-10-both", "")):
        above = f"{ends[name]:.4f}, {100 * (ends[name] / dense - 1):.1f} % above `DiLoCo(30)` {its}".rstrip()
        assert above in text


def test_the_figures_of_muon_inside_diloco_are_those_that_were_measured():
    guide = (ROOT / "docs" / "guides" / "choose.md").read_text()
    loss = {}
    for row in record("muloco")["summary"]:
        assert (len(row["metrics"]), row["steps"]) == (3, 400)
        loss[row["algorithm"]] = row["metric"]
    cells = {kind: [loss[f"{kind}-adam-0.004"], loss[f"{kind}-muon-0.016"]] for kind in ("exact", "diloco-30")}
    for name, kind in (("exact averages in each step", "exact"), ("`DiLoCo(30)`", "diloco-30")):
        assert f"| {name} | {cells[kind][0]:.3f} | {cells[kind][1]:.3f} |" in guide
    assert cells["diloco-30"][1] < cells["exact"][0]
    tried = {run["algorithm"]: run["metric"] for run in record("muloco-rates")["results"]}
    for kind in cells:
        for optimizer, chosen in (("adam", 0.004), ("muon", 0.016)):
            rates = {
                float(name.rpartition("-")[2]): x
                for name, x in tried.items()
                if name.startswith(f"{kind}-{optimizer}")
            }
            assert len(rates) == 3
            assert min(rates, key=rates.get) == chosen


def test_the_hour_of_faults_went_as_the_page_says():
    results = record("soak")["results"]
    assert results["problems"] == []
    text = words_of("how-it-works/failures.md")
    minutes, pause_s = results["seconds"] / 60, results["longest_pause_s"]
    assert (
        f"{results['job']['deaths']} processes died in {minutes:.0f} minutes, and {results['steps']:,} steps"
        in text
    )
    assert f"the longest time without a step was {pause_s:.1f} s, and nothing grew" in text


def test_the_seeds_of_the_record_are_well_as_the_guide_says():
    found = record("schedules")
    assert found["arguments"]["seeds"] == sum(found["results"]["programs"].values()) == 10_000
    assert (ROOT / "docs" / "guides" / "testing.md").read_text().count("all 10,000 seeds are well") == 1
    assert found["results"]["failed"] == []


def test_the_figures_of_many_processes_are_those_that_were_measured():
    text = words_of("how-it-works/growth.md")
    found = record("many-128")
    assert found["ranks"] == 128
    assert not found["problems"]
    assert [row["name"] for row in found["results"]] == ["exact", "bytegrad", "hierarchical", "decentralized"]
    assert not any(row["problems"] for row in found["results"])
    start, elastic = found["start"], found["elastic"]
    assert (
        f"connected after {start['connected_s']:.0f} s, of which imports took {start['imported_s']:.0f} s" in text
    )
    calls, sizes = ([row[key]["median"] for row in found["results"]] for key in ("call_ms", "mib"))
    assert (
        f"took {min(calls):.0f} to {max(calls):.0f} ms, and a rank held {min(sizes):.0f} to {max(sizes):.0f} MiB"
        in text
    )
    assert (elastic["outcome"], len(elastic["struck"])) == ("went on", 2)
    assert f"were training again after {elastic['recovery_s']:.1f} s" in text


def test_the_figures_of_the_backend_are_those_that_were_measured():
    section = section_on("The backend of torch.distributed")
    columns = []
    for where in ("host", "1gbit"):
        for launcher in ("mpi", "torchrun"):
            columns.append([record(f"backend-{launcher}-{where}-{run}")["results"] for run in (1, 2)])
    sizes = {0: "", 1 << 10: ", 1 KiB", 1 << 16: ", 64 KiB", 1 << 20: ", 1 MiB", 1 << 24: ", 16 MiB"}
    for i, row in enumerate(columns[0][0]):
        ratios = [sorted(run[i]["ratio"] for run in runs) for runs in columns]
        cells = " | ".join(f"{least:.2f} to {most:.2f}" for least, most in ratios)
        assert f"| {row['call']}{sizes[row['bytes']]} | {cells} |" in section
    assert section.count(" to ") >= 4 * len(columns[0][0]) == 4 * 14
    assert min(row["ratio"] for run in columns[0] for row in run) > 1  # "faster in all rows"


def test_what_to_type_between_sites_is_what_advise_says():
    guide = (ROOT / "docs" / "guides" / "slow-networks.md").read_text()
    number = r"([\d.]+)"
    rows = re.findall(rf"^\| {number} ([MG])bit/s \| {number} ms \| (.*) \|$", guide, re.MULTILINE)
    assert len(rows) == 8
    job, sites = Job(400_000_000, 0.1, 0.2), (2, 4, 16)
    for bandwidth, unit, latency_ms, cells in rows:
        gbit = float(bandwidth) / (1000 if unit == "M" else 1)
        link = {"bandwidth_gbit": gbit, "latency_s": float(latency_ms) / 1e3, "intra_gbs": 200.0}
        for count, cell in zip(sites, cells.split(" | "), strict=True):
            found = most_communication(job, Cluster(count, **link, transport="nccl"), Rates.gpu())
            assert cell == (f"`{expression(found[0])}`" if found else "-")


def row_of(where, rate_mbit, algorithm):
    """The speed-up of an algorithm in the record, and its share of the limit."""
    table = (ROOT / "benchmarks" / "results" / "ddp.md").read_text()
    rows = table.partition(f"## {where} at {rate_mbit} Mbit/s\n")[2].partition("\n## ")[0]
    found = re.search(rf"^\| {algorithm} \|[^|]*\|[^|]*\|[^|]*\| ([\d.]+) \| (\S+) \|", rows, re.MULTILINE)
    return float(found[1]), found[2]


def test_the_guide_lists_the_names_of_lightnings_strategies():
    guide = (ROOT / "docs" / "guides" / "lightning.md").read_text()
    said = guide.partition("```text\n")[2].partition("```")[0].replace("\n", " ")
    lightning = ModuleType("lightning.pytorch.strategies")
    lightning.StrategyRegistry = registry = Registry()
    names._register(lightning)
    assert said.strip().split(", ") == sorted(registry.keys() - {"bagua"})


class Registry(dict):
    """As Lightning's."""

    def register(self, name, strategy, description):
        self[name] = strategy


def test_no_page_installs_from_an_index_what_is_not_published_there():
    """Anyone may take a name that is free there; see "Release" in CONTRIBUTING.md."""
    texts = {page.name: page.path.read_text() for page in pages() if page.name != "CHANGELOG.md"}
    texts |= {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    command = r"pip3? (install|download)\b[^`\n]*?['\" ]bagua[-_](comm|torch)\b(?!/)"
    found = {name: wrong[0] for name, text in texts.items() if (wrong := re.search(command, text))}
    assert found == {"CONTRIBUTING.md": "pip install bagua-comm"}  # where it says that a test refuses it
    for name in ("README.md", "docs/index.md", "docs/faq.md"):
        assert re.search(r"no release on\s+(a package index|PyPI)", texts[name]), name


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


def test_the_files_and_functions_on_the_way_of_a_gradient_exist():
    page = (ROOT / "docs" / "how-it-works" / "journey.md").read_text()
    rows = re.findall(r"^\| (`bagua_[^|]*) \| ([^|]*) \|", page, re.MULTILINE)
    assert len(rows) > 15
    for files, functions in rows:
        for path in re.findall(r"`([^`]+)`", files):
            assert (ROOT / path).exists(), path
        for name in re.findall(r"`([^`]+)`", functions):
            assert name in names_in(ROOT / path), f"{path}: {name}"
    for path in re.findall(r"`(bagua_comm/[^`]+)`", page):
        assert (ROOT / path).exists(), path


def names_in(path):
    """The functions and classes of a file, and `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        names |= {node.name} if isinstance(node, ast.ClassDef | ast.FunctionDef) else set()
    return names


def block_with(page, text):
    """The program of a page that has this text."""
    (code,) = [block.code for block in read(ROOT / "docs" / "guides" / page).blocks if text in block.code]
    return code


def test_the_checkpoint_of_an_engine_loads_on_any_number_of_ranks(tmp_path):
    code = block_with("checkpoints.md", "load_engine").replace("bagua_comm.connect()", "nullcontext(comm)")
    assert "alignment=32 * comm.size" in code  # so that the flat arrays have other sizes there

    def trained(folder, ranks, steps=10):
        program = code.replace("runs/9", str(tmp_path / folder)).replace("first + 10", f"first + {steps}")

        def body(comm):
            exec(program, {"nullcontext": nullcontext, "comm": comm})
            with Checkpoints(tmp_path / folder, comm) as checkpoints:
                return checkpoints.load()

        return run_ranks(ranks, body)[0]

    parts, whole = [trained("parts", 2) for _ in range(2)], trained("whole", 2, steps=20)
    assert [loaded.step for loaded in (*parts, whole)] == [10, 20, 20]
    for part in ("weights", "variance"):
        assert parts[-1].tree[part]["w"].tobytes() == whole.tree[part]["w"].tobytes()
    assert np.ptp(parts[-1].tree["weights"]["w"]) == 0
    more = [trained("parts", ranks) for ranks in (3, 1)]
    assert [loaded.step for loaded in more] == [30, 40]
    assert [loaded.tree["weights"]["w"].shape for loaded in more] == [(64,)] * 2


def test_a_training_of_numpy_arrays_continues_on_fewer_ranks():
    code = block_with("elastic.md", "sgd = optim.SGD").replace(
        "elastic.run(state)", "elastic.run(state, fleet=fleet)"
    )
    code = code.replace("state.step < 100", "state.step < 40").replace(
        "state.commit()\n", "state.commit()\n            after_step(comm, state.step)\n"
    )
    job = ThreadJob(3)

    def body(fleet):
        sizes = set()

        def after_step(comm, step):
            sizes.add(comm.size)
            if fleet.me == 1 and step == 10:
                job.kill(1)

        names = {"fleet": fleet, "after_step": after_step}
        exec(code, names)
        return names["state"].step, names["distance"] < 0.01, sizes

    first, _, third = run_fleet(job, body)
    assert first == third == {"result": (40, True, {2, 3})}
