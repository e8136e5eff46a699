"""Gradient equilibrium against a plain reimplementation, as MSDNet's re-trainings write it, in float64."""

import pytest
import torch
from auxhead.model import EarlyExitNetwork, Extract, FusedAuxHead, TrainingPlan, joint_loss, train
from support.trainable import tensors, trainable
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.usefixtures("without_interpreter")


class Rescaled(torch.autograd.Function):
    """The same numbers, of a gradient times a factor."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Held(nn.Module):
    """A block that returns its map among other things, channels last."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"size": torch.tensor(x.shape), "map": self.block(x).permute(0, 2, 3, 1)}


class Deep(nn.Module):
    """Three blocks, of which the second hands on a dict, and a residual one at last."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.Tanh())
            for before, after in ((3, 4), (4, 6), (6, 6))
        )
        self.two, self.fc = Held(self.two), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x))["map"].permute(0, 3, 1, 2)
        return self.fc((y + self.three(y)).mean((2, 3)))


def deep() -> EarlyExitNetwork:
    torch.manual_seed(0)
    heads = {tap: FusedAuxHead(width, 5).double() for tap, width in (("one", 4), ("two", 6))}
    extract = {"two": Extract(item="map", layout="NHWC")}
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    return EarlyExitNetwork(Deep().double(), heads, extract=extract, example_input=x)


def plain_logits(network: EarlyExitNetwork, x: Tensor) -> list[Tensor]:
    """As ``GradientRescaleFunction`` of the authors' code does: divided at the exit, multiplied behind it."""
    backbone, (first, second) = network.backbone, network.exit_heads
    y = Rescaled.apply(backbone.one(x), 1 / 3)
    exits = [first.linear(y.mean((2, 3)))]
    y = Rescaled.apply(backbone.two.block(Rescaled.apply(y, 2.0)), 1 / 2)
    exits.append(second.linear(y.mean((2, 3))))
    y = Rescaled.apply(y, 1.0)
    return [*exits, backbone.fc((y + backbone.three(y)).mean((2, 3)))]


def gradients(network: EarlyExitNetwork, exits: list[Tensor], labels: Tensor) -> dict[str, Tensor]:
    network.zero_grad()
    joint_loss(exits, labels, (1.0, 2.0, 4.0)).backward()
    return {name: each.grad.clone() for name, each in network.named_parameters()}


def test_gradients_are_those_of_a_plain_network_and_the_numbers_are_the_same():
    network = deep()
    x, labels = torch.randn(4, 3, 6, 6, dtype=torch.float64), torch.tensor([0, 1, 4, 2])
    exits = network.logits(x, in_equilibrium=True)
    for one, other in zip(exits, network.logits(x), strict=True):
        assert torch.equal(one, other)
    found, wanted = gradients(network, exits, labels), gradients(network, plain_logits(network, x), labels)
    usual = gradients(network, network.logits(x), labels)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=0.0)
        shared = {"backbone.one": 3, "backbone.two": 2}.get(name.rpartition(".block")[0] or name[:12], 1)
        torch.testing.assert_close(gradient * shared, usual[name], rtol=1e-10, atol=1e-15)
    assert network.backbone.one._forward_hooks == {}


class Twice(nn.Module):
    """A block whose last layer returns the very tensor that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.fc = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.block(x))


def test_one_tensor_behind_which_there_are_two_heads():
    torch.manual_seed(0)
    heads = {tap: FusedAuxHead(4, 5, pool="none").double() for tap in ("block.1", "block")}
    network = EarlyExitNetwork(Twice().double(), heads)
    x, labels = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 4, 2])
    found = gradients(network, network.logits(x, in_equilibrium=True), labels)
    for name, gradient in gradients(network, network.logits(x), labels).items():
        shared = 3 if name.startswith("backbone.block") else 1
        torch.testing.assert_close(found[name] * shared, gradient, rtol=1e-10, atol=1e-15)


class Doubled(nn.Module):
    """Returns tensors and what is made of them, beside a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x["y"] if isinstance(x, dict) else x).tanh()
        return {"y": y, "scaled": 2.0 * y, "more": (2.0 * y).sin()}


class OfDoubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fc = Doubled(), Doubled(), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.second(self.first(x))["y"])


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_made_of_another_tensor_is_scaled_once(compiled: bool):
    """And a compiler, which would lose the hooks, is kept out."""
    torch.manual_seed(0)
    heads = {tap: FusedAuxHead(4, 5, pool="none").double() for tap in ("first", "second")}
    extract = dict.fromkeys(heads, Extract(item="more"))
    x, labels = torch.randn(4, 4, dtype=torch.float64), torch.tensor([0, 1, 4, 2])
    network = EarlyExitNetwork(OfDoubled().double(), heads, extract=extract, example_input=x)

    def call(x: Tensor, **how: bool) -> list[Tensor]:
        return network.logits(x, **how)

    called = torch.compile(call, backend="aot_eager") if compiled else call
    found = gradients(network, called(x, in_equilibrium=True), labels)
    for name, gradient in gradients(network, network.logits(x), labels).items():
        shared = {"backbone.first": 3, "backbone.second": 2}.get(".".join(name.split(".")[:2]), 1)
        torch.testing.assert_close(found[name] * shared, gradient, rtol=1e-10, atol=1e-15)


def test_a_tap_of_which_nobody_knows_where_its_tensors_are_is_refused():
    class Box:
        def __init__(self, y: Tensor) -> None:
            self.map = y

    class Boxes(Twice):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.box(self.block(x)).map)

    model = Boxes()
    model.box = type("Boxing", (nn.Module,), {"forward": lambda self, y: Box(y)})()
    network = EarlyExitNetwork(model, {"box": FusedAuxHead(4, 5, pool="none")}, extract={"box": Extract(item="map")})
    with pytest.raises(ValueError, match="^gradients: the output of layer 'box' is a Box, in which no tensor is found"):
        network.logits(torch.randn(4, 3), in_equilibrium=True)
    assert len(network.logits(torch.randn(4, 3))) == 2


def frozen_below() -> EarlyExitNetwork:
    network = trainable(norm=False)
    network.backbone.first.requires_grad_(False)
    return network


def test_layers_that_learn_nothing_get_nothing():
    network, x = frozen_below(), torch.randn(2, 3, 8, 8)
    joint_loss(network.logits(x, in_equilibrium=True), torch.tensor([1, 2])).backward()
    found = network.backbone.second[0].weight.grad.clone()
    network.zero_grad()
    joint_loss(network.logits(x), torch.tensor([1, 2])).backward()
    torch.testing.assert_close(2 * found, network.backbone.second[0].weight.grad)
    assert network.backbone.first[0].weight.grad is None


def test_a_training_is_a_plain_loop_and_an_exit_that_learns_alone_is_as_ever():
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(24, 3, 8, 8, dtype=torch.float64), torch.randint(10, (24,)))
    batches = DataLoader(data, 8)

    def sgd(parameters):
        return torch.optim.SGD(parameters, 0.1)

    for method in ("joint", "mixed"):
        network, alone = (trainable(norm=False).double() for _ in range(2))
        plan = TrainingPlan(
            method, epochs=2, gradients="equilibrium", optimizer=sgd,
            scheduler=lambda optimizer, _: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        )  # fmt: skip
        train(network, batches, plan)
        optimizer = sgd(alone.parameters())
        for epoch in range(2):
            whole = method == "joint" or epoch == 1
            for x, labels in batches:
                optimizer.zero_grad()
                weights = (1.0, 1.0, 1.0) if whole else (0.0, 0.0, 1.0)
                joint_loss(alone.logits(x, in_equilibrium=whole), labels, weights).backward()
                optimizer.step()
        for one, other in zip(tensors(network).values(), tensors(alone).values(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_depth_is_weights_in_the_order_of_the_exits():
    data = TensorDataset(torch.randn(16, 3, 8, 8), torch.arange(16) % 10)
    by_name, by_hand = (
        train(trainable(), DataLoader(data, 8), TrainingPlan(method, epochs=2, **how))
        for method in ("distill",)
        for how in ({"gradients": "depth"}, {"weights": (1.0, 2.0, 3.0)})
    )
    assert [epoch.loss for epoch in by_name.epochs] == [epoch.loss for epoch in by_hand.epochs]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradients": "linear"}, "gradients: got 'linear', wants one of 'equal', 'depth', 'equilibrium'"),
        ({"gradients": "depth", "method": "heads"}, "gradients: got 'depth' for the method 'heads', whose backbone is"),
        ({"gradients": "equilibrium", "method": "heads"}, "gradients: got 'equilibrium' for the method 'heads'"),
        ({"gradients": "depth", "weights": (1.0, 2.0)}, r"weights: got \(1.0, 2.0\) beside the gradients 'depth'"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        TrainingPlan(**settings)


def test_a_frozen_backbone_is_refused():
    network = trainable()
    network.backbone.requires_grad_(False)
    data = TensorDataset(torch.randn(16, 3, 8, 8), torch.arange(16) % 10)
    with pytest.raises(ValueError, match="^gradients: got 'equilibrium' for a network whose backbone is frozen"):
        train(network, DataLoader(data, 8), TrainingPlan(gradients="equilibrium"))
