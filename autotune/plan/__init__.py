"""``auxhead-tune plan``: measures and prints the choice that ``exits="auto"`` makes, or how to use several GPUs.

In: a network. Out: tables of all candidates on this GPU; with ``--devices N``, of layouts on N GPUs, predicted.
"""
