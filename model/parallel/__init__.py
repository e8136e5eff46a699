"""One network over several processes, a device each, as a pipeline of stages that drops samples once they are answered.

In: a network with early exits, the same in every process, and a process group. Out: a runner that gives the answers of
the network on one device, on the first rank.

    pipelined           compares the processes, cuts, places, connects: the front door
    pipelined_runner    a request: announced, sent through the schedule, answers collected
    stage               what PyTorch's PipelineStage runs for each micro-batch; stage_graph is the same as a CUDA graph
    survivors           open samples of several micro-batches as full ones
    answered            samples answered by a stage, on the host
    segments            the backbone cut at its taps
    placement           which stage has which segments, and where merging pays, by measured times
    worker              a thread for what may wait for other processes
"""
