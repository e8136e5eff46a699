"""Training of early-exit networks: the loss of all exits, the loop, and data sets of images."""
