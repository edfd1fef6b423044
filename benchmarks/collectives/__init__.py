"""Collectives, timed and checked beside other implementations.

The program is `run`; `cases` has the inputs and outputs of each collective, `rivals` the other implementations,
and `report` makes tables and a plot of several records.
"""
