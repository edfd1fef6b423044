"""How many CTAs of each codec's kernels a multiprocessor holds, and the registers and the memory that limit it.

A part of benchmarks.gpu; alone:

    python -m benchmarks.gpu.occupancy --out occupancy.jsonl
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from .part import Results, part_parser

KERNELS = {
    ("minmax.cu", 256): ("encode", "decode", "combine"),
    ("int4.cu", 128): ("encode", "decode", "combine", "encode_stochastic", "combine_stochastic"),
    ("int4.cu", 512): ("encode_any", "decode_any", "combine_any"),
    ("top_k.cu", 256): ("choose", "average", "spread", "codes", "sum"),
    ("top_k.cu", 128): ("subtract",),
}
"""Kernels, by file and threads of a CTA."""

DTYPES = ("float32", "float16", "bfloat16")

_SHARED_BYTES, _LOCAL_BYTES, _REGISTERS = 1, 3, 4  # CU_FUNC_ATTRIBUTE_...


def occupancy() -> Iterator[tuple[str, dict[str, int]]]:
    """The name of each kernel and dtype, and its CTAs and threads on a multiprocessor, counted by the driver."""
    import cupy

    loaded, driver = import_module("bagua_comm.kernels.device").loaded, cupy.cuda.driver
    device = cupy.cuda.Device().id
    for (file, threads), names in KERNELS.items():
        for name in names:
            for dtype in DTYPES:
                function = loaded(device, file, name, dtype).ptr
                ctas = driver.occupancyMaxActiveBlocksPerMultiprocessor(function, threads, 0)
                yield (
                    f"{file.removesuffix('.cu')} {name} {dtype}",
                    {
                        "ctas": ctas,
                        "threads": ctas * threads,
                        "registers": driver.funcGetAttribute(_REGISTERS, function),
                        "shared_bytes": driver.funcGetAttribute(_SHARED_BYTES, function),
                        "spilled_bytes": driver.funcGetAttribute(_LOCAL_BYTES, function),
                    },
                )


def main() -> None:
    """Write the occupancy of all kernels."""
    results = Results.of(part_parser(__doc__).parse_args())
    for name, found in occupancy():
        results[name] = found


if __name__ == "__main__":
    main()
