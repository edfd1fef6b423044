"""TopK of several tensors, each by itself and small ones whole, against what is sent of single tensors."""

import numpy as np
import pytest
from support.device_ranks import run_on_devices, up
from support.references import largest

from bagua_comm import ArrayError, CommMismatch, ErrorFeedback, Int4, SparseLoCo, TopK
from bagua_comm.arrays import dtype_named
from bagua_comm.averages.records import record_of
from bagua_comm.kernels import host
from bagua_comm.testing import run_ranks

TENSORS = (40, 300, 7, 1, 129)
PADDING = 5
AVERAGE = TopK(64, 16, whole_below=64)


def array_of(rank, dtype="float32"):
    x = np.random.default_rng(rank).standard_normal(sum(TENSORS) + PADDING)
    x[-PADDING:] = 0
    return x.astype(dtype_named(dtype))


def cut(x):
    return np.split(x, np.cumsum(TENSORS))[: len(TENSORS)]


def sent_of(x, average):
    """What arrives of `x`, by the codec and the choice of single tensors."""
    small = [part for part in cut(x) if part.size < average.whole_below]
    codec, whole = Int4(), np.concatenate([*small, x[:0]])[None]
    decoded = codec.decode(codec.encode(whole), np.empty_like(whole))[0] if whole.size else whole[0]
    found, first = [], 0
    for part in cut(x):
        if part.size < average.whole_below:
            found.append(decoded[first : first + part.size].astype("f4"))
            first += part.size
        else:
            found.append(largest(part.astype("f4"), average.chunk, average.keep, average.bits))
    return np.concatenate([*found, np.zeros(PADDING, "f4")])


def means(comm, average, place=np.copy, dtype="float32"):
    mean, x = ErrorFeedback(average).bind(comm, sizes=TENSORS), place(array_of(comm.rank, dtype))
    assert mean(x) is x
    return [each if isinstance(each, np.ndarray) else each.get() for each in (x, mean.residual)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("bits", "whole_below"), [(2, 64), (32, 64), (2, 1), (2, 1000), (16, 0)])
def test_each_tensor_is_sent_by_itself_and_small_ones_whole(bits, whole_below, dtype):
    average = TopK(64, 16, bits, whole_below)
    if bits == 16:  # without `whole_below` tensors do not matter
        expected = run_ranks(2, lambda comm: TopK(64, 16, 16).bind(comm)(array_of(comm.rank, dtype)))
        assert run_ranks(2, lambda comm: means(comm, average, dtype=dtype)[0].tobytes()) == [
            x.tobytes() for x in expected
        ]
        return
    xs = [array_of(rank, dtype) for rank in range(3)]
    sent = [sent_of(x, average) for x in xs]
    mean = (sum(sent[1:], sent[0]) / np.float32(3)).astype(xs[0].dtype)
    for rank, (result, residual) in enumerate(run_ranks(3, lambda comm: means(comm, average, dtype=dtype))):
        assert result.tobytes() == mean.tobytes()
        left = (xs[rank].astype("f4") - sent[rank]).astype(xs[0].dtype)
        np.testing.assert_array_equal(residual, left)


@pytest.mark.parametrize("bits", [2, 32])
def test_the_mean_over_the_ranks_that_send_an_element(bits):
    average = TopK(64, 16, bits, 64, "senders")
    sent = np.array([sent_of(array_of(rank), average) for rank in range(3)])
    number = np.maximum(np.count_nonzero(sent, axis=0), 1)
    assert set(cut(number)[1]) == {1, 2, 3}
    for i in (0, 2, 3):  # whole
        cut(number)[i][...] = 3
    expected = (sent[0] + sent[1] + sent[2]) / number.astype("f4")
    for result, residual in run_ranks(3, lambda comm: means(comm, average)):
        assert result.tobytes() == expected.tobytes()
        assert np.isfinite(residual).all()


def test_a_rank_that_has_only_zeros_sends_nothing():
    def body(comm):
        return TopK(8, 4, divide="senders").bind(comm)(np.full(8, 6.0 * comm.rank, np.float32)).tolist()

    assert run_ranks(3, body) == [[9.0] * 4 + [0.0] * 4] * 3


def test_a_record_is_a_chunk_of_four_bits_and_a_record_of_each_large_tensor():
    record, x = record_of(64, 16, 2, 64, TENSORS), array_of(0)
    wire = np.full(record.nbytes, 0xEE, np.uint8)

    def body(comm):
        record.encode(x, wire, comm.scratch)

    run_ranks(1, body)
    parts = cut(x)
    expected = Int4().encode(np.concatenate([parts[0], parts[2], parts[3]])[None])[0].tobytes()
    for part in (parts[1], parts[4]):
        large = np.empty(host.top_k_layout(part.size, 64, 16, 2).nbytes, np.uint8)
        host.top_k_encode(part, large, 64, 16, 2)
        expected += bytes(-len(expected) % 32) + large.tobytes()
    assert wire.tobytes() == expected


def test_a_nan_in_a_small_tensor_arrives_and_leaves_no_residual():
    def body(comm):
        mean, x = ErrorFeedback(AVERAGE).bind(comm, sizes=TENSORS), array_of(comm.rank)
        x[340] = np.nan
        return mean(x), mean.residual

    for x, residual in run_ranks(2, body):
        assert np.isnan(cut(x)[2]).any()
        assert not np.isnan(cut(x)[1]).any()
        assert np.isfinite(residual).all()


@pytest.mark.parametrize("device", ["lazy"], indirect=True)
@pytest.mark.parametrize("kind", ["nccl", "local"])
def test_devices_have_the_bytes_of_the_host(device, kind):
    expected = [[x.tobytes() for x in each] for each in run_ranks(2, lambda comm: means(comm, AVERAGE))]
    found = run_on_devices(device, 2, kind, lambda comm: means(comm, AVERAGE, up))
    assert [[x.tobytes() for x in each] for each in found] == expected


# Bad input -----------------------------------------------------------------------------------------------


def test_ranks_with_other_tensors_are_an_error_on_all_ranks():
    def body(comm):
        sizes = (40, 300) if comm.rank else (300, 40)
        with pytest.raises(CommMismatch, match=r"tensors=\(40, 300\)"):
            ErrorFeedback(AVERAGE).bind(comm, sizes=sizes)

    run_ranks(3, body)


def test_an_array_that_is_smaller_than_its_tensors():
    def body(comm):
        residual = np.zeros(100, np.float32)
        with pytest.raises(ArrayError, match="expected the 477 of its tensors"):
            AVERAGE.bind(comm, sizes=TENSORS)(np.ones(100, np.float32), residual)
        assert not residual.any()

    run_ranks(2, body)


@pytest.mark.parametrize("make", [TopK, SparseLoCo])
@pytest.mark.parametrize("bad", [-1, 1.0, True, None, "most"])
def test_settings_out_of_range(make, bad):
    for name in ("whole_below", "divide"):
        with pytest.raises(ArrayError, match=f"{make.__name__}: {name} is"):
            make(**{name: bad})
