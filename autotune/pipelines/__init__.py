"""Networks as pipelines over several GPUs, measured by ``auxhead-tune bench --devices 2``.

In: a ResNet, batch and micro-batch sizes. Out: records of images a second, with the times of stages and links that
bound them, and timelines of all GPUs. The command starts a process for each GPU; the first one runs the baselines.
"""
