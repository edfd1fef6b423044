"""Checkpoints: loading, the files of each rank, errors, and the effects of damage, full disks and kills."""

import collections
import enum
import errno
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from support.children import forked, started
from support.launch import run_python

from bagua_comm import (
    ArrayError,
    CheckpointError,
    Checkpoints,
    CommError,
    CommMismatch,
    Engine,
    ErrorFeedback,
    GradientAllReduce,
    LowPrecisionDecentralized,
    MinMaxUInt8,
    Own,
    Plan,
    Point,
    Quantized,
    TensorSpec,
    UnsupportedError,
)
from bagua_comm.checkpoint import checkpoints as checkpoints_module
from bagua_comm.checkpoint import folders, load_engine, saving, tensorfile, tree_of_engine, trees
from bagua_comm.checkpoint.slices import slices_of
from bagua_comm.system.files import write_at_once
from bagua_comm.testing import run_ranks


def save(folder, tree, *, ranks=2, step=1, **settings):
    """Save what `tree(rank)` gives, or the same tree on all ranks."""

    def body(comm):
        with Checkpoints(folder, comm, **settings) as checkpoints:
            checkpoints.save(step, tree(comm.rank) if callable(tree) else tree)

    run_ranks(ranks, body)


def load(folder, *, ranks=2, **arguments):
    """The values that each rank loads."""

    def body(comm):
        with Checkpoints(folder, comm) as checkpoints:
            return checkpoints.load(**arguments)

    return run_ranks(ranks, body)


def assert_same(actual, expected):
    """Equal to the bit, and of the same types."""
    assert type(actual) is type(expected)
    if isinstance(expected, (np.ndarray, np.generic)):
        assert (actual.dtype, actual.shape, actual.tobytes()) == (
            expected.dtype,
            expected.shape,
            expected.tobytes(),
        )
    elif isinstance(expected, dict):
        for mine, other in zip(actual.items(), expected.items(), strict=True):
            assert_same(mine, other)  # by their places: NaN is a key that is not equal to itself
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for mine, other in zip(actual, expected, strict=True):
            assert_same(mine, other)
    else:
        assert repr(actual) == repr(expected)


# Loading --------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128", ml_dtypes.bfloat16),
]
VALUES = {
    "plain": [None, True, 0, -1, 2**63, -(2**80), 0.1, -0.0, math.nan, math.inf, -math.inf, 1e-320, 1 - 2j],
    "text": ["", "x\ud800\0é", b"", bytes(range(256))],
    "nested": ((), [], {}, ([{"a": (1, [2])}],)),
    "keys": {1: "int", "1": "str", None: 0, True and 2.5: 1, (1, "x"): 2, b"k": 3},
    "kinds": [collections.OrderedDict(b=1, a=2), collections.Counter("abca")],
    "tags": [{"array": 0}, {"dict": []}, {"own": 1}],
    "arrays": {np.dtype(kind).name: RNG.integers(0, 2, (3, 5)).astype(kind) for kind in DTYPES},
    "shapes": [np.array(1.5), np.empty((0, 3)), np.arange(24.0).reshape(2, 3, 4)],
    "layouts": [np.arange(24).reshape(4, 6)[::2, ::-1], np.asfortranarray(np.arange(6).reshape(2, 3))],
    "scalars": [np.float32(0.1), np.int8(-3), np.bool_(True)],
    "large": RNG.standard_normal(100_003).astype(np.float32),
    "nan": np.array([np.nan, -np.nan, np.inf]),
}


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_value_comes_back_to_the_bit(tmp_path, ranks):
    save(tmp_path, lambda rank: {"all": VALUES, "own": Own([VALUES, rank])}, ranks=ranks, step=7)
    for rank, loaded in enumerate(load(tmp_path, ranks=ranks)):
        assert (loaded.step, loaded.ranks) == (7, ranks)
        assert_same(loaded.tree, {"all": VALUES, "own": [VALUES, rank]})


text = st.text(
    'aB0 \0\n"\\é\u2028\ud7ff\U0001f600', max_size=3
)  # of any characters Hypothesis makes a table first, for seconds
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), text, st.binary(max_size=3))
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(plain, inner, max_size=3) | st.tuples(inner, inner)
    ),
    max_leaves=6,
)


@settings(max_examples=20, deadline=None)
@given(nested)
def test_trees_come_back_through_json(tree):
    packed = trees.pack(tree)
    text = json.dumps(packed.tree, allow_nan=False)
    assert_same(trees.Unpacker(lambda n: packed.shared[n].array).unpack(json.loads(text)), tree)


def test_loaded_values_belong_to_the_caller(tmp_path):
    save(tmp_path, {"x": np.zeros(3)})
    for loaded in load(tmp_path):
        loaded.tree["x"] += 1
        assert loaded.tree["x"].tolist() == [1, 1, 1]


def test_arrays_may_change_as_soon_as_save_returns(tmp_path):
    def body(comm):
        x, mine = np.zeros(300_000), np.full(10, comm.rank)
        with Checkpoints(tmp_path, comm, keep=None) as checkpoints:
            for step in range(4):
                checkpoints.save(step, {"x": x, "own": Own(mine)})
                x += 1
                mine += 10
            return [checkpoints.load(step).tree for step in range(4)]

    for rank, loaded in enumerate(run_ranks(2, body)):
        for step, tree in enumerate(loaded):
            assert_same(tree, {"x": np.full(300_000, float(step)), "own": np.full(10, rank + 10 * step)})


def test_arrays_on_a_device_are_copied_to_the_host(tmp_path, device):
    import cupy

    x = cupy.asarray(np.arange(200_000, dtype=np.float32).reshape(2, -1))
    save(tmp_path, lambda rank: {"x": x, "part": x[:, ::3], "own": Own(cupy.full(5, rank))}, ranks=3)
    for rank, loaded in enumerate(load(tmp_path, ranks=3)):
        host = np.arange(200_000, dtype=np.float32).reshape(2, -1)
        expected = {"x": host, "part": np.ascontiguousarray(host[:, ::3]), "own": np.full(5, rank)}
        assert_same(loaded.tree, expected)


# Files of ranks -------------------------------------------------------------------------------------------


def test_shared_arrays_are_written_once_in_equal_parts_that_safetensors_reads(tmp_path):
    x = np.arange(250_000, dtype=np.float32)
    save(tmp_path, lambda rank: {"x": x, "z": np.array(1 + 2j), "own": Own(np.full(3, rank))}, ranks=4)
    files = [safetensors.numpy.load_file(tmp_path / f"step-1/rank-{rank}.safetensors") for rank in range(4)]
    parts = [array for file in files for name, array in file.items() if name.startswith("tree['x']")]
    assert {part.size for part in parts} <= set(range(62_490, 62_511))
    assert np.concatenate(sorted(parts, key=lambda part: part[0])).tobytes() == x.tobytes()
    assert [file["own tree['own']"].tolist() for file in files] == [[rank] * 3 for rank in range(4)]
    assert [file["tree['z']"].tolist() for file in files if "tree['z']" in file] == [[1, 2]]


def transformer_names(layers):
    """Names as usual models have them; they differ in the middle alone."""
    kinds = ["attn.c_attn.weight", "attn.c_attn.bias", "mlp.c_proj.weight"]
    return [f"transformer.h.{layer}.{name}" for layer in range(layers) for name in kinds]


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_tensors_of_a_transformer_are_read_by_safetensors_under_their_whole_names(tmp_path, ranks):
    model = {name: np.arange(3.0) + number for number, name in enumerate(transformer_names(4))}
    save(tmp_path, lambda rank: {"model": model, "own": Own(model)}, ranks=ranks)
    files = [safetensors.numpy.load_file(tmp_path / f"step-1/rank-{rank}.safetensors") for rank in range(ranks)]
    shared = {name: x for file in files for name, x in file.items() if not name.startswith("own ")}
    assert shared.keys() == {f"tree['model'][{name!r}]" for name in model}
    for name, x in model.items():
        assert_same(shared[f"tree['model'][{name!r}]"], x)
        assert [file[f"own tree['own'][{name!r}]"].tolist() for file in files] == [x.tolist()] * ranks


def test_a_checkpoint_whose_names_were_shortened_still_loads(tmp_path):
    shutil.copytree(Path(__file__).parents[1] / "golden" / "checkpoint", tmp_path / "old")
    names = [f"transformer.h.{layer}.attn.c_attn.weight" for layer in range(4)]
    for rank, loaded in enumerate(load(tmp_path / "old")):
        assert loaded.tree["rng"] == rank
        assert [loaded.tree[name].tolist() for name in names] == [[layer] * 3 for layer in range(4)]


def test_keys_that_look_alike_name_two_tensors(tmp_path):
    """NaN is not equal to itself, so a dict may have it twice."""
    keys = [math.nan, float("nan"), 10**5000, 10**5000 + 1]
    save(tmp_path, {key: np.full(2, number) for number, key in enumerate(keys)}, ranks=1)
    found = safetensors.numpy.load_file(tmp_path / "step-1/rank-0.safetensors")
    assert sorted(x[0] for x in found.values()) == [0, 1, 2, 3]


@pytest.mark.parametrize("names", [["x", "x"], ["__metadata__"]])
def test_a_file_of_two_tensors_with_one_name_is_refused_before_it_is_made(tmp_path, names):
    with pytest.raises(CheckpointError, match=f"named {names[-1]!r}"):
        tensorfile.write(tmp_path / "file", [tensorfile.whole(name, np.zeros(2)) for name in names], lambda: None)
    assert not list(tmp_path.iterdir())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.sampled_from([1, 2, 8, 16])), max_size=6), st.integers(1, 9)
)
def test_slices_cover_every_array_once(sizes, ranks):
    parts = slices_of(sizes, ranks)
    assert len(parts) == ranks
    for number, (count, _) in enumerate(sizes):
        found = [each for part in parts for each in part if each.array == number]
        assert found[0].begin == 0
        assert found[-1].end == count
        assert [each.end for each in found[:-1]] == [each.begin for each in found[1:]]
    nbytes = [sum((s.end - s.begin) * sizes[s.array][1] for s in part) for part in parts]
    assert max(nbytes) <= sum(nbytes) / ranks + 2 * (64 << 10)


def test_nothing_is_pickled(tmp_path):
    save(tmp_path, VALUES)
    files = sorted(path.name for path in (tmp_path / "step-1").iterdir())
    assert files == ["manifest.json", "rank-0.safetensors", "rank-1.safetensors"]
    manifest = json.loads((tmp_path / "step-1/manifest.json").read_text())
    assert {"version", "world", "step", "files", "hash", "plan"} <= set(manifest)
    assert (tmp_path / "latest").read_text() == "step-1\n"


# Number of checkpoints that are kept ----------------------------------------------------------------------


def steps_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_the_newest_are_kept(tmp_path):
    def body(comm):
        with Checkpoints(tmp_path, comm, keep=2) as checkpoints:
            assert checkpoints.latest() is None
            for step in (1, 5, 10):
                checkpoints.save(step, {"step": step})
            assert checkpoints.latest() == 10
            assert checkpoints.load(5).tree == {"step": 5}
            with pytest.raises(ArrayError, match="no checkpoint of step 1 in"):
                checkpoints.load(1)

    run_ranks(2, body)
    assert steps_in(tmp_path) == ["step-10", "step-5"]


def test_after_going_back_the_newest_checkpoint_is_the_last_one_saved(tmp_path):
    """A training that continues from step 10 again finds older files of step 30, which are not its future."""

    def body(comm):
        with Checkpoints(tmp_path, comm, keep=2) as checkpoints:
            for step in (10, 20, 30):
                checkpoints.save(step, step)
        with Checkpoints(tmp_path, comm, keep=2) as checkpoints:
            assert checkpoints.load(20).tree == 20
            checkpoints.save(25, "again")
            assert checkpoints.latest() == 25
            checkpoints.save(30, "again")
            assert checkpoints.load() == (30, "again", 2, ())

    run_ranks(2, body)
    assert steps_in(tmp_path) == ["step-25", "step-30"]


def test_a_replacement_that_was_cut_short_leaves_the_old_one(tmp_path):
    save(tmp_path, "old", step=5)
    (tmp_path / "step-5").rename(tmp_path / "step-5.old")
    (tmp_path / "step-5.tmp").mkdir()
    assert load(tmp_path)[0].tree == "old"
    save(tmp_path, "new", step=6)
    assert steps_in(tmp_path) == ["step-5", "step-6"]
    assert load(tmp_path, step=5)[0].tree == "old"


def test_a_removal_that_was_cut_short_leaves_no_checkpoint(tmp_path):
    save(tmp_path, "old", step=5)
    (tmp_path / "step-5/manifest.json").unlink()
    (tmp_path / "step-5").rename(tmp_path / "step-5.old")
    with pytest.raises(ArrayError, match="no checkpoint in"):
        load(tmp_path)
    save(tmp_path, "new", step=6)
    assert steps_in(tmp_path) == ["step-6"]


def test_two_programs_do_not_save_in_one_folder(tmp_path):
    held = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True); input()"
    command = [sys.executable, "-S", "-c", held, str(tmp_path / ".lock")]
    with started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match="another program saves checkpoints in"):
            save(tmp_path, 1)
        other.stdin.write("\n")
    save(tmp_path, 1)


# Errors ---------------------------------------------------------------------------------------------------


class Level(enum.IntEnum):
    LOW = 1


Pair = collections.namedtuple("Pair", "a b")
ENDLESS = []
ENDLESS.append(ENDLESS)
REFUSED = [
    (
        {1, 2},
        r"tree\['x'\]\[0\] is a builtins.set, which a checkpoint cannot hold; expected arrays",
        UnsupportedError,
    ),
    (Level.LOW, "is a .*Level", UnsupportedError),
    (Pair(1, 2), "is a .*Pair", UnsupportedError),
    (collections.defaultdict(int), "is a collections.defaultdict", UnsupportedError),
    (len, "is a builtins.builtin_function_or_method", UnsupportedError),
    (np.array(["a"]), r"tree\['x'\]\[0\] is an array of <U1, expected numbers", UnsupportedError),
    (np.array([None]), "is an array of object", UnsupportedError),
    (np.zeros(2, ">f4"), "is an array of >f4, expected numbers in native byte order", UnsupportedError),
    (np.ma.masked_array([1]), "would lose its mask", UnsupportedError),
    ({frozenset(): 1}, r"a key of tree\['x'\]\[0\] is a builtins.frozenset", UnsupportedError),
    (ENDLESS, "more than 100 levels; does it contain itself", ArrayError),
    (Own(Own(1)), "is an Own inside the Own", ArrayError),
]


@pytest.mark.parametrize(("value", "message", "error"), REFUSED, ids=lambda value: type(value).__name__)
def test_other_values_of_one_rank_are_refused_on_all_with_their_place(tmp_path, value, message, error):
    def body(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            with pytest.raises(error, match=f"save: rank 1: .*{message}"):
                checkpoints.save(1, {"x": [value if comm.rank == 1 else 0]})
            checkpoints.save(2, {"x": [0]}, wait=True)
            assert checkpoints.latest() == 2

    run_ranks(2, body)
    assert steps_in(tmp_path) == ["step-2"]


DIFFERENT = [
    (
        lambda rank: {"lr": 0.1 * (rank + 1)},
        r"tree\['lr'\] is 0.1 on rank 0 and 0.2 on rank 1; put what .* in Own",
    ),
    (lambda rank: {"x": np.zeros(3 + rank)}, r"tree\['x'\] is float64\[3\] on rank 0 and float64\[4\] on rank 1"),
    (lambda rank: {"x": 1} if rank else {"y": 1}, r"tree is a dict of 'y' on rank 0 and a dict of 'x' on rank 1"),
    (lambda rank: [Own(1) if rank else 1], r"tree\[0\] is 1 on rank 0 and Own\(reshape=None\) on rank 1"),
    (
        lambda rank: {"transformer.h.1.attn.c_attn.weight" if rank else "transformer.h.0.attn.c_attn.weight": 1},
        r"'transformer.h.0.attn.c_attn.weight' on rank 0 and a dict of 'transformer.h.1.attn",
    ),
    (
        lambda rank: {"text": 100 * "a" + "xy"[rank] + 100 * "b"},
        r"tree\['text'\] is \.\.\.a+xb+\.\.\. on rank 0 and \.\.\.a+yb+\.\.\. on rank 1",
    ),
    (
        lambda rank: {"text": 50_000 * "a" + "xy"[rank] + 50_000 * "b"},
        r"tree\['text'\] is .*\(100003 characters, \w+\) on rank 0 and .*\(100003 characters, \w+\) on rank 1",
    ),
    (
        lambda rank: {f"layer.{n}": 0 for n in range(30)} | {"extra": 1} if rank else {},
        r"tree is a dict of nothing on rank 0 and a dict of 'layer.0', .* on rank 1",
    ),
    (
        lambda rank: {f"layer.{n}": 0 for n in range(30)} | ({"extra": 1} if rank else {}),
        r"tree is .*'layer.29' on rank 0 and .*'layer.29', 'extra' on rank 1",
    ),
]


@pytest.mark.parametrize(("tree", "message"), DIFFERENT)
def test_trees_that_differ_are_refused(tmp_path, tree, message):
    def body(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            with pytest.raises(CommMismatch, match=message):
                checkpoints.save(1, tree(comm.rank))
            with pytest.raises(CommMismatch, match="step is 3 on rank 0 and 4 on rank 1"):
                checkpoints.save(3 + comm.rank, 0)
            checkpoints.save(1, {"mine": Own(comm.rank)})

    run_ranks(2, body)
    assert steps_in(tmp_path) == ["step-1"]


def test_an_array_that_differs_is_named_so_that_its_layer_is_known(tmp_path):
    names = transformer_names(4)

    def body(comm):
        model = {name: np.zeros(3) for name in names}
        model[names[7]][1] = comm.rank
        with Checkpoints(tmp_path, comm) as checkpoints:
            with pytest.raises(CheckpointError) as caught:
                checkpoints.save(1, model, wait=True)
            assert f"tree[{names[7]!r}] differs between rank" in str(caught.value)

    run_ranks(2, body)


@pytest.mark.parametrize("ranks", [2, 3])
def test_shared_arrays_that_differ_fail_the_save_and_leave_the_last_checkpoint(tmp_path, ranks):
    def body(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(1, {"x": np.zeros(3)})
            checkpoints.save(2, {"y": 1, "x": np.full(3, comm.rank)})
            with pytest.raises(CheckpointError, match=r"step 2 .*tree\['x'\] differs between rank \d"):
                checkpoints.wait()
            checkpoints.wait()
            assert checkpoints.load().step == 1

    run_ranks(ranks, body)
    assert steps_in(tmp_path) == ["step-1"]


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", None, 2**70])
def test_a_step_out_of_range_is_refused(tmp_path, step):
    with pytest.raises(ArrayError, match=r"rank 0: step is .*, expected an integer of at least 0"):
        save(tmp_path, 0, step=step)


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"keep": 1.5}, {"stall_s": 0}, {"stall_s": "1"}])
def test_settings_out_of_range_are_refused(tmp_path, wrong):
    with pytest.raises(ArrayError, match=f"{next(iter(wrong))} is .*expected"):
        save(tmp_path, 0, **wrong)


def test_ranks_must_name_one_folder(tmp_path):
    def body(comm):
        with pytest.raises(ArrayError, match=r"rank 0 has .*0', 3.*but rank 1 has"):
            Checkpoints(tmp_path / str(comm.rank), comm)
        with pytest.raises(ArrayError, match="rank 1: folder is 3, expected a path"):
            Checkpoints(3 if comm.rank else tmp_path, comm)

    run_ranks(2, body)


def test_closing_the_communicator_completes_the_last_checkpoint_and_raises_its_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")

    def body(comm):
        mine = comm.dup()
        good = Checkpoints(tmp_path / "good", mine.dup())
        good.save(1, {"x": np.arange(4)})
        bad = Checkpoints(tmp_path / "file" / "bad", mine)
        bad.save(2, {"x": np.arange(4)})
        with pytest.raises(CheckpointError, match="saving step 2 in"):
            mine.close()
        good.close()  # again: nothing to do
        with pytest.raises(CheckpointError, match="closed"):
            bad.wait()

    run_ranks(2, body)
    assert (tmp_path / "good" / "step-1").is_dir()


def test_a_program_that_ends_with_a_save_in_progress_is_warned(tmp_path, capfd):
    def body(comm):
        checkpoints = Checkpoints(tmp_path, comm)
        checkpoints._at_exit()
        assert capfd.readouterr().err == ""
        checkpoints.save(3, {"x": np.arange(4)})
        checkpoints._at_exit()
        assert "the checkpoint of step 3 in" in capfd.readouterr().err
        assert forked(checkpoints._at_exit) == 0
        assert capfd.readouterr().err == ""
        checkpoints.close()
        checkpoints._at_exit()
        assert capfd.readouterr().err == ""

    run_ranks(1, body)


def test_a_closed_one_says_so(tmp_path):
    def body(comm):
        checkpoints = Checkpoints(tmp_path, comm)
        checkpoints.close()
        checkpoints.close()
        with pytest.raises(CheckpointError, match="are closed"):
            checkpoints.save(1, 2)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (3, "a plain int"),
        ({"a": [0.5]}, "a plain float"),
        (np.zeros(2, np.int64), "an array of int64"),
        ([np.zeros(2), (np.float32(1), np.uint8(1))], "an array of uint8"),
    ],
)
def test_a_sum_of_numbers_that_cannot_be_shared_is_refused(value, found):
    with pytest.raises(ArrayError, match=f'Own: value has {found}, and "sum" shares'):
        Own(value, "sum")
    Own(value, "first")


@pytest.mark.parametrize("rule", ["max", 1, ""])
def test_an_unknown_rule_is_refused(rule):
    with pytest.raises(ArrayError, match=r"Own: reshape is .*expected None or one of first, mean, sum, drop"):
        Own(1, rule)


# Damage ---------------------------------------------------------------------------------------------------


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def resealed(folder, **changes):
    """A manifest with a right hash and wrong contents, as of a program that is not ours."""
    from bagua_comm.checkpoint.folders import sealed

    path = folder / "manifest.json"
    manifest = {**json.loads(path.read_text()), **changes}
    del manifest["hash"]
    path.write_bytes(sealed(manifest))


DAMAGE = {
    "flipped data": (
        lambda f: flip(f / "rank-1.safetensors", -1),
        r"rank \d: .*rank-1.safetensors is damaged: its checksum",
    ),
    "flipped header": (
        lambda f: flip(f / "rank-0.safetensors", 12),
        "the header of rank-0.safetensors is damaged",
    ),
    "truncated": (
        lambda f: os.truncate(f / "rank-1.safetensors", 90),
        "rank-1.safetensors has 90 bytes, expected",
    ),
    "longer": (lambda f: os.truncate(f / "rank-1.safetensors", 10**6), "has 1000000 bytes, expected"),
    "file is gone": (lambda f: (f / "rank-1.safetensors").unlink(), "rank-1.safetensors cannot be opened"),
    "manifest is gone": (lambda f: (f / "manifest.json").unlink(), "it has no manifest.json"),
    "empty manifest": (lambda f: (f / "manifest.json").write_text(""), "manifest.json is damaged"),
    "truncated manifest": (lambda f: os.truncate(f / "manifest.json", 200), "manifest.json is damaged"),
    "flipped manifest": (
        lambda f: flip(f / "manifest.json", 130),
        "manifest.json is damaged|not one of this library",
    ),
    "deep manifest": (lambda f: (f / "manifest.json").write_text("[" * 100_000), "manifest.json is damaged"),
    "foreign": (lambda f: (f / "manifest.json").write_text('{"weights": 3}'), "is not one of this library"),
    "newer": (lambda f: resealed(f, version=99), "is of version 99, expected 1"),
    "senseless": (lambda f: resealed(f, plan={}), "its manifest does not make sense"),
    "fewer files": (lambda f: resealed(f, files=[]), "its manifest does not make sense"),
    "of another step": (lambda f: resealed(f, step=3), "its manifest is of step 3"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_an_error_on_all_ranks_or_the_one_before_is_taken(tmp_path, kind):
    damage, message = DAMAGE[kind]
    save(tmp_path, {"x": np.ones(50)}, step=1)
    save(tmp_path, lambda rank: {"x": np.zeros(50), "mine": Own(np.full(9, rank))}, step=2)
    damage(tmp_path / "step-2")

    def body(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            with pytest.raises(CheckpointError, match=f"step 2 in .* cannot be loaded: .*({message})"):
                checkpoints.load()
            assert checkpoints.load(1).step == 1
            return checkpoints.load(fallback=True)

    with pytest.warns(RuntimeWarning, match=f"step 2 .*({message}).*loading the one before"):
        found = run_ranks(2, body)
    for loaded in found:
        assert_same(loaded.tree, {"x": np.ones(50)})
        assert len(loaded.skipped) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_any_flipped_bit_is_found(tmp_path, seed):
    rng = random.Random(seed)
    save(tmp_path, lambda rank: {"x": np.arange(200.0), "y": (1.5, "text"), "mine": Own(np.full(9, rank))})
    path = rng.choice(sorted((tmp_path / "step-1").iterdir()))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(tmp_path)


def test_if_all_are_damaged_fallback_says_why(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-1/manifest.json").write_text("{")
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(CheckpointError, match=r"no checkpoint can be loaded: .*damaged"),
    ):
        load(tmp_path, fallback=True)


def test_a_damaged_newest_is_not_taken_for_no_checkpoint(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-1/manifest.json").write_text("{")

    def body(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            with pytest.raises(CheckpointError, match=r"step 1 .*damaged"):
                checkpoints.latest()
            return checkpoints.latest(fallback=True)

    assert run_ranks(2, body) == [None, None]


# Disks ----------------------------------------------------------------------------------------------------


def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks(tmp_path):
    """As on a full disk: files may not be longer than 64 KiB for a while, and rank 1's would be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def body(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            mine = Own(np.zeros(50_000 if comm.rank == 1 else 1))
            checkpoints.save(1, {"mine": mine}, wait=True)
            comm.barrier()
            if comm.rank == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
            comm.barrier()
            checkpoints.save(2, {"mine": mine})
            with pytest.raises(CheckpointError, match=r"saving step 2 in .*: rank 1: .*File too large"):
                checkpoints.wait()
            comm.barrier()
            if comm.rank == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            comm.barrier()
            assert steps_in(tmp_path) == ["step-1"]
            checkpoints.save(3, {"mine": mine})
            assert checkpoints.load().step == 3

    try:
        run_ranks(3, body)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_for(monkeypatch, name, times):
    """Let the disk be full for the next `times` files of this name."""
    left = [times]

    def write(path, content, **settings):
        if path.name == name and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_at_once(path, content, **settings)

    monkeypatch.setattr(folders, "write_at_once", write)


def test_a_save_that_fails_at_its_manifest_gives_back_the_room_of_its_files(tmp_path, monkeypatch):
    def body(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(1, {"mine": Own(np.full(50, comm.rank))}, wait=True)
            full_for(monkeypatch, "manifest.json", 1)
            with pytest.raises(CheckpointError, match=r"saving step 2 in .*No space left on device"):
                checkpoints.save(2, {"mine": Own(np.full(50, 2))}, wait=True)
            assert steps_in(tmp_path) == ["step-1"]
            return checkpoints.load().tree["mine"].tolist()

    assert run_ranks(2, body) == [[0] * 50, [1] * 50]


def test_a_disk_too_full_for_the_file_latest_loses_old_checkpoints_first(tmp_path, monkeypatch):
    def body(comm):
        with Checkpoints(tmp_path, comm, keep=1) as checkpoints:
            checkpoints.save(1, 1, wait=True)
            full_for(monkeypatch, "latest", 1)
            checkpoints.save(2, 2, wait=True)
            assert (tmp_path / "latest").read_text() == "step-2\n"
            comm.barrier()
            full_for(monkeypatch, "latest", 2)
            with pytest.raises(CheckpointError, match=r"step 3 .*complete, but the file latest"):
                checkpoints.save(3, 3, wait=True)
            assert steps_in(tmp_path) == ["step-3"]
            return checkpoints.load().tree

    assert run_ranks(2, body) == [3, 3]


def test_the_next_call_raises_that_a_save_failed(tmp_path):
    (tmp_path / "file").write_text("")

    def body(comm):
        checkpoints = Checkpoints(tmp_path / "file/x", comm)
        for call in (lambda: checkpoints.save(2, 0), checkpoints.wait, checkpoints.load, checkpoints.close):
            checkpoints.save(1, 0)
            with pytest.raises(CheckpointError, match=r"saving step 1 .*Not a directory"):
                call()
        with pytest.raises(CheckpointError, match="are closed"):
            checkpoints.wait()

    run_ranks(2, body)


def test_a_slow_disk_does_not_run_into_the_timeout_of_calls(tmp_path, monkeypatch):
    write = saving.write

    def slowly(folder, job, rank, note):
        if rank == 1:
            time.sleep(1.5)  # sleeps: longer than the timeout of calls
        return write(folder, job, rank, note)

    monkeypatch.setattr(saving, "write", slowly)

    def body(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(1, 5)
            return checkpoints.load().tree

    assert run_ranks(2, body, timeout_s=0.5) == [5, 5]


def test_a_disk_that_does_not_answer_fails_the_save(tmp_path, monkeypatch):
    write, answer = saving.write, threading.Event()

    def never(folder, job, rank, note):
        if rank == 1:
            assert answer.wait(30)
        return write(folder, job, rank, note)

    def body(comm):
        with Checkpoints(tmp_path, comm, stall_s=0.2) as checkpoints:
            monkeypatch.setattr(saving, "write", never)
            checkpoints.save(1, 5)
            with pytest.raises(CheckpointError, match=r"rank 1: the disk has not answered for 0.2 s"):
                checkpoints.wait()
            answer.set()
            comm.barrier()
            monkeypatch.setattr(saving, "write", write)
            checkpoints.save(2, 6)
            return checkpoints.load().tree

    assert run_ranks(2, body) == [6, 6]


# Other numbers of ranks -----------------------------------------------------------------------------------


def test_shared_values_load_on_any_number_of_ranks(tmp_path):
    x = RNG.standard_normal((7, 11_111)).astype(np.float16)
    tree = {"x": x, "others": VALUES}
    save(tmp_path, tree, ranks=4)
    for ranks in (3, 8, 1):
        for loaded in load(tmp_path, ranks=ranks):
            assert_same(loaded.tree, tree)
            assert loaded.ranks == 4


def test_rules_for_another_number_of_ranks(tmp_path):
    def tree(rank):
        x = np.array([rank, 0.5, 2 * rank], np.float32)
        return {
            "mean": Own({"x": x, "n": 3, "steps": np.array(5)}, "mean"),
            "sum": Own([x.astype(ml_dtypes.bfloat16), x * (1 + 1j)], "sum"),
            "first": Own(("of", rank), "first"),
            "drop": Own({"replica": np.zeros(10**6)}, "drop"),
        }

    save(tmp_path, tree, ranks=4)
    for ranks in (3, 8):
        for loaded in load(tmp_path, ranks=ranks):
            found = loaded.tree
            assert_same(found["mean"], {"x": np.array([1.5, 0.5, 3], np.float32), "n": 3, "steps": np.array(5)})
            total = np.array([6, 2, 12])
            assert found["sum"][0].tolist() == (total / ranks).astype(ml_dtypes.bfloat16).tolist()
            np.testing.assert_allclose(found["sum"][1] * ranks, total * (1 + 1j), rtol=1e-6)
            assert found["first"] == ("of", 0)
            assert found["drop"] is None
    for rank, loaded in enumerate(load(tmp_path, ranks=4)):
        assert loaded.tree["first"] == ("of", rank)
        assert loaded.tree["drop"]["replica"].size == 10**6


NOT_RESHAPED = [
    (lambda rank: Own(rank), r"tree\['a'\] is a rank's own, and was saved by 2 ranks, but 3 load it"),
    (
        lambda rank: Own([rank], "mean"),
        r"tree\['a'\] holds other values on rank 1 than on rank 0, so there is no mean",
    ),
    (lambda rank: Own([np.array(rank)], "mean"), "has an array of int64 that differs between rank 0 and rank 1"),
    (
        lambda rank: Own(np.zeros(rank), "sum"),
        r"has an array float64\(1,\) on rank 1 and float64\(0,\) on rank 0",
    ),
]


@pytest.mark.parametrize(("tree", "message"), NOT_RESHAPED)
def test_state_that_cannot_move_to_another_number_of_ranks_is_named(tmp_path, tree, message):
    save(tmp_path, lambda rank: {"a": tree(rank)})
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, ranks=3)
    assert len(load(tmp_path)) == 2


def trained(comm, algorithm, steps, folder=None, *, start=0, seed=0):
    """Train a quadratic with plain arrays; load first if there is a checkpoint. Returns what is left."""
    payload = algorithm.payload
    weight = np.random.default_rng(seed).standard_normal(600).astype(np.float32)
    grad = np.zeros_like(weight)
    specs = [TensorSpec("a", (200,), "float32"), TensorSpec("b", (20, 20), "float32")]
    plan = Plan.pack(specs, alignment=comm.size)
    flat = np.zeros(plan.buckets[0].size, np.float32)
    flat[:600] = weight if payload == "weight" else 0
    means = np.zeros(600)
    with Engine(comm, algorithm, plan, [flat]) as engine:
        if start:
            with Checkpoints(folder, comm) as checkpoints:
                loaded = checkpoints.load(start)
                weight[...] = loaded.tree["weight"]
                if payload == "weight":
                    flat[:600] = weight
                load_engine(engine, loaded.tree["engine"])
        residual_before = _residual(engine)
        for step in range(start, steps):
            engine.at(Point.FORWARD)
            if payload == "weight":
                weight[...] = flat[:600]
            grad[...] = np.sin(weight * (comm.rank + 1) + step)
            if payload == "grad":
                flat[:600] = grad
            for name in ("a", "b"):
                engine.ready(name)
            engine.at(Point.BACKWARD)
            if payload == "grad":
                means += flat[:600]
                weight -= 0.1 * flat[:600]
            else:
                weight -= 0.1 * grad
                flat[:600] = weight
            engine.at(Point.STEP)
        engine.settle()
        weight[...] = flat[:600] if payload == "weight" else weight
        if folder is not None:
            tree = tree_of_engine(engine)
            with Checkpoints(folder, comm) as checkpoints:
                mark = Own(weight, "mean") if payload == "weight" else weight
                checkpoints.save(steps, {"weight": mark, "engine": tree})
        return weight.copy(), residual_before, _residual(engine), engine.states


def _residual(engine):
    average = getattr(engine.states[0], "average", engine.states[0])
    found = getattr(average, "residual", None)
    return None if found is None else found.copy()


FEEDBACK = GradientAllReduce(ErrorFeedback())
DECAYED = GradientAllReduce(ErrorFeedback(Quantized(), 0.8, 7, MinMaxUInt8()))


@pytest.mark.parametrize("algorithm", [FEEDBACK, DECAYED, LowPrecisionDecentralized()], ids=repr)
def test_an_engine_continues_bit_for_bit(tmp_path, algorithm):
    expected = run_ranks(3, lambda comm: trained(comm, algorithm, 8)[0])
    run_ranks(3, lambda comm: trained(comm, algorithm, 4, tmp_path))
    found = run_ranks(3, lambda comm: trained(comm, algorithm, 8, tmp_path, start=4, seed=comm.rank)[0])
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("algorithm", [FEEDBACK, DECAYED], ids=repr)
def test_the_mean_of_residuals_stays_from_4_to_3_to_8_ranks(tmp_path, algorithm):
    """Later averages add the mean of the residuals of all ranks."""
    saved = run_ranks(4, lambda comm: trained(comm, algorithm, 4, tmp_path))
    for ranks, steps in ((3, 6), (8, 9)):
        mean = np.mean([residual for _, _, residual, _ in saved], axis=0, dtype=np.float64)
        assert np.abs(mean).max() > 1e-5
        start = {3: 4, 8: 6}[ranks]
        body = lambda comm, start=start, steps=steps: trained(comm, algorithm, steps, tmp_path, start=start)  # noqa: E731
        saved = run_ranks(ranks, body)
        for _, residual, _, _ in saved:
            np.testing.assert_allclose(residual, mean, rtol=1e-6, atol=1e-9)
        counts = [states[0].average.state.means for *_, states in saved]
        assert counts == [steps % 7 if algorithm == DECAYED else None] * ranks  # the count continues, too


def test_replicas_are_recreated_from_4_to_3_to_8_ranks(tmp_path):
    algorithm = LowPrecisionDecentralized()
    before = [weight for weight, *_ in run_ranks(4, lambda comm: trained(comm, algorithm, 4, tmp_path))]
    mean = np.mean(before, axis=0, dtype=np.float64)
    first = run_ranks(3, lambda comm: trained(comm, algorithm, 4, start=4, folder=tmp_path, seed=comm.rank)[0])
    for weight in first:
        np.testing.assert_allclose(weight, mean, rtol=1e-6)
    for ranks, start, steps in ((3, 4, 6), (8, 6, 9)):
        body = lambda comm, start=start, steps=steps: trained(comm, algorithm, steps, tmp_path, start=start)  # noqa: E731
        states = [states[0] for *_, states in run_ranks(ranks, body)]
        for rank, state in enumerate(states):
            assert state.weight.tobytes() == states[rank - 1].right.tobytes()
            assert state.weight.tobytes() == states[(rank + 1) % ranks].left.tobytes()


# Blocks that do not end at their last line ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("leave", "ranks"),
    [
        (lambda: sys.exit(0), (0, 1)),
        (lambda: sys.exit(), (0, 1)),
        (lambda: sys.exit(3), (0, 1)),
        (lambda: int("x"), (0, 1)),
        (lambda: int("x"), (1,)),
    ],
)
def test_a_block_that_is_left_completes_its_save(tmp_path, monkeypatch, capfd, leave, ranks):
    written = saving.write
    monkeypatch.setattr(
        saving, "write", lambda *args: (time.sleep(0.1), written(*args))[1]
    )  # sleeps: a slow disk

    def body(comm):
        with suppress(SystemExit, ValueError), Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(7, {"x": np.arange(5)})
            if comm.rank in ranks:
                leave()
        return checkpoints._closed

    assert run_ranks(2, body) == [True, True]
    assert "latest" in os.listdir(tmp_path)
    assert load(tmp_path)[0].step == 7
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_block_that_is_left_waits_no_longer_than_its_limit_and_names_what_is_not_complete(
    tmp_path, monkeypatch, capfd, ranks
):
    written, gate, left = saving.write, threading.Event(), threading.Barrier(2)
    monkeypatch.setattr(saving, "write", lambda *args: (gate.wait(30), written(*args))[1])
    monkeypatch.setattr(checkpoints_module, "LEAVE_S", 0.2)
    monkeypatch.setattr(checkpoints_module, "QUIET_S", 0.1)

    def body(comm):
        with suppress(ValueError, CheckpointError, CommError), Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(7, {"x": np.arange(5)})
            if comm.rank in ranks:
                raise ValueError("bad day")
        left.wait(20)
        gate.set()

    run_ranks(2, body, timeout_s=10)
    lines = [line for line in capfd.readouterr().err.splitlines() if "rank 1" in line]
    what = f"the checkpoint of step 7 in {tmp_path}"
    assert (
        lines[0] == f"bagua_comm: rank 1 of 2 leaves after ValueError: bad day; it waits up to 0.2 s for {what}"
    )
    assert lines[1].startswith(f"bagua_comm: rank 1 of 2: {what} was not completed")
    assert "latest" not in os.listdir(tmp_path)


WALLTIME = """
    import sys
    import numpy as np
    import bagua_comm

    with bagua_comm.connect() as comm, bagua_comm.Checkpoints(sys.argv[1], comm) as checkpoints:
        for step in range(1, 10):
            comm.barrier()
            if step == 5:
                checkpoints.save(step, {"weights": np.ones(1000)})
                sys.exit(0)
"""


@pytest.mark.slow
def test_an_exit_in_the_middle_of_a_block_completes_the_save_under_mpirun(tmp_path):
    result = run_python(2, tmp_path / "checkpoints", script=(tmp_path / "walltime.py", WALLTIME))
    assert (result.returncode, result.stderr) == (0, "")
    assert load(tmp_path / "checkpoints")[0].step == 5


WITHOUT_BLOCKS = """
    import sys
    import numpy as np
    import bagua_comm

    comm = bagua_comm.connect()
    checkpoints = bagua_comm.Checkpoints(sys.argv[1], comm)
    for step in range(1, 10):
        comm.barrier()
        if step == 5:
            checkpoints.save(step, {"weights": np.ones(1000)})
            if comm.rank >= int(sys.argv[2]):
                raise ValueError("bad day")
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_an_exception_outside_of_a_block_completes_the_save_under_mpirun(tmp_path, first):
    script = (tmp_path / "program.py", WITHOUT_BLOCKS)
    result = run_python(2, tmp_path / "checkpoints", first, script=script)
    assert result.returncode != 0
    assert "ValueError: bad day" in result.stderr
    assert load(tmp_path / "checkpoints")[0].step == 5


@pytest.mark.parametrize("derive", [lambda comm: comm, lambda comm: comm.split(0).dup()])
def test_the_end_of_a_communicator_after_an_error_completes_the_save(tmp_path, derive):
    def body(comm):
        with suppress(ValueError, CommError), comm:
            checkpoints = Checkpoints(tmp_path, derive(comm))
            checkpoints.save(5, {"x": np.arange(5)})
            raise ValueError("bad day")
        return checkpoints._closed

    assert run_ranks(2, body) == [True, True]
    assert load(tmp_path)[0].step == 5


# Kills ----------------------------------------------------------------------------------------------------

VICTIM = """
    import sys
    import numpy as np
    from bagua_comm import Checkpoints, Own
    from bagua_comm.testing import run_ranks

    def body(comm):
        with Checkpoints(sys.argv[1], comm, keep=2) as checkpoints:
            first = checkpoints.latest() or 0
            x = np.full(200_000, first, np.int64)
            if comm.rank == 0:
                print("begin", flush=True)
            for step in range(first + 1, 10**9):
                x += 1
                checkpoints.save(step, {"x": x, "mine": Own([step, comm.rank])})
                checkpoints.wait()
                if comm.rank == 0:
                    print(step, flush=True)

    run_ranks(2, body)
"""


def kill_again_and_again(folder, times, seed):
    rng, reached = random.Random(seed), 0
    script = folder / "victim.py"
    script.write_text(textwrap.dedent(VICTIM))
    for turn in range(times):
        command = [sys.executable, str(script), str(folder / "checkpoints")]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        ) as victim:
            assert victim.stdout.readline() == "begin\n", victim.stderr.read()
            lines = [victim.stdout.readline()] if turn % 4 == 0 else []  # this one completes a save
            time.sleep(rng.uniform(0, 0.12))  # sleeps: the moment of the kill
            victim.send_signal(signal.SIGKILL)
            lines += victim.communicate(timeout=30)[0].split()
            assert victim.returncode == -signal.SIGKILL
        reached = max([reached, *map(int, lines)])
        if reached == 0 and set(steps_in(folder / "checkpoints")) <= {"step-1.tmp"}:
            continue
        loaded = load(folder / "checkpoints")
        step = loaded[0].step
        assert step in (reached, reached + 1)
        for rank, each in enumerate(loaded):
            assert_same(each.tree, {"x": np.full(200_000, step), "mine": [step, rank]})
        reached = step
    return reached


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_program_that_is_killed_leaves_the_last_complete_checkpoint_or_the_next(tmp_path):
    assert kill_again_and_again(tmp_path, 16, seed=2) >= 4
    assert len(steps_in(tmp_path / "checkpoints")) <= 4


KILLED_RANK = """
    import os, signal, sys, threading
    import numpy as np
    import bagua_comm
    from bagua_comm import Checkpoints, Own

    with bagua_comm.connect() as comm, Checkpoints(sys.argv[1], comm) as checkpoints:
        x = np.zeros(300_000)
        for step in range(1, 10**9):
            x += 1
            checkpoints.save(step, {"x": x, "mine": Own([step, comm.rank])})
            if step == 4 and comm.rank == 1:
                threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGKILL)).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.03])
def test_a_rank_that_is_killed_under_mpirun_leaves_a_complete_checkpoint(tmp_path, delay_s):
    script = (tmp_path / "killed.py", KILLED_RANK)
    result = run_python(2, tmp_path / "checkpoints", delay_s, script=script)
    assert result.returncode != 0
    loaded = load(tmp_path / "checkpoints")
    step = loaded[0].step
    assert step >= 3  # the save of step 4 began when that of step 3 was complete
    for rank, each in enumerate(loaded):
        assert_same(each.tree, {"x": np.full(300_000, float(step)), "mine": [step, rank]})


def test_the_memory_of_a_plan_and_its_views_are_saved_as_a_list_and_a_dict(tmp_path):
    plan = Plan.pack([TensorSpec("a", (3,), "float32"), TensorSpec("b", (2, 2), "float64")])
    flats = plan.allocate()
    plan.cut(flats)["b"][...] = [[1, 2], [3, 4]]
    save(tmp_path, {"flats": flats, "views": plan.cut(flats), "own": Own(flats)})
    expected = {"flats": list(flats), "views": dict(plan.cut(flats)), "own": list(flats)}
    for loaded in load(tmp_path):
        assert_same(loaded.tree, expected)
