"""One network over several devices: split among those of one process, or as a pipeline of processes, a device each.

In: a network with early exits. Out: a runner that gives the answers of the network on one device. The two rooms know
nothing of each other's runners; both stand on what is here:

    split/              parallelize: one process drives all devices, each with a part of the network
    pipeline/           pipelined: a process a device, each with a stage of the network

    segments            the backbone cut at its taps
    placement           which stage or part has which segments, and where merging pays, by measured times
"""
