"""Heads that are modules of their own, in eager plans and in graph runners, with streams and graphs simulated."""

import pytest
import torch
from auxhead.kernels import runs_triton
from auxhead.kernels.repeat import ExitsRepeat
from auxhead.model import CompactingRunner, EarlyExitNetwork, make_runner
from auxhead.model.network import eager_pass
from support.example_models import SmallNet, branch, mixed_heads, naive_answers
from support.exits_plan_cases import as_on_a_gpu, assert_same, differ
from support.head_plan_cases import Tripled
from support.one_by_one import one_by_one
from support.simulated_cuda import simulated_cuda
from torch import Tensor, nn

pytestmark = [
    pytest.mark.skipif(not runs_triton(torch.empty(0)), reason="kernels are not interpreted here"),
    pytest.mark.usefixtures("without_interpreter"),  # what the eager runner answers with
]


def images(samples: int) -> Tensor:
    return torch.randn(samples, 3, 8, 8) * torch.rand(samples, 1, 1, 1) * 4


@pytest.fixture
def network() -> EarlyExitNetwork:
    """Thresholds at the medians, so that every exit answers for some."""
    net, x = EarlyExitNetwork(SmallNet(), mixed_heads()).eval(), images(33)
    net.check_taps(x)
    for head, output in zip(net.heads, naive_answers(net, x), strict=False):
        head.rule.threshold = output.confidence.median().item()
    return net


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_every_runner_answers_as_eager(network, way, trunk):
    eager = make_runner(network, images(2), exits="eager", trunk=trunk)
    with simulated_cuda():
        runner = make_runner(network, images(3), batch_sizes=(4, 1), trunk=trunk, exits=way)
        batches = [images(samples) for samples in (4, 1, 7)]
        results = [runner(x) for x in batches]
    for x, found in zip(batches, results, strict=True):
        assert_same(found, eager(x))
    assert torch.cat([found.exit_index for found in results]).unique().numel() > 2


@pytest.mark.parametrize("forks", [(), ("block0",), SmallNet.taps], ids=str)
def test_modules_leave_the_trunk_with_their_launch(network, forks):
    x = images(3)
    with simulated_cuda():
        found = make_runner(network, x, batch_sizes=(3,), forks=forks, exits="overlapped")(x)
    assert_same(found, one_by_one(network, x))


def test_samples_are_gathered(network, monkeypatch):
    monkeypatch.setattr("auxhead.model.runners.compacting.choose_moves", lambda left, size: moves_of(left, size))
    monkeypatch.setattr("auxhead.model.runners.compacting._LEAST_STOP_US", 0.0)
    with simulated_cuda():
        runner = make_runner(network, images(4), batch_sizes=(2, 4), exits="polled", compact=True)
        assert isinstance(runner, CompactingRunner) and "Gathered after block0" in runner.describe()
        for _ in range(3):
            x = images(4)
            assert_same(runner(x), one_by_one(network, x))


def moves_of(left_us: dict[int, float], size: int) -> list[int | None]:
    """The smallest batch that holds the open samples."""
    smaller = sorted(other for other in left_us if other < size)
    if not smaller:
        return []
    return [None, *(next((other for other in smaller if other >= count), None) for count in range(1, size + 1))]


def test_rules_and_parameters_of_modules_are_followed(network, way):
    x = images(3)
    with simulated_cuda():
        runner = make_runner(network, x, batch_sizes=(4,), exits=way)
        for index in (0, 2, 3):
            network.set_rules({tap: 0.0 if i == index else 1.0 for i, tap in enumerate(network.taps)})
            assert runner(x).exit_index.eq(index).all()
        with torch.no_grad():
            network.heads[0].module.fc.weight.mul_(-1.0)
            network.heads[2].module.bn.running_mean.add_(0.1)
        network.set_rules(0.5)
        runner.refresh()
        assert_same(runner(x), one_by_one(network, x))


CHANGES = {
    "hooks": (lambda head: head.module.fc.register_forward_hook(lambda *said: 3 * said[-1]), "its .* hooks since the"),
    "forward": (lambda head: setattr(head.module, "forward", torch.sign), "its .* forward since the runner was made"),
    "class": (lambda head: setattr(head.module.fc, "__class__", Tripled), "its .* class since the runner was made"),
    "module": (lambda head: setattr(head, "module", branch(8)), "its module was replaced"),
    "layer": (lambda head: setattr(head.module, "conv", nn.Conv2d(8, 6, 3, padding=1)), "its conv was replaced"),
    "weight": (lambda head: setattr(head.module.fc, "weight", nn.Parameter(torch.ones(5, 6))), "its weight was"),
    "moved": (lambda head: setattr(head.module.fc.weight, "data", torch.ones(5, 6)), "its weight was given"),
    "statistics": (lambda head: head.module.bn.register_buffer("running_var", torch.ones(6)), "its running_var was"),
    "rule": (lambda head: setattr(head.rule, "temperature_tensor", torch.ones(())), "its temperature_tensor was repl"),
}  # fmt: skip


@pytest.mark.parametrize("change, message", CHANGES.values(), ids=CHANGES)
def test_a_module_that_is_no_longer_what_a_graph_reads_is_named(network, change, message):
    x = images(1)
    with simulated_cuda():
        runner = make_runner(network, x, exits="overlapped")
        runner(x)
        change(network.heads[0])
        with pytest.raises(RuntimeError, match=rf"heads\['block0'\]: {message}"):
            runner(x)


def test_a_runner_says_what_a_module_costs(network, way):
    with simulated_cuda():
        said = make_runner(network, images(2), batch_sizes=(1, 2), exits=way).describe().splitlines()
    of_modules = [line for line in said if "not fused" in line]
    assert [line.split()[1] for line in of_modules] == ["block0:", "block2:"]
    assert all("us alone for a batch of 2." in line and "operators" in line for line in of_modules)


@pytest.mark.parametrize("stop", [False, True])
def test_an_eager_pass_by_a_plan_answers_as_one_by_one(network, stop):
    made = []
    x = images(5)
    network.check_taps(x)
    with as_on_a_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            eager_pass, "ExitsRepeat", lambda *args, **options: made.append(1) or ExitsRepeat(*args, **options)
        )
        for turn in range(3):
            found = network(x, stop=stop)
            assert_same(found, one_by_one(network, x, stop=stop))
            if turn == 1:
                with torch.no_grad():  # read anew by the module, of which the plan knows nothing
                    network.heads[0].module.fc.weight.mul_(-1.0)
    assert len(made) == 1


def test_a_plan_sees_another_rule_of_a_module(network):
    x = images(5)
    network.check_taps(x)
    with as_on_a_gpu():
        before = network(x)
        network.heads[0].rule.criterion = "entropy"
        network.heads[0].rule.threshold = 0.01
        found = network(x)
    assert_same(found, one_by_one(network, x))
    assert differ(found, before)


def test_a_pass_goes_on_head_by_head_and_runs_no_module_twice(network):
    """A head that is not of the tap's dtype is no part of a launch; those before it were asked already."""
    calls = []
    network.heads[0].module.register_forward_hook(lambda *_: calls.append(None))
    x = images(4)
    network.check_taps(x)
    wanted = one_by_one(network, x)
    calls.clear()
    network.heads[1].double()
    with as_on_a_gpu(), pytest.raises((ValueError, TypeError)):
        network(x)
    assert len(calls) == 1
    network.heads[1].float()
    with as_on_a_gpu():
        assert_same(network(x), wanted)
