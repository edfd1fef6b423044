"""What each process of a job is doing, in small files that `bagua top` reads.

    status      one process: its rank, step, rates, call and state, as JSON
    writer      the thread that writes the file of this process once a second
    reading     the files of a job, and whether their processes still run
    findings    what is wrong with a job, in words
    table       the ranks of a job as lines of text, for a terminal of any width

Ranks write and never answer, so that the files go on while a rank hangs in a call.
"""
