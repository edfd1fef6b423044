"""Timelines of all ranks: their file, and what it says about training.

`Communicator.trace` writes the spans of all ranks to a file (`chrome`). `bagua trace` reads it (`reading`),
computes where the time of a step went (`summary`), says what to do (`advice`), and writes a page (`page`).
"""
