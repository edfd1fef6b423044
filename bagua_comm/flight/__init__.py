"""The flight recorder: the last calls of every rank, written to a folder when a call fails, and explained.

    recorder     the ring in which each rank keeps its last calls, and the file that it writes of it
    entries      what such a file holds
    diagnosis    what went wrong, in words, from the files of all ranks
    pytorch      the same files in the format of PyTorch's flight recorder

`trace` keeps spans: what took how long, and only once it has ended. The flight recorder keeps calls, from the
moment in which they begin, with what ranks must have in common. Both share what a call says of itself, and its
times, so a call pays for them once.
"""

from .diagnosis import Diagnosis, Finding, diagnose, explain
from .entries import Entry, FlightError, RankRecord, read_folder
from .recorder import FlightRecorder

__all__ = [
    "Diagnosis",
    "Entry",
    "Finding",
    "FlightError",
    "FlightRecorder",
    "RankRecord",
    "diagnose",
    "explain",
    "read_folder",
]
