"""Networks with early exits, the heads they consist of, and the runners that answer fast."""

from ..kernels import HeadOutput
from .auto.auto_runner import AutoRunner
from .calibration.thresholds import Calibration, calibrate
from .checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from .early_exit_network import EarlyExitNetwork
from .exit_result import ExitResult
from .exit_rule import ExitRule
from .fuse_aux_heads import FuseReport, fuse_aux_heads
from .fused_aux_head import FusedAuxHead
from .make_runner import make_runner
from .runners.compacting import CompactingRunner
from .runners.eager import EagerRunner
from .runners.gated import GatedRunner
from .runners.overlapped import OverlappedRunner
from .runners.polled import PolledRunner
from .runners.runner import Runner
from .trunk.trunk import Trunk, make_trunk

__all__ = [
    "AutoRunner",
    "Calibration",
    "Checkpoint",
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
    "Runner",
    "Trunk",
    "calibrate",
    "fuse_aux_heads",
    "load_checkpoint",
    "make_runner",
    "make_trunk",
    "save_checkpoint",
]
