"""Studies: what the authors measure for a figure, and users need not; in the repository only, not in the wheel.

In: a network known by name. Out: records, in the format of all others.
"""
