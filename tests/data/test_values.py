"""The bytes of samples in a store: they load with the same types, or are refused."""

import collections

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_comm import UnsupportedError
from bagua_comm.data.values import DamagedError, decode, encode

pytestmark = pytest.mark.needs("msgpack", "xxhash")
DTYPES = ["?", "i1", "<i4", ">i4", "u8", "<f2", "<f4", ">f8", "c8", "<U3", "S2", "M8[ns]", ml_dtypes.bfloat16]

# Of any characters Hypothesis makes a table first, for seconds.
text = st.text('aB0 \0\n"\\é\u2028\ud7ff\U0001f600')
numbers = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), text, st.binary())
arrays = st.builds(
    lambda dtype, shape: np.arange(int(np.prod(shape)), dtype=np.int64).astype(dtype).reshape(shape),
    st.sampled_from([dtype for dtype in DTYPES if dtype != "M8[ns]"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
of_dtypes = st.sampled_from(["f4", "f8", "i2", "?", "U2"])
scalars = st.builds(lambda dtype: np.ones(1, np.int64).astype(dtype)[0], of_dtypes)
keys = st.one_of(text, st.integers(), st.tuples(st.integers(), text))
trees = st.recursive(
    st.one_of(numbers, arrays, scalars),
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def alike(a, b):
    """Whether two trees have the same types, bits and order."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        assert all(type(x) is type(y) for x, y in zip(a, b, strict=True))
        return all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)
    return a == b


@given(trees)
@settings(max_examples=30, deadline=None)
def test_a_tree_comes_back_as_it_was(value):
    assert alike(value, decode(encode(value, b"k"), b"k"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_any_dtype_and_layout_come_back_writable(dtype):
    value = np.arange(24).astype(dtype).reshape(2, 3, 4).transpose(2, 0, 1)[:, ::-1]
    found = decode(encode(value, b"k"), b"k")
    assert alike(value, found)
    assert found.flags.writeable
    assert found.flags.c_contiguous
    assert found.flags.aligned
    assert not np.shares_memory(found, decode(encode(value, b"k"), b"k"))


Point = collections.namedtuple("Point", "x y")


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Custom(), r"the value is a .*Custom"),
        ([1, {"a": (2, {3})}], r"the value\[1\]\['a'\]\[1\] is a builtins.set"),
        ((np.array([None]),), r"the value\[0\] is an array of object"),
        (np.zeros(2, [("a", "i4")]), "the value is an array of"),
        (Point(1, 2), "the value is a .*Point"),
        (collections.OrderedDict(a=1), "the value is a collections.OrderedDict"),
        (np.ma.masked_array([1]), "MaskedArray"),
        ({Custom: 1}, "a key of the value is a builtins.type"),
    ],
)
def test_a_value_that_would_change_is_refused_with_its_path(value, message):
    with pytest.raises(UnsupportedError, match=message):
        encode(value, b"k")


@pytest.mark.needs("torch")
def test_tensors_come_back_bit_for_bit():
    import torch

    bits = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 1, 0, 0x3F800000], dtype=torch.int32)  # NaNs, -0.0
    names = ["float32", "float64", "float16", "bfloat16", "float8_e5m2", "complex64", "bool", "uint8", "int64"]
    value = {
        "image": bits.view(torch.float32).reshape(2, 3),
        "turned": torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1)[1:],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3, dtype=torch.float64),
        "all": [torch.arange(6).to(getattr(torch, name)) for name in names],
        "mixed": (torch.ones(3), np.ones(3, np.int16), "label", 7),
    }
    found = decode(encode(value, b"k"), b"k")

    def flat(x):
        return [x] if not isinstance(x, (list, tuple)) else [part for each in x for part in flat(each)]

    expected, back = flat(list(value.values())), flat(list(found.values()))
    assert [type(x) for x in back] == [type(x) for x in expected]
    for x, y in zip(expected, back, strict=True):
        if isinstance(x, torch.Tensor):
            assert (y.dtype, y.shape, y.is_contiguous()) == (x.dtype, x.shape, True)
            x, y = (t.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy() for t in (x, y))
        np.testing.assert_array_equal(x, y)
    found["image"][0, 0] = 5  # writable
    assert type(found["mixed"]) is tuple


@pytest.mark.needs("torch")
def test_tensors_that_are_not_plain_are_refused_with_what_can_be_stored():
    import torch

    values = {
        r"\[0\] is a torch.nn.parameter.Parameter.*as_subclass": torch.nn.Parameter(torch.ones(2)),
        r"requires a gradient.*x.detach\(\)": torch.ones(2, requires_grad=True),
        r"a tensor on meta.*x.cpu\(\)": torch.ones(2, device="meta"),
        r"sparse or quantized.*x.to_dense\(\)": torch.eye(2).to_sparse(),
    }
    for message, value in values.items():
        with pytest.raises(UnsupportedError, match=message):
            encode((value, 1), b"k")


def test_a_tree_that_is_too_deep_is_refused():
    for wrap in (lambda x: [x], lambda x: (x,)):
        value = None
        for _ in range(5000):
            value = wrap(value)
        with pytest.raises(UnsupportedError, match="cannot store"):
            encode(value, b"k")


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_changed_byte_is_noticed(data):
    whole = encode((np.arange(5), "label"), b"k")
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedError):
        decode(bytes(changed), b"k")


@pytest.mark.parametrize("length", [0, 5, 12, 13, 40])
def test_a_part_of_a_value_is_noticed(length):
    with pytest.raises(DamagedError):
        decode(encode(np.arange(100), b"k")[:length], b"k")


def test_the_value_of_another_key_is_noticed():
    with pytest.raises(DamagedError, match="checksum"):
        decode(encode(1, b"k"), b"l")


def explode():
    raise AssertionError("was unpickled")


class Bomb:
    def __reduce__(self):
        return explode, ()


def test_a_pickle_is_read_only_where_it_was_asked_for():
    data = encode(Bomb(), b"k", "pickle")
    with pytest.raises(DamagedError, match="where tree was expected"):
        decode(data, b"k")
    assert decode(encode({1, 2}, b"k", "pickle"), b"k", "pickle") == {1, 2}
    assert decode(encode((1, 2), b"k"), b"k", "pickle") == (1, 2)
    with pytest.raises(UnsupportedError, match="cannot be pickled"):
        encode(lambda: 0, b"k", "pickle")
