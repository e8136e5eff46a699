"""``auxhead-tune heads``: fused heads measured alone, beside plain PyTorch and torch.compile.

In: a network, or a seed that heads are drawn from. Out: records of their times; ``sweep`` and ``overlap`` launch heads
by the same code.
"""
