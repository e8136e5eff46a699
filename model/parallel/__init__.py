"""One network over several devices: split among those of one process, or as a pipeline of processes, a device each.

In: a network with early exits. Out: a runner that gives the answers of the network on one device.

    parallelize         one process drives all devices: the front door; its trunk is a split_trunk
    pipeline/           pipelined: a process a device, each with a stage of the network

    cut                 what each segment between taps reads; parts placed on devices
    balance             times and bytes of segments, and where parts begin by them
"""
