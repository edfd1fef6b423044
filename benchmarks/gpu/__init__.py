"""All checks and measurements that need a GPU, in one command: `python -m benchmarks.gpu --out FILE.json`.

`run` is the command. It starts sections, each in processes of its own (`world`, `keeper`): tests of tests/gpu
with the plugin `pytest_lines`, and the programs `device`, `occupancy`, `codecs`, `ranks` and `training`. All
append their results (`part`) to one file (`lines`), of which `report` makes the record. `instructions` counts the
instructions that the compiler emits, without a GPU; `graphs` times launches of CUDA graphs, and `variants` times
kernels that are compiled in other ways.
"""
