"""accelerate: the runner of a whole model, its report, and what is checked before it is handed out."""

import importlib
import re

import pytest
import torch
from auxhead.kernels import CRITERIA
from auxhead.model import Accelerated, EagerRunner, EarlyExitNetwork, ExitRule, accelerate, attach_exits
from auxhead.model import accelerate as accelerate_of_the_package
from auxhead.model.accelerate import _check_answers, _logits
from auxhead.model.calibration.thresholds import exit_scores
from support.example_models import SmallNet, needs_gpu, plain_heads
from support.multi_exit_models import STYLES, InAList, WithoutModules, confident, probabilities
from torch import Tensor

accelerating = importlib.import_module("auxhead.model.accelerate")
pytestmark = pytest.mark.usefixtures("without_interpreter")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
TIMES = (
    r"Before [\d,]+ us \([\d,]+-[\d,]+\), after [\d,]+ us \([\d,]+-[\d,]+\): \d+\.\d\d times as fast, for batches of "
)


@pytest.fixture(autouse=True)
def _exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # trunks round otherwise than the model there


def images(samples: int = 3, device: str = "cpu") -> Tensor:
    return torch.randn(samples, 3, 16, 16, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("style", ["heads in a list", "softmax layers", "hidden layers", "tokens", "functions"])
def test_a_model_in_one_line(style: str, device: str) -> None:
    model, x = confident(STYLES[style][0]()).to(device), images(6, device)
    with accelerate(model, x, rules=0.5) as fast:
        assert isinstance(fast, Accelerated) and isinstance(fast.runner, EagerRunner) == (device == "cpu")
        probs, answer = probabilities(model, style, x), fast(x)
        for row, place in enumerate(answer.exit_index.tolist()):
            confidence = [float(p[row].max()) for p in probs[:-1]]
            if device == "cpu" or min(abs(each - 0.5) for each in confidence) > 1e-2:  # which a GPU may round over
                assert place == [*(each > 0.5 for each in confidence), True].index(True)
                assert answer.label[row] == probs[place][row].argmax()
    exits, *_, said, times = fast.report.splitlines()
    assert exits.startswith("Exits: ") and all(f" at {tap} (" in exits for tap in fast.network.taps)
    assert exits.endswith(f"and {STYLES[style][3]}, the model's own classifier.")
    assert said.startswith("Label and exit of the 6 samples are what the rules make of the model's own logits")
    where = "the CPU" if device == "cpu" else re.escape(torch.cuda.get_device_name())
    assert re.match(f"{TIMES}6 on {where}. Median", times)


def test_it_is_used_as_the_runner_that_it_holds() -> None:
    model, x = InAList().eval(), images()
    with accelerate(model, x) as fast:
        assert fast(x).exit_index.tolist() == [2, 2, 2]  # None never exits
        assert fast.describe() == f"{fast.report}\n{fast.runner.describe()}"
        fast.network.set_rules(0.0)
        assert fast(x).exit_index.tolist() == [0, 0, 0]
        fast.refresh()
        fast.check_closable()
        fast.wait_until_idle()
    assert accelerate_of_the_package is accelerate


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rules", [None, 0.25, {"block1": ExitRule(0.25, temperature=2.0)}])
def test_a_network_that_has_its_heads(rules: object, device: str) -> None:
    network = EarlyExitNetwork(SmallNet(), plain_heads(), rules=0.6).eval().to(device)
    x = images(5, device)
    fast = accelerate(network, x, rules=rules)
    assert fast.network is network
    thresholds = [head.rule.threshold for head in network.fused_heads]
    assert thresholds == {None: [0.6] * 3, 0.25: [0.25] * 3}.get(
        rules if not isinstance(rules, dict) else 0, [0.6, 0.25, 0.6]
    )
    assert fast.report.startswith("Exits: block0, block1, block2, and the backbone's own classifier.\n")
    assert torch.equal(fast(x).exit_index, network(x).exit_index)


class Wrong(EagerRunner):
    """Answers for other samples."""

    def __call__(self, x: Tensor, *, stop: bool = False) -> object:
        return super().__call__(x.flip(0), stop=stop)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_rules_of_every_criterion(criterion: str) -> None:
    """What a runner says is compared with what these rules, not others, make of the network's logits."""
    network, x = EarlyExitNetwork(SmallNet(), plain_heads()).eval(), images(16)
    with torch.no_grad():
        first = network.logits(x)[0]
    scores = exit_scores(first[None], [criterion], [1.0])[0]
    between = 0.0 if criterion == "patience" else scores.sort().values[7:9].mean().item()
    network.set_rules(ExitRule(between, criterion=criterion))
    with accelerate(network, x) as fast:
        answer, wanted = fast(x), network(x)
    assert torch.equal(answer.exit_index, wanted.exit_index)
    assert 0 < int((wanted.exit_index < len(network.taps)).sum())


def test_a_runner_that_answers_otherwise_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = confident(InAList()), images(8)
    made: list[Wrong] = []

    def make_runner(network: EarlyExitNetwork, _example: Tensor, **_: object) -> Wrong:
        made.append(Wrong(network))
        monkeypatch.setattr(made[0], "close", lambda: made.append(made[0]))
        return made[0]

    monkeypatch.setattr(accelerating, "make_runner", make_runner)
    with pytest.raises(
        RuntimeError, match=r"runner: label or exit of \d of 8 samples of the example differ from the mod"
    ):
        accelerate(model, x, rules=0.7)
    assert len(made) == 2, "it was closed"


def test_what_rounding_explains_is_counted() -> None:
    """A threshold that is a confidence of the model's: in the runner it may be passed or not."""
    model, x = InAList().eval(), images(4)
    confidence = model(x)[0].detach().double().softmax(1).amax(1)
    network = attach_exits(model, x)
    for nudge in (-1e-7, 0.0, 1e-7):
        network.set_rules(float(confidence[1]) + nudge)
        assert (
            _check_answers(EagerRunner(network), network, lambda m, x: _logits(network.backbone, m, x), model, x) <= 1
        )
    network.set_rules(float(confidence[1]) + 1e-3)

    class Early(EagerRunner):
        def __call__(self, x: Tensor, *, stop: bool = False) -> object:
            answer = super().__call__(x, stop=stop)
            return answer._replace(exit_index=torch.zeros_like(answer.exit_index))

    with pytest.raises(RuntimeError, match="runner: label or exit"):
        _check_answers(Early(network), network, lambda m, x: _logits(network.backbone, m, x), model, x)


def test_probabilities_of_zero_do_not_excuse_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = WithoutModules().eval(), images(8)
    with torch.no_grad():
        for linear in (model.fc1, model.fc2):
            linear.weight.mul_(3000.0)
    assert (model(x)[0] == 0).any()
    accelerate(model, x)
    monkeypatch.setattr(accelerating, "make_runner", lambda network, *_, **__: Wrong(network))
    with pytest.raises(RuntimeError, match="differ from the model's"):
        accelerate(model, x)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="model: got list, wants an nn.Module"):
        accelerate([], images())
    with pytest.raises(TypeError, match="example: got NoneType, wants a torch.Tensor"):
        accelerate(InAList().eval(), None)
    with pytest.raises(ValueError, match=r"model: in training mode, wants model.eval\(\)"):
        accelerate(InAList().train(), images())
    with pytest.raises(ValueError, match=r"network: in training mode, wants network.eval\(\)"):
        accelerate(EarlyExitNetwork(SmallNet(), plain_heads()).train(), images())
    with pytest.raises(ValueError, match="threshold: got 2"):
        accelerate(InAList().eval(), images(), rules=2.0)
