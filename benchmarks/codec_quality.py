"""How much one coding by each codec changes an array: random numbers, and the gradients of three small models.

    python -m benchmarks.codec_quality
    python -m benchmarks.codec_quality --codec 'MinMaxUInt8(block=128)' 'Int4()' --out /tmp/codec_quality

The error is relative to the array in the Euclidean norm: |decoded - x| / |x|. An allreduce codes twice, and
averages the first error over the ranks. The models are trained here for some seconds, exactly and by one rank: a
CNN on scikit-learn's digits, a character-level GPT and a character-level GRU on the sources of Python's standard
library. Their gradients are taken at several steps, as one array of all parameters.

The record goes to `--out` with the ending .json, and a table with .md.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import bagua_comm
from bagua_comm import Codec
from bagua_comm.arrays import Array

from .bench import RESULTS
from .bench.arguments import add_out_argument, at_least
from .bench.checking import relative_error
from .bench.record import begin_record, header_lines, write_json
from .bench.report import machine_of, markdown_table, write_report
from .bench.table import Column, Table
from .convergence.tasks import CHARACTERS, Data, load_digits, load_text, make_cnn, make_transformer

CODECS = (
    "MinMaxUInt8()",
    "Float16()",
    "BFloat16()",
    "Int4(rotate=1)",
    "Int4()",
    "Int4(rotate=1, rounding='stochastic')",
    "Int4(rounding='stochastic')",
)
"""The codecs, as expressions of `bagua_comm`."""

# ---------------------------------------------------------------------------------------------------
# The arrays
# ---------------------------------------------------------------------------------------------------

ELEMENTS = 1 << 20
"""Random numbers of each distribution."""
STEPS = (10, 50, 100)
"""The steps whose gradients are coded."""

Draw = Callable[[np.random.Generator, int], Array]
"""Draws a number of elements in float64."""

DISTRIBUTIONS: dict[str, tuple[str, Draw]] = {
    "normal": ("normal numbers", lambda rng, count: rng.standard_normal(count)),
    "student": (
        "numbers of Student's t distribution with 3 degrees of freedom",
        lambda rng, count: rng.standard_t(3, count),
    ),
    "lognormal": (
        "normal numbers, each times exp of another one",
        lambda rng, count: rng.standard_normal(count) * np.exp(rng.standard_normal(count)),
    ),
}
"""What each distribution is, and how to draw from it."""


class GRU(nn.Module):
    """From (n, context) symbols to (n, context, symbols) logits of the next ones."""

    def __init__(self, symbols: int, *, width: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.states = nn.GRU(width, width, batch_first=True)
        self.logits = nn.Linear(width, symbols)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        states, _ = self.states(self.symbols(x))
        logits: Tensor = self.logits(states)
        return logits


@dataclass(frozen=True)
class Training:
    """A small training, whose gradients are coded.

    Args:
        title: The model and its data.
        load: Loads the data.
        make_model: Makes the model.
        lr: The learning rate of Adam.
        batch_size: Samples of a step.
    """

    title: str
    load: Callable[[], Data]
    make_model: Callable[[], nn.Module]
    lr: float
    batch_size: int

    def gradients(self, steps: Sequence[int]) -> Iterator[Array]:
        """The gradients of these steps, counted from 1: all parameters in one array of float32."""
        torch.manual_seed(0)
        model = self.make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=self.lr)
        batches = self.load().batches(0, self.batch_size)
        for step in range(1, max(steps) + 1):
            x, y = next(batches)
            optimizer.zero_grad()
            functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
            if step in steps:
                yield nn.utils.parameters_to_vector(
                    [p.grad for p in model.parameters() if p.grad is not None]
                ).numpy()
            optimizer.step()


TRAININGS = {
    "cnn": Training("a CNN on scikit-learn's digits", load_digits, make_cnn, 0.003, 64),
    "gpt": Training("a character-level GPT on Python's standard library", load_text, make_transformer, 0.004, 16),
    "gru": Training(
        "a character-level GRU on the same text",
        load_text,
        partial(GRU, len(CHARACTERS) + 1, width=128),
        0.004,
        16,
    ),
}

# ---------------------------------------------------------------------------------------------------
# The measurement
# ---------------------------------------------------------------------------------------------------


def codec_of(expression: str) -> Codec:
    """The codec that an expression such as "MinMaxUInt8(block=128)" makes.

    Raises:
        argparse.ArgumentTypeError: It makes none.

    >>> codec_of("Float16()")
    Float16()
    """
    try:
        codec = eval(expression, dict(vars(bagua_comm)))
    except Exception as exc:
        raise argparse.ArgumentTypeError(f"{expression!r} is no codec: {type(exc).__name__}: {exc}") from exc
    if not isinstance(codec, Codec):
        raise argparse.ArgumentTypeError(f"{expression!r} is no codec, but {codec!r}")
    return codec


def error_of(codec: Codec, x: Array) -> float:
    """The relative error of one coding of a flat array, as one chunk."""
    chunk = x[None]
    return relative_error(codec.decode(codec.encode(chunk), np.empty_like(chunk)), chunk.astype(np.float64))


def arrays_of(options: argparse.Namespace) -> Iterator[tuple[str, list[Array]]]:
    """The name of each data, and its arrays of float32."""
    for name, (_, draw) in DISTRIBUTIONS.items():
        rng = np.random.default_rng(0)
        yield name, [draw(rng, options.elements).astype(np.float32)]
    for name, training in TRAININGS.items():
        yield name, list(training.gradients(options.steps))


TABLE = Table(
    (Column("data", width=10), Column("codec", width=56), Column("bits", "/element", 9), Column("error", width=9))
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parse_arguments(argv)
    torch.set_num_threads(1)
    record = begin_record("codec_quality", options, packages=["torch", "scikit-learn", "ml_dtypes"])
    record["arguments"]["codec"] = [repr(codec) for codec in options.codec]
    print(*header_lines(record), *TABLE.header(), sep="\n")
    record["results"] = []
    for name, found in arrays_of(options):
        for codec in options.codec:
            errors = [error_of(codec, x) for x in found]
            (count,) = {x.size for x in found}
            result = {
                "data": name,
                "codec": repr(codec),
                "elements": count,
                "bits": 8 * codec.wire_nbytes(count, np.dtype(np.float32)) / count,
                "error": float(np.mean(errors)),
                "errors": errors,
            }
            record["results"].append(result)
            print(TABLE.row([name, repr(codec), f"{result['bits']:.2f}", f"{result['error']:.2e}"]), flush=True)
    write_json(options.out.with_name(f"{options.out.name}.json"), record)
    write_report(options.out, lambda picture: markdown(record))
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--codec",
        type=codec_of,
        nargs="+",
        default=[codec_of(text) for text in CODECS],
        metavar="EXPRESSION",
        help=f"codecs, as expressions of bagua_comm; by default {', '.join(CODECS)}",
    )
    parser.add_argument("--elements", type=at_least(1), default=ELEMENTS, help="how many random numbers")
    parser.add_argument(
        "--steps", type=at_least(1), nargs="+", default=[*STEPS], help="the steps whose gradients are coded"
    )
    add_out_argument(parser, RESULTS / "codec_quality", "json", "md")
    return parser.parse_args(argv)


def markdown(record: dict[str, Any]) -> str:
    """The report."""
    arguments, results = record["arguments"], record["results"]
    names = list(dict.fromkeys(result["data"] for result in results))
    sizes = {result["data"]: result["elements"] for result in results}
    taken = f"the mean error of those at steps {', '.join(map(str, arguments['steps']))}"
    errors = {(result["codec"], result["data"]): result["error"] for result in results}
    bits = {result["codec"]: result["bits"] for result in results if result["data"] == names[0]}
    rows = [
        [f"`{codec}`", f"{bits[codec]:.2f}", *(_short(errors[codec, name]) for name in names)] for codec in bits
    ]
    return "\n".join(
        [
            "# The error of one coding",
            "",
            f"    {command_of(arguments)}",
            "",
            f"* Machine: {machine_of(record)}.",
            "* The error is |decoded - x| / |x| in the Euclidean norm, of float32 arrays coded once.",
            *(f"* {name}: {sizes[name]:,} {what}." for name, (what, _) in DISTRIBUTIONS.items()),
            *(
                f"* {name}: gradients of {training.title}, {sizes[name]:,} elements; {taken}."
                for name, training in TRAININGS.items()
            ),
            "",
            *markdown_table(["codec", "bits/element", *names], rows, "l" + "r" * (1 + len(names))),
            "",
        ]
    )


def command_of(arguments: dict[str, Any]) -> str:
    """The command that makes a record with these arguments."""
    given = ""
    if arguments["codec"] != [repr(codec_of(text)) for text in CODECS]:
        given += f" --codec {shlex.join(arguments['codec'])}"
    if arguments["elements"] != ELEMENTS:
        given += f" --elements {arguments['elements']}"
    if tuple(arguments["steps"]) != STEPS:
        given += f" --steps {' '.join(map(str, arguments['steps']))}"
    return f"python -m benchmarks.codec_quality{given}"


def _short(error: float) -> str:
    """Three significant digits.

    >>> _short(0.0951), _short(0.000204)
    ('0.0951', '0.000204')
    """
    return f"{error:.{max(0, 2 - math.floor(math.log10(error)))}f}" if error else "0"


if __name__ == "__main__":
    raise SystemExit(main())
