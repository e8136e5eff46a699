"""``auxhead-tune plan``: measures and prints the choice that ``exits="auto"`` makes for a network.

In: a network. Out: tables of all candidates.
"""
