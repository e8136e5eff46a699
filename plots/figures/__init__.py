"""The figures: a module each, whose function ``draw`` turns records into a figure; ``registry`` lists them."""
