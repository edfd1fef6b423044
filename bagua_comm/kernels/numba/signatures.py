"""Names and argument types of the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable

KERNELS = {
    "encode_rows": "iiiiiiiiif",
    "decode_rows": "iiiiiiiiif",
    "combine_rows": "iiiiiiiiif",
    "encode_int4": "iiiiiiiiiiiiii",
    "decode_int4": "iiiiiiiiii",
    "combine_int4": "iiiiiiiiiiii",
    "encode_top_k": "iiiiiiiiiiii",
    "sum_top_k": "iiiiiiiiiii",
    "subtract_top_k": "iiiiiiiii",
    "cast_rows": "iiiiiiii",
    "sum_rows": "iiiiiiiii",
    "find_fields": "iiiii",
    "add_fixed": "iiiiiiii",
    "mean_of_fixed": "iiiiiiii",
    "checksum_blocks": "iiiiii",
    "encoding_errors": "iiiiiff",
}
"""The kernels, with a letter for each argument: i, a 64-bit integer, or f, a 64-bit float."""

Function = Callable[..., None]
"""A compiled kernel."""
