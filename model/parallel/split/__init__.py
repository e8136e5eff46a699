"""A network split over the devices of one process, each with a part; answered samples stop the rest of the network.

In: a network and devices. Out: a runner, which sends a batch through the parts, one after the other.

    parallelize         checks, cuts, places, captures: the front door
    runner              launches the graphs of a request
    part                consecutive segments with their heads on one GPU, with streams, memory, events and graphs
    captured            the graphs of all parts in their order, the copies between devices, and capturing them
"""
