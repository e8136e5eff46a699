"""Modules, taps and runners: a network that leaves early."""

from ..kernels import HeadOutput
from .auto_runner import AutoRunner
from .calibration import Calibration, calibrate
from .compacting_runner import CompactingRunner
from .eager_runner import EagerRunner
from .early_exit_network import EarlyExitNetwork
from .exit_result import ExitResult
from .exit_rule import ExitRule
from .fuse_aux_heads import FuseReport, fuse_aux_heads
from .fused_aux_head import FusedAuxHead
from .gated_runner import GatedRunner
from .make_runner import make_runner
from .overlapped_runner import OverlappedRunner
from .polled_runner import PolledRunner
from .trunk import Trunk, make_trunk

__all__ = [
    "AutoRunner",
    "Calibration",
    "CompactingRunner",
    "EagerRunner",
    "EarlyExitNetwork",
    "ExitResult",
    "ExitRule",
    "FuseReport",
    "FusedAuxHead",
    "GatedRunner",
    "HeadOutput",
    "OverlappedRunner",
    "PolledRunner",
    "Trunk",
    "calibrate",
    "fuse_aux_heads",
    "make_runner",
    "make_trunk",
]
