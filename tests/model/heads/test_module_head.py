"""head.py and module_head.py: a module, and a kind that defines ``logits`` alone, go wherever fused heads go."""

import copy

import pytest
import torch
from auxhead.model import (
    EarlyExitNetwork,
    ExitRule,
    FusedAuxHead,
    ModuleHead,
    TrainingPlan,
    fuse_aux_heads,
    load_checkpoint,
    make_runner,
    save_checkpoint,
    train,
)
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.calibration.samples import collect_logits
from auxhead.model.heads.head import AuxHead
from support.example_models import SmallNet, branch, mixed_heads, naive_answers
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


@pytest.fixture
def x():
    return torch.randn(6, 3, 8, 8)


def of_three_kinds():
    return {"block0": branch(8), "block1": Nearest(12), "block2": FusedAuxHead(16, 5)}


def network(criterion: str = "max_prob", heads=mixed_heads) -> EarlyExitNetwork:
    """A fused head between two that are modules; thresholds at the medians, so that every exit answers for some."""
    torch.manual_seed(0)
    net, x = EarlyExitNetwork(SmallNet(), heads()).eval(), torch.randn(33, 3, 8, 8)
    net.set_rules(ExitRule(criterion=criterion, temperature=1.5, threshold=0.0))
    for head, output in zip(net.exit_heads, naive_answers(net, x), strict=False):
        head.rule.threshold = output.confidence.median().item()
    return net


@pytest.mark.parametrize(
    ("heads", "criterion"),
    [(mixed_heads, "max_prob"), (mixed_heads, "entropy"), (mixed_heads, "margin"), (of_three_kinds, "max_prob")],
)
@pytest.mark.parametrize("stop", [False, True])
def test_answers_are_those_of_the_first_sure_head(heads, criterion, stop):
    net, x = network(criterion, heads), torch.randn(24, 3, 8, 8)
    said = naive_answers(net, x)
    answers = [net(one, stop=stop) for one in x.split(1)]
    for n, answer in enumerate(answers):
        wanted = next(index for index, output in enumerate(said) if index == 3 or output.exit[n])
        assert answer.exit_index.item() == wanted
        assert answer.label.item() == said[wanted].label[n]
        torch.testing.assert_close(answer.probs[0], said[wanted].probs[n])
    assert len({answer.exit_index.item() for answer in answers}) > 2


def test_error_is_at_most_twice_that_of_pytorch(x):
    net = network()
    net.set_rules({"block0": ExitRule(0.0), "block1": 1.0, "block2": 1.0})
    found = net(x)
    exact_net = copy.deepcopy(net).double()
    exact = torch.softmax(exact_net.logits(x.double())[0], 1)
    own = torch.softmax(net.logits(x)[0], 1)
    assert (found.probs - exact).abs().max() <= 2 * (own - exact).abs().max()


def test_the_backbone_does_not_see_what_a_module_writes(x):
    net = network()
    wanted = net.backbone(x)
    torch.testing.assert_close(net.logits(x)[-1], wanted)
    net.set_rules(1.0)
    torch.testing.assert_close(net(x).probs, torch.softmax(wanted, 1))
    assert net.heads[2].run.writes_input and not net.heads[0].run.writes_input


def test_a_module_that_writes_in_training_mode_alone_is_refused(x):
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.linear = nn.Dropout(0.5, inplace=True), nn.Linear(8 * 8 * 8, 5)

        def forward(self, x):
            return self.linear(self.drop(x).flatten(1).relu())

    net = EarlyExitNetwork(SmallNet().train(), {"block0": Dropping()})
    with pytest.raises(RuntimeError, match="Dropping changes its input in place in training mode"):
        net.logits(x)
    net.eval().logits(x)


def test_it_says_that_it_is_not_fused_and_what_it_costs(x):
    net = EarlyExitNetwork(SmallNet(), mixed_heads(), example_input=x)
    first, second, third = net.describe().splitlines()
    parameters = sum(one.numel() for one in net.heads[0].parameters())
    assert "not fused" in first and f"{parameters:,} parameters" in first and "MFLOPs a sample" in first
    assert "not fused" not in second
    assert "on a copy of the tap's output" in third
    assert net.fused_heads == [net.heads[1]] and net.exit_heads == [*net.heads]


def test_operators_flops_and_parameters_are_counted(x):
    net = EarlyExitNetwork(SmallNet(), {"block0": nn.Sequential(nn.Conv2d(8, 4, 1, bias=False), Flat(4 * 64))})
    net.check_taps(x)
    run = net.heads[0].run
    assert run.flops == 2 * (64 * 8 * 4 + 4 * 64 * 5)
    assert run.parameters == 8 * 4 + 4 * 64 * 5 + 5
    assert run.operators == 3  # convolution, tanh, addmm


class Flat(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 5)

    def forward(self, x):
        return self.linear(x.flatten(1).tanh())


class Returning(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    "module, message",
    [
        (Returning(lambda x: x), r"heads\['block0'\]: its module Returning makes of the output \[2, 8, 8, 8\] of"),
        (Returning(lambda x: (x, x)), r"heads\['block0'\]: .* a tuple of 2, wants logits \[2, num_classes\]"),
        (Returning(lambda x: x.mean(1).flatten(1)), r"heads\['block0'\]: has 64 classes, wants 5"),
        (Returning(lambda x: x.flatten(1)[:, :5].long()), r"heads\['block0'\]: .*int64"),
        (Returning(lambda x: x.flatten(1)[:, :5].softmax(1)), r"heads\['block0'\]: .* returns probabilities"),
        (Returning(lambda x: x.flatten(1)[:1, :5]), r"heads\['block0'\]: .* \[1, 5\]"),
        (branch(9), r"heads\['block0'\]: its module Branch cannot read the output \[2, 8, 8, 8\] of the tap"),
    ],
    ids=["a map", "a tuple", "classes", "integers", "probabilities", "samples", "channels"],
)  # fmt: skip
def test_what_makes_no_logits_is_refused_with_its_tap(x, module, message):
    net = EarlyExitNetwork(SmallNet().eval(), {"block0": module})
    with pytest.raises(ValueError, match=message):
        net(x)
    assert net.heads[0].run is None


def test_a_dry_run_leaves_mode_and_statistics_as_they_were(x):
    head = branch(8).train()
    before = copy.deepcopy(head.state_dict())
    net = EarlyExitNetwork(SmallNet().train(), {"block0": head})
    net.check_taps(x)
    assert all(module.training for module in head.modules())
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize("value", ["a", 0, -1, True, 2.0])
def test_bad_number_of_classes(value):
    with pytest.raises(ValueError, match="num_classes: got"):
        ModuleHead(branch(8), num_classes=value)


def test_a_checkpoint_wants_the_modules_and_answers_the_same(tmp_path, x):
    net = network()
    wanted = net(x)
    save_checkpoint(tmp_path, net)
    modules = {"block0": branch(8), "block2": branch(16, inplace=True)}
    loaded = load_checkpoint(tmp_path, SmallNet(), modules=modules).network
    assert [head.num_classes for head in loaded.exit_heads] == [5, 5, 5]  # without a batch
    found = loaded(x)
    assert torch.equal(found.exit_index, wanted.exit_index) and torch.equal(found.probs, wanted.probs)
    with pytest.raises(BadInput, match=r"modules: the head at 'block0' .* \(Branch\).*modules=\{'block0': module\}"):
        load_checkpoint(tmp_path, SmallNet())
    with pytest.raises(BadInput, match=r"modules: .* has no module at 'block1', wants those of \['block0', 'block2'\]"):
        load_checkpoint(tmp_path, SmallNet(), modules={**modules, "block1": branch(12)})
    with pytest.raises(BadInput, match=r"modules\['block0'\]: got int, wants an nn.Module"):
        load_checkpoint(tmp_path, SmallNet(), modules={**modules, "block0": 3})
    with pytest.raises(BadInput, match="modules: got list, wants a dict"):
        load_checkpoint(tmp_path, SmallNet(), modules=[branch(8)])
    with pytest.raises(BadInput, match="does not fit"):
        load_checkpoint(tmp_path, SmallNet(), modules={**modules, "block0": branch(9)})


def test_classes_must_be_known_to_save(tmp_path):
    with pytest.raises(ValueError, match=r"heads\['block0'\]: num_classes: is not known before network.check_taps"):
        save_checkpoint(tmp_path, EarlyExitNetwork(SmallNet(), mixed_heads()))


# A kind of one's own


@pytest.fixture
def three_kinds() -> EarlyExitNetwork:
    net = network(heads=of_three_kinds)
    net.check_taps(torch.randn(2, 3, 8, 8))
    return net


def test_kinds_are_the_direct_subclasses() -> None:
    assert [head.kind() for head in (FusedAuxHead, ModuleHead, Nearest, Farthest)] == [
        FusedAuxHead,
        ModuleHead,
        Nearest,
        Nearest,
    ]


def test_launches_judge_its_logits(three_kinds: EarlyExitNetwork) -> None:
    assert [type(head) for head in three_kinds.exit_heads] == [ModuleHead, Nearest, FusedAuxHead]
    assert "Nearest, not fused: " in three_kinds.describe()
    x = torch.randn(9, 3, 8, 8)
    wanted = three_kinds(x)
    with as_on_a_gpu(), heads_called() as called:
        found = three_kinds(x)
    assert not called and torch.equal(found.exit_index, wanted.exit_index) and torch.equal(found.label, wanted.label)
    with simulated_cuda():
        for exits in ("overlapped", "eager"):
            with make_runner(three_kinds, x, exits=exits, batch_sizes=(9,)) as runner:
                answer = runner(x)
            assert torch.equal(answer.exit_index, wanted.exit_index) and torch.equal(answer.label, wanted.label)


def test_it_is_trained_and_calibrated(three_kinds: EarlyExitNetwork) -> None:
    data = [(torch.randn(8, 3, 8, 8), torch.arange(8) % 5)]
    before = three_kinds.exit_heads[1].points.detach().clone()
    train(three_kinds, data, TrainingPlan("heads"))
    assert not torch.equal(before, three_kinds.exit_heads[1].points)
    assert collect_logits(three_kinds, data) is not None


def test_a_checkpoint_does_not_know_it_and_says_so(three_kinds: EarlyExitNetwork, tmp_path) -> None:
    with pytest.raises(TypeError, match=r"^heads\['block1'\]: is a Nearest, of which no checkpoint is known"):
        save_checkpoint(tmp_path / "net", three_kinds)
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
