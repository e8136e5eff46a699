"""One network over several devices: split among those of one process, or as a pipeline of processes, a device each.

In: a network with early exits. Out: a runner that gives the answers of the network on one device.

    parallelize         one process drives all devices: the front door
    split_trunk         its trunk: parts of a backbone on several devices, run and captured as one
    pipeline/           pipelined: a process a device, each with a stage of the network

    cut                 a network in segments (model/listening/segments.py), placed on devices
    balance             times and bytes of segments, and where parts begin by them
"""
