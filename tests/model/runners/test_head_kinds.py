"""Runners and eager plans of all kinds of heads, with streams and graphs simulated; see test_head_kinds_gpu.py."""

from itertools import product

import pytest
import torch
from auxhead.kernels import runs_triton
from auxhead.model import EarlyExitNetwork, make_runner
from auxhead.model.network import eager_pass
from auxhead.model.network.exits_repeat import ExitsRepeat
from support.example_models import SmallNet, mixed_heads, naive_answers, plain_heads
from support.exits_plan_cases import as_on_a_gpu, assert_same, differ, heads_called
from support.hidden_head_cases import with_hidden_heads
from support.one_by_one import one_by_one
from support.patience_cases import RULES, assert_answers, set_rules
from support.simulated_cuda import CaptureStreams, simulated_cuda
from support.spread_exits import images

pytestmark = [
    pytest.mark.skipif(not runs_triton(torch.empty(0)), reason="kernels are not interpreted here"),
    pytest.mark.usefixtures("without_interpreter"),  # what the eager runner answers with
]


def network_of(kind: str) -> EarlyExitNetwork:
    """Every exit answers for some."""
    if kind == "hidden layers":
        return with_hidden_heads(images(33))[0]
    net, x = EarlyExitNetwork(SmallNet(), plain_heads() if kind == "fused" else mixed_heads()).eval(), images(33)
    net.check_taps(x)
    for head, output in zip(net.heads, naive_answers(net, x), strict=False):
        head.rule.threshold = output.confidence.median().item()
    return net


KINDS = ("fused", "hidden layers", "modules")


@pytest.fixture(params=KINDS)
def network(request: pytest.FixtureRequest) -> EarlyExitNetwork:
    return network_of(request.param)


@pytest.mark.parametrize(
    ("kind", "trunk"), [("fused", "as_is"), ("fused", "cudnn"), ("hidden layers", "cudnn"), ("modules", "as_is")]
)
def test_exact_padded_and_split_batches_answer_as_eager(kind, trunk, way):
    network = network_of(kind)
    eager = make_runner(network, images(2), exits="eager", trunk=trunk)
    with simulated_cuda():
        runner = make_runner(network, images(3), batch_sizes=(4, 2), trunk=trunk, exits=way)
        batches = [images(samples) for samples in (4, 1, 3, 2, 7)]
        results = [runner(x) for x in batches]  # kept: no result is a view of what the next request writes
    for x, found in zip(batches, results, strict=True):
        assert_same(found, eager(x))
    assert torch.cat([found.exit_index for found in results]).unique().numel() > 2


@pytest.mark.parametrize("kind", ["fused", "hidden layers"])
def test_heads_of_more_than_a_launch(kind, way, not_by_one_launch):
    network = network_of(kind)
    with simulated_cuda():
        runner = make_runner(network, images(3), batch_sizes=(4, 2), exits=way)
        assert f"{not_by_one_launch}block0" in runner.describe()
        batches = [images(samples) for samples in (4, 1, 7)]
        results = [runner(x) for x in batches]
    for x, found in zip(batches, results, strict=True):
        assert_same(found, make_runner(network, images(2), exits="eager")(x))


def test_a_classifier_of_more_than_a_launch_is_described(way, not_by_one_launch):
    network = network_of("fused")
    with simulated_cuda():
        runner = make_runner(network, images(3), batch_sizes=(2,), trunk="cudnn", exits=way)
        assert f"{not_by_one_launch}block0, block1, block2, the classifier" in runner.describe()


@pytest.mark.usefixtures("by_library")
def test_workspaces_of_libraries_that_multiply_heads_are_the_runners_own(way, monkeypatch):
    """Others may clear those that cuBLAS takes by itself, while graphs write them."""
    own = []
    monkeypatch.setattr(CaptureStreams, "allocate_workspaces", lambda _, stream: own.append(stream))
    with simulated_cuda():
        runner = make_runner(network_of("fused"), images(3), batch_sizes=(2,), exits=way)
        assert runner._captures.streams.side in own


@pytest.mark.parametrize(("kind", "way"), [*product(KINDS, ("overlapped", "polled", "gated")), ("modules", "compact")])
@pytest.mark.usefixtures("every_move_pays")
def test_rules_and_parameters_are_followed(kind, way):
    network, x, options = network_of(kind), images(3), {"exits": way}
    if way == "compact":
        options = {"exits": "polled", "compact": True}
    with simulated_cuda():
        runner = make_runner(network, x, batch_sizes=(2, 4), trunk="cudnn", **options)
        assert ("Gathered after block0" in runner.describe()) == (way == "compact")
        for index in (0, 2, 3):
            network.set_rules({tap: 0.0 if i == index else 1.0 for i, tap in enumerate(network.taps)})
            assert runner(x).exit_index.eq(index).all()
        network.set_rules(0.0)
        before = runner(x)
        with torch.no_grad():
            for parameter in network.heads.parameters():
                parameter.mul_(-1.5)
            network.backbone.block0[0].weight.mul_(0.5)
        network.set_rules(0.5)
        runner.refresh()
        found = runner(x)
        assert differ(found, before)
        assert_same(found, make_runner(network, x, exits="eager", trunk="cudnn")(x))


@pytest.mark.parametrize(
    ("exits", "name"),
    [
        *zip(("overlapped", "forked", "polled", "gated"), RULES, strict=False),
        *(("compact", name) for name in (*RULES,)[:2]),
    ],
)
@pytest.mark.usefixtures("every_move_pays")
def test_runners_count_heads_that_agree(exits, name):
    rules = RULES[name]
    options = {"forked": {"exits": "overlapped", "forks": ("block0",)}, "compact": {"exits": "polled", "compact": True}}
    network = EarlyExitNetwork(SmallNet(), plain_heads(), 0.0).eval()
    set_rules(network, rules)
    batches = [images(samples) for samples in (3, 5)]
    with simulated_cuda():
        runner = make_runner(network, images(2), batch_sizes=(4, 2), **options.get(exits, {"exits": exits}))
        found = [runner(x) for x in batches]
        said = runner.describe()
    for x, answer in zip(batches, found, strict=True):
        assert_answers(answer, network, x, rules)
    if exits == "compact":
        reason = "a head behind it exits under patience, which counts the labels that earlier heads gave to a row."
        patient = max(index for index, rule in enumerate(rules) if rule.criterion == "patience")
        for index, tap in enumerate(network.taps):
            assert (f"Not compacted after {tap}: {reason}" in said) == (index < patient)
            assert (f"Gathered after {tap}" in said) == (index >= patient)


@pytest.mark.parametrize("forks", [(), ("block0",), SmallNet.taps], ids=str)
def test_modules_leave_the_trunk_with_their_launch(forks):
    network, x = network_of("modules"), images(3)
    with simulated_cuda():
        found = make_runner(network, x, batch_sizes=(3,), forks=forks, exits="overlapped")(x)
    assert_same(found, one_by_one(network, x))


def test_a_runner_says_which_heads_are_modules(way):
    with simulated_cuda():
        runner = make_runner(network_of("modules"), images(2), batch_sizes=(1, 2), exits=way)
    of_modules = [line for line in runner.describe().splitlines() if "not fused" in line]
    assert [line.split()[1] for line in of_modules] == ["block0:", "block2:"]
    assert all("operators" in line for line in of_modules)


# Eager passes by a plan


@pytest.mark.parametrize("stop", [False, True])
def test_an_eager_pass_by_a_plan_answers_as_one_by_one(network, stop, monkeypatch):
    made = []
    monkeypatch.setattr(
        eager_pass, "ExitsRepeat", lambda *args, **options: made.append(1) or ExitsRepeat(*args, **options)
    )
    network.check_taps(images(2))
    with torch.no_grad():
        for samples in (5, 1, 5):
            x = images(samples)
            wanted = one_by_one(network, x, stop=stop)
            with as_on_a_gpu(), heads_called() as called:
                for _ in range(2):
                    assert_same(network(x, stop=stop), wanted)
            assert not called, "heads were called one by one"
            for parameter in network.heads.parameters():  # read anew, with no other plan
                parameter.mul_(-1.0)
    assert made


def test_a_plan_sees_another_rule_of_a_module():
    network, x = network_of("modules"), images(5)
    with as_on_a_gpu():
        before = network(x)
        network.heads[0].rule.criterion = "entropy"
        network.heads[0].rule.threshold = 0.01
        found = network(x)
    assert_same(found, one_by_one(network, x))
    assert differ(found, before)


def test_a_pass_goes_on_head_by_head_and_runs_no_module_twice():
    """A head that is not of the tap's dtype is no part of a launch; those before it were asked already."""
    network, calls, x = network_of("modules"), [], images(4)
    network.heads[0].module.register_forward_hook(lambda *_: calls.append(None))
    wanted = one_by_one(network, x)
    calls.clear()
    network.heads[1].double()
    with as_on_a_gpu(), pytest.raises((ValueError, TypeError)):
        network(x)
    assert len(calls) == 1
    network.heads[1].float()
    with as_on_a_gpu():
        assert_same(network(x), wanted)
