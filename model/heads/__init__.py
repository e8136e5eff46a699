"""Heads: fused ones in one launch, modules as they are, and a user's classifiers that fused heads stand in for.

In: a tap's output. Out: a ``HeadOutput``, or logits.
"""
