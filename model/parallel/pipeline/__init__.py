"""A network as a pipeline of processes, a stage in each.

In: the same network in each process. Out: a runner for each; the one of the first rank takes batches and answers.

    pipelined           compares the processes, cuts, balances by measured times, connects: the front door
    runner              a request: announced, sent through the schedule, its answer collected
    exchange            PyTorch's schedule, announcements before it and answers behind it
    stage               what PyTorch's PipelineStage runs for each micro-batch; stage_graph is the same as a CUDA graph
    wire                what stages hand on, as bytes
    answers             what goes along with samples: decided on each stage's device, told apart on the first
"""
