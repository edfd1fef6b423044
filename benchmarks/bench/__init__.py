"""Shared parts of the benchmarks: arguments, records, checks, times, tables, reports.

The form is that of NVIDIA's nccl-tests: a line that begins with `#` says what ran and where; every other line is
a row of columns. Calls that are compared are timed in turn, so that a slow moment of the machine falls on all of
them. Every result that is timed is checked, element by element.
"""

from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
"""The folder of all records and reports."""

ROOT = RESULTS.parents[1]
"""The root of the repository, where programs run."""
