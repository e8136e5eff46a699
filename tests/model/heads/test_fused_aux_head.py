"""FusedAuxHead: the same head as the nn.Sequential that it replaces, with hidden layers and without."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead, ModuleHead
from support.example_models import SmallNet, assert_as_exact, in_double, softmax_of
from support.head_plan_cases import PUT_ON, check_change, counting, follows, make_head, make_input
from support.head_sequentials import ALL, HIDDEN, MAP, OF_VECTORS, flat, seq
from support.hidden_head_cases import HIDDEN_CHANGES
from torch import nn

KINDS = {**ALL, **{f"hidden-{kind}": make for kind, make in HIDDEN.items()}}

BAD = ValueError, TypeError

#: Twice without anything between is one of another probability, and so of other random numbers.
WITH_DROPOUTS = ["hidden-norm-and-hidden", *(kind for kind in KINDS if "drop" in kind and kind != "dropout-twice")]


def inputs_of(kind: str, **options: object) -> torch.Tensor:
    return torch.randn((3, 6) if kind in OF_VECTORS else MAP, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_as_the_sequential(kind: str, device: torch.device) -> None:
    source = KINDS[kind]().to(device).eval()
    x = inputs_of(kind, device=device)
    exact = softmax_of(in_double(source), x.double())
    head = FusedAuxHead.from_module(source, rule=exact.amax(1).median().item() - 1e-3)
    for out in (head(x), head(x)):  # by the operator, and by a plan
        assert_as_exact(out.probs, softmax_of(source, x), exact)
        assert out.label.equal(exact.argmax(1)) and out.label.dtype == torch.int64
        assert_as_exact(out.confidence, softmax_of(source, x).amax(1), exact.amax(1))
        assert out.exit.equal(exact.amax(1) > head.rule.threshold) and out.exit.any()
    for logits in (head.logits(x), head.logits_of_features(head.features(x))):
        assert_as_exact(torch.softmax(logits, 1), softmax_of(source, x), exact)


@pytest.mark.parametrize("kind", ["avg-2x3", "hidden-norm-and-hidden"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_answers_as_the_sequential_in_half_precision(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    source = KINDS[kind]().to(device, dtype).eval()
    x = inputs_of(kind, device=device, dtype=dtype)
    out = FusedAuxHead.from_module(source)(x)
    assert out.probs.dtype == out.confidence.dtype == torch.float32
    assert_as_exact(out.probs, softmax_of(source, x), softmax_of(in_double(source), x.double()))


@pytest.mark.parametrize("kind", ["named-fc", "hidden-all"])
def test_parameters_are_the_same_tensors(kind: str) -> None:
    source = KINDS[kind]().eval()
    head, x = FusedAuxHead.from_module(source), torch.randn(MAP)
    assert [id(p) for p in head.parameters()] == [id(p) for p in source.parameters()]
    before = source(x)
    nn.functional.cross_entropy(head.logits(x), torch.tensor([0, 1, 2])).backward()
    torch.optim.SGD(head.parameters(), lr=1.0).step()
    assert not torch.equal(before, source(x))
    assert_as_exact(head(x).probs, softmax_of(source, x), softmax_of(in_double(source), x.double()))


@pytest.mark.parametrize("kind", ["avg-2x3", "max", "flatten", "linear", "hidden-no-biases", "hidden-all"])
def test_gradients_are_those_of_the_sequential(kind: str, device: torch.device) -> None:
    """In answers, by the operator and by a plan, and in logits."""
    source = KINDS[kind]().to(device).eval()
    for part in source.modules():
        if isinstance(part, nn.Softmax):
            part.dim = 1
    head = FusedAuxHead.from_module(copy.deepcopy(source))
    x = inputs_of(kind, device=device).requires_grad_()
    seed = torch.randn(3, head.num_classes, device=device)

    def gradients(probs: torch.Tensor, confidence: torch.Tensor, module: nn.Module) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((probs * seed).sum() + confidence.sum(), [x, *module.parameters()])

    probs = softmax_of(source, x)
    wanted = gradients(probs, probs.amax(1), source)
    for out in (head(x), head(x)):
        assert not out.label.requires_grad and not out.exit.requires_grad
        torch.testing.assert_close(gradients(out.probs, out.confidence, head), wanted)
    probs = head.logits(x).softmax(1)
    torch.testing.assert_close(gradients(probs, probs.amax(1), head), wanted)


@pytest.mark.parametrize("kind", WITH_DROPOUTS)
def test_dropouts_act_in_training_where_they_stood(kind: str) -> None:
    source = KINDS[kind]().train()
    head, x = FusedAuxHead.from_module(source), inputs_of(kind)
    assert head.training
    torch.manual_seed(1)
    wanted = softmax_of(source, x)
    torch.manual_seed(1)
    torch.testing.assert_close(head.logits(x).softmax(1), wanted)
    assert torch.equal(head(x).probs, head.eval()(x).probs)


@pytest.mark.parametrize("options", [{}, {"hidden_features": 4, "rectifies": True}], ids=["plain", "hidden"])
def test_lazy_width_comes_from_the_first_input(options: dict[str, Any], device: torch.device) -> None:
    head = FusedAuxHead(None, 5, pool="max", pool_size=(2, 3), device=device, **options)
    head.load_state_dict(head.state_dict())
    x = torch.randn(MAP, device=device)
    out = head(x)
    first = head.hidden.linear if options else head.linear
    assert type(first) is nn.Linear and first.in_features == head.in_features == 36
    assert_as_exact(out.probs, torch.softmax(head.logits(x), 1), out.probs.double())
    assert FusedAuxHead(None, 5, pool="none", **options)(torch.randn(0, 2, 3, 4)).probs.shape == (0, 5)
    network = EarlyExitNetwork(SmallNet(), {"block1": FusedAuxHead(None, 5, **options)})
    network.check_taps(torch.randn(2, 3, 8, 8))
    assert network.fused_heads[0].in_features == 12


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"in_features": 0}, BAD, "in_features: got"),
        ({"in_features": 2.5}, BAD, "in_features: got"),
        ({"in_features": True}, ValueError, "in_features: got True, wants a positive int"),
        ({"bias": "no"}, TypeError, "bias: got 'no', wants a bool"),
        ({"return_probs": None}, TypeError, "return_probs: got None, wants a bool"),
        ({"in_features": None, "norm": True}, ValueError, "in_features: got None with norm=True"),
        ({"num_classes": -1}, BAD, "num_classes: got"),
        ({"num_classes": None}, BAD, "num_classes: got"),
        ({"pool": "mean"}, BAD, "pool: got"),
        ({"pool_size": (2, None)}, BAD, "pool_size: got"),
        ({"pool": "none", "pool_size": 2}, BAD, "pool_size: got"),
        ({"dropout": 1.5}, BAD, "dropout: got"),
        ({"dropout": None}, BAD, "dropout: got"),
        ({"rule": -0.1}, BAD, "threshold: got"),
        ({"rule": "sure"}, BAD, "rule: got"),
        ({"hidden_features": 0}, ValueError, "hidden_features: got 0, wants an int from 1 to 1,024"),
        ({"hidden_features": 1025}, ValueError, "hidden_features: got 1025, wants an int from 1 to 1,024"),
        ({"hidden_features": True}, ValueError, "hidden_features: got True"),
        ({"hidden_features": 3, "activation": "tanh"}, ValueError, "activation: got 'tanh', wants one of"),
        ({"hidden_features": 3, "hidden_dropout": 1.5}, ValueError, "hidden_dropout: got 1.5, wants a probability"),
        ({"norm": 1e-5}, TypeError, "norm: got 1e-05, wants a bool"),
        ({"rectifies": "yes"}, TypeError, "rectifies: got 'yes', wants a bool"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        FusedAuxHead(**{"in_features": 6, "num_classes": 5, **options})


@pytest.mark.parametrize(
    "x", [torch.zeros(6), [[0.0] * 6], None, torch.zeros(2, 6).numpy()], ids=lambda x: str(type(x))
)
def test_bad_inputs_are_named(x: object) -> None:
    with pytest.raises((ValueError, TypeError), match="^x: got"):
        FusedAuxHead(6, 5)(x)


def test_runs_on_the_meta_device() -> None:
    out = FusedAuxHead(6, 5, device="meta")(torch.empty(MAP, device="meta"))
    assert out.probs.shape == (3, 5) and out.label.device.type == "meta"


def test_a_rule_left_on_the_meta_device_is_no_silent_answer() -> None:
    with torch.device("meta"):
        head = FusedAuxHead(6, 5, rule=0.5)
    head.load_state_dict(FusedAuxHead(6, 5).state_dict(), assign=True)
    x = torch.randn(MAP)
    try:
        out = head(x)
    except (ValueError, RuntimeError, NotImplementedError):
        return
    torch.testing.assert_close(out.probs, torch.softmax(head.logits(x), 1))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("change", PUT_ON.values(), ids=PUT_ON)
def test_what_is_put_on_a_layer_is_in_answers_as_in_logits(change: Callable[[FusedAuxHead], object]) -> None:
    """And what launches for a network ask says so."""
    head = make_head()
    x = make_input(head)
    before = head(x)
    change(head)
    assert (head(x).probs - before.probs).abs().max() > 1e-2
    torch.testing.assert_close(head(x).probs, (head.logits(x) / head.rule.temperature).softmax(1))
    torch.testing.assert_close(head.logits_of_features(head.features(x)), head.logits(x))
    assert head.why_not_launched().startswith("linear ")


@pytest.mark.parametrize(
    "x", [torch.randn(2, 8).to_sparse(), torch.nested.nested_tensor([torch.randn(8)] * 2)], ids=["sparse", "nested"]
)
@pytest.mark.parametrize("head", [FusedAuxHead(8, 5), ModuleHead(nn.Linear(8, 5))], ids=["fused", "module"])
def test_tensors_of_other_layouts_are_refused_by_name(head: nn.Module, x: torch.Tensor) -> None:
    for call in (head, head.logits):
        with pytest.raises(TypeError, match="^x: got a .* tensor, wants a dense one"):
            call(x)


def test_a_first_input_within_a_transform_is_refused_by_name() -> None:
    head, x = FusedAuxHead(None, 5), torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="^x: is the head's first, and within a transform of torch.func"):
        torch.func.vmap(lambda one: head(one[None]).probs)(x)
    assert head(x).probs.shape == (4, 5)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_head_that_failed_to_take_its_width_takes_it_later(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, x = FusedAuxHead(None, 5), torch.randn(2, 7)
    materialize, left = nn.UninitializedParameter.materialize, [0, error]

    def failing(parameter: nn.UninitializedParameter, *shape: object, **options: object) -> None:
        if left and left.pop(0):  # the bias, after the weight
            raise error
        materialize(parameter, *shape, **options)

    monkeypatch.setattr(nn.UninitializedParameter, "materialize", failing)
    with pytest.raises(error):
        head(x)
    assert head(torch.randn(2, 9)).label.shape == (2,) and head.linear.weight.shape == (5, 9)


def test_a_pool_size_is_assigned_as_it_is_given() -> None:
    head, x = FusedAuxHead(2, 5).eval(), torch.randn(3, 2, 4, 4)
    head.linear = nn.Linear(8, 5)
    head.pool_size = 2
    torch.testing.assert_close(head(x).probs, head.logits(x).softmax(1))
    with pytest.raises(ValueError, match=r"^pool_size: got \(2, 0\), wants a positive int or a pair"):
        head.pool_size = (2, 0)
    assert head.pool_size == (2, 2)


@pytest.mark.parametrize(
    "options", [{}, {"hidden_features": 6, "hidden_dropout": 0.5, "norm": True}], ids=["", "hidden"]
)
def test_dropout_does_not_act_in_answers_of_layers_that_run_as_they_are(options: dict[str, Any]) -> None:
    head, x = FusedAuxHead(8, 5, dropout=0.5, **options).train(), torch.randn(4, 8)
    before = head(x).probs
    head.linear.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(head(x).probs, before)
    assert not torch.allclose(head.logits(x), head.logits(x)), "in logits it does"


def test_a_first_input_of_another_dtype_leaves_the_width_open() -> None:
    head = FusedAuxHead(None, 5)
    with pytest.raises(ValueError, match="^x: got torch.float16 on cpu, wants torch.float32 on cpu"):
        head(torch.randn(2, 7).half())
    assert isinstance(head.linear, nn.LazyLinear)


# Hidden layers, norms and leading ReLUs: plans, and what they rest on


@pytest.mark.parametrize("change", HIDDEN_CHANGES.values(), ids=HIDDEN_CHANGES)
def test_a_change_is_followed_by_plans(change: object) -> None:
    head = FusedAuxHead.from_module(HIDDEN["all"]().eval(), rule=0.3)
    with torch.no_grad():
        head.hidden.linear.weight.mul_(4)
    check_change(head, change, (2, 6, 1, 3))


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
