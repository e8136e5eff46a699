"""Heads that are trained or calibrated read their taps as the network does: maps whose channels come last, items."""

import pytest
import torch
from auxhead.model import EarlyExitNetwork, Extract, FusedAuxHead, TrainingPlan, train
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("without_interpreter")


class ChannelsLast(nn.Module):
    """[N, 3, H, W] to [N, H, W, 8], in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return self.norm(self.layer(x).permute(0, 2, 3, 1)), "beside it"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.fc = ChannelsLast(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.block(x)[0].mean((1, 2)))


@pytest.fixture
def network() -> EarlyExitNetwork:
    torch.manual_seed(0)
    heads = {"block": FusedAuxHead(None, 4)}
    extract = {"block": Extract(item=0)}
    return EarlyExitNetwork(Net(), heads, example_input=torch.zeros(2, 3, 8, 6), extract=extract).eval()


def test_heads_alone_learn_from_what_they_read(network: EarlyExitNetwork) -> None:
    """To a layer that is linear in the pooled map the head comes as near as one wants."""
    images = torch.randn(64, 3, 8, 6)
    with torch.no_grad():
        labels = network.backbone(images).argmax(1)
    train(network, [(images, labels)] * 4, TrainingPlan("heads", epochs=150, learning_rate=0.1))
    with torch.no_grad():
        right = network.logits(images)[0].argmax(1) == labels
    assert right.double().mean() > 0.95
