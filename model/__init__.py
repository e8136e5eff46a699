"""Modules, taps and runners: a network that leaves early."""

from ..kernels import HeadOutput
from .eager_runner import EagerRunner
from .early_exit_network import EarlyExitNetwork
from .exit_result import ExitResult
from .exit_rule import ExitRule
from .fuse_aux_heads import FuseReport, fuse_aux_heads
from .fused_aux_head import FusedAuxHead

__all__ = [
    "EagerRunner",
    "EarlyExitNetwork",
    "ExitResult",
    "ExitRule",
    "FuseReport",
    "FusedAuxHead",
    "HeadOutput",
    "fuse_aux_heads",
]
