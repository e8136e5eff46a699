"""``auxhead-tune pareto``: accuracy against time to the answer, for every runner under several sets of thresholds.

In: a checkpoint of ``auxhead demo``. Out: records of accuracy and times.
"""
