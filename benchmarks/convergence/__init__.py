"""The quality of the models that each algorithm trains, on two real tasks.

The program is `run`; `methods` has the algorithms, `tasks` the models and data, and `report` makes tables and a
figure of the record.
"""
