"""The recorder of divergence and its report: a unit in the last place, injected on one rank, is named."""

import json
import logging

import numpy as np
import pytest
from support.commands import output_of

from bagua_comm import ArrayError, CommMismatch, Engine, GradientAllReduce, Plan, Point, TensorSpec, arrays
from bagua_comm import __main__ as cli
from bagua_comm.divergence import DivergenceError, DivergenceRecorder, compare_folder, first_difference
from bagua_comm.testing import run_ranks

SHAPES = {"layer.weight": (3, 4), "layer.bias": (4,)}


def train(comm, folder, *, at=None, steps=6, action="raise"):
    """Train a small model by an engine; `at` is a step, a rank, a tensor and an element to change. Collective."""
    plan = Plan.pack([TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()])
    flats = plan.allocate()
    gradients = plan.cut(flats)
    weights = {name: np.full(shape, 0.5, np.float32) for name, shape in SHAPES.items()}
    random = np.random.default_rng(comm.rank)
    recorder = DivergenceRecorder(comm, folder, action=action)
    with recorder, Engine(comm, GradientAllReduce(), plan, flats) as engine:
        for step in range(steps):
            engine.at(Point.FORWARD)
            for name, gradient in gradients.items():
                gradient[...] = random.normal(size=gradient.shape)
                engine.ready(name)
            engine.at(Point.BACKWARD)
            for name, weight in weights.items():
                weight -= 0.1 * gradients[name]
            engine.at(Point.STEP)
            if at is not None and (step, comm.rank) == at[:2]:
                _, _, name, index = at
                weights[name][index] = np.nextafter(weights[name][index], np.float32(2))
            recorder.record(step, {f"grad {name}": x for name, x in gradients.items()})
            recorder.record(step, weights)
    return recorder.found


def test_one_unit_in_the_last_place_on_one_rank_is_named(tmp_path, capsys):
    at = (3, 2, "layer.bias", (1,))
    with pytest.raises(CommMismatch) as error:
        run_ranks(4, lambda comm: train(comm, tmp_path, at=at))
    assert str(error.value) == (
        "record: step 3: tensor 'layer.bias' (float32[4]) differs between ranks: rank 2 differs from ranks "
        f"0, 1, 3; for the element: python -m bagua_comm compare {tmp_path}"
    )
    found = compare_folder(tmp_path)
    assert (found.records, found.last_equal_step, found.step, found.tensor) == (7, 3, 3, "layer.bias")
    most, other = found.groups
    assert (most.ranks, other.ranks, found.others, found.notes) == ((0, 1, 3), (2,), (), ())
    element = other.difference
    assert (element.index, element.ulps, element.count, element.size) == ((1,), 1, 1, 4)
    first, second = map(np.float32, element.values)
    assert second == np.nextafter(first, np.float32(2))

    assert cli.main(["compare", str(tmp_path)]) == 1
    assert capsys.readouterr().out == (
        "The ranks are equal up to step 3 (7 records).\n"
        "They differ in step 3, tensor 'layer.bias': rank 2 differs from ranks 0, 1, 3.\n"
        f"  rank 2 against rank 0: element [1] is {element.values[1]} against {element.values[0]}, 1 unit in the "
        "last place apart; the other 3 elements are equal\n"
    )
    assert cli.main(["compare", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["groups"][1]["difference"]["ulps"] == 1


def test_a_training_whose_ranks_stay_equal(tmp_path, capsys):
    assert run_ranks(3, lambda comm: train(comm, tmp_path)) == [None] * 3
    assert output_of(capsys, "compare", str(tmp_path)) == "The ranks are equal up to step 5 (12 records).\n"


def test_log_continues_and_keeps_the_tensors_of_the_first_difference(tmp_path, caplog):
    at = (1, 0, "layer.weight", (2, 3))
    with caplog.at_level(logging.ERROR, "bagua_comm"):
        found = run_ranks(3, lambda comm: train(comm, tmp_path, at=at, action="log"))
    assert set(found) == {
        "step 1: tensor 'layer.weight' (float32[3, 4]) differs between ranks: rank 0 differs from ranks 1, 2"
    }
    assert len(caplog.messages) == 1
    _, other = compare_folder(tmp_path).groups
    assert (other.ranks, other.difference.index, other.difference.ulps) == ((0,), (2, 3), 1)


def test_write_sends_nothing_and_names_the_tensor(tmp_path):
    def body(comm):
        with DivergenceRecorder(comm, tmp_path, action="write") as recorder:
            before = comm.counters.as_dict()
            for step in range(3):
                recorder.record(step, {"x": np.arange(4) + (step == 2) * comm.rank})
            assert comm.counters.as_dict() == before

    run_ranks(2, body)
    found = compare_folder(tmp_path)
    assert (found.step, found.tensor) == (2, "x")
    assert str(found).splitlines()[1:] == [
        "They differ in step 2, tensor 'x': rank 1 differs from rank 0, and no majority agrees.",
        "  rank 1: the element is not known: rank 0 has not kept its tensors of step 2",
    ]


def records(folder, rows, action="log"):
    """Record the rows of each rank: pairs of a step and tensors."""

    def body(comm):
        with DivergenceRecorder(comm, folder, action=action) as recorder:
            for step, tensors in rows[comm.rank]:
                recorder.record(step, tensors)
        return recorder.found

    return run_ranks(len(rows), body)


X, Y = np.ones(2), np.zeros(3, np.int8)
XYZ = {"x": X, "y": Y, "z": X}
NO_MAJORITY = "rank 1 differs from rank 0, and no majority agrees"


@pytest.mark.parametrize(
    ("rows", "found", "report"),
    [
        (
            [[(0, {"x": X})], [(1, {"x": X})]],
            f"ranks record different steps: {NO_MAJORITY}: step 1 against step 0",
            "Then they recorded different steps: rank 0 step 0, rank 1 step 1.",
        ),
        (
            [[(0, {"x": X, "y": Y})], [(0, {"y": Y, "x": X})]],
            f"step 0: ranks record their tensors in different orders: {NO_MAJORITY}",
            f"In step 0 they recorded the same tensors in different orders: {NO_MAJORITY}.",
        ),
        (
            [[(0, {"x": X})], [(0, {"x": X, "y": Y})], [(0, {"x": X})]],
            "step 0: tensor 'y' (int8[3]) differs between ranks: rank 1 differs from ranks 0, 2",
            "They differ in step 0, tensor 'y': rank 1 differs from ranks 0, 2.\n"
            "  rank 1: 'y' (int8[3]) against no such tensor",
        ),
        (
            [[(0, {"x": X})], [(0, {"x": X[:1]})], [(0, {"x": X})]],
            "step 0: tensor 'x' (float64[2]) differs between ranks: rank 1 differs from ranks 0, 2",
            "They differ in step 0, tensor 'x': rank 1 differs from ranks 0, 2.\n"
            "  rank 1: 'x' (float64[1]) against 'x' (float64[2])",
        ),
        (
            [[(0, XYZ)], [(0, XYZ | {"y": Y + 3, "z": -X})], [(0, XYZ)]],
            "step 0: tensor 'y' (int8[3]) and 1 more differ between ranks: rank 1 differs from ranks 0, 2",
            "They differ in step 0, tensor 'y': rank 1 differs from ranks 0, 2.\n"
            "  rank 1 against rank 0: element [0] is 3 against 0, 3 units in the last place apart; 3 of 3 "
            "elements differ, by at most 3 units in the last place\n"
            "Further tensors of this record differ: 'z'.",
        ),
    ],
    ids=["steps", "order", "missing", "shape", "more"],
)
def test_other_differences(tmp_path, rows, found, report):
    assert set(records(tmp_path, rows)) == {found}
    assert str(compare_folder(tmp_path)) == report


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64", "bool", "uint8"])
def test_every_dtype_is_kept_and_read(tmp_path, dtype):
    def rows(rank):
        x = np.ones((2, 1), arrays.dtype_named(dtype))
        if rank == 1:
            arrays.as_bytes(x)[x.itemsize] ^= 1
        return [(0, {"file": x})]

    records(tmp_path, [rows(rank) for rank in range(3)])
    _, other = compare_folder(tmp_path).groups
    assert (other.difference.index, other.difference.ulps) == ((1, 0), 1)


@pytest.mark.parametrize(
    ("a", "b", "ulps"),
    [
        (1.0, 1.0 + 2**-23, 1),
        (0.0, -0.0, 0),
        (1e-45, -1e-45, 2),
        (1.0, np.nan, None),
        (np.inf, np.finfo(np.float32).max, 1),
        (-1.0, 1.0, 2 * 0x3F800000),
    ],
)
def test_units_in_the_last_place(a, b, ulps):
    found = first_difference(np.array([7, a], np.float32), np.array([7, b], np.float32))
    assert (found.index, found.ulps, found.count) == ((1,), ulps, 1)
    assert first_difference(np.array([a], np.float32), np.array([a], np.float32)) is None


def test_the_distance_of_the_smallest_and_the_largest_integer_does_not_overflow():
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    assert first_difference(np.array([low]), np.array([high])).ulps == 2**64 - 1


# Arguments and files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "tensors", "message"),
    [
        (-1, {}, "step is -1, expected an int from 0 on"),
        ("2", {}, "step is '2', expected an int from 0 on"),
        (0, [X], "expected arrays by name"),
        (0, {1: X}, "a name in tensors is 1, expected a str"),
        (0, {"x": [1]}, "tensor 'x': "),
        (0, {"x": np.array([None])}, "its dtype is object"),
    ],
)
def test_a_wrong_argument_on_one_rank_is_an_error_on_all(tmp_path, step, tensors, message):
    def body(comm):
        with DivergenceRecorder(comm, tmp_path) as recorder:
            with pytest.raises(ArrayError, match="record: rank 1: ") as error:
                recorder.record(*((step, tensors) if comm.rank == 1 else (0, {"x": X})))
            recorder.record(1, {"x": X})  # the communicator is still usable
        return str(error.value)

    for text in run_ranks(2, body):
        assert message in text


def test_an_action_that_is_wrong_or_differs_is_an_error_on_all_ranks(tmp_path):
    def body(comm):
        with pytest.raises(ArrayError, match="rank 0: action is 'stop', expected 'raise', 'log' or 'write'"):
            DivergenceRecorder(comm, tmp_path / "a", action="stop")
        with pytest.raises(ArrayError, match="rank 1: action is 'log', and 'raise' on rank 0"):
            DivergenceRecorder(comm, tmp_path / "b", action="log" if comm.rank else "raise")

    run_ranks(2, body)


def test_a_folder_with_the_records_of_another_run_is_refused_on_all_ranks(tmp_path):
    records(tmp_path, [[], []])
    (tmp_path / "rank_0.steps").unlink()
    with pytest.raises(ArrayError, match=r"rank 1: .*rank_1.steps exists already"):
        records(tmp_path, [[], []])


def failure_of(folder, capsys):
    return output_of(capsys, "compare", str(folder), code=2)


def test_folders_without_records(tmp_path, capsys):
    assert "has no records of steps, files such as rank_0.steps" in failure_of(tmp_path, capsys)
    assert "cannot be read: No such file or directory" in failure_of(tmp_path / "none", capsys)


def test_damaged_and_foreign_files(tmp_path, capsys):
    rows = [[(step, {"x": X}) for step in range(3)]] * 3
    records(tmp_path, rows)
    path = tmp_path / "rank_1.steps"
    good = path.read_bytes()
    for content, message in [
        (good.replace(b'"version": 1', b'"version": 2'), "has version 2, expected 1"),
        (b'{"step": 1}\n', "was not written by DivergenceRecorder"),
        (b"", "was not written by DivergenceRecorder, or its first line is not complete"),
        (good.replace(b'"rank": 1', b'"rank": 0'), "has the records of rank 0 of 3: was it renamed?"),
        (good.replace(b'"run": "', b'"run": "0'), "are of different runs"),
        (good.replace(b'{"step": 1', b'{"step": '), "line 4 of"),
        (good.replace(b'{"step": 1', b'{"stop": 1'), "is damaged: KeyError('step')"),
        (good.replace(b'"digests": "', b'"digests": "AAAA'), "19 bytes of digests for 1 tensors"),
        (b"\xff\xfe\n" + good, "line 1 of"),
    ]:
        path.write_bytes(content)
        assert message in failure_of(tmp_path, capsys)


def test_ranks_that_are_missing_or_end_early_are_noted(tmp_path, capsys):
    rows = [[(step, {"x": X}) for step in range(3)]] * 4
    records(tmp_path, rows)
    (tmp_path / "rank_3.steps").unlink()
    path = tmp_path / "rank_1.steps"
    path.write_bytes(path.read_bytes()[:-5])
    found = compare_folder(tmp_path)
    assert (found.records, found.last_equal_step, found.step) == (3, 2, None)
    assert found.notes == ("rank 3 left no records here", "the records of rank 1 end after step 1, within a line")
    assert "note: rank 3 left no records here" in output_of(capsys, "compare", str(tmp_path))
    (tmp_path / "rank_1.steps").unlink()
    (tmp_path / "rank_2.steps").unlink()
    assert "has only the records of rank 0 of 4: nothing to compare" in failure_of(tmp_path, capsys)


def test_tensors_that_are_missing_or_damaged_leave_the_tensor_named(tmp_path):
    records(tmp_path, [[(0, {"x": X})], [(0, {"x": 2 * X})], [(0, {"x": X})]])
    path = tmp_path / "rank_1.npz"
    path.write_bytes(path.read_bytes()[:100])
    assert "rank 1: the element is not known: " in str(compare_folder(tmp_path))
    path.unlink()
    assert "rank_1.npz cannot be read" in str(compare_folder(tmp_path))


def test_a_rank_that_cannot_keep_its_tensors_is_named(tmp_path):
    def body(comm):
        with DivergenceRecorder(comm, tmp_path) as recorder:
            if comm.rank == 2:
                (tmp_path / "rank_2.npz").mkdir()
            recorder.record(0, {"x": X * (comm.rank == 0)})

    with pytest.raises(CommMismatch, match=r"compare .*; rank 2 cannot keep its tensors: .*Is a directory"):
        run_ranks(3, body)


def test_a_file_that_is_none_cannot_be_compared(tmp_path):
    (tmp_path / "rank_0.steps").mkdir()
    with pytest.raises(DivergenceError, match="cannot be read"):
        compare_folder(tmp_path)
