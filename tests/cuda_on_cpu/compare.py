"""Differences between the fake and the installed CuPy: `python -m cuda_on_cpu.compare` prints names CuPy lacks.

It runs in a separate process, since both are called cupy.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from .fake_cuda import Stream
from .install import MODULES


def _event(real: Any) -> Any:
    """An event of the real CuPy, which cannot be constructed without a device."""
    event = real.__new__(real)
    with contextlib.suppress(RuntimeError):
        event.__init__()
    return event


EXAMPLES = {
    "Event": _event,
    "Stream": lambda real: real.null,
    "CUDARuntimeError": lambda real: real(100),
    "NcclError": lambda real: real(1),
}
"""Real objects for classes whose attributes only an instance has."""


def differences() -> Iterator[str]:
    for path in ("cupy", "cupyx"):
        yield from _compare_modules(path, MODULES[path], importlib.import_module(path))


def _compare_modules(path: str, fake: Any, real: Any) -> Iterator[str]:
    ours = ("cupy", f"{__package__}.fake_")
    for name, member in vars(fake).items():
        below = f"{path}.{name}"
        if name.startswith("_"):
            continue
        if inspect.ismodule(member):
            if member.__name__.startswith(ours):
                real_one = importlib.import_module(below) if below in MODULES else getattr(real, name)
                yield from _compare_modules(below, member, real_one)
        elif getattr(member, "__module__", "cupy").startswith(ours):
            yield from _compare(below, member, getattr(real, name, None))


def _compare(path: str, fake: Any, real: Any) -> Iterator[str]:
    if real is None:
        yield f"{path} does not exist"
        return
    if not callable(fake):
        if not isinstance(fake, Stream) and fake != real:
            yield f"{path} is {real}"
        return
    parameters, known = _parameters(fake), _parameters(real)
    rest = iter(known)
    if "**" not in known and not all(name in rest for name in parameters):
        yield f"{path}({', '.join(parameters)}) takes ({', '.join(known)})"
    if inspect.isclass(fake):
        for name, member in vars(fake).items():
            if not re.match(r"_[^_]|__(init|module|doc|dict|weakref|annotations|hash)__", name):
                yield from _compare(
                    f"{path}.{name}", _plain(member), _plain(inspect.getattr_static(real, name, None))
                )
        example = EXAMPLES.get(real.__name__, lambda real: real)(real)
        for name in re.findall(r"self\.([a-z]\w*)\b.* = ", inspect.getsource(fake)):
            if not hasattr(example, name):
                yield f"{path}.{name} does not exist"


def _plain(member: Any) -> Any:
    """A method as the function behind it; anything that is not a method as "a value"."""
    member = getattr(member, "__func__", member)
    return member if callable(member) or member is None else "a value"


def _parameters(function: Any) -> list[str]:
    """The names in order, with "*" before those that are keyword-only, and "**" if any keyword is accepted."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        found = []
    if not found or any(each.kind is each.VAR_POSITIONAL for each in found):
        return _documented(function)
    names = ["**" if each.kind is each.VAR_KEYWORD else each.name for each in found]
    keywords = [i for i, each in enumerate(found) if each.kind is each.KEYWORD_ONLY]
    if keywords:
        names.insert(keywords[0], "*")
    return [name for name in names if name != "self"]


def _documented(function: Any) -> list[str]:
    """The same from the first "name(type a, b=1)" in the docstring, where Cython writes the signature."""
    call = re.search(r"\w+\((.*?)\)( ->|$)", function.__doc__ or "", re.MULTILINE)
    found = [part.split("=")[0].split() for part in call.group(1).split(",")] if call else []
    names = [words[-1] for words in found if words]
    return ["**" if name.startswith("**") else name for name in names if name != "self"]


if __name__ == "__main__":
    print(*differences(), sep="\n")
