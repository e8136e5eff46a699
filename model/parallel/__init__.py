"""One network over several devices: split among those of one process, or as a pipeline of processes, a device each.

In: a network with early exits. Out: a runner that gives the answers of the network on one device. The two rooms know
nothing of each other; both stand on the modules here:

    split/              parallelize: one process drives all devices, each with a part of the network
    pipeline/           pipelined: a process a device, each with a stage of the network

    segments            the backbone cut at its taps, and dealt to parts or stages by times of segments
"""
