"""EarlyExitNetwork: each sample gets the answer of the first exit that is sure."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from auxhead.model import (
    EarlyExitNetwork,
    ExitResult,
    ExitRule,
    FusedAuxHead,
    ModuleHead,
    TrainingPlan,
    fuse_aux_heads,
    make_runner,
    train,
)
from auxhead.model.calibration.samples import collect_logits
from support.example_models import Counting, SmallNet, answer_slowly, branch, plain_head, plain_heads
from torch import Tensor, nn

#: Kernels are interpreted in test_network_repeats.py and in tests of heads.
pytestmark = pytest.mark.usefixtures("without_interpreter")


def images(samples: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.randn(samples, 3, 8, 8, device=device) * torch.rand(samples, 1, 1, 1, device=device) * 3


def network(rules: object = 0.6, device: torch.device | str = "cpu", **options: object) -> EarlyExitNetwork:
    return EarlyExitNetwork(SmallNet(), plain_heads(), rules, **options).to(device).eval()


def assert_answers_slowly(
    net: EarlyExitNetwork, heads: dict[str, nn.Module], x: Tensor, result: ExitResult
) -> set[int]:
    """Compare with the loop over samples; returns which exits were taken."""
    thresholds = [head.rule.threshold if head.rule.enabled else 1.0 for head in net.heads]
    temperatures = [head.rule.temperature for head in net.heads]
    answers = answer_slowly(net.backbone, heads, thresholds, x, temperatures)
    assert result.label.shape == result.confidence.shape == result.exit_index.shape == (len(answers),)
    assert (result.label.dtype, result.exit_index.dtype) == (torch.int64, torch.int64)
    assert result.confidence.dtype == result.probs.dtype == torch.float32
    sure = [i for i, answer in enumerate(answers) if answer[4] > 1e-4]
    assert len(sure) >= 0.8 * len(answers)
    for i in sure:
        index, label, confidence, probs, _ = answers[i]
        assert (result.exit_index[i].item(), result.label[i].item()) == (index, label)
        assert result.confidence[i].item() == pytest.approx(confidence, abs=1e-4)
        torch.testing.assert_close(result.probs[i].double(), probs, atol=1e-4, rtol=0)
    return {answers[i][0] for i in sure}


@pytest.mark.parametrize("samples", [1, 2, 3, 9])
def test_answers_as_a_loop_over_samples(samples: int, device: torch.device) -> None:
    torch.manual_seed(samples)
    heads = {tap: head.to(device) for tap, head in plain_heads().items()}
    rules = {
        tap: ExitRule(torch.rand(()).item(), temperature=0.5 + torch.rand(()).item(), enabled=index != samples % 4)
        for index, tap in enumerate(SmallNet.taps)
    }
    net = EarlyExitNetwork(SmallNet(), heads, rules).to(device).eval()
    x = images(samples, device)
    for stop in (False, True):
        assert_answers_slowly(net, heads, x, net(x, stop=stop))


def test_every_exit_is_taken_by_some_sample() -> None:
    heads = plain_heads()
    net = EarlyExitNetwork(SmallNet(), heads).eval()
    x = images(24)
    for head, logits in zip(net.heads, net.logits(x), strict=False):  # a third of the samples at each
        head.rule.threshold = torch.softmax(logits, 1).amax(1).quantile(0.66).item()
    assert assert_answers_slowly(net, heads, x, net(x)) == {0, 1, 2, 3}


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("checked", [False, True], ids=["first", "checked"])
def test_no_samples(stop: bool, checked: bool) -> None:
    net = network(example_input=images(1) if checked else None)
    assert [tuple(logits.shape) for logits in net.logits(images(0))] == [(0, 5)] * 4
    result = net(images(0), stop=stop)
    assert [tuple(field.shape) for field in result] == [(0,), (0,), (0, 5), (0,)]
    assert [field.dtype for field in result] == [torch.int64, torch.float32, torch.float32, torch.int64]


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_stop_leaves_the_forward(index: int) -> None:
    net = network({tap: 0.0 if i == index else 1.0 for i, tap in enumerate(SmallNet.taps)}, example_input=images(1))
    runs: list[str] = []
    for name, part in net.backbone.named_children():
        part.register_forward_hook(lambda *_, name=name: runs.append(name))
    x = images(3)
    stopped = net(x, stop=True)
    assert runs == ["block0", "block1", "block2", "fc"][: index + 1]
    assert all(torch.equal(a, b) for a, b in zip(stopped, net(x), strict=True))
    assert stopped.exit_index.eq(index).all()


@pytest.mark.parametrize(
    ("heads", "error", "match"),
    [
        ({}, ValueError, "^heads: got none"),
        ({"block0": nn.Linear(8, 5)}, ValueError, r"^heads\['block0'\]: its module Linear makes of .*fused.*Linear"),
        (
            {"block0": nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(8, 5))},
            ValueError,
            r"^heads\['block0'\]: .*ReLU",
        ),
        ({"block0": lambda x: x}, TypeError, r"^heads\['block0'\]: got function"),
        ({"block0": plain_head(9)}, ValueError, r"^heads\['block0'\]: .*takes 9 features.*has 8"),
        ({"block0": plain_head(8, 4)}, ValueError, r"^heads\['block0'\]: has 4 classes, wants 5"),
        ({"block0": FusedAuxHead(8, 5, pool="first")}, ValueError, r"^heads\['block0'\]: pool: got 'first'"),
        ({"block0": plain_head(8).half()}, (ValueError, TypeError), r"^heads\['block0'\]: .*float16.*float32"),
        ({"block0": FusedAuxHead(8, 5, device="meta")}, (ValueError, TypeError), r"^heads\['block0'\]: .*meta"),
        ({"blok0": plain_head(8)}, ValueError, "no layer 'blok0'; close to it: block0"),
    ],
    ids=["none", "linear", "unfusable", "function", "width", "classes", "pool", "dtype", "device", "unknown"],
)
def test_heads_that_cannot_work_are_refused(heads: dict, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        EarlyExitNetwork(SmallNet(), heads, example_input=images(2))


def test_lazy_heads_take_their_width_from_the_dry_run() -> None:
    heads = {tap: FusedAuxHead(None, 5, pool="max", pool_size=2) for tap in SmallNet.taps}
    net = EarlyExitNetwork(SmallNet().to(torch.bfloat16), heads, example_input=images(2).bfloat16())
    assert [head.linear.in_features for head in net.heads] == [32, 48, 64]
    assert all(p.dtype == torch.bfloat16 for p in net.parameters())
    assert net(images(2).bfloat16()).probs.dtype == torch.float32
    fresh = EarlyExitNetwork(SmallNet(), {tap: FusedAuxHead(None, 5, pool="max", pool_size=2) for tap in SmallNet.taps})
    fresh.load_state_dict({name: value.float() for name, value in net.state_dict().items()})
    fresh.eval()(images(2))
    assert all(torch.equal(a.float(), b) for a, b in zip(net.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_lazy_heads_first_run_in_some_mode_are_trained_in_float32_later(mode: Callable) -> None:
    net = EarlyExitNetwork(SmallNet(), {"block0": FusedAuxHead(None, 5)}).eval()
    with mode():
        net(images(2))
    assert net.heads[0].linear.weight.dtype == torch.float32
    net(images(2))
    sum(logits.sum() for logits in net.logits(images(2))).backward()
    assert all(p.grad is not None for p in net.parameters())


def test_probs_are_left_out_where_a_head_leaves_them_out() -> None:
    heads = {
        tap: FusedAuxHead(w, 5, return_probs=tap != "block1") for tap, w in zip(SmallNet.taps, (8, 12, 16), strict=True)
    }
    net = EarlyExitNetwork(SmallNet(), heads, 0.0).eval()
    result = net(images(3))
    assert result.probs is None and result.confidence.shape == (3,)
    assert net(images(3), stop=True).probs is None  # however far the forward went


def test_a_sample_with_nan_disturbs_no_other_and_never_exits_early() -> None:
    net, x = network(0.0), images(4)
    clean = net(x)
    x[2, 0, 0, 0] = float("nan")
    for stop in (False, True):
        result = net(x, stop=stop)
        assert result.exit_index.tolist() == [0, 0, 3, 0] and result.confidence[2].isnan()
        assert 0 <= result.label[2] < 5
        torch.testing.assert_close(result.probs[[0, 1, 3]], clean.probs[[0, 1, 3]])


def test_training_leaves_a_frozen_backbone_in_eval_mode() -> None:
    net, x = network(1.0), images(9)
    net.backbone.requires_grad_(False)
    before = {name: value.clone() for name, value in net.backbone.state_dict().items()}
    assert net.train() is net and net.training and net.heads.training and not net.backbone.training
    torch.stack(net.logits(x)).sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in net.backbone.state_dict().items())
    net.backbone.fc.requires_grad_(True)
    assert net.train().backbone.block0.training and not net.eval().training and not net.backbone.training


def test_a_backbone_that_returns_probabilities_is_refused() -> None:
    """They would go through a softmax twice; the logarithms of probabilities are logits as good as any."""
    x = torch.randn(2, 3, 8, 8)
    for last, error in ((nn.Softmax(1), "backbone: returns probabilities, wants logits"), (nn.LogSoftmax(1), None)):
        backbone = nn.Sequential(SmallNet(), last).eval()
        with nullcontext() if error is None else pytest.raises(ValueError, match=f"^{error}"):
            network = EarlyExitNetwork(backbone, {"0.block1": plain_head(12, 5)}, example_input=x).eval()
            torch.testing.assert_close(network(x).probs, backbone(x).exp())


def test_a_backbone_whose_classifier_was_fused_is_refused_by_name() -> None:
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), plain_head(8))
    fuse_aux_heads(backbone)
    with pytest.raises(ValueError, match="^backbone: returned a HeadOutput"):
        EarlyExitNetwork(backbone, {"0": FusedAuxHead(8, 5)}, example_input=images(1))


class Frozen(SmallNet):
    """Its own forward is without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_heads_train_behind_layers_that_run_without_gradients(reentrant: bool | None) -> None:
    """Of a frozen backbone, and of one whose layers are checkpointed."""
    backbone = Frozen() if reentrant is None else SmallNet()
    net = EarlyExitNetwork(backbone, plain_heads(), 0.6, example_input=images(2))
    plain = copy.deepcopy(net)
    if reentrant is None:
        plain.backbone.forward = lambda x: SmallNet.forward(plain.backbone, x)
    else:
        layer = net.backbone.get_submodule(net.taps[-1])
        forward = layer.forward
        layer.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=reentrant)
    x = images(3)
    for one in (net, plain):
        sum(logits.square().sum() for logits in one.logits(x) if logits.requires_grad).backward()
    for head, wanted in zip(net.fused_heads, plain.fused_heads, strict=True):
        torch.testing.assert_close(head.linear.weight.grad, wanted.linear.weight.grad)


def test_heads_see_the_autocast_of_the_layer_that_they_tap() -> None:
    class Casting(SmallNet):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    net = EarlyExitNetwork(Casting(), plain_heads())
    net._checked = net._heads_now()
    assert {logits.dtype for logits in net.logits(images(2))} == {torch.bfloat16}


def test_one_head_for_two_taps_is_refused() -> None:
    head = FusedAuxHead(None, 5)
    first, second, *_ = plain_heads()
    with pytest.raises(ValueError, match=f"{second}'.: is that of '{first}', wants one with a rule of its own"):
        EarlyExitNetwork(SmallNet(), {first: head, second: head})


def test_a_refused_network_leaves_heads_as_they_were() -> None:
    first, second, *_ = plain_heads()
    lazy, wrong = FusedAuxHead(None, 5), FusedAuxHead(99, 5)
    with pytest.raises(ValueError, match="takes 99 features"):
        EarlyExitNetwork(SmallNet(), {first: lazy, second: wrong}, rules=0.25, example_input=images(2))
    assert isinstance(lazy.linear, nn.LazyLinear) and lazy.rule.threshold == wrong.rule.threshold == 1.0


@pytest.mark.parametrize("wrong", [False, True], ids=["taken", "refused"])
def test_looking_at_taps_and_heads_is_no_call_that_counts(wrong: bool) -> None:
    first, second, *_ = plain_heads()
    backbone = Counting(SmallNet())
    head = Counting(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(5)))
    heads = {f"layer.{first}": head, f"layer.{second}": FusedAuxHead(99 if wrong else None, 5)}
    with pytest.raises(ValueError, match="takes 99 features") if wrong else nullcontext():
        EarlyExitNetwork(backbone, heads, example_input=images(2))
    assert backbone.calls == head.calls == 0


@pytest.mark.parametrize("mode", [True, False])
def test_a_network_takes_over_its_backbones_mode(mode: bool) -> None:
    backbone = SmallNet().train(mode)
    next(backbone.children()).train(not mode)  # a frozen part, say, which stays as its owner set it
    modes = {module: module.training for module in backbone.modules()}
    net = EarlyExitNetwork(backbone, plain_heads())
    assert net.training is mode and all(head.training is mode for head in net.heads.modules())
    assert {module: module.training for module in backbone.modules()} == modes


# Heads that are changed or put in later


CALLS = {
    "answer": lambda net, x: net(x),
    "logits": lambda net, x: net.logits(x),
    "runner": lambda net, x: make_runner(net, x, exits="eager"),
    "calibration": lambda net, x: collect_logits(net, [(x, torch.zeros(len(x), dtype=torch.int64))]),
}


@pytest.mark.parametrize(
    ("put", "error", "message"),
    [
        (lambda net: net.heads.__setitem__(0, FusedAuxHead(8, 7)), ValueError, "has 7 classes, wants 5, as the backb"),
        (lambda net: setattr(net.heads[0], "linear", nn.Linear(8, 7)), ValueError, "has 7 classes, wants 5, as the"),
        (lambda net: net.heads[0]._modules.update(linear=nn.Linear(8, 7)), ValueError, "has 7 classes, wants 5"),
        (lambda net: net.heads.__setitem__(0, ModuleHead(plain_head(8, 7))), ValueError, "has 7 classes, wants 5"),
        (lambda net: net.heads.__setitem__(0, FusedAuxHead(9, 5)), ValueError, "its linear layer takes 9 features"),
        (lambda net: net.heads.__setitem__(0, plain_head(8)), TypeError, "got Sequential, wants a FusedAuxHead"),
    ],
    ids=["head", "layer", "unseen", "module", "width", "no head"],
)
def test_a_head_that_does_not_fit_is_refused_when_it_was_put_in(put, error, message) -> None:
    x = images(3)
    for call in CALLS.values():
        net = network(example_input=x)
        before = net.heads[0], net.heads[0].linear
        put(net)
        net.eval()
        for _ in range(2):
            with pytest.raises(error, match=rf"^heads\['block0'\]: {message}"):
                call(net, x)
        net.heads[0] = before[0]
        net.heads[0].linear = before[1]
        call(net, x)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_classifier_of_other_classes_is_refused_when_it_was_put_in(call) -> None:
    x = images(3)
    net = network(example_input=x)
    for classes in (1, 7):
        net.backbone.fc = nn.Linear(16, classes).eval()
        wants = f"has 5 classes, wants {classes}, as the backbone has"
        with pytest.raises(ValueError, match=rf"^heads\['block0'\]: {wants}"):
            answered = call(net, x)
            answered(x)
    net.backbone.fc = nn.Sequential(nn.Linear(16, 1), nn.Flatten(0)).eval()
    with pytest.raises(ValueError, match=r"^backbone: returned a tensor \[\d+\] of .*, wants logits \["):
        answered = call(net, x)
        answered(x)


def test_other_numbers_of_heads_are_refused() -> None:
    x = images(3)
    net = network(example_input=x)
    del net.heads[2]
    with pytest.raises(ValueError, match="^heads: got 2, wants 3, one for each of"):
        net(x)


def test_a_head_of_the_same_classes_is_put_in() -> None:
    """Checked as the others were: its width is found, and a module that writes to its input gets a copy."""
    x = images(3)
    net = network(0.0, example_input=x)
    net.heads[0], net.heads[2] = FusedAuxHead(None, 5, rule=0.0), ModuleHead(branch(16, inplace=True).eval())
    assert torch.equal(net(x).label, net.logits(x)[0].argmax(1))
    assert net.heads[0].in_features == 8 and net.heads[2].run.writes_input


class Louder(FusedAuxHead):
    def logits(self, x: Tensor) -> Tensor:
        return 3 * super().logits(x)


class Renamed(FusedAuxHead):
    def describe(self) -> str:
        return "mine"


def test_heads_with_another_way_to_answer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^heads\['block0'\]: is a Louder that has a logits of its own"):
        EarlyExitNetwork(SmallNet(), {"block0": Louder(8, 5)})
    head = FusedAuxHead(8, 5)
    head.forward = lambda x: x
    with pytest.raises(ValueError, match=r"^heads\['block0'\]: is a FusedAuxHead that has a forward of its own"):
        EarlyExitNetwork(SmallNet(), {"block0": head})
    assert EarlyExitNetwork(SmallNet(), {"block0": Renamed(8, 5)}).describe().endswith("mine")
    x, louder = torch.randn(3, 8), Louder(8, 5)
    torch.testing.assert_close(louder(x).probs, louder.logits(x).softmax(1))


PUT_ON_A_HEAD = {
    "pre-hook": (lambda head: head.register_forward_pre_hook(lambda _head, x: (3 * x[0],)), "carries hooks"),
    "backward hook": (lambda head: head.register_full_backward_hook(lambda *_: None), "carries hooks"),
    "forward": (
        lambda head: setattr(head, "forward", lambda x, of=head.forward: of(3 * x)),
        "has a forward of its own",
    ),
    "class": (lambda head: setattr(head, "__class__", Louder), "has a logits of its own"),
}


@pytest.mark.parametrize("put", PUT_ON_A_HEAD)
def test_what_is_put_on_a_head_itself_is_not_passed_over_by_training(put: str) -> None:
    """Calls of the head follow it, logits cannot."""
    x, (act, message) = images(3), PUT_ON_A_HEAD[put]
    net = network(example_input=x)
    act(net.heads[0])
    assert len(net(x).label) == 3
    data = [(x, torch.arange(3))]
    for call in (
        lambda: net.logits(x),
        lambda: collect_logits(net, data),
        lambda: train(net, data, TrainingPlan("joint")),
        lambda: train(net, data, TrainingPlan("heads")),
    ):
        with pytest.raises(ValueError, match=rf"^heads\['block0'\]: {message}, which logits, training and calibration"):
            call()


def test_layers_of_a_head_keep_their_modes() -> None:
    """A dropout that acts in eval mode (Monte-Carlo dropout) is the user's choice."""
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(8, 5)).eval()
    head[2].train()
    net = EarlyExitNetwork(SmallNet().eval(), {"block0": head})
    assert isinstance(net.heads[0], ModuleHead) and "training mode" in net.heads[0].why_not_fused
    assert head[2].training and not head[3].training


# Inputs and backbones of other kinds


@pytest.mark.parametrize("checked", [False, True])
def test_transforms_want_checked_taps(checked: bool) -> None:
    x = images(4)
    net = network(example_input=x if checked else None)
    for of_one in (lambda one: net(one[None]).label, lambda one: net.logits(one[None])[0]):
        if checked:
            assert len(torch.func.vmap(of_one)(x)) == 4
        else:
            with pytest.raises(RuntimeError, match="^network: its taps are not checked yet, .*network.check_taps"):
                torch.func.vmap(of_one)(x)
    assert len(net(x).label) == 4


# Rules: given to all heads or by tap, as rules or as thresholds


def test_rules_by_number_rule_or_tap() -> None:
    """A number changes the threshold alone."""
    rule = ExitRule(0.5, temperature=2.0)
    net = network(rule)
    assert [head.rule.threshold for head in net.heads] == [0.5] * 3
    net.heads[0].rule.threshold = 0.25
    assert rule.threshold == net.heads[1].rule.threshold == 0.5 and net.heads[2].rule.temperature == 2.0
    net.set_rules({"block1": 0.1, "block2": ExitRule(0.2, enabled=False)})
    rules = [head.rule for head in net.fused_heads]
    assert [rule.threshold for rule in rules] == [0.25, 0.1, 0.2]
    assert [rule.temperature for rule in rules] == [2.0, 2.0, 1.0]
    net.set_rules(0.4)
    net.set_rules({"block0": 0.3})
    assert [rule.threshold for rule in rules] == [0.3, 0.4, 0.4]
    assert [rule.temperature for rule in rules] == [2.0, 2.0, 1.0]
    assert [rule.enabled for rule in rules] == [True, True, False]
    assert [rule.threshold_tensor.item() for rule in rules] == pytest.approx([0.3, 0.4, 1.0])
    own = EarlyExitNetwork(SmallNet(), {"block0": FusedAuxHead(8, 5, rule=0.4)})
    assert own.heads[0].rule.threshold == 0.4


@pytest.mark.parametrize(("criterion", "threshold"), [("energy", -7.5), ("patience", 2.0)])
def test_a_number_is_a_threshold_for_the_criterion_that_a_head_has(criterion: str, threshold: float) -> None:
    net = network({"block1": ExitRule(criterion=criterion)})
    net.set_rules({"block1": threshold})
    assert [head.rule.threshold for head in net.fused_heads] == [1.0, threshold, 1.0]
    with pytest.raises(ValueError, match=rf"^threshold: got {threshold}, wants a number in \[0.0, 1.0\]"):
        net.set_rules(threshold)  # which is none for the others
    assert [head.rule.threshold for head in net.fused_heads] == [1.0, threshold, 1.0]


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ({"block9": 0.5}, r"^rules: 'block9'.*block0"),
        (1.5, "^threshold: got 1.5"),
        ({"block0": -1.0}, "^threshold: got"),
        ("sure", r"^rules: got str, wants an ExitRule or a threshold \(a float\)"),
        ([0.5, 0.6, 0.7], "^rules: got list, wants an ExitRule or a threshold .*, or a dict of them by tap"),
        ({"block0": None}, r"^rules\['block0'\]: got NoneType, wants an ExitRule or a threshold \(a float\)$"),
    ],
    ids=str,
)
def test_bad_rules_are_named_and_change_nothing(rules: object, match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        network(rules)
    net = network(0.6)
    with pytest.raises((ValueError, TypeError), match=match):
        net.set_rules(rules)
    assert [head.rule.threshold for head in net.heads] == [0.6] * 3
