"""torch.compile of heads and networks: one graph, no recompiling for a changed rule, the answers of eager mode."""

from collections.abc import Callable

import pytest
import torch
from auxhead.model import EarlyExitNetwork, ExitResult, ExitRule, FusedAuxHead, HeadOutput
from support.example_models import SmallNet, plain_heads
from support.hidden_head_cases import hidden_heads
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

pytestmark = [
    pytest.mark.usefixtures("without_interpreter"),
    # nothing on stderr: what Dynamo makes of our classes, it makes without their __init__
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


HEADS = {"linear": plain_heads, "hidden layers": hidden_heads}
of_each_kind = pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)


def network(heads: Callable[[], dict[str, nn.Module]] = plain_heads, **options: object) -> EarlyExitNetwork:
    return EarlyExitNetwork(SmallNet(), heads(), 0.6, **options).eval()


def images(samples: int = 3) -> Tensor:
    return torch.randn(samples, 3, 8, 8)


def assert_same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


class Doubled(nn.Module):
    """A user's module with a head in it."""

    def __init__(self, **layers: object) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 6, 3)
        self.head = FusedAuxHead(6, 5, rule=ExitRule(0.25, temperature=1.5), **layers)

    def forward(self, x: Tensor) -> tuple[HeadOutput, Tensor]:
        y = torch.relu(self.body(x))
        out = self.head(y)
        return out, torch.where(out.exit, out.label, -1)


@pytest.mark.parametrize("layers", [{}, {"hidden_features": 9, "activation": "gelu", "norm": True}], ids=HEADS)
def test_a_module_with_a_head_is_one_graph_for_all_batches_and_rules(layers: dict[str, object]) -> None:
    module, counter = Doubled(**layers).eval(), CompileCounter()
    compiled, rule = torch.compile(module, backend=counter, fullgraph=True, dynamic=True), module.head.rule
    x = images(9)
    answers = [module(x)]
    assert_same(compiled(x)[0], answers[0][0])
    for name, value in (("threshold", 0.3), ("temperature", 0.05), ("enabled", False), ("enabled", True)):
        setattr(rule, name, value)
        found, marked = compiled(x)
        answers.append(module(x))
        assert_same(found, answers[-1][0])
        assert torch.equal(marked, answers[-1][1])
    assert len({str(answer) for answer in answers}) > 3, "rules that change nothing show nothing"
    assert_same(compiled(x[:5])[0], module(x[:5])[0])
    assert counter.frame_count == 1


@of_each_kind
def test_logits_of_a_network_are_one_graph_and_train(heads: Callable[[], dict[str, nn.Module]]) -> None:
    net, counter = network(heads, example_input=images()), CompileCounter()
    hooks = [dict(layer._forward_hooks) for layer in net.modules()]
    compiled = torch.compile(net.logits, backend=counter, fullgraph=True, dynamic=True)
    gradients = []
    for logits, x in ((net.logits, images(5)), (compiled, images(7)), (compiled, images(5))):
        torch.manual_seed(1)
        x = torch.randn_like(x)
        found = logits(x)
        assert_same(found, net.logits(x))
        net.zero_grad()
        torch.stack(found).logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert_same(gradients[2], gradients[0])
    assert counter.frame_count == 1
    assert [dict(layer._forward_hooks) for layer in net.modules()] == hooks
    assert not torch.nn.modules.module._global_forward_hooks


@of_each_kind
def test_a_network_is_one_graph_and_follows_its_rules(heads: Callable[[], dict[str, nn.Module]]) -> None:
    net, counter, x = network(heads, example_input=images()), CompileCounter(), images(6)
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    middle = torch.softmax(net.logits(x)[0], 1).amax(1).median().item()
    exits = []
    for rules in (middle, 0.0, ExitRule(middle, temperature=3.0, enabled=False)):
        net.set_rules(rules)
        found = compiled(x)
        assert_same(found, net(x))
        exits.append(found.exit_index.tolist())
    assert exits[1] == [0] * 6 and exits[2] == [3] * 6 and exits[0] not in exits[1:]
    assert counter.frame_count == 1


class Breaking(nn.Module):
    """Dynamo cannot trace it in one go."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(torch.relu(x))


class NamedLogits(nn.Module):
    """Its logits are in a dict."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.body(x)}


def test_graph_breaks_between_taps_change_nothing() -> None:
    net, x = (
        EarlyExitNetwork(Breaking(), {"first": FusedAuxHead(6, 5), "second": FusedAuxHead(5, 5)}),
        torch.randn(3, 6),
    )
    compiled = torch.compile(net.logits, backend="eager")
    assert_same(compiled(x), net.logits(x))  # the first call checks the taps
    assert_same(compiled(x), net.logits(x))
    assert not torch.nn.modules.module._global_forward_hooks


def test_one_graph_asks_for_checked_taps() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match="check_taps, or an example_input, has to come before"):
        torch.compile(network().logits, backend="eager", fullgraph=True)(images())


def test_a_backbone_that_was_compiled_by_itself_keeps_its_taps() -> None:
    backbone, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5)), torch.randn(3, 6)
    net = EarlyExitNetwork(torch.compile(backbone, backend="eager"), {"_orig_mod.0": FusedAuxHead(6, 5)})
    for _ in range(2):
        assert_same(net.logits(x), [net.heads[0].logits(backbone[0](x)), backbone(x)])


@pytest.mark.parametrize("of_backbone", [False, True], ids=["of a tap", "of the backbone"])
def test_hooks_of_users_come_before_heads_and_logits_compiled_too(of_backbone: bool) -> None:
    backbone, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5)), torch.randn(3, 6)
    net = EarlyExitNetwork(NamedLogits(backbone), {"body.0": FusedAuxHead(6, 5)}, example_input=x, logits="logits")
    if of_backbone:
        net.backbone.register_forward_hook(lambda _module, _inputs, found: {"logits": 2 * found["logits"]})
    else:
        backbone[0].register_forward_hook(lambda _module, _inputs, y: 2 * y)
    for way in (net.logits, net):
        wanted = way(x)
        for _ in range(2):
            assert_same(torch.compile(way, backend="eager")(x), wanted)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="forward hooks, which have to come before its heads"):
            torch.compile(way, backend="eager", fullgraph=True)(x)
    assert not torch.nn.modules.module._global_forward_hooks


class Scaled(EarlyExitNetwork):
    """A subclass that changes its input, once."""

    def forward(self, x: Tensor, *, stop: bool = False) -> ExitResult:
        return super().forward(x / 4, stop=stop)

    def logits(self, x: Tensor) -> list[Tensor]:
        return super().logits(x / 4)


def test_the_forward_of_a_subclass_runs_once_where_hooks_keep_the_compiler_out() -> None:
    backbone, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5)), torch.randn(3, 6)
    net = Scaled(backbone, {"1": FusedAuxHead(6, 5)}, example_input=x).eval()
    backbone[1].register_forward_hook(lambda _module, _inputs, y: 2 * y)
    for way in (net, net.logits):
        assert_same(torch.compile(way, backend="eager")(x), way(x))
