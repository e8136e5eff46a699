"""Heads that are modules of their own, and those with hidden layers, are trained and calibrated as others are."""

import pytest
import torch
from auxhead.model import EarlyExitNetwork, Extract, FusedAuxHead, TrainingPlan, calibrate_network, train
from auxhead.model.training.learners import HeadsOnFeatures, cache_features
from support.example_models import SmallNet, mixed_heads
from support.hidden_head_cases import hidden_heads, with_hidden_heads
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("without_interpreter")


def samples(count: int) -> tuple[Tensor, Tensor]:
    """Noise in a colour of its own, by which classes are told."""
    labels = torch.arange(count) % 5
    colour = torch.stack([labels - 2.0, (labels % 2) - 0.5, (labels % 3) - 1.0], 1)[:, :, None, None]
    return torch.randn(count, 3, 8, 8) * 0.3 + colour, labels


@pytest.fixture
def network() -> EarlyExitNetwork:
    return EarlyExitNetwork(SmallNet(), mixed_heads(), example_input=torch.zeros(2, 3, 8, 8))


@pytest.mark.parametrize(
    ("method", "kind"), [("distill", "modules"), ("heads", "modules"), ("joint", "hidden"), ("heads", "hidden")]
)
def test_training_changes_the_heads(network, method, kind):
    """Of "heads" on what the frozen backbone returned once: whole, or pooled after a leading ReLU."""
    written = hidden_heads()
    if kind == "hidden":
        network = EarlyExitNetwork(SmallNet(), written, example_input=torch.zeros(2, 3, 8, 8))
    images, labels = samples(40)
    batches = list(zip(images.split(20), labels.split(20), strict=True))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    done = train(network, batches, TrainingPlan(method, epochs=4, learning_rate=1e-2))
    assert done.epochs[0].loss > done.epochs[-1].loss
    for name, parameter in network.named_parameters():
        if not name.endswith("conv.bias"):  # ahead of a batch norm it has no gradient to speak of
            changed = not torch.equal(parameter, before[name])
            assert changed == (method != "heads" or name.startswith("heads.")), name
    if kind == "modules":
        assert not torch.equal(network.heads[0].module.bn.running_mean, before["heads.0.module.bn.running_mean"])
    else:
        y = network.eval().backbone.block0(images)
        torch.testing.assert_close(network.logits(images)[0], written["block0"].eval()(y))


def test_features_are_read_after_a_leading_relu():
    network = EarlyExitNetwork(Colours(), {"layer": FusedAuxHead(3, 5, hidden_features=4, rectifies=True)}).eval()
    images, labels = samples(10)
    cached = cache_features(network, [(images, labels)], torch.autocast("cpu", enabled=False), seed=None)
    ((features, final), _) = next(iter(cached))
    torch.testing.assert_close(features, images.relu().mean((2, 3)))
    for found, wanted in zip(
        HeadsOnFeatures(network.exit_heads)([features, final]), network.logits(images), strict=True
    ):
        torch.testing.assert_close(found, wanted)


class Colours(nn.Module):
    """Its layer returns numbers of both signs."""

    def __init__(self):
        super().__init__()
        self.layer, self.fc = nn.Identity(), nn.Linear(3, 5)

    def forward(self, x):
        return self.fc(self.layer(x).mean((2, 3)))


class ChannelsLast(nn.Module):
    """Its block returns [N, H, W, 8], in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.LayerNorm(8), nn.Linear(8, 4)
        self.block = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.block((self.norm(self.layer(x).permute(0, 2, 3, 1)), "beside it"))[0].mean((1, 2)))


def test_heads_alone_learn_from_what_they_read() -> None:
    """Of maps whose channels come last, and of an item; a head comes as near as one wants."""
    network = EarlyExitNetwork(
        ChannelsLast(), {"block": FusedAuxHead(None, 4)}, example_input=torch.zeros(2, 3, 8, 6),
        extract={"block": Extract(item=0)},
    ).eval()  # fmt: skip
    images = torch.randn(64, 3, 8, 6)
    with torch.no_grad():
        labels = network.backbone(images).argmax(1)
    train(network, [(images, labels)] * 4, TrainingPlan("heads", epochs=150, learning_rate=0.1))
    with torch.no_grad():
        right = network.logits(images)[0].argmax(1) == labels
    assert right.double().mean() > 0.95


def test_modules_and_hidden_layers_are_calibrated(network):
    images, labels = samples(400)
    for each in (network.eval(), with_hidden_heads(images)[0]):
        before = [head.rule.temperature for head in each.exit_heads]
        report = calibrate_network(each, [(images, labels)], max_accuracy_drop=0.5)
        assert [head.rule.temperature for head in each.exit_heads] != before and len(report.exits) == 4
