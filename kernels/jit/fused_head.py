"""Triton kernel of one fused head in one launch; kernels/fused_head.py launches it."""

import triton
import triton.language as tl

from .head_stages import draw_ticket, head_program
from .residency import clock, record_turn


@triton.jit
def fused_head_kernel(
    x, stride_xn, stride_xc, stride_xh, stride_xw,
    weight, stride_wk, stride_wf,
    bias, stride_bk,
    temperature, threshold,
    probs, label, confidence, exits,
    features, partial, arrived, tickets, total, residency,
    N, C, H, W, K: tl.constexpr, GRID_H, GRID_W, WINDOW_H, WINDOW_W, SPLITS: tl.constexpr,
    POOL_MAX: tl.constexpr, ONE_WINDOW: tl.constexpr, INTERPRETED: tl.constexpr,
    TEMPERATURE_TENSOR: tl.constexpr, THRESHOLD_TENSOR: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr,
    ONE_BLOCK: tl.constexpr, WINDOW_PARTS: tl.constexpr, STAGES: tl.constexpr, ALONE: tl.constexpr,
    WAITS: tl.constexpr, WEIGHT_BUFFERS: tl.constexpr, BOUNDED: tl.constexpr, CRITERION: tl.constexpr,
    RECTIFIES: tl.constexpr, NORMS: tl.constexpr, norm, last, CLASSES: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Run one head; see head_program for most arguments.

    ``total``: pieces of work, one a program; if BOUNDED there are fewer programs, which go on until all is done.
    ``residency``: ``Residency.turns`` or None.
    """
    if residency is not None:
        start = clock(INTERPRETED)
    if BOUNDED:
        last_ticket = tl.num_programs(0) - 1 + total
        pid = draw_ticket(tickets, last_ticket)
        while pid < total:
            head_program(
                pid, x, stride_xn, stride_xc, stride_xh, stride_xw, weight, stride_wk, stride_wf,
                bias, stride_bk, temperature, threshold, probs, label, confidence, exits, features, partial, arrived,
                N, C, H, W, K, GRID_H, GRID_W, WINDOW_H, WINDOW_W, SPLITS,
                POOL_MAX, ONE_WINDOW, INTERPRETED, TEMPERATURE_TENSOR, THRESHOLD_TENSOR, BLOCK_N, BLOCK_C, BLOCK_P,
                BLOCK_A, BLOCK_F, BLOCK_K, BLOCK_S, BLOCK_J, ONE_BLOCK, WINDOW_PARTS, STAGES, ALONE, WAITS,
                WEIGHT_BUFFERS, CRITERION, RECTIFIES, NORMS, norm, last, CLASSES, ACTIVATION,
            )  # fmt: skip
            if residency is not None:
                start = record_turn(residency, pid, start, INTERPRETED)
            pid = draw_ticket(tickets, last_ticket)
    else:
        pid = tl.program_id(0)
        head_program(
            pid, x, stride_xn, stride_xc, stride_xh, stride_xw, weight, stride_wk, stride_wf,
            bias, stride_bk, temperature, threshold, probs, label, confidence, exits, features, partial, arrived,
            N, C, H, W, K, GRID_H, GRID_W, WINDOW_H, WINDOW_W, SPLITS,
            POOL_MAX, ONE_WINDOW, INTERPRETED, TEMPERATURE_TENSOR, THRESHOLD_TENSOR, BLOCK_N, BLOCK_C, BLOCK_P, BLOCK_A,
            BLOCK_F, BLOCK_K, BLOCK_S, BLOCK_J, ONE_BLOCK, WINDOW_PARTS, STAGES, ALONE, WAITS, WEIGHT_BUFFERS,
            CRITERION, RECTIFIES, NORMS, norm, last, CLASSES, ACTIVATION,
        )  # fmt: skip
        if residency is not None:
            record_turn(residency, pid, start, INTERPRETED)
