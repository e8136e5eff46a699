"""Triton kernel of one fused head in one launch, and its launcher, which the operator calls."""

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..head_output import HeadOutput
from ..launch.arrival_counters import arrival_counters
from ..launch.head_view import HeadView
from ..launch.launch_config import LaunchConfig
from ..launch.layer_arguments import first_layer, last_layer, norm_arguments
from ..launch.residency import new_turns
from ..launch.workspace import Workspace
from ..reference.criteria import number_of
from ..reference.hidden_layers import NO_LAYERS, HiddenLayers
from .head_stages import INTERPRETED, draw_ticket, head_program
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


_compiled: dict[tuple[Hashable, ...], Any] = {}


def launch_fused_head(
    x: Tensor,
    view: HeadView,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor | float,
    threshold: Tensor | float,
    *,
    pool_max: bool,
    return_probs: bool,
    config: LaunchConfig,
    criterion: str = "max_prob",
    hidden: HiddenLayers = NO_LAYERS,
) -> HeadOutput:
    """Run the kernel once on arguments that ``fused_head`` has checked; N is at least 1.

    ``view`` is that of x; temperature and threshold are floats or one-element tensors on its device. The other
    arguments are those of :func:`auxhead.kernels.fused_head`.
    """
    samples, channels, height, width = view.shape
    classes = weight.shape[0]
    rows = hidden.first_weight(weight).shape[0]
    programs = config.programs(view, rows)
    probs = x.new_empty((samples, classes), dtype=torch.float32) if return_probs else None
    label = x.new_empty(samples, dtype=torch.int64)
    confidence = x.new_empty(samples, dtype=torch.float32)
    exits = x.new_empty(samples, dtype=torch.bool)
    zeros = arrival_counters(x.device).take(programs.zeroed + 1)
    bounded = 0 < config.max_programs < programs.total
    grid = config.max_programs if bounded else programs.total
    residency = new_turns(programs.total, grid, config.num_warps, x.device)
    with torch.cuda.device_of(x):
        arguments = (
            x, *view.strides,
            *first_layer(weight, bias, hidden),
            temperature, threshold,
            probs, label, confidence, exits,
            *Workspace.of(config, programs, zeros[:-1]), zeros[-1:], programs.total, residency,
            samples, channels, height, width, rows,
            view.grid_h, view.grid_w, view.window_h, view.window_w, programs.splits,
            pool_max, view.positions == config.block_p == 1,
            INTERPRETED,
            isinstance(temperature, Tensor), isinstance(threshold, Tensor),
            config.block_n, config.block_c, config.block_p, config.block_a,
            config.block_f, config.block_k, config.block_s, config.block_j,
            rows <= config.block_j, config.window_parts, config.stages,
            config.multiplies_alone(view, rows), config.hands_over,
            config.weight_buffers, bounded, number_of(criterion),
            hidden.rectifies, hidden.eps is not None, norm_arguments(hidden), last_layer(weight, bias, hidden, samples),
            classes, hidden.activation_number,
        )  # fmt: skip
        # Everything by which Triton chooses a compiled kernel; its own look-up is half of a launch's time on the host.
        parameters = (weight, bias, *(tensor for _, tensor in hidden.tensors()))
        pointers = tuple(t is None or t.data_ptr() % 16 for t in (x, *parameters))
        rules = tuple(t.data_ptr() % 16 if isinstance(t, Tensor) else None for t in (temperature, threshold))
        strides = tuple(t is None or t.stride() for t in parameters)
        key = (
            x.device, x.dtype, view, classes, strides, pointers, rules, pool_max, return_probs, config,
            residency is None, criterion, hidden.rectifies, hidden.eps is None, rows, hidden.activation_number,
        )  # fmt: skip
        compiled = _compiled.get(key)
        if compiled is not None:
            compiled[(grid, 1, 1)](*arguments)
        else:
            _compiled[key] = fused_head_kernel[(grid,)](
                *arguments, num_warps=config.num_warps, maxnreg=config.register_limit
            )
    return HeadOutput(probs, label, confidence, exits)
