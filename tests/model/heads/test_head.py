"""head.py: a kind of head that defines ``logits`` alone goes wherever fused heads and modules go, or is refused."""

from pathlib import Path

import pytest
import torch
from auxhead.kernels import HeadOutput, decide
from auxhead.model import (
    EarlyExitNetwork,
    ExitRule,
    FusedAuxHead,
    ModuleHead,
    TrainingPlan,
    fuse_aux_heads,
    make_runner,
    save_checkpoint,
    train,
)
from auxhead.model.calibration.samples import collect_logits
from auxhead.model.heads.head import AuxHead
from support.example_models import SmallNet, branch
from support.exits_plan_cases import as_on_a_gpu, heads_called
from support.simulated_cuda import simulated_cuda
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("without_interpreter")


class Nearest(AuxHead):
    """Classes by the nearest of learned points."""

    def __init__(self, width: int, rule: ExitRule | float = 1.0) -> None:
        super().__init__(rule, None, num_classes=None, return_probs=True)
        self.points = nn.Parameter(torch.randn(5, width))

    def logits(self, x: Tensor) -> Tensor:
        return -torch.cdist(x.mean((2, 3)), self.points)


class Farthest(Nearest):
    def logits(self, x: Tensor) -> Tensor:
        return -super().logits(x)


@torch.no_grad()
def answers_of(network: EarlyExitNetwork, x: Tensor) -> list[HeadOutput]:
    """Of each exit by itself, the classifier last."""
    rules = [*(head.rule for head in network.exit_heads), ExitRule()]
    pairs = zip(network.logits(x), rules, strict=True)
    return [decide(y, rule.temperature, rule.threshold, rule.criterion) for y, rule in pairs]


@pytest.fixture
def network() -> EarlyExitNetwork:
    """The third kind between the others; thresholds at the medians, so that every exit answers for some."""
    torch.manual_seed(0)
    heads = {"block0": branch(8), "block1": Nearest(12), "block2": FusedAuxHead(16, 5)}
    net, x = EarlyExitNetwork(SmallNet(), heads).eval(), torch.randn(33, 3, 8, 8)
    for head, output in zip(net.exit_heads, answers_of(net, x), strict=False):
        head.rule.threshold = output.confidence.median().item()
    return net


def test_kinds_are_the_direct_subclasses() -> None:
    assert [head.kind() for head in (FusedAuxHead, ModuleHead, Nearest, Farthest)] == [
        FusedAuxHead,
        ModuleHead,
        Nearest,
        Nearest,
    ]


@pytest.mark.parametrize("stop", [False, True])
def test_it_answers_in_its_place(network: EarlyExitNetwork, stop: bool) -> None:
    x = torch.randn(24, 3, 8, 8)
    outputs = answers_of(network, x)
    for n, one in enumerate(x.split(1)):
        answer = network(one, stop=stop)
        wanted = next(index for index, output in enumerate(outputs) if index == 3 or output.exit[n])
        assert answer.exit_index.item() == wanted and answer.label.item() == outputs[wanted].label[n]
    assert [type(head) for head in network.exit_heads] == [ModuleHead, Nearest, FusedAuxHead]
    assert len(network.logits(x)) == 4 and "Nearest, not fused: " in network.describe()


def test_launches_judge_its_logits(network: EarlyExitNetwork) -> None:
    x = torch.randn(9, 3, 8, 8)
    wanted = network(x)
    with as_on_a_gpu(), heads_called() as called:
        found = network(x)
    assert not called and torch.equal(found.exit_index, wanted.exit_index) and torch.equal(found.label, wanted.label)
    with simulated_cuda():
        for exits in ("overlapped", "eager"):
            with make_runner(network, x, exits=exits, batch_sizes=(9,)) as runner:
                answer = runner(x)
            assert torch.equal(answer.exit_index, wanted.exit_index) and torch.equal(answer.label, wanted.label)


def test_it_is_trained_and_calibrated(network: EarlyExitNetwork) -> None:
    data = [(torch.randn(8, 3, 8, 8), torch.arange(8) % 5)]
    before = network.exit_heads[1].points.detach().clone()
    train(network, data, TrainingPlan("heads"))
    assert not torch.equal(before, network.exit_heads[1].points)
    assert collect_logits(network, data) is not None


def test_a_checkpoint_does_not_know_it_and_says_so(network: EarlyExitNetwork, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^heads\['block1'\]: is a Nearest, of which no checkpoint is known"):
        save_checkpoint(tmp_path / "net", network)
    assert not (tmp_path / "net").exists()


def test_it_is_checked_on_its_tap() -> None:
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(ValueError, match=r"^heads\['block0'\]: its Nearest cannot read the output \[2, 8, 8, 8\]"):
        EarlyExitNetwork(SmallNet(), {"block0": Nearest(9)}, example_input=x)
    with pytest.raises(ValueError, match=r"^heads\['block0'\]: is a Farthest that has a logits of its own, .* Nearest"):
        EarlyExitNetwork(SmallNet(), {"block0": Farthest(8)})


def test_one_that_is_there_already_is_not_swapped() -> None:
    model = nn.ModuleDict({"exit": Nearest(8), "other": ModuleHead(branch(8))})
    assert fuse_aux_heads(model) == ({}, {})
