"""FusedAuxHead: the same head as the nn.Sequential that it replaces, with hidden layers and without."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from auxhead.model import FusedAuxHead, ModuleHead
from support.example_models import assert_as_exact, in_double, softmax_of
from support.head_plan_cases import PUT_ON, make_head, make_input
from support.head_sequentials import ALL, HIDDEN, MAP, OF_VECTORS
from torch import nn

KINDS = {**ALL, **{f"hidden-{kind}": make for kind, make in HIDDEN.items()}}


#: Twice without anything between is one of another probability, and so of other random numbers.
WITH_DROPOUTS = ["hidden-norm-and-hidden", *(kind for kind in KINDS if "drop" in kind and kind != "dropout-twice")]


def inputs_of(kind: str, **options: object) -> torch.Tensor:
    return torch.randn((3, 6) if kind in OF_VECTORS else MAP, **options)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


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


@pytest.mark.parametrize("kind", ["avg-2x3", "hidden-all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_runs_under_autocast_as_the_sequential(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    source = KINDS[kind]().to(device)
    head, x = FusedAuxHead.from_module(source), torch.randn(MAP, device=device, dtype=dtype)
    with torch.autocast(device.type, torch.bfloat16):
        wanted = softmax_of(source, x)
        out = head(x)
        assert head.logits(x).dtype == torch.bfloat16
        out.probs.sum().backward()
    assert head.linear.weight.dtype == head.linear.weight.grad.dtype == torch.float32
    assert_as_exact(out.probs, wanted, softmax_of(in_double(source), x.double()))


def test_lazy_width_comes_from_the_first_input(device: torch.device) -> None:
    head = FusedAuxHead(None, 5, pool="max", pool_size=(2, 3), device=device)
    head.load_state_dict(head.state_dict())
    x = torch.randn(MAP, device=device)
    out = head(x)
    assert type(head.linear) is nn.Linear and head.linear.in_features == 36
    assert_as_exact(out.probs, torch.softmax(head.logits(x), 1), out.probs.double())
    assert FusedAuxHead(None, 5, pool="none")(torch.randn(0, 2, 3, 4)).probs.shape == (0, 5)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("in_features", (0, 5, {})),
        ("in_features", (2.5, 5, {})),
        ("num_classes", (6, -1, {})),
        ("num_classes", (6, None, {})),
        ("pool", (6, 5, {"pool": "mean"})),
        ("pool_size", (6, 5, {"pool_size": (2, None)})),
        ("pool_size", (6, 5, {"pool": "none", "pool_size": 2})),
        ("dropout", (6, 5, {"dropout": 1.5})),
        ("dropout", (6, 5, {"dropout": None})),
        ("threshold", (6, 5, {"rule": -0.1})),
        ("rule", (6, 5, {"rule": "sure"})),
    ],
    ids=str,
)
def test_bad_arguments_are_named(name: str, arguments: tuple) -> None:
    in_features, num_classes, options = arguments
    with pytest.raises((ValueError, TypeError), match=rf"^{name}: got"):
        FusedAuxHead(in_features, num_classes, **options)


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
