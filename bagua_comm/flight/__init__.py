"""The flight recorder: the last calls of every rank, written to a folder when a call fails, and explained.

    recorder     the ring of each rank's last calls, and its file
    entries      the contents of such a file
    stacks       the Python stacks of a rank
    requests     requests to other ranks to write their files
    diagnosis    an explanation of the failure, from the files of all ranks
    batches      the message for ranks with fewer batches
    pytorch      the same files in the format of PyTorch's flight recorder

`trace` records finished spans. The flight recorder records calls from their begin, with the arguments that must
be equal on all ranks. Both share the description and the times of a call, so a call computes them once.
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
