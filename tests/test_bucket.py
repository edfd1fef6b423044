"""Plans: which tensors travel together; buckets: their memory."""

import copy
import json
import operator
import os
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_comm import ArrayError, Bucket, BucketSpec, Plan, TensorSpec, UnsupportedError
from bagua_comm.algorithms.parts import layout_of
from bagua_comm.arrays import dtype_named
from bagua_comm.bucket import DEFAULT_BUCKET_BYTES, make_buckets

examples = settings(deadline=None, derandomize=True, max_examples=25)

MIXED = [
    TensorSpec("a", (4,), "float32"),
    TensorSpec("b", (2, 3), "float16"),
    TensorSpec("c", (2, 4), "float32"),
    TensorSpec("d", (), "float16"),
    TensorSpec("e", (3,), "float32"),
]

specs = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(["float32", "float16", "bfloat16"])
    ),
    max_size=15,
).map(lambda pairs: [TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(pairs)])


def names(plan):
    return [[tensor.name for tensor in bucket.tensors] for bucket in plan.buckets]


def of_sizes(*sizes, dtype="float32"):
    return [TensorSpec(f"t{i}", (size,), dtype) for i, size in enumerate(sizes)]


# Packing


def test_a_bucket_is_closed_when_it_has_bucket_bytes_or_more():
    # In float32, 40 bytes are 10 elements.
    assert names(Plan.pack(of_sizes(4, 6, 1), bucket_bytes=40)) == [["t0", "t1"], ["t2"]]
    assert names(Plan.pack(of_sizes(4, 5, 1), bucket_bytes=40)) == [["t0", "t1", "t2"]]
    assert names(Plan.pack(of_sizes(4, 100, 1), bucket_bytes=40)) == [["t0", "t1"], ["t2"]]
    assert names(Plan.pack(of_sizes(1, 1, 1), bucket_bytes=1)) == [["t0"], ["t1"], ["t2"]]


def test_dtypes_are_kept_apart_and_buckets_ordered_by_their_last_tensor():
    plan = Plan.pack(MIXED, bucket_bytes=48)
    # a and c fill 48 bytes when c comes; b and d wait till the end, d before e.
    assert names(plan) == [["a", "c"], ["b", "d"], ["e"]]
    assert [bucket.dtype for bucket in plan.buckets] == ["float32", "float16", "float32"]


def test_a_bucket_that_stays_open_leaves_after_those_filled_before_its_last_tensor():
    specs = [TensorSpec("open", (1,), "float16"), *of_sizes(10, 10)]
    assert names(Plan.pack(specs, bucket_bytes=40)) == [["open"], ["t0"], ["t1"]]
    assert names(Plan.pack([*specs, TensorSpec("late", (1,), "float16")], bucket_bytes=40)) == [
        ["t0"],
        ["t1"],
        ["open", "late"],
    ]


def test_sizes_are_rounded_up_to_the_alignment():
    sizes = [Plan.pack(of_sizes(n), alignment=8).buckets[0].size for n in (0, 1, 7, 8, 9)]
    assert sizes == [0, 8, 8, 8, 16]


def test_numbers_of_bytes():
    spec = TensorSpec("w", (2, 3), "bfloat16")
    assert (spec.size, spec.nbytes) == (6, 12)
    assert (TensorSpec("s", (), "float32").size, TensorSpec("z", (0, 5), "float32").nbytes) == (1, 0)
    plan = Plan.pack(MIXED, bucket_bytes=48, alignment=8)
    assert [bucket.nbytes for bucket in plan.buckets] == [16 * 4, 8 * 2, 8 * 4]
    assert plan.nbytes == 112


def test_the_default_is_ten_mebibytes():
    assert DEFAULT_BUCKET_BYTES == 10 * 1024 * 1024
    million = 1024 * 1024
    assert names(Plan.pack(of_sizes(million, million, million // 2, 1))) == [["t0", "t1", "t2"], ["t3"]]


def test_no_tensors_make_no_buckets():
    assert Plan.pack([]).buckets == ()


@examples
@given(specs=specs, bucket_bytes=st.integers(1, 300), alignment=st.integers(1, 16))
def test_every_plan_keeps_the_rules(specs, bucket_bytes, alignment):
    plan = Plan.pack(specs, bucket_bytes=bucket_bytes, alignment=alignment)

    packed = [tensor for bucket in plan.buckets for tensor in bucket.tensors]
    assert sorted(specs, key=specs.index) == sorted(packed, key=specs.index)  # each exactly once
    for bucket in plan.buckets:
        order = [specs.index(tensor) for tensor in bucket.tensors]
        payload = [tensor.nbytes for tensor in bucket.tensors]
        assert sorted(order) == order
        assert {bucket.dtype} == {tensor.dtype for tensor in bucket.tensors}
        assert sum(payload[:-1]) < bucket_bytes  # it was open until its last tensor came
        assert 0 <= bucket.size - sum(tensor.size for tensor in bucket.tensors) < alignment
        assert bucket.size % alignment == 0
    last = [specs.index(bucket.tensors[-1]) for bucket in plan.buckets]
    assert sorted(last) == last
    for dtype in {spec.dtype for spec in specs}:
        *closed, _ = [bucket for bucket in plan.buckets if bucket.dtype == dtype]
        assert all(sum(tensor.nbytes for tensor in bucket.tensors) >= bucket_bytes for bucket in closed)


def test_names_must_differ():
    specs = [TensorSpec(name, (1,), "float32") for name in ("x", "b", "a", "b", "a", "b")]
    with pytest.raises(ArrayError, match=r"^Plan\.pack: names must differ, but several tensors are called a, b$"):
        Plan.pack(specs)


@pytest.mark.parametrize(("bucket_bytes", "alignment"), [(0, 1), (-5, 1), (1, 0)])
def test_numbers_must_be_positive(bucket_bytes, alignment):
    wrong = f"bucket_bytes is {bucket_bytes}" if bucket_bytes < 1 else f"alignment is {alignment}"
    message = f"Plan.pack: {wrong}, expected a positive number"
    with pytest.raises(ArrayError, match=message):
        Plan.pack(MIXED, bucket_bytes=bucket_bytes, alignment=alignment)


# Plans are values


@examples
@given(specs=specs, alignment=st.integers(1, 16))
def test_json_round_trip(specs, alignment):
    plan = Plan.pack(specs, bucket_bytes=100, alignment=alignment)
    again = Plan.from_json(plan.to_json())
    assert plan == again
    assert hash(plan) == hash(again)
    assert plan.digest() == again.digest()


def test_json_by_hand():
    plan = Plan.pack([TensorSpec("w", (2, 1), "float32")], alignment=4)
    assert plan.to_json() == (
        '{"buckets":[{"dtype":"float32",'
        '"tensors":[{"name":"w","shape":[2,1],"dtype":"float32"}],"size":4}],"alignment":4}'
    )


def test_a_plan_keeps_the_order_of_elements_in_memory_and_a_bucket_names_it_in_its_layout():
    plan = Plan.pack([TensorSpec("w", (2, 1), "float32", "by columns"), TensorSpec("b", (2,), "float32")])
    assert Plan.from_json(plan.to_json()) == plan
    plain = Plan.pack([TensorSpec("w", (2, 1), "float32"), TensorSpec("b", (2,), "float32")])
    assert plain.digest() != plan.digest()
    assert layout_of(plan.buckets[0])[1:] == ["w, by columns", "b"]
    with pytest.raises(ArrayError, match="a tensor's memory is 1, expected a string"):
        TensorSpec("w", (2, 1), "float32", 1)


def test_any_difference_changes_the_plan_and_its_digest():
    plans = [
        Plan.pack(MIXED, bucket_bytes=48),
        Plan.pack(MIXED, bucket_bytes=49),
        Plan.pack(MIXED, bucket_bytes=48, alignment=8),
        Plan.pack(MIXED[:-1], bucket_bytes=48),
        Plan.pack(MIXED[::-1], bucket_bytes=48),
        Plan.pack([*MIXED[:-1], TensorSpec("f", (3,), "float32")], bucket_bytes=48),
        Plan.pack([*MIXED[:-1], TensorSpec("e", (3, 1), "float32")], bucket_bytes=48),
        Plan.pack([*MIXED[:-1], TensorSpec("e", (3,), "bfloat16")], bucket_bytes=48),
    ]
    assert len(plans) == len(set(plans)) == len({plan.digest() for plan in plans})
    assert Plan.pack(list(MIXED), bucket_bytes=48) == plans[0]


def test_digest_is_equal_in_another_process():
    program = """if True:
        from bagua_comm import Plan, TensorSpec
        specs = [TensorSpec("a", (4,), "float32"), TensorSpec("\u03b2", (2, 3), "float16")]
        print(Plan.pack(specs, bucket_bytes=8, alignment=4).digest())
    """
    specs = [TensorSpec("a", (4,), "float32"), TensorSpec("\u03b2", (2, 3), "float16")]
    expected = Plan.pack(specs, bucket_bytes=8, alignment=4).digest()
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert found.stdout.strip() == expected


# Buckets


@examples
@given(specs=specs, alignment=st.integers(1, 16))
def test_views_cover_flat_without_overlap_and_padding_stays_zero(specs, alignment):
    plan = Plan.pack(specs, bucket_bytes=100, alignment=alignment)
    buckets = make_buckets(plan, plan.allocate())
    assert list(range(len(buckets))) == [bucket.index for bucket in buckets]
    for bucket in buckets:
        for number, (tensor, view) in enumerate(
            zip(bucket.spec.tensors, bucket.views.values(), strict=True), start=1
        ):
            assert (tensor.shape, dtype_named(tensor.dtype)) == (view.shape, view.dtype)
            assert np.shares_memory(view, bucket.flat) or tensor.size == 0
            view[...] = number
        # Each view still has its number, and the padding is unchanged.
        expected = np.repeat(range(1, len(bucket.views) + 1), [t.size for t in bucket.spec.tensors])
        padding = [0.0] * (bucket.spec.size - expected.size)
        assert [*expected.tolist(), *padding] == bucket.flat.astype(float).tolist()
        assert bucket.spec.nbytes == bucket.flat.nbytes == bucket.nbytes


def test_views_by_hand():
    plan = Plan.pack(MIXED, bucket_bytes=48, alignment=4)
    bucket = make_buckets(plan, plan.allocate())[0]
    bucket.flat[:] = np.arange(12)
    assert list(bucket.views) == ["a", "c"]
    assert bucket.views["a"].tolist() == [0, 1, 2, 3]
    assert bucket.views["c"].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert bucket.step == 0


@pytest.mark.parametrize(
    ("flat", "found"),
    [
        (np.zeros(7, np.float32), "float32(7,)"),
        (np.zeros((2, 4), np.float32), "float32(2, 4)"),
        (np.zeros(8, np.float64), "float64(8,)"),
        (np.zeros(8, np.int32), "int32(8,)"),
    ],
)
def test_storage_that_does_not_fit_is_refused(flat, found):
    spec = BucketSpec("float32", tuple(of_sizes(5)), 8)
    message = re.escape(f"bucket 3: its storage is {found}, expected float32(8,)")
    with pytest.raises(ArrayError, match=f"^{message}$"):
        Bucket(3, spec, flat)


def test_the_number_of_arrays_must_be_that_of_buckets():
    plan = Plan.pack(MIXED, bucket_bytes=48)
    with pytest.raises(ArrayError, match=r"^storage has 2 arrays, expected 3$"):
        make_buckets(plan, plan.allocate()[:2])


# Objects that are no plans


WHOLE = Plan.pack(
    [TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (), "float32"), TensorSpec("c", (0,), "int8")]
)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: [], "is not what Plan.to_json wrote"),
        (lambda d: {}, "is not what Plan.to_json wrote: KeyError"),
        (lambda d: {**d, "alignment": 0}, "alignment is 0, expected an integer of at least 1"),
        (lambda d: {**d, "alignment": 1.5}, "alignment is 1.5"),
        (lambda d: {**d, "buckets": d["buckets"] * 2}, "two tensors have one name"),
        (
            lambda d: {**d, "buckets": [{**d["buckets"][0], "size": 6}]},
            "the size of bucket 0 is 6, expected .* 7",
        ),
        (lambda d: {**d, "buckets": [{**d["buckets"][0], "dtype": "float16"}]}, "tensors of other dtypes"),
        (lambda d: {**d, "buckets": [{**d["buckets"][0], "tensors": []}]}, "bucket 0 has no tensors"),
    ],
)
def test_an_object_that_is_no_plan_is_refused(change, match):
    with pytest.raises(ArrayError, match=match):
        Plan.from_json(json.dumps(change(json.loads(WHOLE.to_json()))))


@pytest.mark.parametrize(
    "text", ["", "[", "[" * 100_000, "\ud800", b"\xff", None, 3, "1" * 5000, "NaN"], ids=range(9)
)
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(ArrayError, match=r"Plan\.from_json: the text is not what Plan\.to_json wrote"):
        Plan.from_json(text)


@pytest.mark.parametrize("shape", [(-1,), (1.5,), ("2",), 3, None, (2**62, 4), (10**5000,)], ids=range(7))
def test_a_shape_that_is_none_is_refused(shape):
    with pytest.raises(ArrayError, match="expected sizes of at least 0"):
        TensorSpec("a", shape, "float32")


def damaged(value, rng):
    junk = [None, [], {}, "", "a", -1, 0, 10**30, 1.5, float("nan"), True, [1, "x"], [[]]]
    if isinstance(value, (dict, list)) and value and rng.random() < 0.9:
        key = rng.choice(list(value)) if isinstance(value, dict) else int(rng.integers(len(value)))
        copied = value.copy()
        if rng.random() < 0.1:
            del copied[key]
        else:
            copied[key] = damaged(copied[key], rng)
        return copied
    return junk[rng.integers(len(junk))]


def test_damaged_plans_are_refused_or_can_be_used():
    rng = np.random.default_rng(2026)
    refused = 0
    for trial in range(1000):
        text = json.dumps(damaged(json.loads(WHOLE.to_json()), rng))
        if trial % 4 == 0:
            text = WHOLE.to_json()[: rng.integers(len(text))]
        if trial % 4 == 1:
            where = int(rng.integers(len(text)))
            text = text[:where] + chr(rng.integers(128)) + text[where + 1 :]
        try:
            plan = Plan.from_json(text)
        except (ArrayError, UnsupportedError):
            refused += 1
            continue
        assert Plan.from_json(plan.to_json()) == plan
        if plan.nbytes < 10**6:
            make_buckets(plan, plan.allocate())
    assert 500 < refused < 1000


def test_a_view_cannot_be_replaced_by_another_array():
    plan = Plan.pack([TensorSpec("w", (2,), "float32")])
    storage = plan.allocate()
    views = plan.cut(storage)
    views["w"] += 1  # in place, which Python ends by an assignment
    for replace in (lambda: views.__setitem__("w", np.ones(2)), lambda: views.update(w=np.ones(2))):
        with pytest.raises(ArrayError, match=r"'w' is a view of a bucket; write into it: views\['w'\]\[...\] ="):
            replace()
    with pytest.raises(ArrayError, match="'v' is a view"):
        views["v"] = np.ones(2)
    assert storage[0].tolist() == views["w"].tolist() == [1, 1]
    copied = pickle.loads(pickle.dumps(views))
    copied["w"] = copied["w"] + 1  # a copy is a plain dict
    assert type(copied) is dict


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("float32"), "f4", np.str_("float32")], ids=repr)
def test_a_dtype_of_a_tensor_may_be_given_as_numpy_allows(dtype):
    spec = TensorSpec("w", (5,), dtype)
    assert spec == TensorSpec("w", (5,), "float32")
    assert type(spec.dtype) is str


@pytest.mark.parametrize("dtype", [None, object, "f4,f4", ["float32"], "no such type", np.ones(1)], ids=repr)
def test_other_dtypes_of_a_tensor_are_refused(dtype):
    with pytest.raises(UnsupportedError, match="cannot be sent; expected a name such as 'float32'"):
        TensorSpec("w", (5,), dtype)


def test_an_array_of_a_plans_memory_is_not_replaced_by_another_one():
    flats = Plan.pack(MIXED, bucket_bytes=1).allocate()
    first, second, *_ = before = list(flats)
    assert isinstance(flats, list)
    assert type(flats[1:]) is list
    flats[0] -= 1  # in place, which Python ends by an assignment
    flats[:] = flats  # the same arrays
    flats[0:2] = [first, second]
    for index in (0, -1):
        with pytest.raises(ArrayError, match=rf"item {index} is .*flats\[{index}\]\[...\] = x or flats"):
            flats[index] = flats[index] - 1
    for part in (slice(None), slice(1, 3)):
        with pytest.raises(ArrayError, match="is a bucket's memory"):
            flats[part] = [flat - 1 for flat in flats[part]]
    with pytest.raises(ArrayError, match="is a bucket's memory"):
        flats[1:] = []
    with pytest.raises(IndexError):
        flats[len(flats)] = first
    assert all(map(operator.is_, flats, before))
    assert len(flats) == len(before)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda flats: pickle.loads(pickle.dumps(flats))])
def test_a_copy_of_a_plans_memory_is_a_plain_list(copied):
    flats = Plan.pack(MIXED, bucket_bytes=1).allocate()
    flats[0] += 3
    other = copied(flats)
    assert type(other) is list
    assert [x.tolist() for x in other] == [x.tolist() for x in flats]
    other[0] = other[0] + 1
