"""How good the models are that each algorithm ends with, on two real tasks.

The program is `run`; `methods` says what is compared, `tasks` what is trained, and `report` makes tables and a
figure of the record.
"""
