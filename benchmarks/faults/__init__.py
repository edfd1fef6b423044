"""Trainings that lose ranks at random moments: whether they continue, with the right weights, and how soon.

plans       draws trials from a seed
training    the program that is disturbed
model       its model; `numpy_model` and `torch_model`: in either framework
trial       runs and disturbs it; `hosts`: on emulated hosts
verdict     judges the outcome
leftovers   finds processes and files that are left over
report      a table and a figure of the record
"""
