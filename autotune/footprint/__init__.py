"""``auxhead-tune footprint``: what heads add to the trunk's time against how much of the GPU they take.

In: a network. Out: records of launches that take more and more of the multiprocessors.
"""
