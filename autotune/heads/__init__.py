"""``auxhead-tune heads``: fused heads measured alone, beside plain PyTorch and torch.compile, and in situ.

In: a network. Out: records of its heads' times; ``sweep`` and ``overlap`` launch heads by the same code.
"""
