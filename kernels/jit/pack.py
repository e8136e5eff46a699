"""Triton kernel that packs features of heads: pools maps, or puts their elements in the weights' order, for a launch.

    features[n, (c * GRID_H + i) * GRID_W + j] = pool of x[n, c] over window (i, j)

Programs that only pool take few registers and little shared memory, so that many run at the same time: within the
launch that multiplies they would have the room of its programs, and read the map at half the speed (H100).
"""

import triton
import triton.language as tl

from .hidden_layers import rectified
from .norm import position_offsets
from .pool import pooled_block, pooled_features
from .read_product import step_blocks


@triton.jit
def pack_kernel(
    packed,  # of each head: a map and its strides, see ``HeadArguments``; features [N, C * GRID_H * GRID_W]; sizes
    starts,  # of each its first program, and their number; None if there is one head
    PACKS: tl.constexpr,  # PackLaunchConstants
):
    """Pack a block of features of one head, or find the head among several; ``packed_features`` has sized all."""
    pid = tl.program_id(0)
    if len(PACKS.heads) == 1:
        pack_block(pid, packed[0], 0, PACKS)
    else:
        for i in tl.static_range(len(PACKS.heads)):
            if (pid >= starts[i]) & (pid < starts[i + 1]):
                pack_block(pid - starts[i], packed[i], i, PACKS)


@triton.jit
def pack_block(pid, packed, i: tl.constexpr, PACKS: tl.constexpr):
    """Pack the block of features of program ``pid`` of a head."""
    x, features, sizes = packed
    CONFIG: tl.constexpr = PACKS.heads[i]
    C, _, _, GRID_H, GRID_W, _, _ = sizes
    positions = GRID_H * GRID_W
    blocks = tl.cdiv(C, CONFIG.block_c) * tl.cdiv(positions, CONFIG.block_p)
    pid_n = pid // blocks
    pid_block = pid % blocks
    row = features + tl.cast(pid_n, tl.int64) * (C * positions)
    if CONFIG.transposes:
        put_in_order(x, pid_n, pid_block, row, sizes, CONFIG)
    else:
        block = pooled_block(pid_block, sizes, CONFIG)
        _, _, off_c, off_p, mask_f = block
        pooled = pooled_features(x, pid_n, block, sizes, CONFIG)
        off_f = off_c.to(tl.int64) * positions + off_p
        tl.store(row + off_f, pooled.to(features.dtype.element_ty), mask=mask_f)


@triton.jit
def put_in_order(x, pid_n, pid_block, row, sizes, CONFIG: tl.constexpr):
    """Store a block of a sample's features, which have channels side by side in x, in the weight's order."""
    x, stride_xn, stride_xc, stride_xh, stride_xw = x
    C, _, _, GRID_H, GRID_W, _, _ = sizes
    off_c, off_p = step_blocks(pid_block, sizes, CONFIG)
    position = position_offsets(off_p, GRID_W, stride_xh, stride_xw)
    pointer = x + tl.cast(pid_n, tl.int64) * stride_xn + position[:, None] + (off_c.to(tl.int64) * stride_xc)[None, :]
    mask = (off_p < GRID_H * GRID_W)[:, None] & (off_c < C)[None, :]
    block = tl.trans(tl.load(pointer, mask=mask, other=0.0))
    if CONFIG.rectifies:
        block = rectified(block.to(tl.float32)).to(block.dtype)
    pointer = row + (off_c.to(tl.int64) * (GRID_H * GRID_W))[:, None] + off_p[None, :]
    tl.store(pointer, block, mask=tl.trans(mask))
