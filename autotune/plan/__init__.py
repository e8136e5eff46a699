"""``auxhead-tune plan``: what ``exits="auto"`` measures for a network, what it chooses, and why.

In: a network. Out: tables of all candidates.
"""
