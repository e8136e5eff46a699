"""Triton kernels of auxhead, plain PyTorch references beside them, and the choice of launch configurations.

In: a head's input ([N, C, H, W], [N, T, D] or [N, D]), weight, bias, temperature and threshold. Out: a ``HeadOutput``,
or from ``ExitLaunch`` one answer per sample, merged over the exits of a network.

    jit/           every Triton function: exits has the kernel of all heads, head says which of its stages (pool,
                   product, decide, of many classes slices) a program does; numbers pass between programs by hand_over;
                   pack has the kernel that pools for it where that is sooner
    reference/     the same in plain PyTorch, and what they mean: a head with its answer and gradients, criteria, hidden
                   layers, merge (what an answer of a network is)
    launch/        checked arguments, the sizes that decide, the chosen LaunchConfig (an override, a tuned table or the
                   rule, by which a library may multiply), memory of programs, residency (where and when they run)
    before_launch  what may come before the launch of a head: one that packs its features, or PyTorch's operations
    noted          remembers a launch, which model/heads/driver_launch.py makes again by CUDA's driver
    cuda/          CUDA's runtime, and lifetimes of what it gives
    fused_head     the operator: one head, one launch, and what may come before it
    exits          the heads of a network in one launch, behind what may come before it; answers merged on the device
    compaction     open samples move into a smaller batch
    max_pool       max-pooling of channels_last maps
    attention      attention over few tokens
    convolution    convolutions of channels_last maps, with what follows
    early_start    lets a launch of these begin while the one before it ends

To add a criterion: see docs/guides/adding.md; tables hold then, by a line there, since other heads compile as before.
"""

from .attention import attend
from .convolution import FOLLOWING, fused_conv2d, takes_convolution
from .exits import ExitBuffers, ExitHead, ExitLaunch
from .fused_head import fused_head, runs_triton
from .launch.launch_config import LaunchConfig
from .max_pool import max_pool2d
from .reference.criteria import CRITERIA
from .reference.fused_head import HeadOutput, decide, fused_head_reference
from .reference.hidden_layers import ACTIVATIONS, HiddenLayers
from .reference.merge import Merged, decide_in_order, in_order, merge

__all__ = [
    "ACTIVATIONS", "CRITERIA", "FOLLOWING", "ExitBuffers", "ExitHead", "ExitLaunch", "HeadOutput", "HiddenLayers",
    "LaunchConfig", "Merged", "attend", "decide", "decide_in_order", "fused_conv2d", "fused_head",
    "fused_head_reference", "in_order", "max_pool2d", "merge", "runs_triton", "takes_convolution",
]  # fmt: skip
