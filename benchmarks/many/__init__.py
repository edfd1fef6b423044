"""Many ranks on this machine: what a start, a step and a rank cost, and whether anything fails.

training    the program of a rank
report      the record as text
"""
