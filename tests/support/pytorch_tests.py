"""PyTorch's own tests of DistributedDataParallel, run on ours, on a CPU.

    python tests/support/pytorch_tests.py                    # on bagua_torch.DistributedDataParallel
    python tests/support/pytorch_tests.py --mode backend     # PyTorch's tests of a backend, on "bagua"
    python tests/support/pytorch_tests.py -v test_ddp_inference    # chosen tests, with their errors

It fails if a test fails that is not in `DIFFERS`, where the reason stands, and if a test in `DIFFERS` passes.

The tests are those in `torch.testing._internal.distributed.distributed_test` that reach DistributedDataParallel.
Most ask for GPUs, although they test behaviour that is the same on a CPU. So the conditions under which PyTorch
skips a test are ignored here, and tensors meant for a GPU stay on the CPU (`OnCpu`). Each test runs on ranks of
its own, forked from a process that has imported everything; a rank that has not ended after `LIMIT_S` is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
import unittest
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce as differentiable_allreduce
from torch.overrides import TorchFunctionMode

import bagua_comm
import bagua_torch

RANKS = 2
LIMIT_S = 60.0
GRACE_S = 1.0
"""How long the other ranks have to report their errors once one rank has failed."""

PyTorchs = nn.parallel.DistributedDataParallel


# ---------------------------------------------------------------------------------------------------
# Classes in place of PyTorch's
# ---------------------------------------------------------------------------------------------------


class Plain(PyTorchs):
    """PyTorch's class, but with its module on the CPU, not on the device that the test names."""

    def __init__(self, module, device_ids=None, output_device=None, **settings):
        super().__init__(module, **settings)


class Ours(bagua_torch.DistributedDataParallel):
    """Our class, also on the CPU, with private methods of PyTorch's that tests call on their way."""

    parameters_to_ignore: frozenset[str] = frozenset()
    broadcast_bucket_size = 2**28

    def __init__(self, module, device_ids=None, output_device=None, **settings):
        super().__init__(module, **settings)
        self._join_config = None

    @contextlib.contextmanager
    def join(self, *, enable=True, **settings):
        """Our `join`, with PyTorch's error message if a rank ends early."""
        self._join_config, ended = argparse.Namespace(enable=enable), False
        try:
            with super().join(enable=enable, **settings):
                yield
                ended = True
        except bagua_comm.CommError as error:
            if "no more batches, so all ranks stop" not in str(error):
                raise
            first = f"Rank {self.comm.rank} exhausted all inputs"
            raise RuntimeError(first if ended else "Detected at least one rank that exhausted inputs.") from error

    @property
    def forward_sync_buffers(self):
        return self.broadcast_buffers

    @property
    def _authoritative_rank(self):
        """The rank whose weights all ranks have after `join`: in the tests, the last rank has the most data."""
        return RANKS - 1

    def _get_ddp_logging_data(self):
        return {"join_uneven_inputs": True, "has_rebuilt_buckets": self.static_graph}

    def _set_ddp_sink_clone(self, clone):
        assert not clone

    def _set_static_graph(self):
        self.static_graph = True

    def _remove_autograd_hooks(self):
        self.close()


CLASSES = {"bagua": Ours, "backend": Plain}


# ---------------------------------------------------------------------------------------------------
# GPUs that are not there
# ---------------------------------------------------------------------------------------------------


class OnCpu(TorchFunctionMode):
    """Tensors made on a GPU, or moved there, stay on the CPU."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = dict(keywords or {})
        if function is torch.Tensor.cuda:
            return arguments[0]
        if function is torch.device and _is_gpu(arguments[0]):
            return torch.device("cpu")
        if _is_gpu(keywords.get("device")):
            keywords["device"] = "cpu"
        if function is torch.Tensor.to and len(arguments) > 1 and _is_gpu(arguments[1]):
            arguments = (arguments[0], "cpu", *arguments[2:])
        return function(*arguments, **keywords)


def _is_gpu(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return str(device).startswith("cuda") or (isinstance(device, int) and not isinstance(device, bool))


def _module_to(module, *arguments, **keywords):
    if arguments and _is_gpu(arguments[0]):
        arguments = ("cpu", *arguments[1:])
    return MODULE_TO(module, *arguments, **keywords)


def _init_device_mesh(device_type, *arguments, **keywords):
    return INIT_DEVICE_MESH("cpu", *arguments, **keywords)


def _sync_batch_norm(self, x):
    """SyncBatchNorm as it works on a GPU."""
    batch = self.training or self.running_mean is None
    if not batch or not self.training:
        return nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, batch, 0.0, self.eps
        )
    wide, others = x.float(), [0, *range(2, x.dim())]
    count = torch.full((1,), x.numel() / x.size(1))
    count, total = differentiable_allreduce(torch.cat([count, wide.sum(others)])).split([1, x.size(1)])
    mean = total / count
    shape = [1, -1] + [1] * (x.dim() - 2)
    centered = wide - mean.view(shape)
    variance = differentiable_allreduce((centered**2).sum(others)) / count
    if self.track_running_stats:
        self.num_batches_tracked.add_(1)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            unbiased = variance * count / (count - 1)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
    normal = centered * (variance.view(shape) + self.eps).rsqrt()
    if self.affine:
        normal = normal * self.weight.view(shape) + self.bias.view(shape)
    return torch.empty_like(x).copy_(normal)


def _compile(model):
    """torch.compile, without minutes of a C++ compiler."""
    return COMPILE(model, backend="eager")


COMPILE = torch.compile
MODULE_TO = nn.Module.to
INIT_DEVICE_MESH = dist.device_mesh.init_device_mesh


@contextlib.contextmanager
def gpus_on_the_cpu():
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in [
            (nn.Module, "cuda", lambda module, device=None: module),
            (nn.Module, "to", _module_to),
            (torch.cuda, "set_device", lambda device: None),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "synchronize", lambda device=None: None),
            (dist.device_mesh, "init_device_mesh", _init_device_mesh),
            (nn.SyncBatchNorm, "forward", _sync_batch_norm),
            (PyTorchs, "_passing_sync_batchnorm_handle", lambda ddp, module: None),
            (torch, "compile", _compile),
        ]:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(OnCpu())
        yield


# ---------------------------------------------------------------------------------------------------
# PyTorch's tests
# ---------------------------------------------------------------------------------------------------


def load() -> tuple[ModuleType, dict[str, Any]]:
    """PyTorch's module of tests, and its tests."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
        CUDA_VISIBLE_DEVICES="",
    )
    for name in ("cupy", "numba"):  # else each rank would import it for itself
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from torch.testing._internal import common_distributed, common_utils

    with contextlib.ExitStack() as stack:
        always = mock.Mock(side_effect=lambda *_, **__: lambda test: test)
        for owner, names in {
            common_distributed: ["skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"],
            common_utils: ["skip_but_pass_in_sandcastle", "skip_but_pass_in_sandcastle_if"],
            unittest: ["skip", "skipIf"],
        }.items():
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, always))
        for name in ["skip_if_no_gpu", "skip_if_odd_worldsize", "skip_if_rocm_multiprocess"]:
            stack.enter_context(mock.patch.object(common_distributed, name, lambda test: test))
        stack.enter_context(
            mock.patch.object(
                common_distributed, "init_multigpu_helper", lambda size, _: {rank: [rank] for rank in range(size)}
            )
        )
        from torch.testing._internal.distributed import distributed_test as module
    tests = vars(module.DistributedTest._DistTestBase)
    return module, {name: test for name, test in tests.items() if name.startswith("test_")}


def reaching_ddp(tests: dict[str, Any]) -> dict[str, Any]:
    """The tests that reach DistributedDataParallel."""
    return {name: test for name, test in tests.items() if _reaches(tests, name)}


def _reaches(functions, name) -> bool:
    """Whether a method names DistributedDataParallel, or names a method that does."""
    seen, todo = set(), [name]
    while todo:
        name = todo.pop()
        if name in seen or not inspect.isfunction(functions.get(name)):
            continue
        seen.add(name)
        names = _names(inspect.unwrap(functions[name]).__code__)
        if "DistributedDataParallel" in names:
            return True
        todo += names
    return False


def _names(code: CodeType) -> set[str]:
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)


# ---------------------------------------------------------------------------------------------------
# Running them
# ---------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One test, running or ended."""

    name: str
    mode: str
    folder: Path
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    ranks: list[Any] = field(default_factory=list)
    pipes: dict[Connection, int] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    """The error of each rank; empty for a rank without one."""
    deadline: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.errors

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.began

    @property
    def message(self) -> str:
        """The last error that each rank printed."""
        return "\n".join(f"rank {rank}: {_last_error(text)}" for rank, text in sorted(self.errors.items()))


def _last_error(text: str) -> str:
    errors = re.findall(
        r"^(?:[\w.]*(?:Error|Mismatch|Failed|Timeout|Aborted|Warning|Skip\w*)\b.*|killed.*|passed)",
        text,
        re.MULTILINE,
    )
    return errors[-1] if errors else text.strip()[-200:]


def start(module: ModuleType, name: str, mode: str) -> Run:
    run = Run(name, mode, Path(tempfile.mkdtemp(prefix="pytorch-tests-")))
    (run.folder / "barrier").mkdir()
    run.deadline = run.began + LIMIT_S
    fork = multiprocessing.get_context("fork")
    for rank in range(RANKS):
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=_run_rank, args=(module, name, mode, rank, run.folder, theirs), daemon=True)
        process.start()
        theirs.close()
        run.ranks.append(process)
        run.pipes[ours] = rank
    return run


def _run_rank(module: ModuleType, name: str, mode: str, rank: int, folder: Path, pipe: Connection) -> None:
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        os.chdir(folder)
        os.environ.update(TEMP_DIR=str(folder))
        torch.set_num_threads(1)
        dist.init_process_group(
            "bagua" if mode == "backend" else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=LIMIT_S / 2),
        )
        _run_test(module, name, mode, rank)
        pipe.send("")
    except BaseException:
        pipe.send(traceback.format_exc())
    finally:
        pipe.close()
        sys.stdout.flush()
        os._exit(0)


def _run_test(module: ModuleType, name: str, mode: str, rank: int) -> None:
    from torch.testing._internal.common_utils import set_rng_seed

    replacement = CLASSES[mode]
    for owner in (nn.parallel, nn.parallel.distributed, module):
        owner.DistributedDataParallel = replacement

    class Case(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def _run_uneven_inputs_test(self, test_case, *arguments, **keywords):
            """Run on a model, given the batches of each rank; fewer and smaller ones than for a GPU."""
            batches, *_ = arguments
            if max(batches.values()) > 8:
                return
            if test_case.name == "large_conv_model":
                test_case = test_case._replace(inp=test_case.inp[..., :16, :16])
            if test_case.name.startswith("small_model"):
                test_case = test_case._replace(model=nn.Linear(100, 100, bias=False), inp=test_case.inp[:, :100])
            super()._run_uneven_inputs_test(test_case, *arguments, **keywords)

    case = Case(name)
    case.rank, case.file_name = rank, f"{os.environ['TEMP_DIR']}/store"
    if mode == "bagua":
        bagua_torch.connect(timeout_s=LIMIT_S / 2)
    case._barrier()
    set_rng_seed()
    with gpus_on_the_cpu():
        getattr(case, name)()
    case._barrier()
    if mode == "bagua":
        bagua_comm.default().close()


def finish(run: Run) -> None:
    """End a run once all its ranks have reported, or their time is over."""
    for pipe, rank in run.pipes.items():
        run.errors.setdefault(rank, "killed: did not end in time, or waited for a rank that had failed")
        pipe.close()
    run.pipes.clear()
    for rank, process in enumerate(run.ranks):
        process.join(10 if rank not in run.errors else 0)
        process.kill()
        process.join(10)
        if process.exitcode != 0:
            run.errors.setdefault(rank, f"killed: ended with exit code {process.exitcode} after it had passed")
    if run.errors:
        for rank in range(RANKS):
            with contextlib.suppress(OSError):
                run.errors[rank] = (run.folder / f"output-{rank}").read_text(errors="replace") + run.errors.get(
                    rank, "passed"
                )
    shutil.rmtree(run.folder, ignore_errors=True)
    run.ended = time.monotonic()


def collect(run: Run, ready: list[Connection]) -> None:
    for pipe in [each for each in run.pipes if each in ready]:
        rank = run.pipes.pop(pipe)
        try:
            error = pipe.recv()
        except EOFError:
            error = "the process died"
        pipe.close()
        if error:
            run.errors[rank] = error
            run.deadline = min(run.deadline, time.monotonic() + GRACE_S)


def run_all(module: ModuleType, tests: Iterable[tuple[str, str]], at_once: int) -> Iterator[Run]:
    """Run tests, given with their mode, and yield each `Run` when it is over."""
    todo, running = list(tests), list[Run]()
    while todo or running:
        while todo and len(running) < at_once:
            running.append(start(module, *todo.pop(0)))
        pipes = [pipe for run in running for pipe in run.pipes]
        ready = wait(pipes, timeout=max(0.0, min(run.deadline for run in running) - time.monotonic()))
        for run in list(running):
            collect(run, ready)
            if not run.pipes or time.monotonic() >= run.deadline:
                finish(run)
                running.remove(run)
                yield run


# ---------------------------------------------------------------------------------------------------
# What is expected: for each test that fails, a part of its message, and why it fails
# ---------------------------------------------------------------------------------------------------

Expected = dict[str, tuple[str, str]]


def _all(names: str, message: str, reason: str) -> Expected:
    """The same for several tests."""
    return dict.fromkeys(_tests(names), (message, reason))


def _tests(names: str) -> list[str]:
    return [f"test_{name}" for name in names.split()]


CANNOT = _tests(
    # CUDA streams, events and numbers of GPUs
    "DistributedDataParallel_non_default_stream ddp_apply_optim_in_backward ddp_logging_data_gpu ddp_device "
    "ddp_apply_optim_in_backward_grad_as_bucket_view_false ddp_apply_optim_in_backward_ignored_params "
    "ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none "
    "ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none "
    "ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none "
    "ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none "
    # about NCCL, and the collectives of PyTorch's SyncBatchNorm
    "ddp_profiling_execution_trace ddp_sync_bn_training_vs_eval "
    # which PyTorch leaves out, as they fail
    "ddp_hook_pickling_powerSGD ddp_has_finalized"
)
"""These fail with PyTorch's own class too, on a machine without a GPU or on any."""

UNUSED = "unused parameters are sent as zeros, where PyTorch raises in the next forward pass"
WORDS = "the error has other words"
LOGGING = "looks into PyTorch's private log of the run"
REDUCER = "looks into PyTorch's private Reducer"
BUFFER_HOOK = "gives a private hook for buffers"

DIFFERS: Expected = {
    **_all(
        "ddp_unused_params_rebuild_buckets_exception ddp_multiple_nested_unused_params_error "
        "ddp_multiple_nested_unused_params_err_ignore_params",
        "unused parameters error not raised|Expected error was not raised",
        UNUSED,
    ),
    **_all("invalid_static_graph", "static_graph is True, but 'lin2.weight' got a gradient", WORDS),
    **_all("ddp_python_error_logged", "hook is {}, expected an Average or a function", WORDS),
    **_all(
        "ddp_static_graph_nested_types",
        "module is a DistributedDataParallel, which would be closed",
        "wraps a wrapper, and trains both; here the older one would end",
    ),
    **_all(
        "static_graph_api_cpu", "RuntimeError not raised", "sets a private method's flag; it is an argument here"
    ),
    **_all(
        "ddp_control_flow_same_across_ranks ddp_control_flow_different_across_ranks "
        "detect_ddp_is_actually_static",
        "the reducer of bagua_torch has no attribute '_(get_local_used_map|ddp_graph_static)'",
        REDUCER,
    ),
    **_all(
        "ddp_build_debug_param_to_name_mapping ddp_build_debug_param_to_name_mapping_requires_grad",
        "no attribute '_build_params_for_reducer'",
        REDUCER,
    ),
    **_all("compute_bucket_assignment_by_size_sparse_error_with_logger", "no attribute 'logger'", LOGGING),
    **_all("ddp_comm_hook_logging", "None is not allreduce_hook", LOGGING),
    **_all("ddp_logging_data_cpu", "no attribute '_set_ddp_runtime_logging_sample_rate'", LOGGING),
    **_all("sync_bn_logged", "True is not false", LOGGING),
    **_all(
        "ddp_profiling_autograd_profiler ddp_profiling_torch_profiler",
        "Scalars are not equal",
        "counts PyTorch's collectives in its profile; `Communicator.trace` shows ours",
    ),
    **_all(
        "ddp_buffer_hook_allreduce_return_future ddp_buffer_hook_allreduce ddp_broadcast_buffer_via_hook",
        "no attribute '_register_buffer_comm_hook'",
        BUFFER_HOOK,
    ),
    **_all(
        "ddp_broadcast_buffers_deprecation_warning",
        "0 not greater than 0",
        "broadcast_buffers keeps its name here",
    ),
    **_all(
        "ddp_native_mixed_precision_ignored_params",
        "mixed_precision is not supported",
        "refused; torch.autocast and half precision do the same",
    ),
    **_all(
        "ddp_bucket_cap_mb_list", "bucket_cap_mb_list is not supported", "refused; all buckets have one limit"
    ),
    **_all(
        "ddp_device_mesh_initialization", "device_mesh is not supported", "refused; the ranks are those of `comm`"
    ),
    **_all("skip_all_reduce_unused_parameters", "None is not 2", LOGGING),
}

# With PyTorch's gloo on two ranks without a GPU these fail, or are skipped: they show nothing about a backend.
CANNOT_WITH_GLOO = _tests(
    "3_level_hierarchical_model_averager SyncBatchNorm_process_group all_gather_coalesced_group "
    "all_gather_group all_reduce_coalesced_group_max all_reduce_coalesced_group_min "
    "all_reduce_coalesced_group_product all_reduce_coalesced_group_sum all_reduce_group_max "
    "all_reduce_group_min all_reduce_group_product all_reduce_group_sum all_to_all_group all_to_all_group_cuda "
    "all_to_all_single_equal_split_group all_to_all_single_equal_split_group_cuda "
    "all_to_all_single_unequal_split_group all_to_all_single_unequal_split_group_cuda average_parameters "
    "barrier_full_group_cuda barrier_group barrier_group_cuda barrier_timeout_arg barrier_timeout_global "
    "barrier_timeout_group batch_isend_irecv_mixed_backend_err batch_isend_irecv_nccl "
    "batch_isend_irecv_no_rank_zero_nccl batch_isend_irecv_self_nccl broadcast_group gather_group get_rank "
    "monitored_barrier_allreduce_hang monitored_barrier_allreduce_hang_wait_all_ranks "
    "monitored_barrier_failure_order monitored_barrier_wait_all_ranks nccl_high_priority_stream "
    "new_subgroups_by_enumeration new_subgroups_by_enumeration_input_rank_exceeds_world_size "
    "new_subgroups_overlap_not_allowed new_subgroups_with_group_param "
    "new_subgroups_world_size_not_divisible_by_group_size reduce_group_max reduce_group_min "
    "reduce_group_product reduce_group_sum scatter_group"
)

BACKEND_DIFFERS: Expected = {
    **_all("get_backend", "'bagua' != 'gloo'", "compares the name of the backend"),
    **_all("barrier_timeout_full_group", "waited 1 s for rank 1", WORDS),
    **_all("sparse_all_reduce_sum sparse_all_reduce_sum_cuda", "expected a dense tensor", "tensors are dense"),
    **_all(
        "ddp_profiling_autograd_profiler ddp_profiling_torch_profiler",
        "Scalars are not equal",
        "counts PyTorch's collectives in its profile; `Communicator.trace` shows ours",
    ),
    **_all(
        "monitored_barrier_gloo monitored_barrier_gloo_subgroup",
        "only implemented for GLOO",
        "PyTorch refuses it for all other backends; barrier() names the missing rank",
    ),
    **_all("monitored_barrier_gloo_rank_0_timeout", "lost rank 1", WORDS),
}

EXPECTED = {"backend": BACKEND_DIFFERS, "bagua": DIFFERS}

LONG = {
    "test_ddp_uneven_inputs",
    "test_ddp_compile_static_graph",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_hook_parity_post_localSGD",
}


def names_of(mode: str, tests: dict[str, Any], *, short: bool) -> list[str]:
    """Return the tests to run in a mode: those that can run here."""
    if mode == "backend":
        names = [name for name in tests if name not in {*CANNOT_WITH_GLOO, *CANNOT}]
        return names[::8] if short else names
    return [name for name in reaching_ddp(dict(tests)) if name not in CANNOT and not (short and name in LONG)]


def judge(run: Run) -> str:
    """How a run ended; in capitals if the tables say otherwise."""
    message, reason = EXPECTED[run.mode].get(run.name, ("", ""))
    if run.passed:
        return f"PASSED, but is expected to fail with {message!r}" if message else "passed"
    if not message:
        return f"FAILED\n{run.message}"
    if not re.search(message, run.message):
        return f"FAILED, but not with {message!r}\n{run.message}"
    return f"differs: {reason}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=[*CLASSES, "all"], default="bagua")
    parser.add_argument("--at-once", type=int, default=2, help="how many tests run at a time")
    parser.add_argument("--short", action="store_true", help="leave out tests that take long, or resemble others")
    parser.add_argument("-v", action="store_true", help="show all that a failing test printed")
    parser.add_argument("names", nargs="*", help="these tests; all of the mode if none is given")
    arguments = parser.parse_args()
    began = time.monotonic()
    module, tests = load()
    unknown = {*arguments.names, *CANNOT, *DIFFERS, *LONG} - set(tests)
    if unknown:
        print(f"PyTorch {torch.__version__} has no tests {', '.join(sorted(unknown))}")
        return 1
    modes = list(CLASSES) if arguments.mode == "all" else [arguments.mode]
    todo = [
        (name, mode) for mode in modes for name in arguments.names or names_of(mode, tests, short=arguments.short)
    ]
    counts: Counter[str] = Counter()
    for run in run_all(module, todo, arguments.at_once):
        verdict = judge(run)
        counts[f"{run.mode} " + re.split(r"\W", verdict)[0]] += 1
        print(f"{run.seconds:5.1f} s  {run.mode}  {run.name}: {verdict}", flush=True)
        if run.errors and arguments.v:
            print("\n".join(run.errors.values()))
    wrong = sum(count for verdict, count in counts.items() if verdict.split()[1].isupper())
    print(f"{dict(counts)}, {time.monotonic() - began:.0f} s; {wrong} not as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
