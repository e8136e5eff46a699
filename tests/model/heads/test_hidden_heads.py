"""Heads with hidden layers, norms and leading ReLUs: the nn.Sequential that they replace, in one launch."""

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead
from support.example_models import SmallNet, assert_as_exact
from support.head_plan_cases import counting, differ, follows
from support.head_sequentials import HIDDEN, MAP, flat, seq
from support.hidden_head_cases import HIDDEN_CHANGES
from torch import nn


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# Plans, and what they rest on


@pytest.mark.parametrize("change", HIDDEN_CHANGES.values(), ids=HIDDEN_CHANGES)
def test_a_change_is_followed_by_plans(change: object) -> None:
    head = FusedAuxHead.from_module(HIDDEN["all"]().eval(), rule=0.3)
    with torch.no_grad():
        head.hidden.linear.weight.mul_(4)
    inputs = [torch.randn(3, 6, 2, 3), torch.randn(1, 6, 2, 3)]
    follows(head, *inputs)
    with torch.no_grad():
        before = head(inputs[0])
        change(head)
        inputs = [x.to(head.linear.weight.dtype) for x in inputs]
        assert differ(before, head._call(inputs[0])), "the change is to show"
    follows(head, *inputs)


def test_a_plan_answers_without_the_operator() -> None:
    head = FusedAuxHead.from_module(HIDDEN["all"]().eval())
    x = torch.randn(MAP)
    with torch.no_grad(), counting(head) as calls:
        for _ in range(3):
            head(x)
    assert len(calls) == 1


def test_a_plain_head_takes_no_hidden_layers() -> None:
    head, x = FusedAuxHead(6, 5).eval(), torch.randn(MAP)
    follows(head, x)
    for _ in range(2):
        with pytest.raises(AttributeError, match="hidden: the head was made without hidden layers, wants a new one"):
            head.hidden = FusedAuxHead(6, 5, norm=True).hidden
        head.hidden = None
    follows(head, x)
    assert "hidden" not in repr(head) and "hidden" not in head._modules


# Made directly


def test_constructor() -> None:
    head = FusedAuxHead(
        12, 5, pool="max", dropout=0.1, hidden_features=8, activation="gelu", hidden_bias=False, hidden_dropout=0.3,
        norm=True, rectifies=True, dtype=torch.float64,
    )  # fmt: skip
    names = ["hidden.norm.weight", "hidden.norm.bias", "hidden.linear.weight", "linear.weight", "linear.bias"]
    assert [name for name, _ in head.named_parameters()] == names
    assert {p.dtype for p in head.parameters()} == {torch.float64} and head.in_features == 12
    assert head.describe() == "pool 'max', a ReLU before it, a LayerNorm, 8 hidden features with gelu, 5 classes"
    plain = FusedAuxHead(12, 5)
    assert plain.hidden is None and {*plain.state_dict()} == {"linear.weight", "linear.bias", "rule._extra_state"}
    assert plain.describe() == "pool 'avg', 5 classes"


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"hidden_features": 0}, ValueError, "hidden_features: got 0, wants an int from 1 to 1,024"),
        ({"hidden_features": 1025}, ValueError, "hidden_features: got 1025, wants an int from 1 to 1,024"),
        ({"hidden_features": True}, ValueError, "hidden_features: got True"),
        ({"hidden_features": 3, "activation": "tanh"}, ValueError, "activation: got 'tanh', wants one of"),
        ({"hidden_features": 3, "hidden_dropout": 1.5}, ValueError, "hidden_dropout: got 1.5, wants a probability"),
        ({"norm": 1e-5}, TypeError, "norm: got 1e-05, wants a bool"),
        ({"rectifies": "yes"}, TypeError, "rectifies: got 'yes', wants a bool"),
        ({"in_features": None, "norm": True}, ValueError, "in_features: got None with norm=True"),
    ],
)
def test_bad_arguments(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FusedAuxHead(**{"in_features": 6, "num_classes": 5, **options})


def test_the_first_linear_layer_takes_the_width_of_the_first_input(device: torch.device) -> None:
    head = FusedAuxHead(None, 5, pool="max", pool_size=(2, 3), hidden_features=4, rectifies=True, device=device)
    assert head.in_features is None
    head.load_state_dict(head.state_dict())
    x = torch.randn(MAP, device=device)
    out = head(x)
    assert type(head.hidden.linear) is nn.Linear and head.in_features == 36
    assert_as_exact(out.probs, torch.softmax(head.logits(x), 1), out.probs.double())
    network = EarlyExitNetwork(SmallNet(), {"block1": FusedAuxHead(None, 5, hidden_features=4)})
    network.check_taps(torch.randn(2, 3, 8, 8))
    assert network.fused_heads[0].in_features == 12


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda head: setattr(head.hidden, "linear", nn.Linear(6, 8)), "linear: takes 9 features, wants 8"),
        (lambda head: setattr(head.hidden, "norm", nn.LayerNorm(5)), r"hidden.norm: got a LayerNorm over \[5\], wants"),
        (lambda head: head.hidden.half(), "hidden.norm_weight: got torch.float16, wants torch.float32"),
        (lambda head: head.hidden.linear.double(), "hidden.weight: got torch.float64, wants torch.float32"),
        (lambda head: setattr(head.hidden, "activation", "tanh"), "hidden.activation: got 'tanh', wants one of"),
    ],
    ids=["width", "norm", "dtype of all", "dtype of one", "activation"],
)
def test_layers_that_do_not_fit_are_refused(change: object, message: str) -> None:
    head = FusedAuxHead.from_module(HIDDEN["norm-and-hidden"]().eval())
    change(head)
    with pytest.raises((ValueError, TypeError), match=message):
        head.as_exit_head()
    network = EarlyExitNetwork(nn.Sequential(nn.Identity(), flat(), nn.Linear(210, 5)), {"0": head})
    with pytest.raises(ValueError, match=r"heads\['0'\]: " + message):
        network.check_taps(torch.randn(MAP))
    with pytest.raises((ValueError, TypeError)):
        head(torch.randn(MAP))


# An AvgPool2d whose window is the whole map


@pytest.mark.parametrize("made", [nn.AvgPool2d((5, 7)), nn.AvgPool2d((5, 7), stride=(5, 7)), nn.AvgPool2d(5)])
def test_a_window_of_the_whole_map(made: nn.AvgPool2d) -> None:
    x = torch.randn(3, 6, 5, made.kernel_size[1] if isinstance(made.kernel_size, tuple) else 5)
    source = seq(made, flat(), nn.Linear(6, 5)).eval()
    head = FusedAuxHead.from_module(source)
    assert head.map_size == x.shape[2:]
    torch.testing.assert_close(head(x).probs, source(x).softmax(1))
    wrong = torch.randn(3, 6, 10, 14)
    for call in (head, head.logits, head.features, head.launch_input):
        with pytest.raises(ValueError, match=r"x: got shape \[3, 6, 10, 14\], wants maps of 5x\d: .* AvgPool2d"):
            call(wrong)
        with pytest.raises(ValueError, match=r"x: got shape \[3, 6\], wants maps"):
            call(torch.randn(3, 6))


def test_a_network_runs_a_window_of_part_of_the_map_as_a_module() -> None:
    torch.manual_seed(0)
    part, whole = (seq(nn.AvgPool2d(2), flat(), nn.Linear(width, 5)) for width in (48, 16))
    network = EarlyExitNetwork(SmallNet(), {"block1": part, "block2": whole}, rules=0.3).eval()
    x = torch.randn(4, 3, 8, 8)
    first, second, _ = network.logits(x)
    assert len(network.fused_heads) == 1 and network.exit_heads[0].module is part
    assert network.exit_heads[0].rule.threshold == 0.3
    assert "its AvgPool2d has windows of 2x2 on the output [2, 12, 4, 4]" in network.describe()
    y = network.backbone.block1(network.backbone.block0(x))
    torch.testing.assert_close(first, part(y))
    torch.testing.assert_close(second, whole(network.backbone.block2(y)))
    head = FusedAuxHead.from_module(seq(nn.AvgPool2d(3), flat(), nn.Linear(12, 5)))
    with pytest.raises(ValueError, match=r"heads\['block1'\]: x: got shape \[2, 12, 4, 4\], wants maps of 3x3"):
        EarlyExitNetwork(SmallNet(), {"block1": head}, example_input=x)
