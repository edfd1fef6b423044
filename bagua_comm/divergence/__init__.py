"""Where ranks part: the first step, tensor and element whose bits differ between ranks that should agree.

    recorder     digests of the tensors of each step, compared between the ranks and written to a folder
    records      the files in that folder
    differences  how the records of one step differ
    report       the first difference, from the files of all ranks
    elements     elements of two arrays: the first that differs, and units in the last place

`Communicator.check_consistency` finds that an array differs at this moment. A recorder finds the step at which it
began to differ; `python -m bagua_comm compare FOLDER` prints the report.
"""

from .elements import ElementDifference, first_difference
from .recorder import DivergenceRecorder
from .records import DivergenceError
from .report import Divergence, Group, compare_folder

__all__ = [
    "Divergence",
    "DivergenceError",
    "DivergenceRecorder",
    "ElementDifference",
    "Group",
    "compare_folder",
    "first_difference",
]
