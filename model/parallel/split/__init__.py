"""A network split over the devices of one process, each with a part; answered samples stop the rest of the network.

In: a network and devices. Out: a runner, which sends a batch through the parts, one after the other.

    parallelize         checks, cuts, places, captures: the front door; arguments reads devices and balance
    runner              the base of both runners, on that of all that answer one request at a time
    eager_runner        runs parts on CPUs
    graph_runner        launches parts on GPUs
    part                consecutive segments with their heads, on one device
    streams             streams, memory and events of a part on its GPU
    graphs              a part as CUDA graphs for one batch size
    captured            the graphs of all parts in their order, and the copies between devices
    capturing           captures them, by measured times of the segments
"""
