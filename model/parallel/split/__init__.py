"""A network split over the devices of one process, each with a part; answered samples stop the rest of the network.

In: a network and devices. Out: a runner, which sends a batch through the parts, one after the other.

    parallelize         checks, cuts, places, captures: the front door
    runner              both runners and their base: one runs parts on CPUs, one launches them on GPUs
    part                consecutive segments with their heads on one device; on a GPU with streams, memory and events
    graphs              a part as CUDA graphs for one batch size
    captured            the graphs of all parts in their order, the copies between devices, and capturing them
"""
