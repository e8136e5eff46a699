"""Heads for a model that has none: the layers that may carry one, the choice among them, and the network.

In: a model that returns logits, and a batch. Out: an ``EarlyExitNetwork`` whose heads are new, by ``attach``.
"""
