"""before_launch.py: heads that PyTorch's own operations multiply, behind which one launch decides."""

from functools import partial

import pytest
import torch
from auxhead.kernels import ExitBuffers, ExitHead, ExitLaunch, fused_head, runs_triton
from auxhead.kernels.launch import choose_config
from auxhead.kernels.launch.choose_config import Layers, chosen_by_rule
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.noted import noting
from auxhead.model import FusedAuxHead
from support.head_cases import DTYPES, POOLED_HEADS, assert_same_bits, check_head, make_head, make_input
from support.hidden_layer_cases import LAYERS, check, make
from support.layouts import LAYOUTS

pytestmark = pytest.mark.usefixtures("by_library", "poisoned_empty")

#: Of more classes, too, than one step of a softmax takes.
HEADS = {
    **POOLED_HEADS,
    "flattened": ((3, 4, 3, 5), 130, "none", 1),
    "vector": ((1, 33), 2500, "none", 1),
    "more than a step": ((2, 8), 33_000, "none", 1),
}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head", HEADS)
def test_it_answers_as_exactly_as_pytorch(head, dtype, device):
    shape, classes, pool, size = HEADS[head]
    x, weight, bias = make_head(shape, classes, pool=pool, pool_size=size, dtype=dtype, device=device)
    for layout in LAYOUTS[x.ndim].values():
        laid = layout(partial(make_input, dtype=dtype, device=device), *shape)
        if not runs_triton(laid):
            pytest.skip("needs the kernel")
        with noting() as launches:
            out = check_head(laid, weight, bias, pool=pool, pool_size=size, temperature=1.5)
        (place,) = launches[-1].given()["LAUNCH"].places
        view = head_view(tuple(laid.shape), laid.stride(), pool, (size, size) if isinstance(size, int) else size)
        packs = view.turned or not view.unpooled
        assert [one.packs for one in launches] == [True] * packs + [False] and not place.is_fused
        assert_same_bits(out, fused_head(laid, weight, bias, pool=pool, pool_size=size, temperature=1.5, threshold=0.5))
    no_probs = fused_head(x, weight, pool=pool, pool_size=size, return_probs=False, threshold=0.5)
    assert no_probs.probs is None
    check_head(x, weight, None, pool=pool, pool_size=size, return_probs=False, out=no_probs)


@pytest.mark.parametrize("layers", LAYERS)
def test_hidden_layers(layers, device):
    for dtype in DTYPES.values():
        x, *head = make((3, 6, 5, 4), 9, dtype=dtype, device=device, **LAYERS[layers])
        if not runs_triton(x):
            pytest.skip("needs the kernel")
        check(x, *head)


@pytest.mark.parametrize("criterion", ["margin", "entropy", "energy", "patience"])
def test_criteria_are_those_of_other_heads(criterion, device, monkeypatch):
    x, weight, bias = make_head((4, 6, 3, 3), 2100, device=device)
    options = {"criterion": criterion, "temperature": 0.7, "threshold": 2.0 if criterion == "patience" else 0.9}
    found = fused_head(x, weight, bias, **options)
    monkeypatch.setattr(choose_config, "library_pays", lambda *_, **__: False)
    choose_config.forget_tables()
    other = fused_head(x, weight, bias, **options)
    assert torch.equal(found.label, other.label) and torch.equal(found.exit, other.exit)
    torch.testing.assert_close(found.confidence, other.confidence, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.probs, other.probs, rtol=1e-4, atol=1e-6)


def test_logits_are_not_rounded(device):
    """They pass what float16 can hold, and two that it cannot tell apart are two; a NaN among them is no answer."""
    x = torch.full((1, 16), 100.0, dtype=torch.float16, device=device)
    weight = torch.full((3, 16), 50.0, dtype=torch.float16, device=device)
    weight[1, 0] = 50.0625
    out = fused_head(x, weight)
    assert out.label.tolist() == [1] and out.confidence.isfinite().all() and out.confidence.item() > 0.99
    x[0, 3] = float("nan")
    out = fused_head(x, weight)
    assert out.confidence.isnan().all() and not out.exit.any()


def test_autocast_and_gradients_change_nothing(device):
    x, weight, bias = make_head((3, 16), 5, device=device)
    if not runs_triton(x):
        pytest.skip("needs the kernel")
    plain = fused_head(x, weight, bias)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert_same_bits(fused_head(x, weight, bias), plain)
    weight.requires_grad_()
    out = fused_head(x, weight, bias)
    out.confidence.sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0
    assert_same_bits(out._replace(probs=out.probs.detach(), confidence=out.confidence.detach()), plain)


@pytest.mark.parametrize("samples", [1, 3])
def test_a_module_that_is_asked_again(samples, device):
    """No launch is repeated with the logits of an earlier input."""
    head = FusedAuxHead(16, 5).eval().to(device)
    inputs = [make_input((samples, 16), device=device, seed=seed) for seed in (1, 2)]
    if not runs_triton(inputs[0]):
        pytest.skip("needs the kernel")
    with torch.no_grad():
        for x in (*inputs, *inputs):
            assert_same_bits(head(x), fused_head(x, head.linear.weight, head.linear.bias))
            head.linear.weight.mul_(-0.5)
            head.linear.bias.add_(1.0)
            assert_same_bits(head(x), fused_head(x, head.linear.weight, head.linear.bias))


@pytest.mark.parametrize("samples", [1, 3])
def test_heads_of_both_kinds_share_a_launch(samples, device, monkeypatch):
    """A library's logits, to which it adds the bias of one sample, programs of ours, and a classifier's logits."""
    heads, inputs = [], []
    classes = 70
    for width in (48, 16):
        x = make_input((samples, width, 4, 4), device=device, seed=width)
        _, weight, bias = make_head((1, width), classes, device=device, seed=width)
        rule = (torch.full((), 1.5, device=device), torch.full((), 0.02, device=device))
        heads.append(ExitHead(weight, bias, *rule, "avg", (1, 1)))
        inputs.append(x)
        if not runs_triton(x):
            pytest.skip("needs the kernel")
    # of the first alone
    monkeypatch.setattr(choose_config, "library_pays", lambda shape, *_, **__: shape.channels == 48)
    choose_config.forget_tables()
    logits = torch.randn(samples, classes, device=device)
    buffers = ExitBuffers.allocate(3, samples, classes, with_probs=True, device=device)
    launch = ExitLaunch(buffers, 0, [*heads, None])
    assert launch.by_library == []
    for _ in range(2):
        launch([*inputs, logits])
        for place, (head, x) in enumerate(zip(heads, inputs, strict=True)):
            alone = fused_head(x, head.weight, head.bias, temperature=head.temperature, threshold=head.threshold)
            assert torch.equal(buffers.label[place], alone.label) and torch.equal(buffers.exits[place], alone.exit)
            torch.testing.assert_close(buffers.probs[place], alone.probs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(buffers.probs[2], logits.softmax(-1))
        assert launch.by_library == [0]
        heads[0].weight.mul_(-0.5)  # parameters are read anew by every launch


def rule_of(shape, classes, *, dtype=torch.float16, pool="avg", size=1, hidden=0, norms=False, turned=False):
    x = torch.empty(shape, dtype=dtype, device="meta")
    x = x.to(memory_format=torch.channels_last) if turned else x
    view = head_view(tuple(x.shape), x.stride(), pool, (size, size))
    described = HeadShape.of(view, hidden or classes, pool_max=pool == "max", dtype=dtype)
    return chosen_by_rule(described, Layers(classes, hidden > 0, norms)).by_library


def test_the_rule(monkeypatch):
    """Heads that a library multiplied sooner, and their neighbours that it did not (H100 and H200, random heads)."""
    monkeypatch.undo()
    choose_config.forget_tables()
    single = torch.float32
    # of one sample, float32
    assert rule_of((1, 192, 28, 28), 73, dtype=single, pool="none", turned=True)
    assert rule_of((1, 1302, 8, 32), 21_843, dtype=single) and not rule_of((1, 768), 21_843, dtype=single, pool="none")
    assert not rule_of((8, 128, 8, 8), 507, dtype=single, pool="none", turned=True)
    assert not rule_of((1, 25_088), 10, dtype=single, pool="none"), "programs of ours are sooner done with few sums"
    # float32 of odd rows, of few steps, and of so many classes that tiles leave SMs idle
    assert rule_of((32, 41, 565), 1429, dtype=single, pool="none") and not rule_of((32, 577, 262), 1429, dtype=single)
    assert not rule_of((32, 261), 266, dtype=single, pool="none"), "as few as are soon read number by number"
    assert rule_of((1, 257, 787), 21_843, dtype=single) and not rule_of((10, 213, 5, 5), 12_015, dtype=single)
    assert rule_of((118, 128, 8, 8), 21_843, dtype=single) and not rule_of((37, 512, 8, 8), 21_843, dtype=single)
    assert rule_of((48, 256, 14, 14), 5000, dtype=single, pool="none")
    assert not rule_of((32, 96, 56, 56), 5823, dtype=single, size=7, pool="max", turned=True)
    assert not rule_of((32, 2304), 21_843, dtype=single, pool="none")
    # a large weight before a large batch, rows that are read number by number
    assert rule_of((128, 1035, 14, 14), 948, pool="none") and not rule_of((128, 512, 7, 7), 255, pool="none")
    assert not rule_of((128, 96, 28, 28), 1107, pool="none", turned=True), "rows of logits of an odd length"
    assert rule_of((17, 197, 301), 51, pool="none") and not rule_of((128, 1549, 7, 7), 10, pool="none")
    assert not rule_of((15, 197, 301), 51, pool="none")
    assert rule_of((32, 393, 7, 7), 4544, size=7) and not rule_of((32, 393, 7, 7), 1000, size=7), "a very large weight"
    assert rule_of((1, 577, 221), 1000, pool="none") and not rule_of((1, 197, 463), 300, pool="none"), "of one sample"
    assert not rule_of((32, 577, 221), 62, dtype=single, pool="none"), "float32 before few classes"
    assert rule_of((1, 1403, 14, 14), 6218, size=3) and rule_of((1, 2019), 21_843, pool="none")
    assert not rule_of((1, 665, 28, 28), 1000, size=3), "a small weight"
    # few features before many classes, hidden layers, norms
    assert rule_of((128, 454), 21_843, pool="none") and not rule_of((32, 229), 21_843, pool="none")
    assert not rule_of((128, 768), 21_843, pool="none")
    assert rule_of((103, 64), 21_843, pool="none") and not rule_of((152, 384), 21_843, pool="none"), "odd counts"
    assert rule_of((128, 384), 21_842, pool="none") and rule_of((53, 419), 5904, pool="none"), "even ones, odd rows"
    assert not rule_of((128, 246), 4245, pool="none"), "few features, of not so many classes"
    assert rule_of((2, 512), 21_843, pool="none", hidden=512) and not rule_of((2, 512), 8_000, pool="none", hidden=512)
    assert not rule_of((8, 25_088), 10_000, pool="none", hidden=512), "behind a large first layer"
    assert rule_of((128, 16_368), 1000, pool="none", hidden=632) and not rule_of((32, 16_368), 1000, hidden=632)
    assert rule_of((16, 128), 1000, pool="none", hidden=512) and not rule_of((9, 128), 1000, pool="none", hidden=512)
    assert rule_of((8, 103), 1000, pool="none", hidden=1024) and not rule_of((229, 64), 1337, pool="none", hidden=64)
    assert rule_of((147, 17, 21), 100, pool="max", hidden=241) and not rule_of((128, 384, 8, 8), 17, hidden=256)
    assert rule_of((19, 1024), 17543, pool="none", hidden=882) and not rule_of((128, 256), 2, pool="none", hidden=622)
    assert rule_of((1, 233), 1462, pool="none", hidden=941) and rule_of((1, 791), 109, pool="none", hidden=1024)
    assert rule_of((1, 257, 96), 4403, pool="first", hidden=635, norms=True), "rows of an odd length"
    assert rule_of((1, 50, 192), 100, dtype=single, pool="first", hidden=763, norms=True), "rows of an odd length"
    assert not rule_of((1, 512), 2, pool="none", hidden=509) and not rule_of((2, 233), 1462, pool="none", hidden=941)
    assert not rule_of((1, 577, 64), 2, dtype=single, pool="none", norms=True), "a norm of one sample"
    assert not rule_of((1, 128, 7, 28), 2, dtype=single, pool="none", hidden=256, norms=True, turned=True)
    assert rule_of((47, 192, 8, 8), 371, hidden=512, norms=True) and not rule_of((5, 96), 1000, pool="none", hidden=40)
    assert rule_of((128, 32), 21843, pool="none", norms=True) and not rule_of((32, 397), 761, pool="none", norms=True)
    assert not rule_of((8, 1280), 4096, pool="none", norms=True) and not rule_of(
        (8, 1024), 10_000, pool="none", norms=True
    )
    assert rule_of((18, 1024, 8, 8), 4322, size=7, norms=True, turned=True), "each tile would norm all features"
    assert rule_of((193, 64, 8, 8), 10_320, size=3, norms=True) and not rule_of((42, 2048, 28, 7), 1000)
    assert not rule_of((128, 512), 6293, pool="none", norms=True), "an odd count"
    assert not rule_of((8, 620), 7418, pool="none", norms=True), "few samples"
    assert rule_of((128, 4531), 21_843, pool="none", norms=True) and not rule_of((6, 837), 21_843, norms=True), (
        "odd rows"
    )
    assert rule_of((146, 50, 2048), 1000, norms=True) and not rule_of((21, 768, 8, 8), 1000, size=7, norms=True)
    # groups of samples that programs of ours pad, and batches that one program each decides about
    assert rule_of((169, 11_328), 1000, pool="none") and not rule_of((128, 192, 7, 7), 1000, pool="none")
    assert rule_of((58, 82), 21_843, pool="none") and not rule_of((32, 192), 6126, pool="none")
    assert rule_of((128, 2048), 21_843, dtype=single, pool="none") and not rule_of((128, 706), 21_843, dtype=single)
    for batch in (1, 8, 32, 128):
        for channels, side in ((64, 56), (128, 28), (256, 14), (512, 7), (1024, 14), (2048, 7)):
            for classes in (10, 1000):
                assert not rule_of((batch, channels, side, side), classes), "heads of ResNets are launches of ours"
