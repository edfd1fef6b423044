"""Programs that measure the library, and their results. Run each as a module, from the root of the repository.

    benchmarks.collectives          times of collectives, beside mpi4py, gloo and textbook algorithms
    benchmarks.latency              the cost of a call, beside mpi4py, from 4 bytes on
    benchmarks.halos                halos of a grid of ranks, beside mpi4py's Sendrecv with derived datatypes
    benchmarks.codecs               the speed of codecs on this machine's processor
    benchmarks.codec_quality        the error of one coding by each codec, of random numbers and gradients
    benchmarks.first_run            the cost of a first training, while kernels are compiled
    benchmarks.fused                optimizer steps of many small tensors, beside PyTorch's implementations
    benchmarks.training             training speed of models by each algorithm, beside PyTorch's
    benchmarks.training.links       training speed over several TCP connections between two ranks
    benchmarks.training.tuner       whether the tuner finds the fastest settings
    benchmarks.training.costmodel   whether the cost model predicts what was measured
    benchmarks.training.scaling     steps on 2 to 8 emulated hosts, whose computation is a sleep
    benchmarks.training.simulator   whether the simulator predicts what was measured, and steps on 4,096 ranks
    benchmarks.hooks                the cost of the hooks of DistributedDataParallel, beside PyTorch's
    benchmarks.convergence          quality of the models that each algorithm trains
    benchmarks.data                 balance of work by samplers, and time that a cache of samples saves
    benchmarks.faults               whether trainings continue when ranks and hosts die, and how soon
    benchmarks.soak                 an hour of training under kills, stops and bad links; whether anything grows
    benchmarks.many                 64 and 128 ranks on this machine: start, steps, memory
    benchmarks.net                  the network plugin beside NCCL's socket scheme
    benchmarks.net_check            a million messages through the plugin, also through checked builds
    benchmarks.gpu                  all checks and measurements that need a GPU
    benchmarks.netlab               emulated hosts with slow links, to run the others on
    benchmarks.figures              all figures about networks, shared memory and codecs again

Shared code is in benchmarks/bench, results are in benchmarks/results.
"""
