"""repeats.py: a repeated call is the operator's answer bit for bit, and whatever a repeat rests on may change."""

import gc
import importlib
import weakref
from collections.abc import Callable
from itertools import product

import pytest
import torch
from auxhead.kernels import runs_triton
from auxhead.model import ExitRule, FusedAuxHead
from support.head_cases import DTYPES, readable
from support.head_cases import make_input as noise
from support.head_plan_cases import (
    CHANGES,
    REFUSED,
    assert_planned,
    check_change,
    counting,
    differ,
    follows,
    head_for,
    make_head,
    make_input,
)
from support.layouts import MAP_LAYOUTS, TOKEN_LAYOUTS, VECTOR_LAYOUTS
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("where", "poisoned_empty", "tiles_from_7")


ON_A_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "packed, cuda")]


@pytest.fixture(params=["triton", "packed, triton", "cpu", *ON_A_GPU * torch.cuda.is_available()], autouse=True)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device: repeats are launches, one or two, in Triton's interpreter too; else operations of PyTorch's CPU."""
    if "triton" in request.param and not runs_triton(torch.empty(0)):
        pytest.skip("kernels are not interpreted here")
    if "packed" in request.param:
        request.getfixturevalue("packs_features")
    if request.param == "cpu":
        for name in ("auxhead.kernels.fused_head", "auxhead.model.heads.repeats"):
            monkeypatch.setattr(importlib.import_module(name), "runs_triton", lambda x: x.is_cuda and runs_triton(x))
    return "cuda" if "cuda" in request.param else "cpu"


def inputs_like(
    where: str, layout: Callable, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Inputs of one layout and alignment: slices of one tensor lie as they come."""
    made = [layout(lambda s, n=n: noise(s, dtype=dtype, device=where, seed=n), *shape) for n in range(3)]
    return [x for x in made if x.data_ptr() % 16 == made[0].data_ptr() % 16][:2]


def plain(make: Callable, *shape: int) -> Tensor:
    return make(shape)


# What repeated calls answer

LAYOUTS = {
    **{f"map {name}": (layout, (2, 3, 5, 4), {"pool": "max", "pool_size": 2}) for name, layout in MAP_LAYOUTS.items()},
    "grid": (MAP_LAYOUTS["channels_last"], (2, 3, 5, 4), {"pool_size": 3}),
    "flattened": (MAP_LAYOUTS["steps"], (2, 3, 5, 4), {"pool": "none"}),
    **{f"tokens {name}": (layout, (2, 5, 9), {}) for name, layout in TOKEN_LAYOUTS.items()},
    "first token": (plain, (2, 5, 9), {"pool": "first"}),
    **{f"vectors {name}": (layout, (3, 21), {}) for name, layout in VECTOR_LAYOUTS.items()},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, where: str) -> None:
    make, shape, pooling = LAYOUTS[layout]
    assert_planned(head_for(where, shape, 11, rule=0.3, **pooling), inputs_like(where, make, shape))


#: Odd ones, and such as are launched in each way: split, in tiles, in tiles of groups of samples.
SHAPES = [((1, 1, 1, 1), 2), ((2, 7, 1, 9), 130), ((7, 33, 3, 5), 17), ((9, 65), 12)]
#: Of a GPU.
LARGE = [((1, 512, 7, 7), 10), ((2, 512, 7, 7), 1000), ((64, 512, 2, 2), 1000), ((9, 197, 192), 12)]


@pytest.mark.parametrize("shape, classes", [*SHAPES, *LARGE * torch.cuda.is_available()], ids=readable)
def test_dtypes_sizes_and_options(shape: tuple[int, ...], classes: int, where: str) -> None:
    options = ({}, {"bias": False}, {"return_probs": False})
    for (dtype, given), heat in zip(zip(DTYPES.values(), options, strict=True), (1.7, 1.0, 40.0), strict=True):
        head = head_for(where, shape, classes, dtype=dtype, rule=ExitRule(0.3, temperature=heat), **given)
        assert_planned(head, inputs_like(where, plain, shape, dtype))


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_logits_that_are_not_finite(dtype: torch.dtype, temperature: float, where: str) -> None:
    """NaN and infinities of both signs, in some samples and in none."""
    head = head_for(where, (6, 4), 4, dtype=dtype, rule=ExitRule(0.3, temperature=temperature))
    with torch.no_grad():
        head.linear.weight.copy_(torch.eye(4))
    fine = noise((6, 4), dtype=dtype, device=where)
    odd, huge = fine.clone(), fine * torch.finfo(dtype).max / 8
    odd[0, 1], odd[1, 2], odd[2, 3] = torch.nan, torch.inf, -torch.inf
    odd[3], odd[4] = -torch.inf, torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    assert_planned(head, [fine, odd, huge, fine])


def test_a_head_without_a_width_takes_it_from_the_first_input(where: str) -> None:
    head = FusedAuxHead(None, 5, rule=0.3, device=where).eval()
    head(noise((2, 6, 4, 4), device=where))
    follows(head, noise((2, 6, 4, 4), seed=1, device=where), noise((1, 6, 3, 3), device=where))


def test_answers_share_no_memory(where: str) -> None:
    head = make_head(where).requires_grad_(False)
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


# What repeats rest on


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_followed(change: Callable[[FusedAuxHead], object], where: str) -> None:
    check_change(make_head(where), change)


@pytest.mark.parametrize("change, error, message", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_is_refused_after_repeats_too(
    change: Callable[[FusedAuxHead], object], error: type[Exception], message: str, where: str
) -> None:
    head = make_head(where, torch.float16)
    x = make_input(head)
    follows(head, x)
    change(head)
    for with_gradients in (False, True):
        with torch.set_grad_enabled(with_gradients), pytest.raises(error, match=message):
            head(x)


def test_inputs_of_many_layouts_in_turn(where: str) -> None:
    head = make_head(where)
    x = make_input(head)
    memory = torch.randn(x.numel() + 1, device=where)
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
def test_wrong_inputs_are_refused_after_repeats_too(wrong: Tensor, error: type[Exception], where: str) -> None:
    head = make_head(where)
    follows(head, make_input(head))
    wrong = wrong.to(where) if isinstance(wrong, Tensor) and not wrong.is_meta else wrong
    with torch.no_grad(), pytest.raises(error):
        head(wrong)


@torch.no_grad()
def test_lazy_inputs_are_read_as_they_are_meant(where: str) -> None:
    head = make_head(where)
    x = make_input(head)
    follows(head, x, torch._neg_view(x))
    assert differ(head(x), head(torch._neg_view(x)))
    assert not differ(head(-x), head(torch._neg_view(x)))
    zeros = torch._efficientzerotensor(x.shape, device=where)  # which has no memory
    for _ in range(2):
        assert not differ(head(zeros), head._call(torch.zeros_like(x)))


def test_repeats_of_one_mode_serve_another(where: str) -> None:
    modes = (torch.inference_mode, torch.no_grad, torch.enable_grad)
    for made, used in product(modes, modes):
        head = make_head(where)
        x = make_input(head)
        with made():
            head(x)
            head(x)
        with used():
            wanted, found = head._call(x), head(x)
            assert not differ(found, wanted)
            assert found.probs.requires_grad == (used is torch.enable_grad)
            assert found.probs.is_inference() == (used is torch.inference_mode)


@pytest.fixture
def few_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auxhead.model.heads.repeats._MOST", 3)


def test_what_was_replaced_is_let_go_of(where: str, few_kept: None) -> None:
    head = make_head(where)
    for x in (make_input(head), make_input(head, (1, 2, 4, 5))):
        follows(head, x)
    old = weakref.ref(head.linear.weight)
    head.linear = nn.Linear(8, 8, device=where)
    with torch.no_grad():
        for width in range(1, 6):
            head(make_input(head, (1, 2, 1, width)))
    gc.collect()
    assert old() is None, "repeats are kept for good"
    refs = [weakref.ref(head.linear.weight), weakref.ref(head.rule)]
    del head
    gc.collect()
    assert [ref() for ref in refs] == [None, None], "they go with their head"


def test_a_layout_that_was_forgotten_is_repeated_anew(where: str, few_kept: None) -> None:
    head = make_head(where)
    x = make_input(head)
    follows(head, x)
    with torch.no_grad():
        for width in range(1, 6):
            head(make_input(head, (1, 2, 1, width)))
    with counting(head) as calls, torch.no_grad():
        head(x)
        head(x)
    assert len(calls) == 1
    follows(head, x)
