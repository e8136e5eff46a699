"""Heads that are modules of their own, and those with hidden layers, are trained and calibrated as others are."""

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead, TrainingPlan, calibrate_network, train
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
    torch.manual_seed(0)
    return EarlyExitNetwork(SmallNet(), mixed_heads(), example_input=torch.zeros(2, 3, 8, 8))


@pytest.mark.parametrize("method", ["distill", "heads"])
def test_training_changes_the_modules(network, method):
    """Of "heads" on what the frozen backbone returned once, whole."""
    images, labels = samples(40)
    batches = list(zip(images.split(20), labels.split(20), strict=True))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    done = train(network, batches, TrainingPlan(method, epochs=4, learning_rate=1e-2))
    assert done.epochs[0].loss > done.epochs[-1].loss
    for name, parameter in network.named_parameters():
        if not name.endswith("conv.bias"):  # ahead of a batch norm it has no gradient to speak of
            changed = not torch.equal(parameter, before[name])
            assert changed == (method != "heads" or name.startswith("heads.")), name
    assert not torch.equal(network.heads[0].module.bn.running_mean, before["heads.0.module.bn.running_mean"])


@pytest.mark.parametrize("method", ["joint", "heads"])
def test_training_changes_hidden_layers(method):
    """Of "heads" on what they pool of the frozen backbone's maps, after a leading ReLU."""
    torch.manual_seed(0)
    written = hidden_heads()
    network = EarlyExitNetwork(SmallNet(), written, example_input=torch.zeros(2, 3, 8, 8))
    images, labels = samples(40)
    batches = list(zip(images.split(20), labels.split(20), strict=True))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    done = train(network, batches, TrainingPlan(method, epochs=4, learning_rate=1e-2))
    assert done.epochs[0].loss > done.epochs[-1].loss
    for name, parameter in network.named_parameters():
        changed = not torch.equal(parameter, before[name])
        assert changed == (method != "heads" or name.startswith("heads.")), name
    network.eval()
    logits = network.logits(images)
    y = network.backbone.block0(images)
    torch.testing.assert_close(logits[0], written["block0"].eval()(y))


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


def test_modules_and_hidden_layers_are_calibrated(network):
    images, labels = samples(400)
    for each in (network.eval(), with_hidden_heads(images)[0]):
        before = [head.rule.temperature for head in each.exit_heads]
        report = calibrate_network(each, [(images, labels)], max_accuracy_drop=0.5)
        assert [head.rule.temperature for head in each.exit_heads] != before and len(report.exits) == 4
