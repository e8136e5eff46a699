"""A network's answer whose heads are launched one by one and merged by PyTorch: a truth for those in one launch."""

from auxhead.model import EarlyExitNetwork, ExitResult, Trunk
from auxhead.model.network.eager_pass import run_eagerly
from torch import Tensor


def one_by_one(network: EarlyExitNetwork, x: Tensor, *, trunk: Trunk | None = None, stop: bool = False) -> ExitResult:
    """Answer for a batch with the backbone as ``trunk``, where there is one."""
    network.check_taps(x)
    backbone, classifier = network.backbone, None
    if trunk is not None:
        backbone, classifier = trunk.module, trunk.classifier
        x = x.contiguous(memory_format=trunk.memory_format)
    return run_eagerly(backbone, network.taps, network.exit_heads, x, classifier=classifier, stop=stop)
