"""Last layer of a head with a hidden one, multiplied by the program that decides about a sample; see head.py."""

import triton
import triton.language as tl

from .decide import decide, logits_block
from .hidden_layers import activated
from .product import weight_block


@triton.jit
def decide_by_hidden(product, sums, bias, rule, last, output, off_n, pid_n, N, CONFIG: tl.constexpr):
    """Decide about sample ``pid_n``, whose hidden features, all in one block, are sums as ``decide`` takes logits'."""
    last_weight, last_bias, logits = last
    weight, stride_lk, stride_lh = last_weight
    K: tl.constexpr = CONFIG.classes
    BLOCK_L: tl.constexpr = CONFIG.block_l
    off_h = tl.arange(0, CONFIG.block_j)
    mask_h = off_h < CONFIG.rows
    off_l = tl.arange(0, BLOCK_L)
    column = weight + off_h.to(tl.int64) * stride_lh
    rows = weight_block(column, stride_lk, mask_h, off_l, K)  # on its way while sums are
    hidden = logits_block(product, sums, bias, off_n, off_h, N, CONFIG.rows, CONFIG.hands_over, CONFIG.block_s)
    hidden = tl.where(mask_h[None, :], activated(hidden, CONFIG.activation), 0.0)
    if BLOCK_L >= K:
        product = tl.sum(rows.to(tl.float32) * hidden, axis=1)[None, :]
        decide(product, None, last_bias, rule, output, off_n, N, K, CONFIG.criterion, False, 1, BLOCK_L)
    else:
        row = logits + tl.cast(pid_n, tl.int64) * K
        for start_l in range(0, K, BLOCK_L):
            off_l = start_l + tl.arange(0, BLOCK_L)
            following = weight_block(column, stride_lk, mask_h, off_l + BLOCK_L, K)
            tl.store(row + off_l, tl.sum(rows.to(tl.float32) * hidden, axis=1), mask=off_l < K)
            rows = following
        tl.debug_barrier()  # threads read what others stored
        sums = (logits, 0, K, 1, K, 1)
        decide(None, sums, last_bias, rule, output, off_n, N, K, CONFIG.criterion, False, 1, CONFIG.block_d)
