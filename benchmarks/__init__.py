"""Programs that measure the library, and their results. Run each as a module, from the root of the repository.

    benchmarks.collectives          how long collectives take, beside those of mpi4py, gloo and textbooks
    benchmarks.latency              what a call costs beside mpi4py's own, from 4 bytes on
    benchmarks.codecs               how fast codecs are on this machine's processor
    benchmarks.first_run            what training costs while kernels are compiled for the first time
    benchmarks.fused                how fast optimizers step many small tensors, beside PyTorch's own ways
    benchmarks.training             how fast models train by each algorithm, beside PyTorch's own
    benchmarks.training.links       how fast a model trains over several TCP connections between two ranks
    benchmarks.training.tuner       whether the tuner finds the fastest settings
    benchmarks.training.costmodel   whether the cost model predicts what was measured
    benchmarks.hooks                what the hooks of DistributedDataParallel cost, beside PyTorch's own
    benchmarks.convergence          how good the models are that each algorithm ends with
    benchmarks.data                 how even samplers make the work of ranks, and what a cache of samples saves
    benchmarks.faults               whether trainings go on when ranks and hosts die, and how soon
    benchmarks.net                  the network plugin beside NCCL's own scheme
    benchmarks.net_check            a million messages through the plugin, also through checked builds
    benchmarks.gpu                  all checks and measurements that need a GPU
    benchmarks.netlab               emulated hosts with slow links, to run the others on
    benchmarks.figures              all figures about networks, shared memory and codecs again

What the programs share lies in benchmarks/bench, and what they have found in benchmarks/results.
"""
