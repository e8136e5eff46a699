"""Backbones of torchvision and timm on a GPU: heads attached, trained, calibrated, saved and loaded; every runner."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from auxhead.model import (
    EarlyExitNetwork,
    ExitResult,
    TrainingPlan,
    attach,
    calibrate_network,
    load_checkpoint,
    make_runner,
    save_checkpoint,
    train,
)
from auxhead.model.auto.pass_times import BUDGETS
from auxhead.model.runners.table import EXITS
from support.example_models import needs_gpu
from support.graph_runner_cases import assert_same, exits_at
from torch import Tensor, nn

pytestmark = [*needs_gpu, pytest.mark.usefixtures("stops_at_every_tap")]

DEVICE = "cuda"
CLASSES = 10
#: How far apart two right confidences may be, in float32: batch sizes and convolution algorithms round differently.
ROUNDING = 5e-3


def of_torchvision(name: str, **options: Any) -> nn.Module:
    return getattr(torchvision.models, name)(num_classes=CLASSES, **options)


def of_timm(name: str, **options: Any) -> nn.Module:
    return pytest.importorskip("timm").create_model(name, num_classes=CLASSES, **options)


#: With random parameters, and the side of their images.
BACKBONES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mobilenet_v3_small": (lambda: of_torchvision("mobilenet_v3_small"), 64),
    "efficientnet_b0": (lambda: of_torchvision("efficientnet_b0"), 64),
    "densenet121": (lambda: of_torchvision("densenet121"), 64),
    "googlenet": (lambda: of_torchvision("googlenet", init_weights=False), 64),
    "inception_v3": (lambda: of_torchvision("inception_v3", init_weights=False), 96),
    "regnet_y_400mf": (lambda: of_torchvision("regnet_y_400mf"), 64),
    "convnext_tiny": (lambda: of_torchvision("convnext_tiny"), 64),
    "vit_b_16": (lambda: of_torchvision("vit_b_16", image_size=64), 64),
    "swin_t": (lambda: of_torchvision("swin_t"), 64),
    "timm resnet18": (lambda: of_timm("resnet18"), 64),
    "timm vit_tiny_patch16_224": (lambda: of_timm("vit_tiny_patch16_224", img_size=64), 64),
}
WITHOUT_TIMM = [name for name in BACKBONES if not name.startswith("timm ") or importlib.util.find_spec("timm")]


def batches(number: int, side: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Eight images each, noise in the colour of their class."""
    generator = torch.Generator().manual_seed(seed)
    colours = 2 * torch.randn(CLASSES, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (number * 8,), generator=generator)
    pixels = torch.randn(number * 8, 3, side, side, generator=generator) + colours[labels]
    return list(zip(pixels.split(8), labels.split(8), strict=True))


@torch.no_grad()
def tell_images_apart(backbone: nn.Module, x: Tensor) -> None:
    """Fit the statistics of batch norms, and let the classifier, which is not trained, be sure of some images."""
    backbone.eval()
    for layer in backbone.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.momentum = None
            layer.train()
    backbone(x)
    classifier = [layer for layer in backbone.modules() if isinstance(layer, nn.Linear)][-1]
    assert classifier.out_features == CLASSES
    if not classifier.weight.any():  # as torchvision's ViT begins
        nn.init.normal_(classifier.weight)
    logits = backbone.eval()(x)
    classifier.weight.mul_(3 / logits.std(0).mean().clamp_min(1e-3))
    classifier.bias.sub_(logits.mean(0)).mul_(3 / logits.std(0).mean().clamp_min(1e-3))


class Case:
    """A backbone on its way from the constructor to a checkpoint that was loaded, and what was noted meanwhile."""

    def __init__(self, name: str, directory: Path) -> None:
        make, side = BACKBONES[name]
        torch.manual_seed(0)
        backbone = make().to(DEVICE)
        learned, held_out = batches(8, side, seed=1), batches(24, side, seed=2)
        self.x = torch.cat([x for x, _ in batches(3, side, seed=3)]).to(DEVICE)
        tell_images_apart(backbone, torch.cat([x for x, _ in learned]).to(DEVICE))
        self.attached = attach(backbone, taps="auto", example_input=self.x[:8], num_classes=CLASSES)
        frozen = {name: value.clone() for name, value in backbone.state_dict().items()}
        self.training = train(self.attached, learned, TrainingPlan("heads", epochs=4, learning_rate=1e-2))
        self.kept = all(torch.equal(frozen[name], value) for name, value in backbone.state_dict().items())
        self.report = calibrate_network(self.attached, held_out, max_work=0.7)
        save_checkpoint(directory, self.attached, calibration=self.report.to_json())
        self.network = load_checkpoint(directory, make().to(DEVICE)).network


@pytest.fixture(scope="module", params=WITHOUT_TIMM)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("network") / "saved")


@pytest.fixture(autouse=True)
def _exact_convolutions() -> Iterator[None]:
    """Without TF32; some algorithms that repeat their bits cannot be captured in the body of a conditional node."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False):
        yield


@pytest.fixture(autouse=True)
def _measures_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUDGETS, "quick", 2.0)


def test_heads_are_placed_trained_and_calibrated(case: Case) -> None:
    network = case.attached
    assert 1 <= len(network.taps) <= 3 and {head.num_classes for head in network.exit_heads} == {CLASSES}
    assert {parameter.device.type for parameter in network.parameters()} == {DEVICE}
    first, *_, last = (epoch.loss for epoch in case.training.epochs)
    assert last < first and case.kept, "the heads alone have learned"
    assert case.report.expected_work < 1.0, "some leave early"
    assert sum(case.report.samples.values()) == 24 * 8


def test_what_was_loaded_answers_as_what_was_saved(case: Case) -> None:
    rules = [
        [(head.rule.threshold, head.rule.temperature) for head in net.exit_heads]
        for net in (case.attached, case.network)
    ]
    assert rules[0] == rules[1] and case.network.taps == case.attached.taps
    wanted = case.attached(case.x)
    assert_same(case.network(case.x), wanted, ROUNDING, near_a_decision(case.attached, case.x, wanted))


@torch.no_grad()
def near_a_decision(network: EarlyExitNetwork, x: Tensor, answer: ExitResult) -> Tensor:
    """[N] bool: within rounding of a threshold on the way, or of another label at the exit."""
    near = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    rules = [(head.rule.threshold, head.rule.temperature) for head in network.exit_heads]
    for index, logits in enumerate(network.logits(x)):
        threshold, temperature = rules[index] if index < len(rules) else (1.0, 1.0)
        top = torch.softmax(logits.float() / temperature, 1).topk(2).values
        if 0.0 < threshold < 1.0:
            near |= (answer.exit_index >= index) & ((top[:, 0] - threshold).abs() <= ROUNDING)
        near |= (answer.exit_index == index) & (top[:, 0] - top[:, 1] <= ROUNDING)
    return near


@torch.no_grad()
def let_half_leave(network: EarlyExitNetwork, x: Tensor) -> None:
    """At each head, of all images."""
    for head, logits in zip(network.exit_heads, network.logits(x), strict=False):
        confidence = torch.softmax(logits.float() / head.rule.temperature, 1).amax(1)
        head.rule.threshold = confidence.median().item()


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
@pytest.mark.parametrize("exits", EXITS)
def test_runners_answer_as_the_network(case: Case, exits: str, trunk: str) -> None:
    """A batch that fits, one that is padded and one that is split; by calibrated rules, others, and at each exit."""
    network = case.network
    requests = case.x[:4], case.x[4:7], case.x[7:]
    calibrated = [head.rule.threshold for head in network.exit_heads]
    with make_runner(network, case.x[:4], exits=exits, trunk=trunk, batch_sizes=(4,)) as runner:
        truth = make_runner(network, case.x[:4], exits="eager", trunk=trunk)

        def compare() -> tuple[Tensor, Tensor]:
            """Return the exits of all images, and which of them are near a decision."""
            exit_index, near = [], []
            for x in requests:
                wanted = truth(x)
                near.append(near_a_decision(network, x, wanted))
                assert_same(runner(x), wanted, ROUNDING, near[-1])
                exit_index.append(wanted.exit_index)
            return torch.cat(exit_index), torch.cat(near)

        try:
            compare()
            let_half_leave(network, case.x)
            exit_index, near = compare()
            assert exit_index.unique().numel() > 1 and near.float().mean() <= 0.5, "hardly anything is tested"
            for index in range(len(network.taps) + 1):
                with exits_at(network, index):
                    exit_index, near = compare()
                assert exit_index.eq(index).all()
        finally:
            network.set_rules(dict(zip(network.taps, calibrated, strict=True)))
