"""Training of early-exit networks: one loop for all exits or heads alone, its losses, and data sets of images.

In: a network and images with labels. Out: the network trained in place. ``auxhead train`` does it from the shell.
"""
