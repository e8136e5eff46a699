"""The Triton kernels of auxhead, their plain PyTorch references and their launch configurations."""

from .compaction import Answer, collect, destination, gather_open, moves_rows, new_destinations
from .criteria import CRITERIA, check_criterion, check_temperature, check_threshold
from .exit_launch import ExitBuffers, ExitHead, ExitLaunch
from .fused_head import fused_head, runs_triton
from .fused_head_reference import decide, fused_head_reference, pooled_features
from .head_arguments import POOLS, check_input, check_pool
from .head_output import HeadOutput
from .launch_config import LaunchConfig
from .max_pool import max_pool2d

__all__ = [
    "CRITERIA",
    "POOLS",
    "Answer",
    "ExitBuffers",
    "ExitHead",
    "ExitLaunch",
    "HeadOutput",
    "LaunchConfig",
    "check_criterion",
    "check_input",
    "check_pool",
    "check_temperature",
    "check_threshold",
    "collect",
    "decide",
    "destination",
    "fused_head",
    "fused_head_reference",
    "gather_open",
    "max_pool2d",
    "moves_rows",
    "new_destinations",
    "pooled_features",
    "runs_triton",
]
