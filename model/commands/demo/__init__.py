"""``auxhead demo``: trains a small ResNet-18 with eight heads, calibrates it, and lets real images leave early.

In: images with labels. Out: a checkpoint, ``report.json`` and a figure. ``auxhead infer`` answers with the checkpoint.
"""
