"""Compilation of kernels to object files with Numba and LLVM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numba
from llvmlite import binding, ir
from numba.core import cgutils
from numba.extending import intrinsic

from .signatures import KERNELS

STRIP = 2048
"""The number of elements in a strip: 8 KiB of float32."""

_Function = TypeVar("_Function", bound=Callable[..., object])
_Typed: TypeAlias = tuple[object, Callable[..., object]]
"""What an intrinsic function returns: the types of its result and arguments, and a function that emits code."""

_SEMANTICS = {"nogil": True, "error_model": "numpy"}
"""x / 0 is inf or NaN, as in NumPy."""


def inner(function: _Function) -> _Function:
    """Compile a function for kernels to call; Python cannot call it."""
    return cast(_Function, numba.njit(**_SEMANTICS, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


def inlined(function: _Function) -> _Function:
    """As `inner`, and inlined wherever it is called, for functions that inner loops call."""
    made = numba.njit(**_SEMANTICS, no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)(function)
    return cast(_Function, made)


def kernel(function: _Function) -> _Function:
    """Register a function that `object_code` compiles for Python to call."""
    _functions[function.__name__] = function
    return function


_functions: dict[str, Callable[..., object]] = {}
_TYPES = {"i": numba.types.int64, "f": numba.types.float64}


def object_code(name: str) -> bytes:
    """Compile one of `KERNELS` to an object file for this processor.

    It defines a function of that name by Numba's convention: two addresses, of a result and of an error, precede
    the arguments. Its status is not checked, since it can fail only for an unknown element dtype.

    Raises:
        RuntimeError: The kernel calls functions of Numba or Python.
    """
    compiled = numba.cfunc(numba.types.void(*(_TYPES[letter] for letter in KERNELS[name])), **_SEMANTICS)(
        _functions[name]
    )
    module = binding.parse_assembly(compiled.inspect_llvm())
    module.link_in(_empty_destructor())
    native = compiled.native_name.removeprefix("cfunc.")  # the wrapper for C calls Python
    for function in module.functions:
        if function.name == native:
            function.name = name
        elif not function.is_declaration:
            function.linkage = "internal"
    _drop_unused(module)
    called = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")]
    if called:
        raise RuntimeError(f"the kernel {name} calls {called}")
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static" if target.name.startswith("x86") else "default",  # as Numba itself does
        codemodel="jitdefault",
        jit=True,
    )
    return cast(bytes, machine.emit_object(module))


def _empty_destructor() -> binding.ModuleRef:
    """A module with the function by which Numba frees an array's memory: empty, since kernels own none."""
    module = ir.Module()
    prototype = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()])
    builder = ir.IRBuilder(ir.Function(module, prototype, "NRT_MemInfo_call_dtor").append_basic_block())
    builder.ret_void()
    return binding.parse_assembly(str(module))


def _drop_unused(module: binding.ModuleRef) -> None:
    """Remove functions that no external function calls."""
    machine = binding.Target.from_default_triple().create_target_machine()
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options())
    passes = binding.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, builder)


def emits(result: numba.types.Type, *arguments: numba.types.Type) -> Callable[[Callable[..., object]], Any]:
    """Make a function for kernels, of these types, from one that emits its instructions by a builder."""

    def decorate(emit: Callable[..., object]) -> Any:
        @functools.wraps(emit)
        def typed(_: object, *types: object) -> _Typed:
            return result(*arguments), lambda context, builder, signature, values: emit(builder, *values)

        return intrinsic(typed)

    return decorate


@intrinsic  # type: ignore[untyped-decorator]
def pointer(_: object, address: numba.types.Type, dtype: numba.types.DType) -> _Typed:
    """An integer as a pointer to elements of `dtype`."""
    result = numba.types.CPointer(dtype.dtype)
    return result(address, dtype), lambda context, builder, signature, values: builder.inttoptr(
        values[0], context.get_value_type(result)
    )


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def scratch(_: object, count: numba.types.IntegerLiteral) -> _Typed:
    """A pointer to floats on the stack; their number is a literal."""
    length = count.literal_value

    def code(context: object, builder: ir.IRBuilder, signature: object, values: object) -> ir.Value:
        strip = cgutils.alloca_once(builder, ir.ArrayType(ir.FloatType(), length))
        strip.align = 64
        return builder.bitcast(strip, ir.FloatType().as_pointer())

    return numba.types.CPointer(numba.types.float32)(count), code


@intrinsic  # type: ignore[untyped-decorator]
def address_of(_: object, pointer: numba.types.Type) -> _Typed:
    """A pointer as an integer."""
    return numba.types.int64(pointer), lambda context, builder, signature, values: builder.ptrtoint(
        values[0], ir.IntType(64)
    )


@emits(numba.types.void, numba.types.int64)
def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Begin to load the cache line at an address, which need not exist."""
    line, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    prototype = ir.FunctionType(ir.VoidType(), [line, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, prototype, "llvm.prefetch.p0i8")
    flags = (ir.Constant(number, flag) for flag in (0, 3, 1))  # to read, for all caches, data
    builder.call(function, [builder.inttoptr(address, line), *flags])
