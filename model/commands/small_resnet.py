"""``resnet18_small``: ResNet-18 for small images, which checkpoints name, with a head behind each of its blocks."""

from torch import nn

from ..heads.fused_aux_head import FusedAuxHead
from ..network.early_exit_network import EarlyExitNetwork

#: How checkpoints name :func:`resnet18_small`.
BACKBONE = "auxhead.model.commands.small_resnet:resnet18_small"

#: The eight residual blocks, in the order in which they run.
BLOCKS = tuple(f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1))

#: Channels of what each block returns.
WIDTHS = (64, 64, 128, 128, 256, 256, 512, 512)


def resnet18_small(num_classes: int) -> nn.Module:
    """Return torchvision's ResNet-18 with the usual stem for small images, freshly initialised.

    The first convolution is 3x3 with stride 1 and there is no max-pool, so that a 16x16 image is still 16x16 in layer1
    and 2x2 in layer4. It turns images [N, 3, H, W] into logits [N, num_classes].
    """
    from torchvision.models import resnet18  # takes a second: commands that build nothing need not wait for it

    network = resnet18(num_classes=num_classes)
    network.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision does
    network.maxpool = nn.Identity()
    return network


def small_early_exit_network(num_classes: int) -> EarlyExitNetwork:
    """Return ``resnet18_small`` with a head (average pool, linear) behind each of ``BLOCKS``; no head exits yet."""
    backbone = resnet18_small(num_classes)
    heads = {tap: FusedAuxHead(width, num_classes) for tap, width in zip(BLOCKS, WIDTHS, strict=True)}
    return EarlyExitNetwork(backbone, heads)
