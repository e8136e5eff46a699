"""``auxhead-tune overlap``: how much of the heads' time lies under the trunk's kernels, and how much room they may take.

In: a network. Out: records of overlap, and of the kernels of one replay, which the timeline figure draws; of footprints.
"""
