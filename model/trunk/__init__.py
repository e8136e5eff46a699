"""Ways to run a backbone under its heads: as it is, on fused convolutions, side by side, or compiled.

In: the user's backbone and its taps. Out: a ``Trunk`` with the same taps.
"""
