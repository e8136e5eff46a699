"""Ways to run a backbone under its heads: as it is, on cuDNN's fused convolutions, or through Inductor.

In: the user's backbone and its taps. Out: a ``Trunk`` with the same taps.
"""
