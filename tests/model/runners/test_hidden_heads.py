"""Heads with hidden layers, in eager plans and in graph runners, with streams and graphs simulated."""

import pytest
import torch
from auxhead.kernels import runs_triton
from auxhead.kernels.repeat import ExitsRepeat
from auxhead.model import EarlyExitNetwork, make_runner
from auxhead.model.answers.exit_result import first_sure
from auxhead.model.network import eager_pass
from support.exits_plan_cases import as_on_a_gpu, assert_same, differ, heads_called
from support.hidden_head_cases import HIDDEN_CHANGES, naive_answers, with_hidden_heads
from support.one_by_one import one_by_one
from support.simulated_cuda import simulated_cuda
from torch import Tensor, nn
from torch.nn.utils import parametrizations

pytestmark = [
    pytest.mark.skipif(not runs_triton(torch.empty(0)), reason="kernels are not interpreted here"),
    pytest.mark.usefixtures("without_interpreter"),  # what the eager runner answers with
]


def images(samples: int) -> Tensor:
    return torch.randn(samples, 3, 8, 8) * torch.rand(samples, 1, 1, 1) * 4


@pytest.fixture
def network() -> EarlyExitNetwork:
    return with_hidden_heads(images(33))[0]


def test_an_eager_network_answers_as_its_heads_were_written() -> None:
    x = images(33)
    net, written = with_hidden_heads(x)
    assert len(net.fused_heads) == 3
    found, said = net(x), naive_answers(net, written, x)
    assert_same(found, first_sure(said, with_probs=True))
    assert found.exit_index.unique().numel() == 4
    for logits, output in zip(net.logits(x), said, strict=True):
        torch.testing.assert_close(logits.softmax(1), output.probs)


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_every_runner_answers_as_eager(network: EarlyExitNetwork, way: str, trunk: str) -> None:
    eager = make_runner(network, images(2), exits="eager", trunk=trunk)
    with simulated_cuda():
        runner = make_runner(network, images(3), batch_sizes=(4, 1), trunk=trunk, exits=way)
        batches = [images(samples) for samples in (4, 1, 7)]
        results = [runner(x) for x in batches]
    for x, found in zip(batches, results, strict=True):
        assert_same(found, eager(x))


def test_parameters_that_change_in_place_are_followed(network: EarlyExitNetwork, way: str) -> None:
    x = images(3)
    with simulated_cuda():
        runner = make_runner(network, x, batch_sizes=(4,), exits=way)
        network.set_rules(0.0)
        before = runner(x)
        with torch.no_grad():
            network.fused_heads[0].hidden.norm.weight.neg_()
            network.fused_heads[0].hidden.linear.weight.mul_(-2.0)
        assert differ(runner(x), before)
        assert_same(runner(x), one_by_one(network, x))


CHANGES = {
    "stack": (lambda head: setattr(head, "hidden", None), "its hidden was replaced"),
    "layer": (lambda head: setattr(head.hidden, "linear", nn.Linear(8, 17)), "its linear was replaced"),
    "norm": (lambda head: setattr(head.hidden, "norm", nn.LayerNorm(8)), "its norm was replaced"),
    "weight": (lambda head: setattr(head.hidden.linear, "weight", nn.Linear(8, 17).weight), "its weight was replaced"),
    "moved": (lambda head: setattr(head.hidden.linear.bias, "data", torch.ones(17)), "its bias was given other memory"),
    "moved norm": (lambda head: setattr(head.hidden.norm.weight, "data", torch.ones(8)), "its weight was given other"),
    "activation": (lambda head: setattr(head.hidden, "activation", "relu"), "its activation was"),
    "ReLU": (lambda head: setattr(head.hidden, "rectifies", False), "its rectifies was changed"),
    "eps": (lambda head: setattr(head.hidden.norm, "eps", 0.5), "its eps was changed"),
}  # fmt: skip


@pytest.mark.parametrize("change, message", CHANGES.values(), ids=CHANGES)
def test_layers_that_are_no_longer_what_a_graph_reads_are_named(
    network: EarlyExitNetwork, change: object, message: str
) -> None:
    x = images(1)
    with simulated_cuda():
        runner = make_runner(network, x, exits="overlapped")
        runner(x)
        change(network.heads[0])
        with pytest.raises(RuntimeError, match=rf"heads\['block0'\]: {message}"):
            runner(x)


def test_parametrized_hidden_layers_are_not_captured(network: EarlyExitNetwork) -> None:
    parametrizations.weight_norm(network.fused_heads[1].hidden.linear)
    network.eval()
    with simulated_cuda(), pytest.raises(ValueError, match=r"heads\['block1'\]: hidden.linear is a Parametr"):
        make_runner(network, images(1), exits="overlapped")


@pytest.mark.parametrize("stop", [False, True])
def test_an_eager_pass_by_a_plan_answers_as_one_by_one(network: EarlyExitNetwork, stop: bool) -> None:
    with torch.no_grad():
        for samples in (5, 1, 5):
            x = images(samples)
            wanted = one_by_one(network, x, stop=stop)
            with as_on_a_gpu(), heads_called() as called:
                for _ in range(2):
                    assert_same(network(x, stop=stop), wanted)
            assert not called, "heads were called one by one"


#: Of a head that reads what a ReLU has made, and that has other widths.
OF_ONE_HEAD = {
    name: change
    for name, change in HIDDEN_CHANGES.items()
    if name not in ("half", "other hidden layers", "no ReLU before the pool")
}


@pytest.mark.parametrize("change", OF_ONE_HEAD)
def test_a_plan_sees_a_change_of_hidden_layers(
    network: EarlyExitNetwork, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(
        eager_pass, "ExitsRepeat", lambda *args, **options: made.append(1) or ExitsRepeat(*args, **options)
    )
    head, x = network.fused_heads[0], images(2)
    network.set_rules(0.0)
    with torch.no_grad(), as_on_a_gpu():
        before = network(x)
        assert not differ(network(x), before) and len(made) == 1
        if change == "no norm":
            head.hidden.norm = None
        elif change == "another hidden layer":
            head.hidden.linear = nn.Linear(8, 17)
        elif change == "another hidden weight":
            head.hidden.linear.weight = nn.Linear(8, 17).weight
        elif change == "data of the hidden weight":
            head.hidden.linear.weight.data = torch.randn(17, 8)
        else:
            OF_ONE_HEAD[change](head)
        assert differ(network(x), before)
        assert_same(network(x), one_by_one(network, x))
