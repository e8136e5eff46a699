"""Branches of a backbone on lanes of their own: what a plan orders, by itself and on a GPU."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from auxhead.kernels.cuda.lifetimes import MemoryPool
from auxhead.model import EarlyExitNetwork, FusedAuxHead, Trunk, make_runner, make_trunk
from auxhead.model.listening.taps import listening
from auxhead.model.runners.capture import Capture, Graph, warm_up
from auxhead.model.trunk.branches import MOST_BESIDE, has_branches, plan_branches
from hypothesis import given
from hypothesis import strategies as st
from support.example_models import SmallNet
from support.lane_plans import wrong
from support.trunk_cases import assert_same, made, trunk_outputs
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


class Inception(nn.Module):
    """Four branches, as GoogLeNet has them, between a stem and a tap, and once more behind it."""

    taps = ("first",)

    def __init__(self, layer: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Sequential(nn.Conv2d(3, 8, 3), layer()), Mixed(layer), Mixed(layer)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.second(self.first(self.stem(x))).mean((2, 3)))


class Mixed(nn.Module):
    """8 channels of four branches."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.one = nn.Conv2d(8, 2, 1)
        self.two = nn.Sequential(nn.Conv2d(8, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(2, 2, 3, padding=1), layer())
        self.three = nn.Sequential(nn.Conv2d(8, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 5, padding=2), layer())
        self.four = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(8, 2, 1), layer())
        self.last = layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.one(x), self.two(x), self.three(x), self.four(x)], 1))


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


# On a GPU


#: Streams on which what is slow takes its time: one lane alone, since whoever waits for another one waits long enough.
slow_streams: list[torch.cuda.Stream] = []


@fx.wrap
def slowly(x: Tensor) -> Tensor:
    """Take a millisecond or two, so that who does not wait for it reads what was there before."""
    if torch.cuda.current_stream() in slow_streams:
        torch.cuda._sleep(2_000_000)
    return x.clone()


class Slow(nn.Module):
    """An Identity that takes its time on a lane that is slow."""

    def forward(self, x: Tensor) -> Tensor:
        return slowly(x)


def captured(trunk: Trunk, x: Tensor, slow: int) -> tuple[Graph, list[Tensor]]:
    """A graph of a trunk with its branches side by side, one lane of them slow, and what it writes."""
    main, *beside = streams = [torch.cuda.Stream() for _ in range(MOST_BESIDE + 1)]
    slow_streams[:] = [streams[slow]]
    capture, found = Capture(x.device, MemoryPool(x.device)), []

    def forward() -> None:
        found.clear()
        with listening(trunk.module, Inception.taps, lambda _index, y: found.append(y.clone()), trunk.reading):
            y = trunk.run(x.contiguous(memory_format=trunk.memory_format), beside)
        found.append(y if trunk.classifier is None else trunk.classifier.logits(y))

    with torch.no_grad():
        warm_up(forward, lambda: None, main)
        with capture.capturing(main, trunk.module):
            forward()
    return capture.graphs[0], found


def answers(trunk: Trunk, x: Tensor, slow: int) -> bool:
    """Whether a graph that is captured anew answers for another batch as the trunk does in line."""
    graph, found = captured(trunk, x, slow)
    x.normal_()
    for each in found:
        each.fill_(float("nan"))
    graph.launch(torch.cuda.current_stream())
    torch.cuda.synchronize()
    return all(torch.equal(*pair) for pair in zip(found, trunk_outputs(trunk, Inception.taps, x), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_lanes_wait_for_each_other_in_a_graph() -> None:
    """Without any one wait of the plan an answer is wrong, or the capture fails."""
    torch.manual_seed(0)
    backbone, x = Inception(Slow).cuda().eval(), torch.randn(2, 3, 12, 12, device="cuda")
    trunk = made(backbone, Inception.taps, x, "branched")
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        assert all(answers(trunk, x, lane) for lane in range(MOST_BESIDE + 1))
        steps, waits = trunk.branches, 0
        for number, step in enumerate(steps):
            for each in step.waits:
                waits += 1
                less = step._replace(waits=tuple(one for one in step.waits if one != each))
                mutant = replace(trunk, branches=[*steps[:number], less, *steps[number + 1 :]])
                try:
                    assert not answers(mutant, x, steps[each].lane), (step, each)
                except RuntimeError:  # a lane that does not capture
                    torch.cuda.synchronize()
        assert waits > 8 and answers(trunk, x, 0)


@pytest.mark.parametrize("exits", ["overlapped", "polled", "gated"])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("repeatable")
def test_runners_on_branches(exits: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 12, 12, device="cuda")
    heads = {tap: FusedAuxHead(8, 5) for tap in ("stem", "first")}
    network = EarlyExitNetwork(Inception(), heads, example_input=x.cpu()).cuda().eval()
    for threshold in (0.0, 1.0):
        for head in network.exit_heads:
            head.rule.threshold = threshold
        with make_runner(network, x, exits=exits, batch_sizes=(4,), trunk="branched") as runner:
            assert runner.trunk.side_by_side
            for _ in range(3):
                found, wanted = runner(x), network(x)
                assert found.exit_index.equal(wanted.exit_index)
                torch.testing.assert_close(found.confidence, wanted.confidence, atol=1e-2, rtol=1e-2)
                x.normal_()
