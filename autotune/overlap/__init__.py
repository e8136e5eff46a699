"""``auxhead-tune overlap``: how much of the heads' time the trunk hides.

In: a network. Out: records of overlap, and of the kernels of one replay, which a figure draws.
"""
