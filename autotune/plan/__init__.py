"""``auxhead-tune plan``: measures and prints the choice that ``exits="auto"`` makes.

In: a network. Out: tables of all candidates on this GPU.
"""
