"""Networks as pipelines over several GPUs: what they reach, measured and predicted.

In: times of stages, links and exits. Out: images a second.
"""
