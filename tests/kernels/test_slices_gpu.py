"""jit/slices.py on a GPU: many classes as the rule launches them, launch after launch beside other work."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from auxhead.kernels import CRITERIA, ExitBuffers, ExitHead, ExitLaunch, LaunchConfig, fused_head
from auxhead.kernels.reference.fused_head import decide
from support.head_cases import (
    DTYPES,
    assert_same_bits,
    check_head,
    check_in_turn,
    head_logits,
    launched_as,
    make_head,
)
from support.hidden_layer_cases import check, make

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
IN_PLACE = LaunchConfig(16, 64, 1, 1, 64, 64, 1, 1024, 1, 1, 4, weight_buffers=3, features="in place")
PACKED = replace(IN_PLACE, block_c=16, block_p=2, block_a=16, features="packed")
#: By name: shape, pool and its size, classes; configurations beside the rule's.
HEADS = {
    "one vector": ((1, 64), "none", (1, 1), 5000, (IN_PLACE, replace(IN_PLACE, block_n=8, block_k=16, block_j=4))),
    "vectors": ((70, 600), "none", (1, 1), 21843, (IN_PLACE, replace(IN_PLACE, block_n=64, block_k=128))),
    "few programs": ((32, 200), "none", (1, 1), 9001, (replace(IN_PLACE, max_programs=20),)),
    "pooled": ((20, 512, 7, 7), "avg", (1, 1), 10000, (PACKED, replace(PACKED, num_warps=8, block_j=512))),
    "windows": ((8, 48, 15, 11), "avg", (5, 3), 4999, (PACKED, replace(PACKED, block_p=4))),
    "maxima": ((8, 48, 15, 11), "max", (5, 3), 8192, (replace(PACKED, max_programs=7),)),
}
every_head = pytest.mark.parametrize("name", HEADS)


def made(name, dtype=torch.float16, seed=0):
    """Return a head's x, weight and bias, and its pool."""
    shape, pool, size, classes, _ = HEADS[name]
    return make_head(shape, classes, pool=pool, pool_size=size, dtype=dtype, device=DEVICE, seed=seed), {
        "pool": pool, "pool_size": size
    }  # fmt: skip


def ways(name, x):
    """Contexts in which a head is launched as the rule and as some configurations say; all decide in slices."""
    _, pool, size, classes, configs = HEADS[name]
    assert all(config.surveys_of(classes) for config in configs)
    return [nullcontext(), *(launched_as(config, x, classes, pool, size) for config in configs)]


@pytest.mark.usefixtures("poisoned_empty")
@every_head
def test_as_accurate_as_pytorch_and_the_same_bits_again(name):
    for dtype in DTYPES.values():
        head, pooling = made(name, dtype)
        for way in ways(name, head[0]):
            with way:
                first = check_head(*head, **pooling)
                for _ in range(20):
                    assert_same_bits(first, fused_head(*head, threshold=0.5, **pooling))
                without = fused_head(*head, threshold=0.5, return_probs=False, **pooling)
                assert_same_bits(first._replace(probs=None), without)


@every_head
def test_with_a_norm(name):
    shape, pool, size, classes, _ = HEADS[name]
    for dtype in DTYPES.values():
        x, weight, bias, hidden = make(
            shape, classes, norm="affine", pool=pool, pool_size=size, dtype=dtype, device=DEVICE
        )
        for way in ways(name, x):
            with way:
                first = check(x, weight, bias, hidden, pool=pool, pool_size=size)
                options = {"pool": pool, "pool_size": size, "threshold": 0.5, "hidden": hidden}
                for _ in range(20):
                    assert_same_bits(first, fused_head(x, weight, bias, **options))


@pytest.mark.parametrize("criterion", CRITERIA)
@every_head
def test_the_confidence_is_the_formula(name, criterion):
    head, pooling = made(name, torch.float32)
    exact = head_logits(*(one.double() for one in head), **pooling)
    wanted = decide(exact, 1.5, 0.5, criterion).confidence.float()
    for way in ways(name, head[0]):
        with way:
            out = fused_head(*head, criterion=criterion, temperature=1.5, threshold=0.5, **pooling)
        torch.testing.assert_close(out.confidence, wanted, rtol=1e-4, atol=1e-5, msg=name)
        assert torch.equal(out.exit, out.confidence > 0.5)


def test_ties_and_what_is_no_number_across_slices():
    """Also of the classes at which slices, and what different programs write, meet."""
    zeros = torch.zeros(9, 64, device=DEVICE), torch.zeros(5000, 64, device=DEVICE)
    for way in ways("one vector", zeros[0]):
        with way:
            for places in itertools.combinations((0, 15, 16, 63, 64, 1023, 1024, 4095, 4096, 4999), 2):
                bias = torch.zeros(5000, device=DEVICE)
                bias[list(places)] = 3.0
                assert fused_head(*zeros, bias).label.tolist() == 9 * [places[0]]
                for value in (float("nan"), float("inf"), -float("inf")):
                    bias[places[1]] = value
                    out = fused_head(*zeros, bias, threshold=0.0)
                    if value == -float("inf"):
                        assert out.exit.all() and (out.probs[:, places[1]] == 0).all()
                    else:
                        assert not out.exit.any() and out.probs.isnan().all() and out.confidence.isnan().all()


@every_head
def test_beside_other_work_and_each_other(name):
    """Inputs in turn: no launch takes what tiles of the one before have found, or those of another stream."""
    heads, pooling = [made(name, seed=seed)[0] for seed in (0, 7)], made(name)[1]
    for way in ways(name, heads[0][0]):
        with way:
            check_in_turn(heads, partial(fused_head, criterion="entropy", **pooling), DEVICE)


@pytest.mark.parametrize("count", [1, 3], ids=["one_head", "three_heads"])
@every_head
def test_in_turn_into_memory_that_shows_what_was_not_written(name, count):
    """The same memory launch after launch, with other inputs: nothing is what the launch before has left there."""
    _, pool, size, classes, configs = HEADS[name]
    for config in (None, *configs):
        parts, one = [made(name, seed=seed)[0] for seed in range(2 * count)], torch.ones((), device=DEVICE)
        inputs = [[x for x, _, _ in parts[:count]], [x for x, _, _ in parts[count:]]]
        heads = [ExitHead(weight, bias, one, one, pool, size, "margin") for _, weight, bias in parts[:count]]
        with nullcontext() if config is None else launched_as(config, parts[0][0], classes, pool, size):
            wanted = [
                [
                    fused_head(x, head.weight, head.bias, pool=pool, pool_size=size, criterion="margin")
                    for head, x in zip(heads, xs, strict=True)
                ]
                for xs in inputs
            ]
            buffers = ExitBuffers.allocate(
                count, len(parts[0][0]), classes, with_probs=True, device=torch.device(DEVICE)
            )
            launch = ExitLaunch(buffers, 0, heads)
            for turn in range(100):
                buffers.packed_answer.fill_(255)
                buffers.probs.fill_(float("nan"))
                buffers.confidence.fill_(float("nan"))
                buffers.label.fill_(-7)
                launch(inputs[turn % 2])
                last = wanted[turn % 2][-1]
                for place, output in enumerate(wanted[turn % 2]):
                    torch.testing.assert_close(buffers.probs[place], output.probs)
                    torch.testing.assert_close(buffers.confidence[place], output.confidence)
                    assert torch.equal(buffers.label[place], output.label)
                label, exit_index, confidence, probs = buffers.answer(buffers.packed_answer)
                assert (exit_index == count - 1).all(), "no confidence exceeds 1"
                assert torch.equal(label, last.label)
                torch.testing.assert_close(confidence, last.confidence)
                torch.testing.assert_close(probs, last.probs)
            assert all(space.constants.surveys for space in launch._spaces.values())
            assert not any(space.arguments.workspace[2].any() for space in launch._spaces.values())
