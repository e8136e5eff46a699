"""Plain PyTorch beside every kernel: the definitions that the Triton functions of ``jit/`` are tested against.

In: tensors on any device. Out: the same numbers as the kernel of that name, up to rounding.
"""
