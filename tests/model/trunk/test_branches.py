"""Branches of a backbone on lanes of their own: what a plan orders, and trunks that have one."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from auxhead.model import make_trunk
from auxhead.model.listening.taps import listening
from auxhead.model.trunk.branches import MOST_BESIDE, has_branches, plan_branches
from hypothesis import given
from hypothesis import strategies as st
from support.example_models import SmallNet
from support.lane_plans import wrong
from support.trunk_cases import Inception, assert_same, made
from torch import Tensor, fx, nn

# Plans


def graph_of(inputs: list[list[int]], taps: set[int] = frozenset()) -> fx.Graph:  # type: ignore[assignment]
    """A graph whose n-th layer sums what some earlier ones return (0: the input)."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for number, each in enumerate(inputs, start=1):
        node = graph.call_function(torch.stack, ([nodes[index % len(nodes)] for index in each],))
        nodes.append(graph.call_module(f"tap{number}", (node,)) if number in taps else node)
    graph.output(nodes[-1])
    return graph


INCEPTION = [[0], [1], [1], [3], [1], [5], [1], [7], [2, 4, 6, 8]]
TWO_STREAMS = [[0], [1], [2], [0], [4], [5], [3, 6], [7]]


@pytest.mark.parametrize("inputs", [INCEPTION, TWO_STREAMS, INCEPTION + [[9], [10], [10, 11]]], ids=str)
@pytest.mark.parametrize("taps", [set(), {5}, {9}, {2, 9}], ids=str)
def test_every_wait_of_a_plan_is_needed(inputs, taps) -> None:
    names = {f"tap{number}" for number in taps}
    steps = plan_branches(graph_of(inputs, taps), names)
    assert has_branches(steps) and not wrong(steps, names)
    waits = [(number, each) for number, step in enumerate(steps) for each in step.waits]
    # behind a join a lane waits whether or not others have read its memory: who shares it shows when it runs alone
    goes_on = [(number, each) for number, each in waits if steps[each].joins and steps[number].lane]
    assert waits and all(wrong(steps, names, without=each) for each in waits if each not in goes_on)


def test_branches_run_beside_each_other() -> None:
    for inputs, lanes in ((INCEPTION, [0, 0, 1, 1, 2, 2, 3, 3, 0]), (TWO_STREAMS, [0, 0, 0, 1, 1, 1, 0, 0])):
        graph = graph_of(inputs)
        lane_of = {step.node: step.lane for step in plan_branches(graph, set())}
        assert [lane_of[node] for node in graph.nodes][1:-1] == lanes


def test_taps_of_one_branch_do_not_hold_up_another() -> None:
    """Layers of the second stream run before, between and behind the first one's taps, which keep their order."""
    steps = plan_branches(graph_of(TWO_STREAMS, {1, 2, 3}), {"tap1", "tap2", "tap3"})
    names = [step.node.name for step in steps]
    assert [name for name in names if "tap" in name] == ["tap1", "tap2", "tap3"]
    for layer, tap in (("stack_3", "tap2"), ("stack_4", "tap3")):
        assert names.index(layer) < names.index(tap) and steps[names.index(layer)].lane == 1


def test_layers_of_the_users_keep_their_order() -> None:
    """One may read what another has left."""
    left = []

    class Leaves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() < 1e9:  # so that it is not traced
                left.append(x.mean())
            return x * 1

    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * left[-1] if x.sum() < 1e9 else x

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Conv2d(4, 4, 1) for _ in range(4))
            self.leaves, self.reads, self.fc = Leaves(), Reads(), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.leaves(self.b(F.relu(self.a(x))))
            return self.fc((y * self.reads(self.c(x)) * self.d(x).sigmoid()).mean((2, 3)))

    backbone, x = Both().eval(), torch.randn(2, 4, 5, 5)
    trunk = made(backbone, [], x, "branched")
    names = [step.node.name for step in trunk.branches]
    steps = {step.node.name: step for step in trunk.branches}
    assert names.index("leaves") < names.index("reads") and steps["leaves"].lane == steps["reads"].lane == 0
    assert steps["leaves"].joins and steps["reads"].joins


def test_layers_that_hold_taps_keep_their_order() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    deep = x
    for _ in range(4):
        deep = graph.call_function(torch.tanh, (deep,))
    first = graph.call_module("first", (deep,))
    second = graph.call_module("second", (x,))
    graph.output(graph.call_function(torch.mul, (first, second)))
    steps = plan_branches(graph, {"first.tap", "second.tap"})
    assert [step.node for step in steps if step.node.op == "call_module"] == [first, second]
    assert all(step.lane == 0 and step.joins for step in steps if step.node is second)


@pytest.mark.parametrize(
    "inputs", [[[0], [1], [2]], [[0], [1], [2, 1], [3], [4, 3, 0]], [[0], [1, 0], [2, 1, 0]]], ids=str
)
def test_nothing_changes_for_chains(inputs) -> None:
    """Residual sums and dense blocks are chains: what goes on from the newest output goes on where that is."""
    steps = plan_branches(graph_of(inputs), set())
    assert not has_branches(steps) and not any(step.waits for step in steps)


def test_views_and_sizes_are_no_branches() -> None:
    class Sized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            return y.view(y.size(0), -1).sin().unsqueeze(1)[:, 0]

    assert not has_branches(plan_branches(fx.symbolic_trace(Sized()).graph, set()))


@pytest.mark.parametrize("kind", ["index", "list", "flatten", "a layer named squeeze"])
def test_lanes_wait_for_what_may_launch_something(kind: str) -> None:
    """An index may be a tensor, a flatten may copy, and a layer may be named as a view is."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.squeeze = nn.AvgPool2d(3, 1, 1)
            self.register_buffer("order", torch.tensor([1, 0]))

        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            if kind == "index":
                y = y[:, self.order]
            elif kind == "list":
                y = y[:, [1, 0]]
            elif kind == "flatten":
                y = torch.flatten(y, 1)
            else:
                y = self.squeeze(y)
            return y.sin() * y.cos().tan()

    steps = plan_branches(fx.symbolic_trace(Net()).graph, ())
    assert has_branches(steps) and not wrong(steps, set())


@given(st.data())
def test_any_graph_is_ordered(data) -> None:
    layers = data.draw(st.integers(1, 14))
    inputs = [data.draw(st.lists(st.integers(0, number), min_size=1, max_size=3)) for number in range(layers)]
    taps = data.draw(st.sets(st.integers(1, layers), max_size=2))
    names = {f"tap{number}" for number in taps}
    steps = plan_branches(graph_of(inputs, taps), names)
    assert not wrong(steps, names)
    assert max(step.lane for step in steps) <= MOST_BESIDE


# Trunks


def test_a_branched_trunk_answers_as_the_backbone() -> None:
    backbone, x = Inception().eval(), torch.randn(2, 3, 12, 12)
    trunk = made(backbone, Inception.taps, x, "branched")
    assert trunk.side_by_side and not make_trunk(backbone, Inception.taps, x, "cudnn").side_by_side
    assert_same(trunk, backbone, Inception.taps, x)


class Lane:
    """A stream's part in a plan, without a GPU."""

    def wait_event(self, event: object) -> None:
        assert event == "recorded"

    def record_event(self) -> str:
        return "recorded"


def test_steps_answer_as_the_graph(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Lane())
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    backbone, x = Inception().eval(), torch.randn(2, 3, 12, 12)
    trunk = made(backbone, Inception.taps, x, "branched")
    heard = []
    with listening(trunk.module, Inception.taps, lambda index, _y: heard.append(index)):
        y = trunk.run(x, [Lane() for _ in range(MOST_BESIDE)])
    assert heard == [0] and trunk.classifier is not None
    assert torch.equal(trunk.classifier.logits(y), trunk.classifier.logits(trunk.module(x)))


@fx.wrap
def users_own(x: Tensor) -> Tensor:
    """A copy of what branches have joined."""
    return x.clone()


class UsersOwn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return users_own(x)


def attending() -> nn.Module:
    """Attends beside a branch; attention of ours changes nothing."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.a, self.b, self.fc = nn.MultiheadAttention(12, 2), *(nn.Linear(12, 12) for _ in "abc")

        def forward(self, x: Tensor) -> Tensor:
            y = x.flatten(1, 2).sin()
            return self.fc((self.attention(y, y, y)[0] + self.b(self.a(y))).mean(1))

    return Attends()


@pytest.mark.parametrize("backbone", [Inception(UsersOwn), attending()], ids=["its own memory", "attention"])
def test_what_changes_nothing_of_others_is_branched(backbone) -> None:
    x = torch.randn(2, 3, 12, 12)
    assert_same(made(backbone.eval(), (), x, "branched"), backbone, (), x)


class Changing(Inception):
    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return self.fc((self.first(y) + self.second(y) + y.relu_()).mean((2, 3)))


@fx.wrap
def doubled(x: Tensor) -> Tensor:
    """Twice x, in its memory."""
    return x.mul_(2)


class ChangingBy(Inception):
    """Changes in place what two branches read: by a layer, or by what it is told to."""

    def __init__(self, change: Callable[[Tensor], Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.change, self.layer = change, layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        z = self.change(y) if self.layer is None else self.layer(y)
        return self.fc((self.first(y) + self.second(y) + z).mean((2, 3)))


def with_hook() -> nn.Module:
    """A layer of PyTorch's that does nothing, but for a hook."""
    layer = nn.Identity()
    layer.register_forward_pre_hook(lambda _layer, inputs: inputs[0].mul_(2))
    return layer


def within() -> nn.Module:
    """A layer of PyTorch's that is not traced through, with one in it that changes its input."""
    layer = nn.Sequential(nn.ReLU(inplace=True))
    layer.forward = layer[0].forward  # type: ignore[method-assign]
    return layer


class Untraceable(Inception):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() < 1e9 else -x)


@pytest.mark.parametrize(
    ("backbone", "taps", "why"),
    [
        (SmallNet(), SmallNet.taps, "no layers run beside each other"),
        (Changing(), (), "relu_ may change in place what others read"),
        (ChangingBy(lambda y: doubled(y)), (), "doubled may change in place what others read"),
        (ChangingBy(lambda y: y.__imul__(2)), (), "imul may change in place what others read"),
        (ChangingBy(lambda y: torch.neg(y.exp(), out=y)), (), "neg may change in place what others read"),
        (ChangingBy(torch.abs, with_hook()), (), "layer may change in place what others read"),
        (ChangingBy(torch.abs, within()), (), "layer may change in place what others read"),
        (Untraceable(), (), "the forward of the backbone could not be traced"),
    ],
    ids=["a chain", "relu_", "function", "imul", "out", "hook", "forward", "untraceable"],
)
def test_what_has_no_branches_is_as_it_is(backbone, taps, why) -> None:
    trunk = make_trunk(backbone.eval(), taps, torch.randn(2, 3, 12, 12), "branched")
    assert trunk.module is backbone and trunk.notes == (f"Not branched: {why}.",)
