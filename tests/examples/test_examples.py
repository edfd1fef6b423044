"""The examples, run as their users would."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_on_cpu.install import environment
from support.launch import run_python, torchrun

from bagua_comm.timeline.reading import read_timeline

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


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
def test_four_ranks_train_with_bytegrad_to_95_percent(tmp_path):
    trace = tmp_path / "trace.json"
    process = run_python(4, EXAMPLES / "train.py", "--trace", trace, timeout_s=380)

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
def test_one_rank_needs_no_mpirun():
    command = [sys.executable, str(EXAMPLES / "train.py"), "--epochs", "1"]
    result = result_of(subprocess.run(command, capture_output=True, text=True, timeout=100))
    assert (result["ranks"], result["wire_bytes"]) == (1, 0)


@pytest.mark.needs("sklearn")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "algorithm"),
    [(1, "low_precision_one_peer"), (3, "hierarchical")],
)
def test_training_without_a_framework(ranks, algorithm):
    result = result_of(run_python(ranks, EXAMPLES / "train_numpy.py", "--algorithm", algorithm))
    assert (result["algorithm"], result["ranks"]) == (algorithm, ranks)
    assert result["accuracy"] >= 0.93
    assert (result["wire_bytes_per_step"] > 0) == (ranks > 1)


@pytest.mark.needs("sklearn")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_training_without_a_framework_by_one_algorithm_after_the_other(tmp_path):
    """In the same processes, since starting them takes longer than training."""
    algorithms = ["exact", "one_peer", "low_precision", "async", "warm_up", "qadam"]
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
@pytest.mark.parametrize("balance", ["bias", "loss"])
def test_experts_on_two_ranks_learn_beside_a_dense_model(tmp_path, balance):
    figure = tmp_path / "loads.png"
    options = ["--epochs", "4", "--balance", balance, "--plot", figure]
    result = result_of(run_python(2, EXAMPLES / "moe.py", *options, timeout_s=380))
    assert (result["ranks"], result["steps"]) == (2, 4 * 22)
    assert result["imbalance"] < 4
    for name in ("dense", "experts"):
        assert result[name]["accuracy"] >= 0.85
    assert result["experts"]["weights_per_token"] < 1.1 * result["dense"]["weights_per_token"]
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_fifteen_line_way_in():
    process = run_python(2, EXAMPLES / "allreduce_numpy.py")
    assert process.returncode == 0, process.stderr
    for rank in range(2):
        assert f"rank {rank} of 2: exact 0.5, quantized 1.0000" in process.stdout


CUPY = EXAMPLES / "allreduce_cupy.py"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_without_a_gpu_the_cupy_example_says_so(ranks):
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = run_python(ranks, CUPY, env=hidden)
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
def test_counters_are_shown_in_tensorboard(tmp_path):
    options = ["--logdir", tmp_path, "--steps", "200", "--every", "100"]
    process = run_python(2, EXAMPLES / "tensorboard_digits.py", *options, timeout_s=180)
    assert process.returncode == 0, process.stdout + process.stderr
    says, _, accuracy = process.stdout.strip().splitlines()[-1].rpartition(" ")
    assert says == "2 ranks: accuracy"
    assert float(accuracy) >= 0.8
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["rank-0", "rank-1"]
    for folder in tmp_path.iterdir():
        found = scalars_in(folder)
        assert found["exchange/calls_per_step"] == [(100, 1.0), (200, 1.0)]
        assert [step for step, _ in found["loss"]] == [100, 200]
        for name in ("exchange/wire_bytes", "exchange/seconds", "wait/seconds"):
            assert all(value > 0 for _, value in found[f"{name}_per_step"]), name


@pytest.mark.needs("sklearn")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_weights_are_the_same_bytes_when_a_rank_was_killed():
    def said(*arguments, ranks=3, flags=("--spares", "1")):
        command = [EXAMPLES / "elastic.py", "--steps", "40", *arguments]
        process = run_python(ranks, *command, flags=flags, timeout_s=130)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout.strip().splitlines()

    undisturbed = said(ranks=2, flags=())
    with_a_spare = said("--kill", "1")
    with_fewer = said("--kill", "0", flags=("--spares", "0"))
    assert undisturbed[-1].startswith("accuracy 0.")
    assert with_a_spare[-1] == with_fewer[-1] == undisturbed[-1]
    assert "3 ranks before, 3 from now on" in with_a_spare[-2]
    assert "3 ranks before, 2 from now on" in with_fewer[-2]


@pytest.mark.needs("accelerate", "lightning", "sklearn", "transformers")
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("start", [run_python, torchrun], ids=["mpirun", "torchrun"])
@pytest.mark.parametrize("framework", ["lightning", "fabric", "trainer", "accelerate"])
def test_two_ranks_train_in_another_framework(framework, start):
    process = start(2, EXAMPLES / f"{framework}_digits.py", timeout_s=380)
    assert process.returncode == 0, process.stdout + process.stderr
    says, _, accuracy = process.stdout.strip().splitlines()[-1].rpartition(" ")
    assert says == "2 ranks: accuracy"
    assert float(accuracy) >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sharded_transformer_learns_as_well_in_eight_bits():
    command = 2, EXAMPLES / "fsdp_text.py", "--steps", 60
    exact, coded = (
        result_of(torchrun(*command, "--reduce", reduce, "--gather", gather, timeout_s=140))
        for reduce, gather in (("exact", "exact"), ("feedback", "eight-bits"))
    )
    assert exact["wire_bytes"] == pytest.approx(exact["exact_bytes"], rel=0.01)
    assert 3.5 < coded["exact_bytes"] / coded["wire_bytes"] < 4
    assert coded["loss"] < 1.05 * exact["loss"] < 3
