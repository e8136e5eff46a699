"""Triton functions: all that the GPU runs, and nothing else; tuned tables belong to what these compile to."""
