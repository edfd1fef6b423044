"""The commands of `python -m bagua_comm`, one module each: `add_arguments(parser)` and `run(options)`.

They read arguments and print; the library under `run` is `launch`.
"""
