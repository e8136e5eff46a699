"""Heads whose calls are repeated, what may change between two calls, and the comparison with the operator."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from auxhead.kernels import HeadOutput
from auxhead.model import ExitRule, FusedAuxHead
from support.head_cases import assert_same_bits, feature_count, make_linear
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm

#: Of inputs: windows of 2 x 2 make as many features as there are classes, so that the weight is a square.
SHAPE = (3, 2, 4, 5)


def make_head(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> FusedAuxHead:
    """Return a head of which some samples exit and others do not."""
    head = FusedAuxHead(8, 8, pool_size=2, rule=ExitRule(0.6, temperature=0.7), device=device, dtype=dtype).eval()
    with torch.no_grad():
        head.linear.weight.mul_(6)
    return head


def head_for(
    device: torch.device | str, shape: tuple[int, ...], classes: int, *, dtype: torch.dtype = torch.float32,
    bias: bool = True, **options: object,
) -> FusedAuxHead:  # fmt: skip
    """A head with logits of order 1 to 3."""
    features = feature_count(shape, options.get("pool", "avg"), options.get("pool_size", 1))
    head = FusedAuxHead(features, classes, bias=bias, dtype=dtype, device=device, **options).eval()
    with torch.no_grad():
        for own, given in zip(head.linear.parameters(), make_linear(features, classes, bias=bias), strict=False):
            own.copy_(given)
    return head


def make_input(head: FusedAuxHead, shape: Sequence[int] = SHAPE) -> Tensor:
    """Return noise that the head takes."""
    weight = head.linear.weight
    return torch.randn(shape).to(weight.device, weight.dtype)


@contextmanager
def counting(head: FusedAuxHead) -> Iterator[list[Tensor]]:
    """While open, the inputs for which a head calls the operator are added to the list that is returned."""
    calls: list[Tensor] = []
    call = head._call

    def counted(x: Tensor) -> HeadOutput:
        calls.append(x)
        return call(x)

    head._call = counted  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        del head._call


def assert_planned(head: FusedAuxHead, inputs: Sequence[Tensor]) -> None:
    """All inputs, of one layout, get the operator's answers, all but the first without it; none changes another."""
    with torch.no_grad(), counting(head) as calls:
        found = [head(x) for x in inputs]
        asked = len(calls)
        wanted = [head._call(x) for x in inputs]
    assert asked == 1, f"the operator was called {asked} times for {len(inputs)} inputs"
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one, other)
        assert_same_form(one, other)


def assert_same_form(found: HeadOutput, wanted: HeadOutput) -> None:
    """The parts are tensors of the same kind."""
    for name, one, other in zip(HeadOutput._fields, found, wanted, strict=True):
        if one is not None:
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype), name
            assert (one.device, one.requires_grad) == (other.device, other.requires_grad), name
            assert one.is_contiguous() and one.data_ptr() % one.element_size() == 0, name


def follows(head: FusedAuxHead, *inputs: Tensor) -> None:
    """Assert that each input, again and again, gets what the operator says now, without gradients and with them."""
    for with_gradients in (False, True):
        with torch.set_grad_enabled(with_gradients):
            for x in inputs:
                wanted = head._call(x)
                found = head(x)
                assert_same_bits(found, wanted)
                assert_same_form(found, wanted)


def differ(first: Iterable[Tensor | None], second: Iterable[Tensor | None]) -> bool:
    """Return whether two answers are not the same."""
    return any(
        (one is None) != (other is None) or (one is not None and not torch.equal(one, other))
        for one, other in zip(first, second, strict=True)
    )


def _linear(head: FusedAuxHead, bias: bool = True) -> nn.Linear:
    weight = head.linear.weight
    return nn.Linear(8, 8, bias=bias, device=weight.device, dtype=weight.dtype)


def _in_place(head: FusedAuxHead, name: str) -> None:
    with torch.no_grad():
        getattr(head.linear, name).neg_()


def _set_data(head: FusedAuxHead, name: str, change: Callable[[Tensor], Tensor]) -> None:
    tensor = getattr(head.linear, name)
    tensor.data = change(tensor.data)


def _fewer_classes(head: FusedAuxHead) -> None:
    """Of both, at the addresses that they have."""
    for name in ("weight", "bias"):
        _set_data(head, name, lambda tensor: tensor[:5])


def _step(head: FusedAuxHead) -> None:
    head.linear.weight.grad = torch.ones_like(head.linear.weight)
    head.linear.bias.grad = torch.arange(8).to(head.linear.bias)
    torch.optim.SGD(head.parameters(), lr=1.0).step()


def _swap(head: FusedAuxHead) -> None:
    torch.utils.swap_tensors(head.linear.weight, _linear(head).weight)


def _load(head: FusedAuxHead, assign: bool) -> None:
    state = {name: value.clone() for name, value in head.state_dict().items()}
    state["linear.weight"] = state["linear.weight"].flip(0)
    head.load_state_dict(state, assign=assign)


class Adapter(nn.Module):
    """A linear layer with something beside it, as LoRA wraps one."""

    weight = property(lambda self: self.base.weight)

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.beside = base, nn.Linear(base.in_features, base.out_features).to(base.weight)
        self.in_features, self.out_features = base.in_features, base.out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 10 * self.beside(x)


class Tripled(nn.Linear):
    """A linear layer of the user's."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def _old_weight_norm(head: FusedAuxHead) -> None:
    with torch.no_grad():
        weight_norm(head.linear).weight_g.mul_(-2)


def _new_weight_norm(head: FusedAuxHead) -> None:
    with torch.no_grad():
        parametrizations.weight_norm(head.linear).parametrizations.weight.original0.mul_(-2)


def _own_forward(head: FusedAuxHead) -> None:
    forward = head.linear.forward
    head.linear.forward = lambda x: 3 * forward(x)


#: What users put on the layer of a head; each changes the answers of ``make_head``.
PUT_ON: dict[str, Callable[[FusedAuxHead], object]] = {
    "hook": lambda head: head.linear.register_forward_hook(lambda _layer, _x, y: 3 * y),
    "hook with keywords": lambda head: head.linear.register_forward_hook(lambda *said: 3 * said[-1], with_kwargs=True),
    "pre-hook": lambda head: head.linear.register_forward_pre_hook(lambda _layer, x: (-x[0],)),
    "forward": _own_forward,
    "adapter": lambda head: setattr(head, "linear", Adapter(head.linear)),
    "class": lambda head: setattr(head.linear, "__class__", Tripled),
    "pruned": lambda head: prune.l1_unstructured(head.linear, "weight", 0.4),
    "pruned bias": lambda head: prune.l1_unstructured(head.linear, "bias", 0.7),
    "old weight norm": _old_weight_norm,
    "weight norm": _new_weight_norm,
}

#: Each changes the answers of ``make_head``.
CHANGES: dict[str, Callable[[FusedAuxHead], object]] = {
    "logits": lambda head: setattr(head, "logits", lambda x, of=head.logits: 3 * of(x)),
    "weight in place": lambda head: _in_place(head, "weight"),
    "bias in place": lambda head: _in_place(head, "bias"),
    "step of an optimizer": _step,
    "data of the weight": lambda head: _set_data(head, "weight", lambda tensor: -tensor),
    "data of the bias": lambda head: _set_data(head, "bias", lambda tensor: -tensor),
    "weight transposed where it lies": lambda head: _set_data(head, "weight", Tensor.t),
    "weight lazily negated where it lies": lambda head: _set_data(head, "weight", torch._neg_view),
    "bias lazily negated where it lies": lambda head: _set_data(head, "bias", torch._neg_view),
    "fewer classes where they lie": _fewer_classes,
    "another weight": lambda head: setattr(head.linear, "weight", _linear(head).weight),
    "another bias": lambda head: setattr(head.linear, "bias", _linear(head).bias),
    "no bias": lambda head: setattr(head.linear, "bias", None),
    "weight of swapped content": _swap,
    "another linear layer": lambda head: setattr(head, "linear", _linear(head)),
    "another linear layer without bias": lambda head: setattr(head, "linear", _linear(head, bias=False)),
    "state that is loaded": lambda head: _load(head, assign=False),
    "state that is assigned": lambda head: _load(head, assign=True),
    "threshold": lambda head: setattr(head.rule, "threshold", 0.0),
    "temperature": lambda head: setattr(head.rule, "temperature", 2.5),
    "temperature of 1": lambda head: setattr(head.rule, "temperature", 1.0),
    "disabled": lambda head: setattr(head.rule, "enabled", False),
    "values of another rule": lambda head: head.rule.assign(ExitRule(0.1, temperature=3.0)),
    "criterion": lambda head: head.rule.assign(ExitRule(0.1, criterion="entropy", temperature=0.7)),
    "criterion of any size": lambda head: head.rule.assign(ExitRule(2.0, criterion="energy", temperature=0.7)),
    "another rule": lambda head: setattr(
        head, "rule", ExitRule(0.1, temperature=3.0).to(head.linear.weight.device)
    ),
    "threshold in device memory": lambda head: head.rule.threshold_tensor.fill_(0.0),
    "another tensor of the temperature": lambda head: setattr(
        head.rule, "temperature_tensor", torch.full_like(head.rule.temperature_tensor, 3.0)
    ),
    "pool": lambda head: setattr(head, "pool", "max"),
    "pool_size": lambda head: setattr(head, "pool_size", (1, 4)),
    "return_probs": lambda head: setattr(head, "return_probs", False),
    "half": lambda head: head.half(),
    "bfloat16": lambda head: head.bfloat16(),
    "channels permuted": lambda head: _set_data(head, "weight", lambda tensor: tensor.flip(1)),
    **PUT_ON,
}  # fmt: skip


def check_change(head: FusedAuxHead, change: Callable[[FusedAuxHead], object], shape: Sequence[int] = SHAPE) -> None:
    """Make plans, change something, and assert that answers are the operator's of now."""
    inputs = [make_input(head, shape), make_input(head, (1, *shape[1:]))]
    with torch.no_grad():
        before, *_ = [head(x) for x in inputs]
    change(head)
    inputs = [x.to(head.linear.weight.dtype) for x in inputs]
    with torch.no_grad():
        assert differ(before, head._call(inputs[0])), "the change is to show"
    follows(head, *inputs)


def _in_halves(head: FusedAuxHead) -> None:
    """The weight in another dtype of the same size, where it lies; the head is one of float16."""
    _set_data(head, "weight", lambda tensor: tensor.view(torch.bfloat16))


#: Each makes of a head in float16 one that is refused: the change, the error, and what it says.
REFUSED: dict[str, tuple[Callable[[FusedAuxHead], object], type[Exception], str]] = {
    "weight in another dtype where it lies": (_in_halves, TypeError, "weight: got torch.bfloat16"),
    "weight on another device": (lambda head: head.linear.to("meta"), ValueError, "weight: got device meta"),
    "weight of other features": (
        lambda head: _set_data(head, "weight", lambda tensor: tensor[:, :7]), ValueError, "weight: got shape",
    ),
    "pool that does not fit": (lambda head: setattr(head, "pool", "first"), ValueError, "pool: got 'first'|pool_size"),
    "pool_size that does not fit": (lambda head: setattr(head, "pool_size", (3, 3)), ValueError, "weight: got shape"),
    "criterion that is none": (lambda head: setattr(head.rule, "criterion", "hunch"), ValueError, "criterion"),
}  # fmt: skip
