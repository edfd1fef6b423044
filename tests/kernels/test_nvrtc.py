"""Every kernel compiles for every architecture; this needs no GPU and no driver."""

import functools
import inspect
import json
import re
from importlib import import_module

import pytest

from benchmarks.bench import RESULTS
from benchmarks.gpu import instructions

pytestmark = pytest.mark.needs("cupy")
ARCHITECTURES = ("75", "80", "89", "90", "100", "120")  # code for others of a generation is nearly the same
REGISTERS = 65536  # of a multiprocessor
CODED = ("float32", "float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
MODULES = {
    "minmax.cu": [(dtype,) for dtype in CODED],
    "int4.cu": [(dtype,) for dtype in CODED],
    "top_k.cu": [(dtype,) for dtype in CODED],
    "fixed.cu": [(dtype,) for dtype in (*CODED, "float64")],
    "cast.cu": [(dtype, f"WIRE={sent}") for dtype in CODED for sent in ("float16", "bfloat16")],
    "elementwise.cu": [(dtype,) for dtype in (*CODED, "float64")],
    "reduce.cu": [(dtype,) for dtype in (*CODED, "float64")] + [(dtype, "INTEGER") for dtype in INTEGERS],
}


@pytest.fixture(scope="module")
def nvrtc():
    return import_module("cupy_backends.cuda.libs.nvrtc")


compiled = functools.cache(instructions.compiled)
QUICK = {"fixed.cu", "cast.cu", "elementwise.cu", "reduce.cu"}
"""The codecs' files take the compiler ten seconds; what stands in for a GPU compiles them in the default run."""

FEWER = {"minmax.cu": ("75", "120"), "int4.cu": ("75",), "top_k.cu": ("75", "90", "100")}
"""The architectures of these files besides those whose instructions are counted."""


def joined(value):
    """A name for options."""
    return value if isinstance(value, str) else "-".join(value)


@pytest.mark.parametrize(
    ("file", "options", "architecture"),
    [
        pytest.param(file, each[0], arch, marks=() if arch == "90" and file in QUICK else pytest.mark.slow)
        for file, each in MODULES.items()
        for arch in FEWER.get(file, ARCHITECTURES)
    ],
    ids=joined,
)
def test_every_file_compiles_for_every_architecture_without_spilling_registers(file, options, architecture):
    check(*compiled(file, architecture, *options), architecture)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "options"), [(file, each) for file, options in MODULES.items() for each in options[1:]], ids=joined
)
def test_every_file_compiles_for_every_further_dtype(file, options):
    check(*compiled(file, "90", *options), options)


def check(cubin, log, what):
    """Mistakes that would keep a kernel from starting on a GPU, or make it slow."""
    frames = [line for line in log.splitlines() if "bytes stack frame" in line]
    most = max(int(count) for count in re.findall(r"Used (\d+) registers", log))
    assert cubin.startswith(b"\x7fELF"), what
    assert frames, what
    assert [line for line in frames if " 0 bytes stack" not in line] == [], what
    assert most * import_module("bagua_comm.kernels.device").LARGEST_CTA <= REGISTERS, what


TABLE = json.loads((RESULTS / "kernel_instructions.json").read_text())
SLACK = 1.05
"""Another version of the compiler may differ by as much."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "architecture"), [*(("minmax.cu", each) for each in instructions.ARCHITECTURES), ("int4.cu", "90")]
)
def test_the_codecs_kernels_issue_no_more_instructions_than_they_did(file, architecture):
    cubin, log = compiled(file, architecture, "float32")
    check(cubin, log, architecture)
    counts, known = instructions.counted(file, cubin, "float32"), TABLE[f"sm_{architecture}"]
    wanted = {step for step in known if "float32" in step and ("int4" in step) == (file == "int4.cu")}
    assert counts.keys() == wanted
    assert {step: n for step, n in counts.items() if n > SLACK * known[step]} == {}


def test_denormal_numbers_are_kept_and_no_product_is_fused_with_a_sum(nvrtc):
    device = import_module("bagua_comm.kernels.device")
    program = nvrtc.createProgram(device.source("elementwise.cu"), "elementwise.cu", (), ())
    nvrtc.compileProgram(program, [*device.compile_options("float32"), "-arch=compute_90"])
    ptx = nvrtc.getPTX(program).decode()
    nvrtc.destroyProgram(program)
    assert "mul.rn.f32" in ptx
    assert ".ftz" not in ptx
    assert "fma" not in ptx.partition(".entry sgd_step")[2].partition(".entry")[0]


def test_cupy_compiles_with_the_options_that_it_is_given():
    compile_using_nvrtc = import_module("cupy.cuda.compiler").compile_using_nvrtc
    assert {"source", "options", "filename"} <= set(inspect.signature(compile_using_nvrtc).parameters)
    assert "ftz" not in inspect.getsource(compile_using_nvrtc)


def test_a_mistake_is_an_error(nvrtc, monkeypatch):
    device = import_module("bagua_comm.kernels.device")
    broken = device.source("cast.cu").replace("int64 summands", "summands")
    monkeypatch.setattr(device, "source", lambda file: broken)
    with pytest.raises(nvrtc.NVRTCError):
        instructions.compiled("cast.cu", "90", "float32", "WIRE=float16")
