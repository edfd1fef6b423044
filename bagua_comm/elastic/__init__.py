"""Training that goes on when ranks die.

fleet    the processes of a job: who lives, how they meet, how they become a communicator
"""
