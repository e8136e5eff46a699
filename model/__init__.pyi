from ..kernels import HeadOutput as HeadOutput
from .accelerate import Accelerated as Accelerated
from .accelerate import accelerate as accelerate
from .auto.auto_runner import AutoRunner as AutoRunner
from .calibration.thresholds import Calibration as Calibration
from .calibration.thresholds import calibrate as calibrate
from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .early_exit_network import EarlyExitNetwork as EarlyExitNetwork
from .exit_result import ExitResult as ExitResult
from .exit_rule import ExitRule as ExitRule
from .fuse_aux_heads import FuseReport as FuseReport
from .fuse_aux_heads import fuse_aux_heads as fuse_aux_heads
from .fused_aux_head import FusedAuxHead as FusedAuxHead
from .make_runner import make_runner as make_runner
from .own_exits.attach_exits import attach_exits as attach_exits
from .runners.compacting import CompactingRunner as CompactingRunner
from .runners.eager import EagerRunner as EagerRunner
from .runners.gated import GatedRunner as GatedRunner
from .runners.overlapped import OverlappedRunner as OverlappedRunner
from .runners.polled import PolledRunner as PolledRunner
from .runners.runner import Runner as Runner
from .trunk.trunk import Trunk as Trunk
from .trunk.trunk import make_trunk as make_trunk

__version__: str
