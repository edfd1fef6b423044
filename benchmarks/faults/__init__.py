"""Trainings that lose ranks at random moments: whether they go on, with the right weights, and how soon.

plans       draws trials from a seed
training    the program that is disturbed, with a network in NumPy or in PyTorch
trial       runs and disturbs it; `hosts`: on emulated hosts
verdict     how it ended
leftovers   what it left behind
report      a table and a figure of the record
"""
