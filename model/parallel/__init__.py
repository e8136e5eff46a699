"""One network over several devices: in one process, part after part, or as a pipeline of processes.

In: a network with early exits. Out: a runner that gives the answers of the network on one device.

In one process, of which each device runs a part; answered samples stop the rest of the network:

    parallelize         checks, cuts, places, captures: the front door
    split_runner        the way of a request; eager_parts runs parts on CPUs, graph_parts on GPUs
    part                consecutive segments with their heads, on one device
    part_streams        streams, memory and events of a part on its GPU
    part_graphs         a part as CUDA graphs for one batch size
    captured_parts      the graphs of all parts in their order, and the copies between devices
    capture_parts       captures them, by measured times of the segments

A process a device, the same network in each, as a pipeline of stages that drops samples once they are answered; answers
are on the first rank:

    pipelined           compares the processes, cuts, places, connects: the front door
    pipelined_runner    a request: announced, sent through the schedule, answers collected
    exchange            PyTorch's schedule, announcements before it and answers beside it
    stage               what PyTorch's PipelineStage runs for each micro-batch; stage_graph is the same as a CUDA graph
    survivors           open samples of several micro-batches as full ones
    answered            answers of a stage: decided on its device, told apart on the host
    worker              a thread for what may wait for other processes

For both:

    segments            the backbone cut at its taps
    placement           which stage has which segments, and where merging pays, by measured times
"""
