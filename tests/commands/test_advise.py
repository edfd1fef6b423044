"""`python -m bagua_comm advise`."""

import dataclasses
import json
import sys

import numpy as np
import pytest
from support.commands import output_of

from bagua_comm import (
    ArrayError,
    BFloat16,
    DiLoCo,
    GradientAllReduce,
    Hierarchical,
    LowPrecisionDecentralized,
    MinMaxUInt8,
    QAdam,
    Quantized,
    after,
    by_node,
    every,
)
from bagua_comm import __main__ as cli
from bagua_comm.commands import advise, quantities
from bagua_comm.launch.cli import CommandError
from bagua_comm.planning.advise import AS_FAST, enough_flows, expression, payload
from bagua_comm.planning.costmodel import METHODS, SHARDED, Cluster, Job, Rates, predict

BASE = ["advise", "--nodes", "4", "--bandwidth", "1gbit"]
VGG16 = [*BASE, "--model", "vgg16", "--step-time", "3s"]


def test_it_prints_the_table(capsys):
    lines = output_of(capsys, *VGG16, "--ranks-per-node", "2").splitlines()
    assert lines[0] == "553 MB, 3.00 s a step alone; 4 nodes of 2 ranks, 1 Gbit/s, 50 us"
    table = lines[lines.index("") + 1 :]
    names = [line.split()[0] for line in table[1 : table.index("")] if not line.startswith("-- ")]
    assert sorted(names) == sorted(METHODS)
    (exact,) = [line.split() for line in table if line.startswith("exact")]
    assert exact[1:] == ["1", "9.16", "s", "1.00x", "25%", "968.5", "968.5"]


def test_json_holds_the_same(capsys):
    options = ["--model-bytes", "100M", "--forward", "0.1s", "--backward", "200ms", "--optimizer", "0"]
    record = json.loads(output_of(capsys, *BASE, *options, "--latency", "1ms", "--device", "cpu", "--json"))
    job, cluster = Job(100_000_000, 0.1, 0.2, 0.0), Cluster(4, 1, 1.0, 1e-3)
    steps = {row["name"]: row["step_s"] for row in record["algorithms"]}
    assert list(steps.values()) == sorted(steps.values())
    assert steps["bytegrad"] == predict(METHODS["bytegrad"], job, cluster).step_s
    assert record["cluster"]["cores_per_rank"] is None


CAPPED = [*VGG16, "--flow-bandwidth", "100mbit"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--device", "cpu"], "run --links 4 pays"),  # three peers at once: 3 x 4 flows of 0.1 fill 1 Gbit/s
        ([], "the plugin for NCCL, run --net bagua, pays"),
    ],
)
def test_more_flows_pay_where_each_is_held_below_the_link(options, expected, capsys):
    line = output_of(capsys, *CAPPED, *options).splitlines()[1]
    assert line.startswith("1 flow of 0.1 Gbit/s between two ranks: exact takes ")
    assert line.endswith(expected)


def test_enough_flows_are_the_fewest_that_make_a_step_as_fast_as_an_uncapped_link(capsys):
    job, cluster = (
        Job(500_000_000, 1.0, 2.0),
        Cluster(4, bandwidth_gbit=1, transport="nccl", flow_bandwidth_gbit=0.1),
    )
    enough = enough_flows(job, cluster, Rates())
    step = {
        flows: predict(METHODS["exact"], job, dataclasses.replace(cluster, flows=flows), Rates()).step_s
        for flows in (enough - 1, enough)
    }
    uncapped = predict(METHODS["exact"], job, Cluster(4, bandwidth_gbit=1, transport="nccl"), Rates()).step_s
    assert step[enough] <= AS_FAST * uncapped < step[enough - 1]
    assert output_of(capsys, *CAPPED, "--flows", str(enough)).splitlines()[1].endswith("more would gain nothing")
    record = json.loads(output_of(capsys, *CAPPED, "--json"))
    assert record["cluster"]["flow_bandwidth_gbit"] == 0.1
    assert record["enough_flows"] == 10
    record = json.loads(output_of(capsys, *VGG16, "--json"))
    assert (record["cluster"]["flow_bandwidth_gbit"], record["enough_flows"]) == (None, 1)


def test_on_one_node_there_are_no_flows(capsys):
    options = ["--ranks-per-node", "8", "--bandwidth", "1gbit", "--flow-bandwidth", "0.1gbit", "--model", "vgg16"]
    assert cli.main(["advise", "--nodes", "1", *options, "--step-time", "1s"]) == 0
    assert "on one node there are no flows" in capsys.readouterr().out.splitlines()[1]


@pytest.mark.parametrize(
    ("ranks_per_node", "best"),
    [("1", "GradientAllReduce(Quantized(Int4()))"), ("2", "GradientAllReduce(Hierarchical(Quantized(Int4())))")],
)
def test_the_advice_in_four_bits_depends_on_the_ranks_of_a_node(ranks_per_node, best, capsys):
    options = ["--nodes", "4", "--ranks-per-node", ranks_per_node, "--bandwidth", "500mbit", "--model", "vgg16"]
    assert cli.main(["advise", *options, "--cores-per-rank", "4", "--step-time", "1s"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("In four bits: ")]
    assert line.startswith(f"In four bits: {best}, ")


def test_each_printed_expression_makes_the_algorithm_that_it_names(capsys):
    lines = output_of(capsys, *VGG16, "--ranks-per-node", "2", "--device", "cpu").splitlines()
    begin = lines.index("In Python, after `from bagua_comm import *`:") + 1
    printed = dict(line.split(maxsplit=1) for line in lines[begin:])
    names = {}
    exec("from bagua_comm import *", names)
    assert {name: eval(text, names) for name, text in printed.items()} == {
        name: method for name, method in METHODS.items() if name != "ddp"
    }
    assert printed["hierarchical-bytes"] == "GradientAllReduce(Hierarchical(Quantized()))"


@pytest.mark.parametrize(
    "algorithm",
    [
        after(50, GradientAllReduce(), DiLoCo(10)),
        every(3, by_node(LowPrecisionDecentralized(MinMaxUInt8(block=256)))),
        DiLoCo(outer_lr=0.5),
        QAdam(7, average=Hierarchical(Quantized(BFloat16(), min_bytes=0))),
    ],
    ids=repr,
)
def test_the_expression_of_any_algorithm_makes_it_again(algorithm):
    names = {}
    exec("from bagua_comm import *", names)
    assert eval(expression(algorithm), names) == algorithm


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--bandwidth", "1gbit"], "ByteGrad(), 3."),
        (["--bandwidth", "1gbit", "--ranks-per-node", "8"], "GradientAllReduce(Hierarchical(Quantized())), 4."),
        (["--bandwidth", "1tbit"], "GradientAllReduce(); fewer bytes would gain nothing."),
    ],
)
def test_gradients_of_one_or_several_ranks_a_node(options, expected, capsys):
    assert cli.main([*BASE, *options, "--model", "vgg16", "--step-time", "120ms"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Gradients in every")]
    assert line.startswith(f"Gradients in every step: {expected}")


def test_averages_of_weights_are_advised_with_how_many_steps_they_may_need(capsys):
    slow = [*VGG16, "--bandwidth", "200mbit"]
    steps = {row["name"]: row["step_s"] for row in json.loads(output_of(capsys, *slow, "--json"))["algorithms"]}
    out = output_of(capsys, *slow)
    lines = {line.partition(": ")[0]: line for line in out.splitlines()}
    rarely = {"shift-one-every-4", "async", "diloco-100", "diloco-100-bytes"}
    rarely |= {"streaming-diloco", "streaming-diloco-int4", "sparseloco"}
    weights = {name for name in steps if payload(METHODS[name]) == "weights"}
    assert rarely < weights
    for when, names in (("in every step", weights - rarely), ("now and then", rarely)):
        name = min(names, key=lambda name: steps[name])
        assert f": {expression(METHODS[name])}, " in lines[f"Weights {when}"]
        gain = f"{steps['bytegrad'] / steps[name]:.2f}"
        assert f"pays if it needs fewer than {gain} times as many steps" in lines[f"Weights {when}"]
    assert "Not known here: how many steps an algorithm needs to the same loss" in out


def test_algorithms_that_seldom_communicate_come_last_with_how_seldom(capsys):
    """At 50 Mbit/s `async` came first, 469 times as fast, though it averages once in 469 steps."""
    out = output_of(capsys, *VGG16[:-1], "300ms", "--bandwidth", "50mbit", "--latency", "30ms")
    rows = [line.split() for line in out.partition("algorithm ")[2].partition("\n\n")[0].splitlines()[1:]]
    heads = [at for at, row in enumerate(rows) if row[0] == "--"]
    assert [rows[at][1:3] for at in heads] == [["gradients", "in"], ["weights", "in"], ["weights", "now"]]
    assert {payload(METHODS[row[0]]) for row in rows[1 : heads[1]] if row[0] != "ddp"} == {"gradients"}
    steps = {row[0]: int(row[1]) for row in rows if row[0] != "--"}
    assert steps["async"] > steps["diloco-100"] == 100 > steps["sparseloco"] > steps["bytegrad"] == 1
    assert {name for name, count in steps.items() if count > 1} == {row[0] for row in rows[heads[2] + 1 :]}
    assert f"Weights now and then: AsyncModelAverage(), 469.18x, once in {steps['async']} steps, pays if" in out


def test_a_group_without_a_faster_algorithm_is_named_too(capsys):
    assert cli.main([*VGG16, "--ranks-per-node", "8", "--bandwidth", "10gbit", "--step-time", "120ms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Weights in every step: none is more than 2 % faster than the best with gradients." in lines


def test_diloco_is_advised_with_an_exact_beginning(capsys):
    options = ["--model-bytes", "16.8M", "--device", "cpu", "--cores-per-rank", "1", "--step-time", "330ms"]
    lines = output_of(capsys, *BASE, *options).splitlines()
    assert any(line.startswith("Weights now and then: DiLoCo(average=Quantized()), ") for line in lines)
    (begun,) = [line.partition("exactly: ")[2].removesuffix(".") for line in lines if "exactly: " in line]
    names = {}
    exec("from bagua_comm import *", names)
    assert eval(begun, names) == after(500, GradientAllReduce(), DiLoCo(100, average=Quantized()))


@pytest.mark.parametrize(("nodes", "sends_less"), [(64, "sparseloco"), (80, "dense")])
def test_above_some_ranks_sparse_changes_are_more_bytes(nodes, sends_less):
    cluster, job = Cluster(nodes), Job(100_000_000)
    methods = {"sparseloco": METHODS["sparseloco"], "dense": DiLoCo(30, average=Quantized())}
    sent = {name: predict(method, job, cluster).wire_bytes for name, method in methods.items()}
    assert min(sent, key=sent.get) == sends_less


@pytest.mark.parametrize(("nodes", "ranks", "text"), [(1, 2, "1 node of 2 ranks"), (2, 1, "2 nodes of 1 rank")])
def test_one_node_and_one_rank_are_singular(nodes, ranks, text, capsys):
    assert cli.main([*VGG16, "--nodes", str(nodes), "--ranks-per-node", str(ranks)]) == 0
    assert f"; {text}, 1 Gbit/s" in capsys.readouterr().out.splitlines()[0]


def steps_of(options, capsys):
    return json.loads(output_of(capsys, *BASE, *options, "--step-time", "3s", "--json"))


def test_a_model_is_given_by_its_layers_or_its_number_of_parameters(capsys):
    gpt2 = steps_of(["--model", "gpt2"], capsys)
    same = steps_of(["--layers", "39383808:0, 12x7087872:7.1, 1536:38.6"], capsys)
    assert same == gpt2
    assert gpt2["job"]["model_bytes"] == 4 * 124_439_808
    alike = steps_of(["--parameters", "124439808"], capsys)
    assert alike["algorithms"] == steps_of(["--model-bytes", "497759232"], capsys)["algorithms"]
    assert alike["algorithms"] != gpt2["algorithms"]
    # Without their work, layers are complete in proportion to their parameters.
    found, given = (steps_of(["--layers", layers], capsys) for layers in ("2x10M", "10M:1,10M:1"))
    assert found == given | {"job": found["job"]}


def test_only_rates_of_gpus_that_were_not_measured_are_called_guesses(tmp_path, capsys):
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps(dataclasses.asdict(Rates())))
    said = []
    for options in ([], ["--device", "cpu"], ["--rates", str(rates)]):
        said.append("the others are guesses" in output_of(capsys, *VGG16, *options))
    assert said == [True, False, False]


def test_calibrated_rates_are_used(tmp_path, capsys):
    rates = Rates(direct=0.25)
    file = tmp_path / "rates.json"
    exact = {}
    for text in ({}, dataclasses.asdict(rates), {"rates": {"direct": 0.25}, "results": []}):
        file.write_text(json.dumps(text))
        assert cli.main([*VGG16, "--device", "cpu", "--rates", str(file), "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["algorithms"]
        exact[len(exact)] = next(row["step_s"] for row in rows if row["name"] == "exact")
    assert exact[0] < exact[1] == exact[2]


@pytest.mark.slow
def test_the_figure_is_drawn(tmp_path, capsys):
    figure = tmp_path / "advice.png"
    assert cli.main([*VGG16, "--plot", str(figure)]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert str(figure) in capsys.readouterr().out


@pytest.mark.needs("matplotlib")
def test_a_fast_average_of_weights_does_not_squeeze_the_averages_of_gradients_together(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    options = ["--ranks-per-node", "8", "--model", "vgg16", "--step-time", "120ms"]
    assert cli.main([*BASE, *options, "--plot", str(tmp_path / "advice.png")]) == 0
    gradients, weights = drawn[0].axes
    assert weights.get_ylim()[1] > 100 > 6 > gradients.get_ylim()[1] > 3
    shown = {line.get_label() for line in (*gradients.lines, *weights.lines)}
    assert {"bytegrad", "hierarchical-bytes", "float16", "async", "exact"} <= shown


def test_without_matplotlib_the_figure_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in output_of(capsys, *VGG16, "--plot", str(tmp_path / "advice.png"), code=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step-time", "1s", "--forward", "1s"], "give --step-time, or --forward"),
        (["--rates", "no_such_file"], "no_such_file"),
        (["--rates", "pyproject.toml"], "pyproject.toml: Expecting value"),
        (["--cores-per-rank", "0"], "cores_per_rank is 0.0"),
        pytest.param(
            ["--plot", "no/such/folder.png"], "no/such/folder.png", marks=pytest.mark.needs("matplotlib")
        ),
        pytest.param(["--plot", "advice.nothing"], "not supported", marks=pytest.mark.needs("matplotlib")),
    ],
)
def test_questions_without_an_answer_are_refused(options, message, capsys):
    assert message in output_of(capsys, *VGG16, *options, code=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["advise"], "--nodes"),
        ([*VGG16, "--nodes", "0"], "'0' is not a positive number; expected e.g. 4"),
        ([*BASE, "--step-time", "1s"], "arguments --model --parameters --model-bytes --layers is"),
        ([*BASE, "--model", "vgg61", "--step-time", "1s"], "invalid choice: 'vgg61'"),
        ([*VGG16, "--bandwidth", "fast"], "'fast' is not a bandwidth; expected e.g. 10gbit or 500mbit"),
        ([*VGG16, "--bandwidth", "0gbit"], "'0gbit' is too small"),
        ([*VGG16, "--latency", "50parsecs"], "'50parsecs' is not a time; expected e.g. 50us or 1ms"),
        ([*VGG16, "--step-time", "200"], "'200' has no unit; 200ms or 200s?"),
        ([*VGG16, "--latency", "50"], "'50' has no unit; 50us or 50ms?"),
        ([*VGG16, "--bandwidth", "1GB/s"], "'1GB/s' is in bytes, expected bits; that is 8gbit"),
        ([*VGG16, "--bandwidth", "125MBps"], "'125MBps' is in bytes, expected bits; that is 1000mbit"),
        ([*VGG16, "--bandwidth", "5MiB/s"], "'5MiB/s' is in bytes, expected bits; that is 41.943mbit"),
        ([*VGG16, "--bandwidth", "10gb/s"], "'10gb/s' may be in bits or in bytes; 10gbit, or 80gbit?"),
        ([*VGG16, "--bandwidth", "10G"], "'10G' may be in bits or in bytes; 10gbit, or 80gbit?"),
        ([*VGG16, "--bandwidth", "10gigas"], "'10gigas' is not a bandwidth"),
        ([*VGG16, "--bandwidth", "100"], "'100' has no unit; 100mbit or 100gbit?"),
        ([*BASE, "--parameters", "1.5"], "'1.5' has no unit; 1.5M or 1.5B?"),
        ([*BASE, "--model-bytes", "1.2"], "'1.2' has no unit; 1.2M or 1.2G?"),
        ([*BASE, "--parameters", "20"], "'20' has no unit; 20M or 20B?"),
        ([*BASE, "--model-bytes", "400"], "'400' has no unit; 400M or 400G?"),
        ([*BASE, "--layers", "7.1,12x7.1M"], "'7.1' has no unit; 7.1M or 7.1B?"),
        ([*BASE, "--parameters", "12x7M"], "'12x7M' is not a number of parameters; expected e.g. 124M"),
        ([*BASE, "--layers", "7M:"], "'7M:' is not [COUNTx]PARAMETERS[:WORK]; expected e.g. 12x7.1M or 38.6M:0"),
        ([*BASE, "--layers", "7M,0x7M"], "'0x7M' is not [COUNTx]PARAMETERS[:WORK]"),
        ([*BASE, "--layers", "7M:fast"], "'fast' is not work"),
        ([*BASE, "--layers", "7M", "--model", "vgg16"], "not allowed with argument --layers"),
        ([*BASE, "--model-bytes", "1.2.3M", "--step-time", "1s"], "'1.2.3M' is not a size"),
        ([*BASE, "--model-bytes", "0", "--step-time", "1s"], "'0' is too small"),
        ([*BASE, "--parameters", "1M", "--step-time", "1s/s"], "'1s/s' is not a time"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        cli.main(options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (quantities.bandwidth, "10gbit", 10.0),
        (quantities.bandwidth, "500 Mbit", 0.5),
        (quantities.bandwidth, "10 Gbit/s", 10.0),
        (quantities.bandwidth, "10gbps", 10.0),
        (quantities.bandwidth, "10 Gb/s", 10.0),
        (quantities.bandwidth, "9.4 Gbits/sec", 9.4),
        (quantities.bandwidth, "1Mibit", 1.048576e-3),
        (quantities.seconds, "50us", 50e-6),
        (quantities.seconds, "1.5s", 1.5),
        (quantities.seconds, "0", 0.0),
        (quantities.size_in_bytes, "553M", 553_000_000),
        (quantities.size_in_bytes, "1.5GiB", 1_610_612_736),
        (quantities.size_in_bytes, "12", 12),
        (quantities.latency, "1ms", 1e-3),
        (quantities.parameters, "124M", 124_000_000),
        (quantities.parameters, "1.5B", 1_500_000_000),
        (quantities.parameters, "7087872", 7_087_872),
        (quantities.parameters, "1.5e9", 1_500_000_000),
    ],
)
def test_units_are_read(parse, text, value):
    assert parse(text) == pytest.approx(value)


ABSURD = ["1e400", "inf", "nan", "-1", "0", "1e300", "1e30", "", "x", "1" * 5000, "1e-400", "\u0661"]


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("--bandwidth", "gbit"),
        ("--latency", "s"),
        ("--intra-gbs", ""),
        ("--cores-per-rank", ""),
        ("--nodes", ""),
        ("--ranks-per-node", ""),
        ("--model-bytes", "G"),
        ("--step-time", "s"),
        ("--backward", "ms"),
        ("--bucket-bytes", "M"),
    ],
)
def test_absurd_numbers_are_refused_and_no_infinite_one_is_printed(name, unit, capsys):
    for number in ABSURD:
        options = {
            "--nodes": "4",
            "--bandwidth": "1gbit",
            "--model-bytes": "100M",
            "--step-time": "1s",
            name: number + unit,
        }
        if name == "--backward":
            del options["--step-time"]
        zero_is_one = number in ("0", "1e-400") and name in ("--latency", "--step-time", "--backward")
        try:
            code = cli.main(["advise", *(f"{key}={value}" for key, value in options.items())])
        except SystemExit as exc:
            code = exc.code
        out, err = capsys.readouterr()
        assert (code, not err) == ((0, True) if zero_is_one else (2, False)), number[:8]
        assert "Traceback" not in err, number[:8]
        assert "inf" not in out, number[:8]
        assert len(err) < 4000, number[:8]


@pytest.mark.parametrize("bytes_", ["1e18", "999P", "1e15"])
def test_a_model_of_more_buckets_than_can_be_looked_at_is_refused_at_once(bytes_, capsys):
    try:
        code = cli.main([*BASE, "--model-bytes", bytes_, "--step-time", "1s", "--bucket-bytes", "1"])
    except SystemExit as exc:
        code = exc.code
    assert code == 2
    assert capsys.readouterr().err


def test_the_largest_cluster_is_still_answered(capsys):
    options = ["--nodes", str(2**17), "--ranks-per-node", "8", "--bandwidth", "1e-9gbit", "--latency", "1e6s"]
    out = output_of(capsys, "advise", *options, "--model-bytes", "100M", "--step-time", "1ns")
    assert "inf" not in out
    assert "nan" not in out


def damaged(value, rng):
    junk = [None, [], {}, "", "1", -1, 0, float("nan"), float("inf"), 10**400, 1e-320, True, [1], {"encode": 1}]
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = list(value)[rng.integers(len(value))]
        copied = {**value, key: damaged(value[key], rng)}
        if rng.random() < 0.2:
            copied[str(rng.integers(9))] = copied.pop(key)
        return copied
    return junk[rng.integers(len(junk))]


def test_damaged_files_of_rates_are_refused_by_name_or_read(tmp_path):
    rng = np.random.default_rng(2026)
    file, whole = tmp_path / "rates.json", dataclasses.asdict(Rates())
    refused = 0
    for trial in range(300):
        text = json.dumps(damaged({"rates": whole} if trial % 2 else whole, rng)).encode()
        match trial % 6:
            case 3:
                text = text[: rng.integers(len(text) + 1)]
            case 4:
                text = rng.integers(0, 256, 50, dtype=np.uint8).tobytes()
            case 5:
                text = b"[" * (10 ** int(rng.integers(6)))
        file.write_bytes(text)
        try:
            rates = advise.read_rates(file)
        except CommandError as exc:
            assert "rates.json: " in str(exc)  # noqa: PT017
            refused += 1
        else:
            prediction = predict(METHODS["bytegrad"], Job(10**8, 0.1, 0.2), Cluster(4), rates)
            assert 0 < prediction.step_s < float("inf")
    assert 200 < refused < 300


@pytest.mark.parametrize("data", [None, 3, "x", [], {"minmax": 3}, {"direct": "x"}, {"add": 10**5000}, {3: 4}])
def test_values_that_are_no_rates_raise_an_error_of_this_library(data):
    with pytest.raises(ArrayError, match="Rates"):
        Rates.from_dict({"rates": data} if data == [] else data)


# Sharded models ---------------------------------------------------------------------------------------------

SHARDS = [*BASE, "--sharded", "--parameters", "30M", "--step-time", "2s", "--device", "cpu"]


def test_ways_of_a_sharded_model_with_what_to_type(capsys):
    lines = output_of(capsys, *SHARDS, "--ranks-per-node", "2").splitlines()
    table = lines[3 : lines.index("", 3)]
    assert sorted(line.split()[0] for line in table) == sorted(SHARDED)
    (exact,) = [line for line in table if line.startswith("exact ")]
    assert "1.00x" in exact
    (at,) = [i for i, line in enumerate(lines) if line.startswith("Shards over all ranks: two-levels-both, ")]
    assert lines[at + 1 : at + 3] == [
        "  fully_shard(model)",
        "  bagua_torch.fsdp.attach(model, Hierarchical(Quantized()), Hierarchical(Quantized()))",
    ]
    assert lines[at + 3].startswith("Shards inside nodes: bytes-replicas, ")
    assert lines[at + 4].startswith('  mesh = init_device_mesh("cpu", (4, 2)')
    (at,) = [i for i, line in enumerate(lines) if line.startswith("Local steps between nodes; ")]
    assert lines[at + 1 : at + 3] == lines[at - 3 : at - 1]
    assert lines[at + 3].startswith("  bagua_torch.fsdp.attach(model, Exact(), replicas=DiLoCo(")
    assert lines[at + 3].endswith(", optimizers=optimizer)")


def test_a_sharded_model_as_json(capsys):
    record = json.loads(output_of(capsys, *SHARDS, "--json"))
    assert [way["name"] for way in record["ways"]] == ["both", "gradients", "exact", "pytorch"]
    assert (record["shards_over_all_ranks"], record["shards_inside_nodes"]) == ("both", None)
    assert record["local_steps_between_nodes"] is None
    assert record["ways"][0]["python"][-1] == "bagua_torch.fsdp.attach(model, Quantized(), Quantized())"
    assert record["cluster"]["cores_per_rank"] is None


def test_the_figure_is_of_algorithms_alone(tmp_path, capsys):
    assert cli.main([*SHARDS, "--plot", str(tmp_path / "x.png")]) == 2
    assert "--plot knows no sharded models; leave --sharded out" in capsys.readouterr().err
