"""``auxhead-tune overlap``: how much of the heads' time the trunk hides, and how much room they may take beside it.

In: a network. Out: records of overlap and of footprints, and of the kernels of one replay, which figures draw.
"""
