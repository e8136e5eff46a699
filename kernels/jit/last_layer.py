"""Last layer of a head with a hidden one, multiplied by the program that decides about a sample, or, large, by tiles.

A tile has ``last_rows`` rows of the weight by ``last_n`` samples, on tensor cores: products of upper and lower halves
of hidden features, together 22 bits in float16 (beyond 65,504 NaN, as in PyTorch), 16 in bfloat16; float32 in three.
It waits for hidden features [N, row_width], which the program that adds a sample's up sends, and sends logits [N,
last_row_width] to the program that decides; both lie in one memory, logits first.
"""

import triton
import triton.language as tl

from .decide import dealt_out, decide, logits_block
from .hand_over import awaited, dot, seen, send
from .hidden_layers import activated
from .pool import known_multiple
from .product import weight_block


@triton.jit
def decide_by_hidden(product, sums, bias, rule, last, output, off_n, N, CONFIG: tl.constexpr):
    """Decide about a sample by its hidden features, which come as logits to ``decide``: as ``product``, or in parts."""
    weight, stride_lk, stride_lh = last[0]
    BLOCK_L: tl.constexpr = CONFIG.block_l
    off_h = tl.arange(0, CONFIG.block_j)
    mask_h = off_h < CONFIG.rows
    column = weight + off_h.to(tl.int64) * stride_lh
    stride_lk = known_multiple(stride_lk, CONFIG.last_unit)
    rows = weight_block(column, stride_lk, mask_h, tl.arange(0, BLOCK_L), CONFIG.classes)  # on its way while sums are
    hidden = logits_block(product, sums, bias, off_n, off_h, N, CONFIG.rows, CONFIG.hands_over, CONFIG.parts_at_once)
    hidden = tl.where(mask_h[None, :], activated(hidden, CONFIG.activation), 0.0)
    if BLOCK_L < 32 or CONFIG.block_j < 16:
        product = tl.sum(rows.to(tl.float32) * hidden, axis=1)[None, :]
    else:  # on tensor cores, as several equal samples: sums over threads would be many instructions
        equal = tl.broadcast_to(tl.trans(hidden), (CONFIG.block_j, 8))
        tile = last_product(rows, equal, tl.zeros((BLOCK_L, 8), tl.float32))
        product = tl.sum(tl.where(tl.arange(0, 8)[None, :] == 0, tile, 0.0), axis=1)[None, :]
        product = dealt_out(product, BLOCK_L)
    decide(product, None, last[1], rule, output, off_n, N, CONFIG.classes, CONFIG.criterion, False, 1, BLOCK_L)


@triton.jit
def last_product(left, right, tile):
    """Add the product of rows of the weight and hidden features [H, BLOCK_N] to a tile; see the module's docstring."""
    if left.dtype == tl.float32:
        return dot(left, right, tile, "tf32x3")
    else:
        upper = right.to(left.dtype)
        tile = dot(left, upper, tile, None)
        return dot(left, (right - upper.to(tl.float32)).to(left.dtype), tile, None)


@triton.jit
def hidden_row(last, off_n, N, CONFIG: tl.constexpr):
    """Return where the hidden features of samples lie."""
    return last[2] + tl.cast(N, tl.int64) * CONFIG.last_row_width + off_n.to(tl.int64) * CONFIG.row_width


@triton.jit
def send_hidden(product, sums, bias, last, off_n, N, CONFIG: tl.constexpr):
    """Send hidden features of a sample, sums as ``decide_by_hidden`` takes them, to the tiles."""
    off_h = tl.arange(0, CONFIG.block_j)
    hidden = logits_block(product, sums, bias, off_n, off_h, N, CONFIG.rows, CONFIG.hands_over, CONFIG.parts_at_once)
    pointer = hidden_row(last, off_n, N, CONFIG)[:, None] + off_h[None, :]
    send(pointer, activated(hidden, CONFIG.activation), (off_h < CONFIG.rows)[None, :])


@triton.jit
def last_tile(pid_tile, last, N, CONFIG: tl.constexpr):
    """Wait for hidden features of a group of samples, multiply them with some rows of the weight, send logits."""
    BLOCK_N: tl.constexpr = CONFIG.last_n
    BLOCK_H: tl.constexpr = CONFIG.block_h
    H: tl.constexpr = CONFIG.rows
    weight, stride_lk, stride_lh = last[0]
    stride_lk = known_multiple(stride_lk, CONFIG.last_unit)
    groups = tl.cdiv(N, BLOCK_N)  # side by side, so that they find the weight in the cache
    off_n = pid_tile % groups * BLOCK_N + tl.arange(0, BLOCK_N)
    off_k = pid_tile // groups * CONFIG.last_rows + tl.arange(0, CONFIG.last_rows)
    mask_n = (off_n < N)[:, None]
    hidden = hidden_row(last, off_n, N, CONFIG)[:, None]
    column = weight + tl.arange(0, BLOCK_H).to(tl.int64) * stride_lh
    tile = tl.full((CONFIG.last_rows, BLOCK_N), 0.0, tl.float32)
    for start_h in tl.range(0, H, BLOCK_H, num_stages=3):
        off_h = start_h + tl.arange(0, BLOCK_H)
        left = weight_block(column, stride_lk, off_h < H, off_k, CONFIG.classes)
        mask = mask_n & (off_h < H)[None, :]
        right = tl.trans(awaited(seen(hidden + off_h[None, :], mask), hidden + off_h[None, :], mask))
        tile = last_product(left, right, tile)
        column += tl.cast(BLOCK_H, tl.int64) * stride_lh
    pointer = last[2] + off_n.to(tl.int64)[None, :] * CONFIG.last_row_width + off_k[:, None]
    send(pointer, tile, (off_n < N)[None, :] & (off_k < CONFIG.last_row_width)[:, None])


@triton.jit
def decide_by_logits(rule, last, output, pid_n, N, CONFIG: tl.constexpr):
    """Wait for logits of sample ``pid_n`` and decide; clear its hidden features, which all tiles have read by then."""
    off_n = pid_n + tl.arange(0, 1)
    sums = (last[2], 0, CONFIG.last_row_width, 1, CONFIG.last_row_width, 1)
    decide(None, sums, last[1], rule, output, off_n, N, CONFIG.classes, CONFIG.criterion, True, 1, CONFIG.block_d)
    off_h = tl.arange(0, CONFIG.block_j)
    pointer = hidden_row(last, off_n, N, CONFIG)[:, None] + off_h[None, :]
    tl.store(pointer, 0, mask=(off_h < CONFIG.rows)[None, :])
