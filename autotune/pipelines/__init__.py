"""Networks as pipelines over several GPUs, measured by ``auxhead-tune bench --devices 2``.

In: a ResNet, batch and micro-batch sizes. Out: records of images a second, with the times of stages and links that
bound them, and timelines of all GPUs. The command starts a process for each GPU; the first one runs the baselines.

    run          starts the processes, prints the tables
    rank         the program of each process
    plan         what they measure, handed to them as JSON
    measure      builds, checks and times all variants in turns
    variants     the variants: one GPU, the two networks of PyTorch's tutorial, ours
    bound        times of stages and links, and the throughput that these allow
    timelines    kernels of all GPUs in one request
    records, tables
"""
