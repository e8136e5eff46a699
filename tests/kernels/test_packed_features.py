"""before_launch.py: heads whose features a launch of their own pools, or puts in order, before one that decides."""

from contextlib import ExitStack
from functools import partial

import pytest
import torch
from auxhead.kernels import ExitBuffers, ExitHead, ExitLaunch, HeadOutput, before_launch, fused_head, runs_triton
from auxhead.kernels.launch.launch_config import LaunchConfig, by_library
from auxhead.kernels.noted import noting
from auxhead.model import FusedAuxHead
from support.head_cases import (
    DTYPES,
    POOLED_HEADS,
    assert_same_bits,
    check_head,
    feature_count,
    launched_as,
    make_head,
    make_input,
    make_linear,
)
from support.head_plan_cases import counting
from support.hidden_layer_cases import LAYERS, check, make
from support.layouts import LAYOUTS

pytestmark = pytest.mark.usefixtures("packs_features", "poisoned_empty")


@pytest.fixture
def device(device):
    if not runs_triton(torch.empty(0, device=device)):
        pytest.skip("needs the kernel")
    return device


def of_two_launches(call):
    """Return what a call says, which is a launch that packs and one that decides."""
    with noting() as launches:
        out = call()
    assert [one.packs for one in launches] == [True, False]
    return out


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head", POOLED_HEADS)
def test_every_layout_is_as_exact_as_pytorch(head, dtype, device):
    shape, classes, pool, size = POOLED_HEADS[head]
    pooling = {"pool": pool, "pool_size": size}
    linear = make_linear(feature_count(shape, pool, size), classes, dtype=dtype, device=device)
    for layout in LAYOUTS[len(shape)].values():
        x = layout(partial(make_input, dtype=dtype, device=device), *shape)
        out = of_two_launches(partial(check_head, x, *linear, temperature=1.5, **pooling))
        assert_same_bits(out, fused_head(x, *linear, temperature=1.5, threshold=0.5, **pooling))


@pytest.mark.parametrize("layers", LAYERS)
def test_layers_before_the_last_one(layers, device):
    """A ReLU of the map is the first launch's, a norm and a hidden layer are the second's."""
    for dtype, pool, size in zip(DTYPES.values(), ("avg", "max", "none"), (1, (2, 3), 1), strict=True):
        x, *head = make((9, 6, 5, 4), 9, pool=pool, pool_size=size, dtype=dtype, device=device, **LAYERS[layers])
        for each in (x - 0.5, (x - 0.5).contiguous(memory_format=torch.channels_last)):
            of_two_launches(partial(check, each, *head, pool=pool, pool_size=size))


@pytest.mark.parametrize("head", [name for name, (shape, *_) in POOLED_HEADS.items() if len(shape) == 4])
@pytest.mark.parametrize("channels_last", [False, True])
def test_what_is_not_finite_stays_in_its_sample(head, channels_last, device):
    (_, *sizes), classes, pool, size = POOLED_HEADS[head]
    x, *linear = make_head((9, *sizes), classes, pool=pool, pool_size=size, device=device)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    whole, broken = (fused_head(one, *linear, pool=pool, pool_size=size, threshold=0.0) for one in (x, spoilt(x)))
    assert broken.probs[[1, 4]].isnan().all() and broken.confidence[[1, 4]].isnan().all()
    assert not broken.exit[[1, 4]].any()
    others = [0, 2, 3, 5, 6, 7, 8]
    assert_same_bits(type(whole)(*(one[others] for one in broken)), type(whole)(*(one[others] for one in whole)))


def spoilt(x):
    """Return a copy with a NaN in a sample, and an infinity in another one, as the largest of its window."""
    x = x.clone()
    x[1, 2, 1, 1], x[4, 2, 2, 2] = float("nan"), float("inf")
    return x


def test_a_module_that_is_asked_again_with_gradients(device):
    """Its two launches are made again, of the input and the parameters as they are then."""
    kinds = ({"pool_size": 2}, {"pool": "max", "hidden_features": 9, "norm": True})
    for number, options in enumerate(kinds):
        head = FusedAuxHead(24 if number == 0 else 6, 5, rule=0.3, **options).eval().to(device)
        inputs = [make_input((3, 6, 5, 4), device=device, seed=seed).requires_grad_() for seed in (1, 2)]
        leaves = [*head.parameters()]
        for request, x in enumerate((*inputs, *inputs)):
            with counting(head) as calls:
                out = head(x)
            assert len(calls) == (request == 0), "the operator is called once"
            wanted, found = of_two_launches(partial(head._call, x)), []
            for each in (out, wanted):
                said = [each.probs, each.confidence]
                found.append(torch.autograd.grad(said, [x, *leaves], said))
            assert_same_bits(*(type(out)(*(one.detach() for one in each)) for each in (out, wanted)))
            assert all(torch.equal(one, other) and one.any() for one, other in zip(*found, strict=True))
            with torch.no_grad():
                head.linear.weight.mul_(-0.5)


#: Of heads in one launch: what is read, pool, configuration; None is the fixture's.
SPLIT = LaunchConfig(1, 4, 1, 4, 1, 16, 4, 16, 1, stages=1, num_warps=4)
TOGETHER = [
    ((9, 6, 4, 4), "avg", SPLIT), ((9, 5, 3, 3), "max", None), ((9, 7), "none", by_library(33)),
    ((9, 4, 3, 5), "none", None),
]  # fmt: skip


@pytest.mark.parametrize("last_first", [False, True])
@torch.no_grad()
def test_heads_of_all_kinds_share_the_launch_that_decides(last_first, device, monkeypatch):
    """Behind one that packs, the last map first if they are large, and a library; beside a classifier's logits."""
    monkeypatch.setattr(before_launch, "_LARGE_MAPS", 0 if last_first else 1 << 30)
    heads, inputs, classes = [], [], 33
    heat, limit = torch.full((), 1.5, device=device), torch.full((), 0.3, device=device)
    with ExitStack() as stack:
        for number, (shape, pool, config) in enumerate(TOGETHER):
            x, weight, bias = make_head(shape, classes, pool=pool, device=device, seed=number)
            inputs.append(x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x)
            heads.append(ExitHead(weight, bias, heat, limit, pool, (1, 1)))
            if config is not None:
                stack.enter_context(launched_as(config, inputs[-1], classes, pool))
        buffers = ExitBuffers.allocate(5, 9, classes, with_probs=True, device=device)
        launch, logits = ExitLaunch(buffers, 0, [*heads, None]), torch.randn(9, classes, device=device)
        assert launch.packed == []
        for _ in range(2):
            buffers.probs.fill_(float("nan"))
            with noting() as launches:
                launch([*inputs, logits])
            assert [one.packs for one in launches] == [True, False], "one launch packs for both"
            assert (launch.packed, launch.by_library) == ([1, 3], [2])
            for place, (x, head) in enumerate(zip(inputs, heads, strict=True)):
                said = (getattr(buffers, name)[place] for name in ("probs", "label", "confidence", "exits"))
                pooling = {"pool": head.pool, "temperature": 1.5, "threshold": 0.3}
                check_head(x, head.weight, head.bias, out=HeadOutput(*said), **pooling)
            torch.testing.assert_close(buffers.probs[4], logits.softmax(-1))
            inputs[1].neg_()  # all is read anew by every launch
            heads[3].weight.mul_(-0.5)
