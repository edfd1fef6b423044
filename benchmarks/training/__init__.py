"""The time of training steps: with each algorithm, with settings that the tuner may choose, and as predicted.

`run` is the program `benchmarks.training`, and `report` makes tables and a figure of its records. `tuner`
compares the tuner's choice with all others. `costmodel` fits the cost model to some rows of records
(`calibration`), and predicts the others. `models` has the models that are trained.
"""
