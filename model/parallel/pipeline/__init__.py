"""A network as a pipeline of processes, a stage in each.

In: the same network in each process. Out: a runner for each; the one of the first rank takes batches and answers.

    pipelined           compares the processes, cuts, balances by measured times, connects: the front door
    runner              a request: announced, sent through the schedule, answers collected
    exchange            PyTorch's schedule, announcements before it and answers beside it; a thread for what may wait
    stage               what PyTorch's PipelineStage runs for each micro-batch; stage_graph is the same as a CUDA graph
    answered            the network cut for stages anywhere, and answers of a stage: decided on its device, told apart
                        on the host
"""
