"""Checkpoints: a network's rules, heads and parameters on disk, complete or absent, and networks made of them again.

In: a network, or the folder it was saved to. Out: ``model.json`` and the parameters it points to, or the same network.
"""
