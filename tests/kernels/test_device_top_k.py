"""top_k.cu against kernels.host, byte for byte, as test_device.py does."""

import json

import numpy as np
import pytest
from kernels.test_device import mutation_tests, normal, special_values, up
from support.golden import GOLDEN

from bagua_comm import TopK, kernels
from bagua_comm.arrays import dtype_named
from bagua_comm.execution.recording import recorded
from bagua_comm.kernels import host

pytestmark = pytest.mark.parametrize("device", ["lazy"], indirect=True)

# Each is compiled first.
each_dtype = pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(each, marks=pytest.mark.slow) for each in ("float16", "bfloat16"))]
)
CASES = json.loads((GOLDEN / "top_k.json").read_text())


@pytest.fixture
def run(device):
    """kernels/device, on the fake device."""
    return kernels.of(up(np.empty(0)))


def on_host(x, settings, op):
    """The records of rows, their sum or mean, and what is left of each row."""
    wires = np.full((len(x), TopK(*settings).wire_nbytes(x.shape[1])), 0xEE, np.uint8)
    mean, left = np.empty_like(x[0]), x.copy()
    for row, rest, wire in zip(x, left, wires, strict=True):
        host.top_k_encode(row, wire, *settings)
        host.top_k_subtract(rest, wire, *settings)
    host.top_k_sum(wires, mean, *settings, op)
    return [each.tobytes() for each in (wires, mean, left)]


def on_device(run, x, settings, op, shift=0):
    """The same on the device."""
    wires = up(np.full((len(x), TopK(*settings).wire_nbytes(x.shape[1])), 0xEE, np.uint8))
    mean, left = up(np.zeros_like(x[0]), shift), [up(row, shift) for row in x]
    for rest, wire in zip(left, wires, strict=True):
        run.top_k_encode(rest, wire, *settings)
        run.top_k_subtract(rest, wire, *settings)
    run.top_k_sum(wires, mean, *settings, op)
    return [wires.get().tobytes(), mean.get().tobytes(), b"".join(row.get().tobytes() for row in left)]


def both(run, x, settings, op="avg", shift=0):
    """The bytes of the host, and of the device."""
    return on_host(x, settings, op), on_device(run, x, settings, op, shift)


SIZES = [
    ((4096, 64, 2), 1),
    ((4096, 64, 2), 5000),  # the last chunk is short
    ((4096, 64, 16), 4096 + 30),  # and has fewer elements than are sent of others
    ((4096, 300, 32), 4097),  # more are sent than there are threads
    ((1000, 6, 2), 3100),
    ((64, 16, 2), 1000),
    ((50, 2, 2), 333),  # bytes of codes with values of two chunks
    ((6, 6, 16), 101),  # an odd number of indices
    ((2, 2, 2), 151),
]


@pytest.mark.covering(1)
@each_dtype
@pytest.mark.parametrize(("settings", "m"), SIZES, ids=str)
def test_top_k(device, run, settings, m, dtype):
    device.order = "backward" if dtype == "float16" else "forward"
    expected, actual = both(run, normal((3, m), dtype, seed=m), settings, ("sum", "avg", "senders")[m % 3])
    assert expected == actual


@pytest.mark.covering(1)
@each_dtype
@pytest.mark.parametrize("settings", [(512, 8, 2), (512, 8, 16), (512, 40, 32)], ids=str)
@pytest.mark.parametrize(("m", "shift"), [(1024, 0), (1030, 1), (1024, 3)])
def test_top_k_of_special_values_and_at_odd_addresses(device, run, settings, dtype, m, shift):
    expected, actual = both(run, special_values(m, dtype), settings, shift=shift)
    assert expected == actual


def ties(m, dtype):
    """Rows with few magnitudes, of which many elements are equal, and with many that are not finite."""
    random = np.random.default_rng(m)
    x = random.integers(-3, 4, (6, m)).astype(np.float32)
    x[1] = np.where(random.random(m) < 0.1, np.nan, x[1])
    x[2] = np.where(random.random(m) < 0.1, -np.inf, x[2])
    x[2] = np.where(random.random(m) < 0.01, -np.nan, x[2])
    x[3] = 0
    x[4] = -2.5
    x[5] = np.where(random.random(m) < 0.005, 1e-30, 0)
    return x.astype(dtype_named(dtype))


@pytest.mark.covering(1)
@each_dtype
@pytest.mark.parametrize("settings", [(1024, 64, 2), (1024, 400, 32), (64, 6, 16), (700, 2, 2)], ids=str)
def test_of_equal_magnitudes_the_device_sends_those_of_lower_indices(device, run, settings, dtype):
    expected, actual = both(run, ties(2100, dtype), settings, "senders" if settings[2] == 2 else "avg")
    assert expected == actual


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_any_settings(device, run, seed):
    random = np.random.default_rng(seed)
    for _ in range(3):
        chunk = int(random.choice([random.integers(2, 100), random.integers(2, 4097)]))
        keep = 2 * int(random.integers(1, chunk // 2 + 1)) if random.random() < 0.5 else 2
        settings = chunk, keep, int(random.choice([2, 16, 32]))
        m, rows = int(random.integers(1, 6000)), int(random.integers(1, 6))
        x = normal((rows, m), "float16" if seed % 2 else "float32", seed, scale=2.0 ** random.integers(-20, 9))
        x[:, random.random(m) < 0.3] = random.choice([0, 1, -1])
        expected, actual = both(
            run, x, settings, random.choice(["sum", "avg", "senders"]), int(random.integers(0, 4))
        )
        assert expected == actual, (settings, m, rows)


@each_dtype
def test_golden_bytes_of_top_k(device, run, dtype):
    found = [case for case in CASES if case["dtype"] == dtype]
    assert len(found) > 50
    for case in found:
        x = np.frombuffer(bytes.fromhex(case["input"]), dtype_named(dtype)).reshape(case["n"], case["m"])
        actual = on_device(run, x, (case["chunk"], case["keep"], case["bits"]), "avg")
        assert [case[part] for part in ("wire", "mean", "left")] == [each.hex() for each in actual], case["name"]


def test_few_ctas_do_the_work_of_many_with_top_k(device, run, monkeypatch):
    monkeypatch.setattr(run.launches, "_MOST_CTAS", 2)
    run.top_k.partition_of.cache_clear()
    for m, settings in (
        (600, (64, 4, 2)),
        (3000, (6, 6, 2)),
    ):  # in the second, a CTA has several blocks
        expected, actual = both(run, normal((2, m), "float32"), settings)
        assert expected == actual
    run.top_k.partition_of.cache_clear()


@pytest.mark.parametrize("m", [128, 130, 128 * 129, 128 * 128 + 1])
def test_sums_of_blocks_of_blocks(device, run, monkeypatch, m):
    """With CTAs of one warp, whose blocks have 128 values, sums of more than 128 blocks have two levels."""
    wide = run.launches.source("top_k.cu")
    narrow = wide.replace("book_warps = 8", "book_warps = 1")
    assert narrow != wide
    monkeypatch.setattr(run.launches, "source", lambda file: narrow)
    monkeypatch.setattr(run.top_k, "_BOOK_WARPS", 1)
    monkeypatch.setattr(run.top_k, "_BLOCK", 128)
    x = np.ldexp(normal((1, m), "float32", m), np.random.default_rng(m).integers(-60, 60, m))
    for device.order in ("forward", "backward"):
        expected, actual = both(run, x, (4096, 4096, 2))
        assert expected == actual


def test_empty_arrays_launch_nothing_with_top_k(device, run):
    x, wires = up(np.empty(0, np.float32)), up(np.ones((1, 16), np.uint8))
    run.top_k_encode(x, wires[0], 64, 4, 2)
    run.top_k_subtract(x, wires[0], 64, 4, 2)
    run.top_k_sum(wires, x, 64, 4, 2, "avg")
    assert not wires.get().any()
    assert device.launches == []


def test_launches_of_top_k_and_which_can_be_replayed(device, run):
    x, wires = up(normal(100, "float32")), up(np.empty((1, TopK(64, 4).wire_nbytes(100)), np.uint8))
    assert not recorded(lambda: run.top_k_encode(x, wires[0], 64, 4, 2)).is_complete  # memory between kernels
    assert recorded(lambda: run.top_k_subtract(x, wires[0], 64, 4, 2)).is_complete
    assert recorded(lambda: run.top_k_sum(wires, x, 64, 4, 2, "avg")).is_complete
    assert device.launches == ["choose", "average", "spread", "codes", "subtract", "sum"]


# Kernels that are broken on purpose


def check_ties(run):
    return both(run, ties(2100, "float32"), (1024, 64, 2))


def check_pairs(run):
    return both(run, normal((3, 333), "float32"), (50, 2, 2))


def check_groups(run):
    """A large number in each of 64 groups, or of 32, or all in one warp; or 63 large ones, and one less so."""
    x = np.random.default_rng(0).uniform(1, 1.2, (4, 4096)).astype(np.float32)
    x[0, ::64] += 0.5
    x[1, ::128] += 0.5
    x[2, :512] += 0.5
    x[3, ::64], x[3, 64] = 8, 4
    return both(run, x, (4096, 64, 2))


def check_blocks(run):
    return both(run, np.ldexp(normal((2, 5000), "float32"), np.arange(5000) % 60), (2, 2, 2))


MUTANTS = {
    "bounds too high": (">= chunk.kept) bound |=", "> 0) bound |=", check_groups),
    "bounds that fewer threads reach": (
        ">= chunk.kept) bound |=",
        ">= chunk.kept - 1) bound |=",
        check_groups,
    ),
    "numbers of another digit": ("shared.numbers[i * warp + lane] = 0;", "", check_groups),
    "digits too early": ("__syncwarp();\n        Digit", "Digit", check_groups),
    "positions of other warps": ("if (i == number) before += all;", "", check_groups),
    "ties of another group": ("larger += __popc(all_larger), equal +=", "larger +=", check_ties),
    "NaNs that are not sent": ("if (__all_sync(all_lanes, !broken)) continue;", "continue;", check_ties),
    "a byte of values beyond the last": ("if (i < valid) byte |=", "byte |=", check_pairs),
    "sums of warps forgotten": ("distance < book_warps;", "distance < book_warps / 2;", check_blocks),
    "sums before all CTAs have ended": ("== gridDim.x - 1;", "== 0;", check_blocks),
    "counts of one block": (">> 16 * c & 0xffff;", ">> 16 * c & 0xff;", check_blocks),
}


test_a_broken_kernel_is_noticed, test_a_whole_kernel_passes = mutation_tests(MUTANTS, "top_k.cu")
