"""Arrays that are distributed over ranks, `Own(slab, "concatenate")`: one array in a file, for any partition."""

import re

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_comm import ArrayError, CheckpointError, Checkpoints, CommMismatch, Own, elastic
from bagua_comm.checkpoint import slabs, tensorfile
from bagua_comm.testing import run_ranks

RNG = np.random.default_rng(0)


def part(whole, lengths, rank, axis=0):
    """The slab of a rank; a view."""
    begin = sum(lengths[:rank])
    return np.moveaxis(np.moveaxis(whole, axis, 0)[begin : begin + lengths[rank]], 0, axis)


def save(folder, tree, ranks):
    def body(comm):
        with Checkpoints(folder, comm) as checkpoints:
            checkpoints.save(1, tree(comm.rank), wait=True)

    run_ranks(ranks, body)


def load(folder, ranks, like=lambda rank: None):
    """The tree of each rank."""

    def body(comm):
        with Checkpoints(folder, comm) as checkpoints:
            return checkpoints.load(like=like(comm.rank)).tree

    return run_ranks(ranks, body)


@st.composite
def partitions(draw, total):
    """Lengths of the slabs of one to four ranks, of which some may be empty."""
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=3)))
    return [end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True)]


@st.composite
def distributed(draw):
    """An array, an axis, partitions for saving and for loading, and a number of ranks that load evenly."""
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    dtype = draw(st.sampled_from(["bool", "int8", "uint64", ml_dtypes.bfloat16, "float32", "complex128"]))
    whole = RNG.integers(0, 100, shape).astype(dtype)
    total = shape[axis]
    return whole, axis, draw(partitions(total)), draw(partitions(total)), draw(st.integers(1, 4))


@settings(max_examples=12, deadline=None)
@given(distributed())
def test_every_partition_loads_as_every_other_to_the_bit(tmp_path_factory, case):
    whole, axis, saved, loaded, ranks = case
    folder = tmp_path_factory.mktemp("run")
    save(folder, lambda r: {"u": Own(part(whole, saved, r, axis), "concatenate", axis), "t": 1.5}, len(saved))
    file = (folder / "step-1" / slabs.FILE).read_bytes()
    if whole.dtype != ml_dtypes.bfloat16:  # for which NumPy has no dtype
        ((name, found),) = safetensors.numpy.load(file).items()
        pairs = whole.dtype.kind == "c"
        assert (name, found.shape) == ("tree['u']", (*whole.shape, 2) if pairs else whole.shape)
        assert found.dtype == (whole.real.dtype if pairs else whole.dtype)
        assert found.tobytes() == whole.tobytes()
    assert len(file) == 8 + int.from_bytes(file[:8], "little") + whole.nbytes

    def like(rank):
        return {"u": Own(part(np.zeros_like(whole), loaded, rank, axis), "concatenate", axis)}

    even = [each.shape[axis] for each in np.array_split(whole, ranks, axis)]
    for trees, lengths in ((load(folder, len(loaded), like), loaded), (load(folder, ranks), even)):
        for rank, tree in enumerate(trees):
            expected = part(whole, lengths, rank, axis)
            assert tree["t"] == 1.5
            assert (tree["u"].shape, tree["u"].dtype) == (expected.shape, expected.dtype)
            assert tree["u"].tobytes() == expected.tobytes()


def test_other_values_and_rules_are_saved_beside_slabs_of_several_arrays(tmp_path):
    u, v = np.arange(12.0).reshape(6, 2), np.arange(5, dtype=np.int16)

    def tree(rank):
        return {
            "fields": Own({"u": part(u, [1, 5], rank), "v": [part(v, [5, 0], rank)]}, "concatenate"),
            "residual": Own(np.ones(2) * rank, "sum"),
            "first": Own(np.full(2, rank), "first"),
            "w": np.zeros(3),
        }

    save(tmp_path, tree, 2)
    found = load(tmp_path, 3)
    assert np.concatenate([each["fields"]["u"] for each in found]).tobytes() == u.tobytes()
    assert np.concatenate([each["fields"]["v"][0] for each in found]).tobytes() == v.tobytes()
    assert sum(each["residual"] for each in found).tolist() == [1, 1]
    assert [each["first"].tolist() for each in found] == [[0, 0]] * 3


@pytest.mark.parametrize(("axis", "lengths"), [(0, [2, 1]), (1, [11, 39])])
def test_slabs_larger_than_a_piece_are_written_and_read_in_pieces(tmp_path, monkeypatch, axis, lengths):
    monkeypatch.setattr(tensorfile, "CHUNK_BYTES", 64)
    whole = RNG.standard_normal((3, 50, 2))
    save(tmp_path, lambda rank: Own(part(whole, lengths, rank, axis), "concatenate", axis), 2)
    assert np.concatenate(load(tmp_path, 3), axis).tobytes() == whole.tobytes()


def test_slabs_on_a_device_are_copied_to_the_host(tmp_path, device):
    import cupy

    whole = np.arange(30, dtype=np.float32).reshape(3, 10)

    def slab(rank, lengths):
        return Own(cupy.asarray(np.ascontiguousarray(part(whole, lengths, rank, 1))), "concatenate", axis=1)

    save(tmp_path, lambda rank: slab(rank, [3, 7]), 2)
    found = load(tmp_path, 2, lambda rank: slab(rank, [9, 1]))
    assert [each.shape for each in found] == [(3, 9), (3, 1)]
    assert np.concatenate(found, 1).tobytes() == whole.tobytes()


# Errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "theirs"),
    [
        (Own(np.zeros((2, 4)), "concatenate"), "a slab float64[*, 4]"),
        (Own(np.zeros((2, 3), np.float32), "concatenate"), "a slab float32[*, 3]"),
        (Own(np.zeros((2, 3)), "concatenate", axis=1), "a slab float64[2, *]"),
        (Own(np.zeros((2, 3, 1)), "concatenate"), "a slab float64[*, 3, 1]"),
    ],
    ids=["shape", "dtype", "axis", "dimensions"],
)
def test_slabs_that_make_no_array_are_refused_on_all_ranks_before_a_byte_is_written(tmp_path, other, theirs):
    def body(comm):
        slab = other if comm.rank == 1 else Own(np.zeros((5, 3)), "concatenate")
        with Checkpoints(tmp_path, comm) as checkpoints:
            with pytest.raises(CommMismatch, match=r"give slabs of one dtype, .* same lengths .* grid") as caught:
                checkpoints.save(1, {"u": slab})
            assert f"tree['u'] is a slab float64[*, 3] on rank 0 and {theirs} on rank 1" in str(caught.value)

    run_ranks(3, body)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Own(np.zeros(3), "concatenate", axis=1), r"tree\['u'\] has the shape \(3,\), and no axis 1"),
        (Own(np.float64(1), "concatenate"), r"has the shape \(\), and no axis 0"),
        (Own([np.zeros(3), 1.5], "concatenate"), r"tree\['u'\]\[1\] is 1.5: \"concatenate\" expects"),
        (Own([Own(np.zeros(3), "concatenate")], "concatenate"), "is an Own inside the Own"),
    ],
    ids=["axis", "scalar", "plain", "twice"],
)
def test_values_that_are_no_slabs_are_refused_on_all_ranks(tmp_path, value, message):
    def body(comm):
        with (
            Checkpoints(tmp_path, comm) as checkpoints,
            pytest.raises(ArrayError, match=f"save: rank 1: .*{message}"),
        ):
            checkpoints.save(1, {"u": value if comm.rank == 1 else Own(np.zeros(3), "concatenate")})

    run_ranks(2, body)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("rule", "axis"), [("mean", 1), (None, 1), ("concatenate", 1.0), ("concatenate", True)])
def test_an_axis_that_is_no_integer_or_of_another_rule_is_refused(rule, axis):
    with pytest.raises(ArrayError, match=f"axis is {axis}, expected an integer"):
        Own(np.zeros(3), rule, axis)


def like_of(*lengths, dtype=float, name="u"):
    """A `like` with slabs of these lengths by rank; None for no slab."""
    slab = [None if n is None else {name: Own(np.zeros((n, 2), dtype), "concatenate")} for n in lengths]
    return slab.__getitem__


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (like_of(3, 8), "with 10 along axis 0 in all, and `like` has 3 + 8 = 11 along axis 0"),
        (
            like_of(10, None),
            "is a slab float64[*, 2] from each rank, with 10 along axis 0 in all, and `like` has no slab on",
        ),
        (like_of(5, 5, dtype="f4"), "and `like` has a slab float32[*, 2] on rank 0"),
        (
            like_of(None, 3, name="v"),
            "`like` has a slab at tree['v'], and the checkpoint has slabs at: tree['u']",
        ),
    ],
    ids=["sum", "missing", "dtype", "name"],
)
def test_slabs_of_like_that_do_not_make_the_saved_array_are_refused_on_all_ranks(tmp_path, like, message):
    save(tmp_path, lambda rank: {"u": Own(np.zeros((5, 2)), "concatenate")}, 2)

    def body(comm):
        with (
            Checkpoints(tmp_path, comm) as checkpoints,
            pytest.raises(CheckpointError, match=f"step 1 .*{re.escape(message)}"),
        ):
            checkpoints.load(like=like(comm.rank))

    run_ranks(2, body)


def test_a_wrong_like_on_one_rank_is_an_error_on_all(tmp_path):
    save(tmp_path, lambda rank: 0, 2)

    def body(comm):
        wrong = Own(np.zeros(3), "concatenate", 3) if comm.rank == 1 else None
        with (
            Checkpoints(tmp_path, comm) as checkpoints,
            pytest.raises(ArrayError, match=r"load: rank 1: .*no axis 3"),
        ):
            checkpoints.load(like=wrong)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "rank 1's slab of tree in .* is damaged"),
        (lambda data: data[:-1], "has .* bytes, expected"),
        (lambda data: None, "cannot be opened"),
    ],
    ids=["flipped", "cut", "removed"],
)
def test_damage_of_a_slab_is_an_error_on_all_ranks(tmp_path, damage, message):
    save(tmp_path, lambda rank: Own(np.ones((4, 2)), "concatenate"), 2)
    file = tmp_path / "step-1" / slabs.FILE
    data = damage(file.read_bytes())
    file.unlink()
    if data is not None:
        file.write_bytes(data)

    def body(comm):
        with (
            Checkpoints(tmp_path, comm) as checkpoints,
            pytest.raises(CheckpointError, match=f"step 1 .*{message}"),
        ):
            checkpoints.load()

    run_ranks(3, body)


@pytest.mark.parametrize("wrap", [lambda own: own, lambda own: [own]], ids=["part", "inside"])
def test_the_elastic_state_refuses_slabs_by_name(wrap):
    with pytest.raises(
        ArrayError, match='State: u cannot be kept: a rank that dies takes its slab of "concatenate"'
    ):
        elastic.State(u=wrap(Own(np.zeros(3), "concatenate")))


def test_only_a_file_of_several_ranks_may_exist_before_it_is_written(tmp_path):
    entries = [tensorfile.whole("x", np.zeros(2))]
    for _ in range(2):
        tensorfile.write(tmp_path / "shared", entries, lambda: None, is_shared=True)
    tensorfile.write(tmp_path / "own", entries, lambda: None)
    with pytest.raises(FileExistsError):
        tensorfile.write(tmp_path / "own", entries, lambda: None)
