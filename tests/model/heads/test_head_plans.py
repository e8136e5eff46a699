"""head_plans.py: a planned call is the operator's answer bit for bit, and whatever a plan rests on may change."""

import gc
import importlib
import weakref
from collections.abc import Callable
from itertools import product

import pytest
import torch
from auxhead.kernels import runs_triton
from auxhead.model import ExitRule, FusedAuxHead
from support.head_cases import DTYPES, feature_count, make_linear, readable
from support.head_cases import make_input as noise
from support.head_plan_cases import (
    CHANGES,
    REFUSED,
    assert_planned,
    check_change,
    counting,
    differ,
    follows,
    make_head,
    make_input,
)
from support.layouts import MAP_LAYOUTS, TOKEN_LAYOUTS
from torch import Tensor, nn

#: In Triton's interpreter plans repeat a launch, elsewhere on the CPU operations of PyTorch.
pytestmark = [
    pytest.mark.parametrize("interpreted", [True, False], ids=["triton", "cpu"], indirect=True),
    pytest.mark.usefixtures("interpreted", "poisoned_empty", "tiles_from_7"),
]


@pytest.fixture
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not runs_triton(torch.empty(0)):
        pytest.skip("kernels are not interpreted here")
    if not request.param:
        for name in ("auxhead.kernels.fused_head", "auxhead.model.heads.repeats"):
            monkeypatch.setattr(importlib.import_module(name), "runs_triton", lambda x: x.is_cuda and runs_triton(x))
    return request.param


def head_for(
    shape: tuple[int, ...], classes: int, *, dtype: torch.dtype = torch.float32, bias: bool = True, **options: object
) -> FusedAuxHead:
    """A head with logits of order 1 to 3."""
    features = feature_count(shape, options.get("pool", "avg"), options.get("pool_size", 1))
    head = FusedAuxHead(features, classes, bias=bias, dtype=dtype, **options).eval()
    weight, offset = make_linear(features, classes, dtype=dtype, bias=bias)
    with torch.no_grad():
        head.linear.weight.copy_(weight)
        if offset is not None:
            head.linear.bias.copy_(offset)
    return head


def inputs_like(layout: Callable, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Inputs of one layout."""
    return [layout(lambda s, seed=seed: noise(s, dtype=dtype, seed=seed), *shape) for seed in range(2)]


# What planned calls answer


@pytest.mark.parametrize("layout", MAP_LAYOUTS.values(), ids=MAP_LAYOUTS)
def test_maps_of_any_layout(layout: Callable, interpreted: bool) -> None:
    shape = (2, 3, 5, 4)
    for pool, pool_size in [("max", (2, 3))] if interpreted else [("avg", 1), ("avg", 3), ("max", (2, 3)), ("none", 1)]:
        head = head_for(shape, 11, pool=pool, pool_size=pool_size, rule=0.3)
        assert_planned(head, inputs_like(layout, shape))


@pytest.mark.parametrize("layout", TOKEN_LAYOUTS.values(), ids=TOKEN_LAYOUTS)
def test_tokens_of_any_layout(layout: Callable) -> None:
    shape = (2, 5, 9)
    for pool in ("avg", "max", "first", "none"):
        assert_planned(head_for(shape, 7, pool=pool, rule=0.3), inputs_like(layout, shape))


VECTOR_LAYOUTS = {
    "plain": lambda make, n, d: make((n, d)),
    "transposed": lambda make, n, d: make((d, n)).t(),
    "steps": lambda make, n, d: make((3 * n, 2 * d))[::3, 1::2],
    "offset": lambda make, n, d: make((n + 1, d + 5))[1:, 5:],
    "expanded": lambda make, n, d: make((1, d)).expand(n, d),
    "one_column": lambda make, n, d: make((n, 1)).expand(n, d),
}


@pytest.mark.parametrize("layout", VECTOR_LAYOUTS.values(), ids=VECTOR_LAYOUTS)
def test_vectors_of_any_layout(layout: Callable) -> None:
    for pool in ("avg", "first"):
        assert_planned(head_for((3, 21), 5, pool=pool, rule=0.3), inputs_like(layout, (3, 21)))


#: Odd ones, and such as are launched in each way: split, in tiles, in tiles of groups of samples.
SHAPES = [
    ((1, 1, 1, 1), 2),
    ((1, 6, 13, 11), 3),
    ((2, 7, 1, 9), 130),
    ((7, 33, 3, 5), 17),
    ((9, 65), 12),
    ((1, 300), 2),
]


@pytest.mark.parametrize("shape, classes", SHAPES, ids=readable)
def test_dtypes_and_odd_shapes(shape: tuple[int, ...], classes: int) -> None:
    for dtype in DTYPES.values():
        head = head_for(shape, classes, dtype=dtype, rule=ExitRule(0.3, temperature=1.7))
        assert_planned(head, inputs_like(lambda make, *shape: make(shape), shape, dtype))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_options(bias: bool) -> None:
    shape = (3, 6, 4, 4)
    for temperature, return_probs in product((1.0, 0.3, 40.0), (True, False)):
        rule = ExitRule(0.3, temperature=temperature)
        head = head_for(shape, 5, bias=bias, rule=rule, return_probs=return_probs)
        assert_planned(head, inputs_like(MAP_LAYOUTS["nchw"], shape))


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_logits_that_are_not_finite(dtype: torch.dtype, temperature: float) -> None:
    """NaN and infinities of both signs, in some samples and in none."""
    head = head_for((6, 4), 4, dtype=dtype, rule=ExitRule(0.3, temperature=temperature))
    with torch.no_grad():
        head.linear.weight.copy_(torch.eye(4))
    fine = noise((6, 4), dtype=dtype)
    odd, huge = fine.clone(), fine * torch.finfo(dtype).max / 8
    odd[0, 1], odd[1, 2], odd[2, 3] = torch.nan, torch.inf, -torch.inf
    odd[3], odd[4] = -torch.inf, torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    assert_planned(head, [fine, odd, huge, fine])


def test_a_head_without_a_width_takes_it_from_the_first_input() -> None:
    head = FusedAuxHead(None, 5, rule=0.3).eval()
    head(noise((2, 6, 4, 4)))
    follows(head, noise((2, 6, 4, 4), seed=1), noise((1, 6, 3, 3)))


def test_answers_share_no_memory() -> None:
    head = make_head().requires_grad_(False)
    kept = [head(make_input(head)) for _ in range(5)]
    said = [[part.clone() for part in answer] for answer in kept]
    kept[2].probs.fill_(9.0)
    kept[3].label.fill_(9)
    head(make_input(head))
    for place in (0, 1, 4):
        assert all(torch.equal(one, other) for one, other in zip(kept[place], said[place], strict=True))
    assert torch.equal(kept[3].confidence, said[3][2]), "parts of one answer neither"
    storages = {part.untyped_storage().data_ptr() for answer in kept for part in answer}
    assert len(storages) >= 5


# What plans rest on


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_followed(change: Callable[[FusedAuxHead], object]) -> None:
    check_change(make_head(), change)


@pytest.mark.parametrize("change, error, message", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_is_refused_after_plans_too(
    change: Callable[[FusedAuxHead], object], error: type[Exception], message: str
) -> None:
    head = make_head(dtype=torch.float16)
    x = make_input(head)
    follows(head, x)
    change(head)
    for with_gradients in (False, True):
        with torch.set_grad_enabled(with_gradients), pytest.raises(error, match=message):
            head(x)


def test_inputs_of_many_layouts_in_turn() -> None:
    head = make_head()
    x = make_input(head)
    memory = torch.randn(x.numel() + 1)
    follows(
        head, x, x.clone(memory_format=torch.channels_last), x[1:], x[:1], make_input(head, (3, 2, 5, 4)),
        make_input(head, (3, 2, 4, 6))[..., 1:], memory[1:].view(x.shape), memory[:-1].view(x.shape), x[:0],
    )  # fmt: skip


@pytest.mark.parametrize(
    "wrong, error",
    [
        (torch.randn(3, 3, 4, 5), ValueError),
        (torch.randn(3, 8, 2), ValueError),
        (torch.randn(3, 2, 4, 5).half(), TypeError),
        (torch.randn(3, 2, 4, 5).double(), TypeError),
        (torch.ones(3, 2, 4, 5, dtype=torch.int64), TypeError),
        (torch.randn(3, 2, 4, 5, device="meta"), ValueError),
        (torch.randn(()), ValueError),
        (torch.randn(0, 3, 4, 5), ValueError),
        ([1.0], (TypeError, AttributeError)),
    ],
    ids=["channels", "rank", "float16", "float64", "int64", "meta", "no dimension", "empty", "list"],
)
def test_wrong_inputs_are_refused_after_plans_too(wrong: Tensor, error: type[Exception]) -> None:
    head = make_head()
    follows(head, make_input(head))
    with torch.no_grad(), pytest.raises(error):
        head(wrong)


@torch.no_grad()
def test_lazily_negated_inputs_are_read_as_they_are_meant() -> None:
    head = make_head()
    x = make_input(head)
    follows(head, x, torch._neg_view(x))
    assert differ(head(x), head(torch._neg_view(x)))
    assert not differ(head(-x), head(torch._neg_view(x)))


@torch.no_grad()
def test_an_input_of_zeros_without_memory() -> None:
    head = make_head()
    x = make_input(head)
    follows(head, x)
    zeros = torch._efficientzerotensor(x.shape)
    for _ in range(2):
        assert not differ(head(zeros), head._call(torch.zeros(x.shape)))


@torch.no_grad()
def test_a_lazily_negated_weight_is_followed() -> None:
    head = make_head()
    x = make_input(head)
    follows(head, x)
    before = head(x)
    head.linear.weight = nn.Parameter(torch._neg_view(head.linear.weight.detach().clone()))
    follows(head, x)
    assert differ(before, head(x))


def test_plans_of_one_mode_serve_another() -> None:
    modes = (torch.inference_mode, torch.no_grad, torch.enable_grad)
    for made, used in product(modes, modes):
        head = make_head()
        x = make_input(head)
        with made():
            head(x)
            head(x)
        with used():
            wanted, found = head._call(x), head(x)
            assert not differ(found, wanted)
            assert found.probs.requires_grad == (used is torch.enable_grad)
            assert found.probs.is_inference() == (used is torch.inference_mode)


# How many plans there are


def test_what_was_replaced_is_let_go_of() -> None:
    head = make_head()
    for x in (make_input(head), make_input(head, (1, 2, 4, 5))):
        follows(head, x)
    old = weakref.ref(head.linear.weight)
    head.linear = nn.Linear(8, 8)
    with torch.no_grad():
        for width in range(1, 40):
            head(make_input(head, (1, 2, 1, width)))
    gc.collect()
    assert old() is None, "plans are kept for good"


def test_plans_go_with_their_head() -> None:
    head = make_head()
    follows(head, make_input(head))
    refs = [weakref.ref(head.linear.weight), weakref.ref(head.rule)]
    del head
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_a_layout_that_was_forgotten_is_planned_anew() -> None:
    head = make_head()
    x = make_input(head)
    follows(head, x)
    with torch.no_grad():
        for width in range(1, 40):
            head(make_input(head, (1, 2, 1, width)))
    with counting(head) as calls, torch.no_grad():
        head(x)
        head(x)
    assert len(calls) == 1
    follows(head, x)
