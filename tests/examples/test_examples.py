"""The examples, run by the commands that their docstrings give."""

import argparse
import json
import re
import struct

import numpy as np
import pytest
from cuda_on_cpu.install import environment
from support.launch import as_typed, clone, run_python
from support.pages import ROOT, commands_of_examples

from bagua_comm.testing import run_ranks
from bagua_comm.timeline.reading import read_timeline

EXAMPLES = ROOT / "examples"
COMMANDS = commands_of_examples()
TESTED = set()
ALIKE = {
    "bagua run -n 3 --spares 0 examples/elastic.py --steps 40 --kill 0": "elastic_fsdp without spares",
    "bagua run -n 3 --spares 1 examples/elastic_fsdp.py --steps 20 --kill 1": "elastic with a spare",
}
"""Commands that are not run, since another example tests the same; which one."""


def all_commands(example):
    """A test of the commands of an example."""
    found = [command for command in COMMANDS[example] if command not in ALIKE]
    TESTED.update(found)
    return pytest.mark.parametrize("commands", [pytest.param(found, id=example)])


def each_command(*examples):
    """A test for each command of the examples."""
    found = [command for example in examples for command in COMMANDS[example]]
    TESTED.update(found)
    return pytest.mark.parametrize("command", found)


IN_OTHER_FRAMEWORKS = [
    command for each in ("lightning", "fabric", "trainer") for command in COMMANDS[f"{each}_digits"]
]
TESTED.update(IN_OTHER_FRAMEWORKS)


@pytest.fixture
def folder(tmp_path):
    return clone(tmp_path)


def test_each_command_of_an_example_is_run():
    assert {command for of_example in COMMANDS.values() for command in of_example} == TESTED | ALIKE.keys()
    assert all(COMMANDS.values())


def results_of(process):
    assert process.returncode == 0, process.stdout + process.stderr
    lines = process.stdout.strip().splitlines()
    assert lines[-1].startswith("result: ")
    return [json.loads(line.removeprefix("result: ")) for line in lines if line.startswith("result: ")]


def result_of(process):
    (result,) = results_of(process)
    return result


@pytest.mark.needs("sklearn", "tqdm")
@pytest.mark.slow
@pytest.mark.timeout(400)
@all_commands("train")
def test_four_ranks_train_with_bytegrad_to_95_percent(commands, folder):
    first, _, _ = commands
    trace = folder / "trace.json"
    process = as_typed(f"{first} --epochs 8 --trace trace.json", folder, timeout_s=380)

    result = result_of(process)
    assert set(result) == {"algorithm", "ranks", "accuracy", "images_per_s", "wire_bytes", "exact_bytes"}
    assert (result["algorithm"], result["ranks"]) == ("bytegrad", 4)
    assert result["accuracy"] >= 0.95
    assert 3.5 < result["exact_bytes"] / result["wire_bytes"] < 4
    assert "step/s" in process.stderr  # the progress bar

    spans = read_timeline(trace).ranks[0].spans
    passes = [span for span in spans if span.name == "backward"]
    first = [span.start_ns for span in spans if span.name == "exchange" and span.args["bucket"] == 0]
    # In some steps the lane's thread gets a core only later: there are four ranks on few cores.
    assert any(each.start_ns < start < each.end_ns for each in passes for start in first)


@pytest.mark.needs("sklearn", "tqdm")
@pytest.mark.slow
@all_commands("train")
def test_torchrun_starts_it_and_one_rank_needs_no_launcher(commands, folder):
    _, under_torchrun, alone = commands
    result = result_of(as_typed(under_torchrun, folder))
    assert (result["ranks"], result["algorithm"]) == (2, "exact")
    assert result["wire_bytes"] == result["exact_bytes"] > 0
    result = result_of(as_typed(alone, folder))
    assert (result["ranks"], result["wire_bytes"]) == (1, 0)


@pytest.mark.needs("sklearn")
@pytest.mark.slow
@each_command("train_numpy")
def test_training_without_a_framework(command, folder):
    result = result_of(as_typed(command, folder))
    assert result["algorithm"] == command.split()[-1]
    ranks = result["ranks"]
    assert ranks == (3 if "-n 3" in command else 1)
    assert result["accuracy"] >= 0.93
    assert (result["wire_bytes_per_step"] > 0) == (ranks > 1)


@pytest.mark.needs("sklearn")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_training_without_a_framework_by_one_algorithm_after_the_other(tmp_path):
    """In the same processes, since starting them takes longer than training."""
    algorithms = ["exact", "one_peer", "low_precision", "async", "streaming_diloco", "warm_up", "qadam"]
    text = """
        import sys
        import bagua_comm

        sys.path.insert(0, sys.argv[1])
        import train_numpy

        with bagua_comm.connect(timeout_s=120) as comm:
            for algorithm in sys.argv[2:]:
                sys.argv[1:] = ["--algorithm", algorithm]
                train_numpy.train(comm, train_numpy.parse_arguments())
        """
    script = (tmp_path / "script.py", text)
    results = results_of(run_python(4, EXAMPLES, *algorithms, script=script, timeout_s=380))

    assert [result["algorithm"] for result in results] == algorithms
    for result in results:
        assert result["ranks"] == 4
        assert result["accuracy"] >= 0.93
        assert result["wire_bytes_per_step"] > 0


@pytest.mark.needs("sklearn", "tqdm")
@pytest.mark.slow
@pytest.mark.timeout(400)
@each_command("moe")
def test_experts_on_two_ranks_learn_beside_a_dense_model(command, folder):
    result = result_of(as_typed(command, folder, timeout_s=380))
    assert (result["ranks"], result["steps"]) == (2, 4 * 22)
    assert result["imbalance"] < 4
    for name in ("dense", "experts"):
        assert result[name]["accuracy"] >= 0.85
    assert result["experts"]["weights_per_token"] < 1.1 * result["dense"]["weights_per_token"]
    assert (folder / "loads.png").read_bytes().startswith(b"\x89PNG")


@each_command("allreduce_numpy")
def test_the_fifteen_line_way_in(command, folder):
    process = as_typed(command, folder)
    assert process.returncode == 0, process.stderr
    for rank in range(2):
        assert f"rank {rank} of 2: exact 0.5, quantized 1.0000" in process.stdout


CUPY = EXAMPLES / "allreduce_cupy.py"


@each_command("allreduce_cupy")
def test_without_a_gpu_the_cupy_example_says_so(command, folder):
    process = as_typed(f"export CUDA_VISIBLE_DEVICES=; {command}", folder)
    assert process.returncode == 0, process.stderr
    says = "CuPy finds no GPU here, so nothing was done; examples/allreduce_numpy.py runs without one.\n"
    assert process.stdout == says


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "transport"), [pytest.param(1, "nccl", marks=pytest.mark.slow), (2, "staged")])
def test_cupy_arrays_on_the_stand_in_for_a_gpu(tmp_path, ranks, transport):
    process = run_python(ranks, CUPY, env=environment(tmp_path))
    assert process.returncode == 0, process.stderr
    assert ("share the GPU" in process.stderr) == (ranks == 2)
    values = f"exact {(ranks - 1) / 2:.1f}, quantized {ranks - 1:.4f}, on a lane {1.5 * (ranks - 1):.1f}"
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}, GPU 0, over {transport}: {values}" in process.stdout


def test_residuals_of_a_solver_are_the_same_bits_on_one_to_four_ranks(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    import conjugate_gradient

    def printed(ranks, *, plain=False):
        options = argparse.Namespace(size=8, tolerance=1e-12, plain=plain)
        run_ranks(ranks, lambda comm: conjugate_gradient.solve(comm, options))
        return capsys.readouterr().out

    expected = printed(1)
    assert len(re.findall(r"^step +\d+: residual [\d.e-]+$", expected, re.MULTILINE)) >= 2
    for ranks in (2, 3, 4):
        assert printed(ranks) == expected, ranks
    assert {printed(ranks, plain=True) for ranks in (1, 3)} != {expected}


@pytest.mark.slow
@all_commands("conjugate_gradient")
def test_a_solver_on_three_ranks_prints_what_it_prints_alone_but_with_plain_sums(commands, folder):
    three, plain = [lines_of(as_typed(command, folder)) for command in commands]
    alone = lines_of(as_typed(commands[1].removesuffix(" --plain"), folder))
    assert three == alone
    assert plain[0].partition(":")[0] == alone[0].partition(":")[0] == "step   0"
    assert plain != alone


def test_temperatures_are_the_same_bits_on_one_to_four_ranks(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    import heat

    def solved(ranks):
        options = argparse.Namespace(size=9, steps=100)
        whole, *others = run_ranks(ranks, lambda comm: heat.solve(comm, options))
        assert others == [None] * (ranks - 1)
        return whole.tobytes(), capsys.readouterr().out

    values, printed = solved(1)
    assert re.fullmatch(r"step  100: mean temperature 0\.[\d]+\n", printed)
    assert (np.diff(np.frombuffer(values).reshape(9, 9), axis=0) < 0).all()  # colder from row to row
    for ranks in (2, 3, 4):
        assert solved(ranks) == (values, printed), ranks


@pytest.mark.slow
@all_commands("heat")
def test_the_heat_equation_on_four_ranks_prints_what_it_prints_alone(commands, folder):
    four, alone = [lines_of(as_typed(command, folder)) for command in commands]
    assert four == alone
    assert [line.partition(":")[0] for line in alone] == [
        *(f"step {n:4}" for n in range(100, 401, 100)),
        "halfway",
    ]


@pytest.mark.slow
@all_commands("master_worker")
def test_the_worker_with_the_long_task_gets_fewer(commands, folder):
    lines = lines_of(as_typed(commands[0], folder))
    found = [tuple(map(int, re.findall(r"\d+", line))) for line in lines]
    assert [worker for worker, _, _ in found] == [1, 2]
    assert sum(tasks for _, tasks, _ in found) == 20
    assert sum(result for *_, result in found) == sum(task**2 for task in range(20))
    assert min(tasks for _, tasks, _ in found) < 8


def scalars_in(folder):
    """All values in TensorBoard's files, by tag: records of a length, a checksum, an event and a checksum."""
    from tensorboardX.proto import event_pb2

    values = {}
    for file in folder.iterdir():
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[12 + length + 4 :]
            for value in event.summary.value:
                values.setdefault(value.tag, []).append((event.step, value.simple_value))
    return values


@pytest.mark.needs("sklearn", "tensorboardX")
@pytest.mark.slow
@pytest.mark.timeout(200)
@each_command("tensorboard_digits")
def test_counters_are_shown_in_tensorboard(command, folder):
    process = as_typed(command, folder, timeout_s=180)
    assert process.returncode == 0, process.stdout + process.stderr
    says, _, accuracy = process.stdout.strip().splitlines()[-1].rpartition(" ")
    assert says == "2 ranks: accuracy"
    assert float(accuracy) >= 0.8
    runs = sorted((folder / "runs").iterdir())
    assert [run.name for run in runs] == ["rank-0", "rank-1"]
    steps = list(range(10, 301, 10))
    for run in runs:
        found = scalars_in(run)
        assert found["exchange/calls_per_step"] == [(step, 1.0) for step in steps]
        assert [step for step, _ in found["loss"]] == steps
        for name in ("exchange/wire_bytes", "exchange/seconds", "wait/seconds"):
            assert all(value > 0 for _, value in found[f"{name}_per_step"]), name


@pytest.mark.needs("sklearn")
@pytest.mark.slow
@pytest.mark.timeout(400)
@all_commands("elastic")
def test_weights_are_the_same_bytes_when_a_rank_was_killed(commands, folder):
    undisturbed, with_a_spare = [lines_of(as_typed(command, folder, timeout_s=130)) for command in commands]
    assert undisturbed[-1].startswith("accuracy 0.")
    assert with_a_spare[-1] == undisturbed[-1]
    assert "3 ranks before, 3 from now on" in with_a_spare[-2]


@pytest.mark.needs("sklearn")
@pytest.mark.slow
@pytest.mark.timeout(600)
@all_commands("elastic_fsdp")
def test_a_sharded_model_has_the_same_bytes_when_a_rank_was_killed(commands, folder):
    undisturbed, with_fewer = [lines_of(as_typed(command, folder, timeout_s=190)) for command in commands]
    assert undisturbed[-1].startswith("weights ")
    assert with_fewer[-1] == undisturbed[-1]
    assert "4 ranks before, 3 from now on" in with_fewer[-3]


@pytest.mark.needs("sklearn")
@pytest.mark.slow
@pytest.mark.timeout(400)
@each_command("elastic_data")
def test_each_image_is_used_once_an_epoch_though_a_rank_was_killed(command, folder):
    lines = lines_of(as_typed(command, folder, timeout_s=380))
    found = re.fullmatch(r"4 epochs of 1797 images: (\d+) used, accuracy ([\d.]+)", lines[-1])
    assert found, lines
    assert 4 * 1797 <= int(found[1]) < 4 * (1797 + 2)  # at most one is repeated on two ranks
    assert float(found[2]) > 0.9
    changes = [line for line in lines if "died; 2 ranks before, 2 from now on" in line]
    assert len(changes) == (2 if "--kill" in command else 0)


def lines_of(process):
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout.strip().splitlines()


@pytest.mark.needs("sklearn")
@pytest.mark.slow
@pytest.mark.timeout(600)
@all_commands("train_complete")
def test_a_training_goes_on_with_another_number_of_ranks(commands, folder):
    whole, first, then = commands
    typed = [f"{whole} --epochs 1", first, then]
    whole, first, then = [as_typed(command, folder, timeout_s=190) for command in typed]
    for process in (whole, first, then):
        assert process.returncode == 0, process.stdout + process.stderr
    assert "resuming after epoch 2, which 2 ranks saved" in then.stderr
    assert re.findall(r"epoch +(\d)", first.stderr) == ["1", "2"]
    assert re.findall(r"epoch +(\d)", then.stderr)[:3] == ["2", "3", "4"]  # the first is that of the resuming
    assert float(re.search(r"best accuracy ([\d.]+)", then.stderr)[1]) > 0.8
    assert (folder / "runs" / "killed" / "model.pt").exists()


IN_TURN = """
import runpy, sys

for path in sys.argv[1:]:
    runpy.run_path(path, run_name="__main__")
"""
RUN = "bagua run -n 2 "


@pytest.mark.needs("accelerate", "lightning", "sklearn", "transformers")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_train_in_other_frameworks(folder):
    """In the same processes, since importing the frameworks takes longer than training."""
    (folder / "in_turn.py").write_text(IN_TURN)
    examples = [command.removeprefix(RUN) for command in IN_OTHER_FRAMEWORKS]
    accuracies = accuracies_of(as_typed(f"{RUN}in_turn.py {' '.join(examples)}", folder, timeout_s=380))
    assert len(accuracies) == len(examples)
    assert min(accuracies) >= 0.9


@pytest.mark.needs("accelerate", "sklearn")
@pytest.mark.slow
@pytest.mark.timeout(400)
@each_command("accelerate_digits")
def test_two_ranks_train_in_accelerate(command, folder):
    (accuracy,) = accuracies_of(as_typed(command, folder, timeout_s=380))
    assert accuracy >= 0.9


def accuracies_of(process):
    assert process.returncode == 0, process.stdout + process.stderr
    return [float(each) for each in re.findall(r"^2 ranks: accuracy (.*)$", process.stdout, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@all_commands("fsdp_text")
def test_a_sharded_transformer_learns_as_well_in_eight_bits(commands, folder):
    coded, feedback, exact = (result_of(as_typed(f"{each} --steps 25", folder)) for each in commands)
    assert exact["wire_bytes"] == pytest.approx(exact["exact_bytes"], rel=0.01)
    assert 3.5 < coded["exact_bytes"] / coded["wire_bytes"] < 4
    assert coded["loss"] < 1.05 * exact["loss"] < 3
    assert feedback["loss"] < 1.05 * exact["loss"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@all_commands("muloco")
def test_a_transformer_learns_by_muloco(commands, folder):
    muon, adamw = (result_of(as_typed(command, folder, timeout_s=140)) for command in commands)
    assert (muon["ranks"], muon["inner"], muon["streaming"]) == (2, "muon", False)
    assert (adamw["ranks"], adamw["inner"], adamw["streaming"]) == (2, "adamw", True)
    for result in (muon, adamw):
        assert result["loss"] < 3  # a symbol that is drawn at random has 4.9
        assert result["wire_bytes"] > 0
