"""A long training on two emulated hosts that is disturbed all the time: does it go on, and does anything grow?

plan        draws the disturbances from a seed
job         the training, its events, and the disturbances
resources   memory, threads, descriptors and files, and whether they grow
report      the verdict, and the record as text
"""
