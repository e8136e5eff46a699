"""Training of early-exit networks: the loss of all exits, the loop, and data sets of images.

In: a network and images with labels. Out: the network trained in place, and the splits it was trained on.
"""
