"""Programs that measure the library, and their results. Run each as a module, from the root of the repository.

    benchmarks.collectives          how long collectives take, beside those of mpi4py, gloo and textbooks
    benchmarks.codecs               how fast codecs are on this machine's processor
    benchmarks.first_run            what training costs while kernels are compiled for the first time
    benchmarks.fused                how fast optimizers step many small tensors, beside PyTorch's own ways
    benchmarks.training             how fast models train by each algorithm, beside PyTorch's own
    benchmarks.training.tuner       whether the tuner finds the fastest settings
    benchmarks.training.costmodel   whether the cost model predicts what was measured
    benchmarks.convergence          how good the models are that each algorithm ends with
    benchmarks.data                 how even samplers make the work of ranks, and what a cache of samples saves
    benchmarks.faults               whether trainings go on when ranks and hosts die, and how soon
    benchmarks.gpu                  all checks and measurements that need a GPU
    benchmarks.netlab               emulated hosts with slow links, to run the others on
    benchmarks.figures              all figures about networks, shared memory and codecs again

What the programs share lies in benchmarks/bench, and what they have found in benchmarks/results.
"""
