"""Machine instructions of the codec's kernels for each element, which limit their speed.

    python -m benchmarks.gpu.instructions                                           # compile, count, print
    python -m benchmarks.gpu.instructions --json benchmarks/results/kernel_instructions.json

NVRTC compiles the kernels, and nvdisasm shows the result; neither needs a GPU. Instructions are counted on the
hot path of a thread: the shortest way through the code on which it moves its elements in 16-byte words, without a
call. Rare cases take a longer way, or a call. A thread of MinMaxUInt8, in blocks of 512, has sixteen elements and
takes part in the range of its block; one of Int4 has a whole block of 32.

Another formula of MinMaxUInt8 would need fewer: with level * (1 / scale), rounded twice, in place of the quotient
level / scale, float32 on sm_90 would need 55.6 instructions in place of 83.8 to combine 8 rows, 33.4 in place of
42.9 for 2, and 14.6 in place of 15.4 to decode. It would change the last bit of some decoded numbers, and so the
wire format's version, its golden files, host.py and compiled.py. On an H100, combining 8 rows reached 0.79 of a
copy with it, and 0.71 without, both with four loads ahead: too little for a new version.
"""

from __future__ import annotations

import argparse
import heapq
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

ARCHITECTURES = ("80", "90", "100")
DTYPES = ("float32", "float16", "bfloat16")
SUMMANDS = (2, 4, 8)
HELD = {"minmax.cu": 16, "int4.cu": 32}
"""Elements that a thread holds."""

WIDTHS = {"float32": 4, "float16": 8, "bfloat16": 8}
"""Elements in a word of 16 bytes."""

SHUFFLES = 10
"""Shuffles for the range of a team of 32 threads: five steps of two."""


class Moves(NamedTuple):
    """Instructions that mark the hot path through a kernel."""

    loads: int = 0
    """At least this many loads of 16 bytes from the device's memory; one that is skipped counts, too."""

    stores: int = 0
    """Stores of 16 bytes to the device's memory."""

    shuffles: int = 0
    decoders: int = 0
    """Loads of 16 bytes from the memory that a CTA shares: how a row of a block is to be decoded."""

    reciprocals: int = 0
    """Instructions with which divisions begin."""

    fused: int = 0
    """At least this many fused multiplications and additions."""

    def __add__(self, other: Moves) -> Moves:  # type: ignore[override]
        return Moves(*(a + b for a, b in zip(self, other, strict=True)))

    def within(self, other: Moves) -> bool:
        """Whether there are no more than in `other`, of each kind."""
        return all(a <= b for a, b in zip(self, other, strict=True))


class Block(NamedTuple):
    """Instructions without a branch between them."""

    count: int
    moves: Moves

    meets: tuple[tuple[str, int], ...]
    """Where threads that diverge after this block reconverge (BSSY): the number of a barrier, and an address."""

    follow: tuple[int | str, ...]
    """The blocks that may come next, by address; -1 is the end; a barrier (BSYNC) stands for where it leads."""


def compiled(file: str, architecture: str, element: str, *defines: str) -> tuple[bytes, str]:
    """The cubin of a .cu file of bagua_comm, and the compiler's report on its kernels. Needs no driver."""
    device = import_module("bagua_comm.kernels.device")
    # Through its binding, since `cupy.cuda.compiler` asks for a driver.
    nvrtc = import_module("cupy_backends.cuda.libs.nvrtc")
    program = nvrtc.createProgram(device.source(file), file, (), ())
    # CuPy adds these two.
    added = (f"-arch=sm_{architecture}", "--device-as-default-execution-space")
    try:
        nvrtc.compileProgram(program, (*device.compile_options(element, *defines), *added, "--ptxas-options=-v"))
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def disassembled(cubin: bytes) -> str:
    """The output of nvdisasm for a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin + b"\0")  # the last byte, which CuPy takes off
        file.flush()
        command = [str(_nvdisasm()), "--print-code", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def _nvdisasm() -> Path:
    for root in import_module("nvidia").__path__:
        for found in Path(root).glob("*/bin/nvdisasm"):
            return found
    raise FileNotFoundError("nvdisasm is not installed; pip install 'bagua-comm[test]'")


def blocks_of(text: str, kernel: str) -> dict[int, Block]:
    """The basic blocks of a kernel, by address, from the text of nvdisasm."""
    (body,) = (
        part for part in re.split(r"\n(?=\s*\.text\.)", text) if part.strip().startswith(f".text.{kernel}:")
    )
    lines = re.findall(r"^(\.L_x_\d+):|/\*([0-9a-f]{4,})\*/\s+([^;]*?) *;", body, re.MULTILINE)
    labels: dict[str, int] = {}
    waiting: list[str] = []
    code: list[tuple[int, str]] = []
    for label, address, text_of in lines:
        if label:
            waiting.append(label)
            continue
        labels.update(dict.fromkeys(waiting, int(address, 16)))
        waiting.clear()
        code.append((int(address, 16), text_of))
    leaving = [re.search(r"\b(BRA|EXIT|RET|CALL|BRX|BSYNC)\b", text_of) is not None for _, text_of in code]
    starts = {code[0][0], *labels.values()}
    starts.update(after for leaves, (after, _) in zip(leaving, code[1:], strict=False) if leaves)
    found: dict[int, Block] = {}
    texts: list[str] = []
    start = code[0][0]
    for (address, text_of), after in zip(code, [*(later for later, _ in code[1:]), -1], strict=True):
        start = address if not texts else start
        texts.append(text_of)
        if after in starts or after == -1:
            meets = re.findall(r"\bBSSY\S* (B\d+), `\((\.L_x_\d+)\)", "\n".join(texts))
            found[start] = Block(
                len(texts),
                _moves(texts),
                tuple((barrier, labels[label]) for barrier, label in meets),
                tuple(_follow(text_of, after, labels)),
            )
            texts = []
    return _with_meetings(found)


def _with_meetings(blocks: dict[int, Block]) -> dict[int, Block]:
    """The same with addresses in place of barriers' numbers, which are used again and again."""
    meetings: dict[tuple[int, str], set[int]] = {}
    queue: list[tuple[int, tuple[tuple[str, int], ...]]] = [(min(blocks), ())]
    seen = set(queue)
    while queue:
        at, meets = queue.pop()
        barriers = {**dict(meets), **dict(blocks[at].meets)}
        for follow in blocks[at].follow:
            left = {barrier: there for barrier, there in barriers.items() if barrier != follow}
            if isinstance(follow, str):
                meetings.setdefault((at, follow), set()).add(barriers[follow])
                follow = barriers[follow]
            following = follow, tuple(sorted(left.items()))
            if follow != -1 and following not in seen:
                seen.add(following)
                queue.append(following)
    return {
        at: block._replace(
            follow=tuple(
                there
                for follow in block.follow
                for there in (meetings.get((at, follow), ()) if isinstance(follow, str) else (follow,))
            )
        )
        for at, block in blocks.items()
    }


def _moves(texts: Sequence[str]) -> Moves:
    def number(pattern: str) -> int:
        return sum(re.search(pattern, text) is not None for text in texts)

    loads, stores, decoders = (number(rf"\b{name}\S*\.128\b") for name in ("LDG", "STG", "LDS"))
    rest = (number(rf"\b{name}\b") for name in (r"MUFU\.RCP", "FFMA"))
    return Moves(loads, stores, number(r"\bSHFL\b"), decoders, *rest)


def _follow(text: str, after: int, labels: dict[str, int]) -> Iterator[int | str]:
    """Successors of a block with this end, without calls and branches for diverged warps (BRA.DIV)."""
    conditional = re.match(r"@!?U?P\w+ ", text) is not None
    jump = re.search(r"\b(?:BRA|CALL)\b.*`\((\.L_x_\d+)\)", text)  # ptxas also writes CALL for a jump
    if re.search(r"\b(RET|BRX)\b|\bBRA\.DIV\b", text) or ("CALL" in text and not jump):
        if conditional or "BRA.DIV" in text:
            yield after
        return
    if re.search(r"\bEXIT\b", text):
        yield -1
        if conditional:
            yield after
        return
    sync = re.search(r"\bBSYNC\S* (?:\S+, )?(B\d+)", text)
    if jump:
        yield labels[jump.group(1)]
        if conditional or re.search(r"BRA\S* !?U?P\w+,", text):
            yield after
    elif sync:
        yield sync.group(1)
    else:
        yield after


def shortest(blocks: dict[int, Block], moves: Moves) -> int:
    """The fewest instructions from the start of a kernel to its end, on a way that makes just these moves."""
    queue = [(0, min(blocks), Moves())]
    seen = set()
    while queue:
        count, at, made = heapq.heappop(queue)
        if at == -1 and made == moves:
            return count
        if at == -1 or (at, made) in seen:
            continue
        seen.add((at, made))
        made += blocks[at].moves
        made = made._replace(loads=min(made.loads, moves.loads), fused=min(made.fused, moves.fused))
        if made.within(moves):
            for follow in blocks[at].follow:
                assert isinstance(follow, int)
                heapq.heappush(queue, (count + blocks[at].count, follow, made))
    raise ValueError(f"there is no way through this kernel with {moves}")


def hot_paths(file: str, dtype: str) -> dict[str, tuple[str, Moves]]:
    """For each step of a codec, the kernel in the .cu file, and what marks its hot path."""
    words = HELD[file] // WIDTHS[dtype]
    if file == "minmax.cu":
        return {
            f"encode {dtype}": ("encode", Moves(loads=words, shuffles=SHUFFLES, reciprocals=1)),
            f"decode {dtype}": ("decode", Moves(stores=words, reciprocals=2)),
            **{
                f"combine {dtype} p={p}": (
                    "combine",
                    Moves(stores=1, shuffles=SHUFFLES, decoders=p, reciprocals=3),
                )
                for p in SUMMANDS
            },
        }
    # Each element is multiplied by a weight and added. One more reciprocal is that of the number of summands.
    return {
        f"int4 encode {dtype}": ("encode", Moves(loads=words, stores=1, decoders=words, reciprocals=1)),
        f"int4 decode {dtype}": ("decode", Moves(loads=1, stores=words, decoders=words)),
        **{
            f"int4 combine {dtype} p={p}": (
                "combine",
                Moves(loads=p, stores=1, reciprocals=2, fused=HELD[file] * p),
            )
            for p in SUMMANDS
        },
    }


def counted(file: str, cubin: bytes, dtype: str) -> dict[str, float]:
    """Instructions an element of each step of a codec, from what NVRTC made of its .cu file."""
    text, paths = disassembled(cubin), hot_paths(file, dtype)
    kernels = {kernel: blocks_of(text, kernel) for kernel, _ in paths.values()}
    return {step: shortest(kernels[kernel], hot) / HELD[file] for step, (kernel, hot) in paths.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the counts; with --json, write them."""
    parser = argparse.ArgumentParser(description="Instructions an element, counted in compiled kernels.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    table: dict[str, dict[str, float]] = {}
    for architecture in ARCHITECTURES:
        counts = table[f"sm_{architecture}"] = {}
        for file in HELD:
            for dtype in DTYPES:
                cubin, _ = compiled(file, architecture, dtype)
                counts |= counted(file, cubin, dtype)
    steps = list(next(iter(table.values())))
    print(f"{'instructions an element':28}" + "".join(f"{name:>9}" for name in table))
    for step in steps:
        print(f"{step:28}" + "".join(f"{table[name][step]:9.1f}" for name in table))
    if args.json:
        args.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
