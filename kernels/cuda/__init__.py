"""CUDA's runtime and driver, called directly where PyTorch and Triton pass nothing on; lifetimes of what they give."""
