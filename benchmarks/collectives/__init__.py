"""Collectives, timed and checked beside other implementations.

The program is `run`; `cases` says what each collective takes and gives, `rivals` has the others, and `report`
makes tables and a plot of several records.
"""
