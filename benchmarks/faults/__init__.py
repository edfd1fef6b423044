"""Trainings that lose ranks at random moments: whether they go on, with the right weights, and how soon.

`plans` draws trials from a seed, `training` is the program that is disturbed, `trial` runs and disturbs it (`hosts`
on emulated hosts), `verdict` says how it ended, `leftovers` what it left behind, `report` makes tables and a figure.
"""
