"""Convolutions of a backbone, with what follows them, as launches of Triton."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from auxhead.model.trunk import fused_convolution, timed_convolutions
from auxhead.model.trunk.fused_convolution import FusedConvolution
from support.trunk_cases import TRITON, assert_same, convolutions, made, sooner, trunk_outputs, with_odd_norms
from torch import Tensor, nn


class Depthwise(nn.Module):
    """Depthwise convolutions with what may follow them, and convolutions that are not quite that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        followed = (nn.SiLU(), nn.Hardswish(), nn.ReLU6(), nn.ReLU(), nn.Identity())
        self.depthwise = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, padding=1), f) for f in followed))
        self.grouped = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.SiLU(), nn.Conv2d(4, 8, 3, groups=4), nn.SiLU())
        self.shared = nn.Conv2d(8, 8, 3, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(self.grouped(self.depthwise(self.norm(x))))
        return (F.silu(y) + y).flatten(1)


def test_what_follows_a_depthwise_convolution_is_fused() -> None:
    backbone, x = with_odd_norms(Depthwise()), torch.randn(2, 4, 9, 9)
    trunk = made(backbone, [], x)
    found = [(conv.following, conv.in_triton) for conv in convolutions(trunk)]
    assert found == [
        ("silu", True), ("hardswish", True), ("relu6", True), ("relu", True), ("", True), ("silu", False),
        ("silu", False), ("", True),
    ]  # fmt: skip
    assert "Convolutions and norms that run with what follows as one launch of Triton: 7." in trunk.notes
    for _ in range(2):
        assert_same(trunk, backbone, [], x)
        with torch.no_grad():
            backbone.depthwise[0][0].weight.mul_(2.0)
            backbone.depthwise[4][0].bias.add_(1.0)
        trunk.refresh()


class Halves(nn.Module):
    """Convolutions of half precision, with all that may be behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.SiLU())
        inner = nn.Conv2d(16, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU6()
        self.main = nn.Sequential(*inner, nn.Conv2d(24, 24, 3, 1, 1), nn.BatchNorm2d(24))
        self.beside = nn.Sequential(nn.Conv2d(16, 24, 1, 2), nn.BatchNorm2d(24))
        self.last = nn.Sequential(nn.Conv2d(24, 24, 1), nn.Hardswish(), nn.Conv2d(24, 24, 1, bias=False))
        self.fc = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = F.relu(self.main(y) + self.beside(y))
        return self.fc((y + self.last(y)).mean((2, 3)))


def halves(device, dtype=torch.float16, memory_format=torch.channels_last) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    backbone = with_odd_norms(Halves()).to(device, dtype).to(memory_format=memory_format)
    x = torch.randn(2, 8, 7, 7, device=device, dtype=dtype)
    return backbone, x.contiguous(memory_format=torch.channels_last)


def off(right, *given) -> Tensor:
    return right(*given) * 1.5 + 1.0


@TRITON
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "taps"), [("cudnn", ["main"]), ("cudnn", []), ("branched", [])], ids=str)
def test_all_that_triton_takes_is_one_launch_each(device, monkeypatch, kind, taps, dtype, memory_format) -> None:
    sooner(monkeypatch, True)
    backbone, x = halves(device, dtype, memory_format)
    trunk = made(backbone, taps, x, kind)
    assert all(conv.in_triton for conv in convolutions(trunk))
    assert sorted(conv.following for conv in convolutions(trunk)) == ["", "", "hardswish", "relu", "relu6", "silu"]
    for _ in range(2):
        assert_same(trunk, backbone, taps, x)
        with torch.no_grad():
            backbone.last[2].weight.mul_(2.0)
            backbone.beside[1].running_mean.add_(0.5)
            backbone.last[0].bias.sub_(0.5)
        trunk.refresh()


@TRITON
def test_what_takes_longer_or_is_wrong_is_left(device, monkeypatch) -> None:
    backbone, x = halves(device)
    for which, wrong in ((False, False), (True, True)):
        timed = sooner(monkeypatch, which)
        if wrong:
            right = fused_convolution.fused_conv2d
            monkeypatch.setattr(fused_convolution, "fused_conv2d", partial(off, right))
        trunk = made(backbone, [], x)
        assert not any(conv.in_triton for conv in convolutions(trunk)) and bool(timed) != wrong
        assert_same(trunk, backbone, [], x)


@TRITON
def test_a_kind_of_convolution_is_timed_once_and_none_where_it_is_to_be_deterministic(device, monkeypatch) -> None:
    backbone, x = halves(device)
    timed = sooner(monkeypatch, True)
    for _ in range(2):
        made(backbone, [], x)
        assert len(timed) == 6
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    for most, expected in ((2**26, 6), (1000, 0)):
        monkeypatch.setattr(timed_convolutions, "MOST_UNTIMED_PRODUCTS", most)
        trunk = made(backbone, [], x)
        assert sum(conv.in_triton for conv in convolutions(trunk)) == expected and len(timed) == 6


@TRITON
def test_what_another_process_has_found_is_not_timed(device, monkeypatch) -> None:
    """Or the next one might choose otherwise, and find nothing that the first one has compiled."""
    backbone, x = halves(device)
    timed = sooner(monkeypatch, True)
    with timed_convolutions.keeping_answers({}) as answers:
        made(backbone, [], x)
    assert len(answers) == len(timed) == 6 and all(answers.values())
    for which in (True, False):
        timed = sooner(monkeypatch, not which)
        known = dict.fromkeys(answers, which)
        with timed_convolutions.keeping_answers(known) as asked:
            trunk = made(backbone, [], x)
        assert not timed and asked == known
        assert any(conv.in_triton for conv in convolutions(trunk)) == which
        assert_same(trunk, backbone, [], x)
    made(backbone, [], x)
    assert len(timed) == 6 and asked == known, (
        "what was known there is not known elsewhere, and what is asked later not there"
    )
    with timed_convolutions.keeping_answers(known) as again:  # what was known is in force where this process has timed
        trunk = made(backbone, [], x)
    assert again == known and not any(conv.in_triton for conv in convolutions(trunk))


def test_answers_hold_for_devices_of_a_kind_and_settings_of_cudnn(monkeypatch) -> None:
    gpus = [SimpleNamespace(name=name, multi_processor_count=132) for name in ("H200", "H200", "H100")]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpus[device.index])
    monkeypatch.setattr(timed_convolutions, "_is_sooner", {})

    def keys(index: int) -> set[str]:
        with timed_convolutions.keeping_answers({}) as used:
            timed_convolutions.asked_once("layer", lambda: True, torch.device("cuda", index))
        return {*used}

    assert keys(0) == keys(1) != keys(2)
    before = keys(0)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark)
    assert keys(0) != before


class Norms(nn.Module):
    """Batch norms before activations, as in DenseNets: no convolution can take them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 1))
        self.second = nn.Sequential(nn.BatchNorm2d(24, affine=False, eps=0.1), nn.SiLU())
        self.fc = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.second(torch.cat([x, self.first(x)], 1)).mean((2, 3)))


def norms(trunk) -> list[FusedConvolution]:
    return [each for each in trunk.module.modules() if isinstance(each, FusedConvolution) and each.scales]


@TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_norm_before_an_activation_is_one_launch_with_it(device, monkeypatch, dtype) -> None:
    sooner(monkeypatch, True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    backbone = with_odd_norms(Norms()).to(device, dtype)
    x = torch.randn(2, 8, 7, 7, device=device, dtype=dtype)
    before = torch.get_rng_state()
    trunk = made(backbone, [], x)
    assert torch.equal(torch.get_rng_state(), before)
    assert [(each.following, each.in_triton) for each in norms(trunk)] == [("relu", True), ("silu", True)]
    for _ in range(2):
        assert_same(trunk, backbone, [], x)
        with torch.no_grad():
            backbone.first[0].weight.mul_(2.0)
            backbone.second[0].running_var.mul_(2.0)
        trunk.refresh()
    assert_same(trunk, backbone, [], torch.randn(5, 8, 9, 9, device=device, dtype=dtype))


@TRITON
def test_a_norm_that_triton_does_not_take_is_itself(device, monkeypatch) -> None:
    backbone, x = with_odd_norms(Norms()).to(device), torch.randn(2, 8, 7, 7, device=device)
    with monkeypatch.context() as patch:
        patch.setattr("auxhead.model.trunk.graph_passes.runs_triton", lambda _: False)
        assert not norms(made(backbone, [], x))
    monkeypatch.setattr("auxhead.kernels.convolution.LARGEST_WINDOW", 0)
    trunk = made(backbone, [], x)
    assert norms(trunk) and not any(each.in_triton for each in norms(trunk))
    assert_same(trunk, backbone, [], x)


@TRITON
def test_a_norm_may_be_of_float32(device) -> None:
    backbone = nn.Sequential(nn.BatchNorm2d(4).float(), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3).half())
    backbone, x = with_odd_norms(backbone).to(device), torch.randn(2, 4, 3, 3, device=device, dtype=torch.float16)
    trunk = made(backbone, [], x)
    assert [each.in_triton for each in norms(trunk)] == [True]
    torch.testing.assert_close(trunk_outputs(trunk, [], x)[-1], backbone(x), atol=0.01, rtol=0.01)


@TRITON
@pytest.mark.parametrize("numbers", [np.int64(1), [1, 1], 1], ids=str)
def test_sizes_may_be_numbers_of_any_type(device, numbers) -> None:
    backbone = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    backbone[0].padding = backbone[0].stride = numbers
    backbone = backbone.to(device, torch.float16).to(memory_format=torch.channels_last).eval()
    x = torch.randn(2, 8, 6, 6, device=device, dtype=torch.float16)
    assert_same(made(backbone, [], x), backbone, [], x)


@TRITON
def test_where_triton_fails_others_convolve(device, monkeypatch) -> None:
    def fails(*_given):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(fused_convolution, "fused_conv2d", fails)
    backbone, x = halves(device)
    trunk = made(backbone, [], x)
    assert not any(conv.in_triton for conv in convolutions(trunk))
    assert_same(trunk, backbone, [], x)


@TRITON
@torch.no_grad()
def test_what_triton_does_not_take_later_is_summed_as_it_was(device, monkeypatch) -> None:
    """In place, and so in the first summand's dtype, under autocast; and behind the other in its memory."""
    sooner(monkeypatch, True)

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.one, self.two, self.fc = nn.Identity(), nn.Identity(), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.two(x + self.b(self.one(self.a(x).add_(x)))).mean((2, 3)))

    backbone = Sums().eval().to(device, torch.float16).to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 6, 6, device=device, dtype=torch.float16).to(memory_format=torch.channels_last)
    trunk = made(backbone, ["one", "two"], x)
    assert all(conv.in_triton for conv in convolutions(trunk))
    for given, autocast in ((x, True), (x.contiguous(), False)):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            assert seen_at(backbone, given) == seen_at(trunk.module, given)


def seen_at(module: nn.Module, x: Tensor) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and strides of what two taps return."""
    seen: list[Tensor] = []
    taps = [module.get_submodule(tap) for tap in ("one", "two")]
    hooks = [tap.register_forward_hook(lambda _m, _i, y: seen.append(y)) for tap in taps]
    module(x.clone(memory_format=torch.preserve_format))
    for hook in hooks:
        hook.remove()
    return [(y.dtype, y.stride()) for y in seen]


@TRITON
@torch.no_grad()
def test_what_a_compiler_fuses_is_left_to_it(device) -> None:
    """Squeeze and excitation: maps of one position, whose products go with what is before and behind them."""
    conv = FusedConvolution(nn.Conv2d(16, 8, 1).to(device, torch.float16))
    for size, compiled, takes in ((1, False, True), (1, True, False), (2, True, True)):
        conv.compiled = compiled
        x = torch.randn(2, 16, size, size, device=device, dtype=torch.float16).to(memory_format=torch.channels_last)
        assert (conv.in_triton_by(x) is not None) == takes, (size, compiled)


@TRITON
@pytest.mark.parametrize("odd", ["in steps", "negated"])
def test_a_bias_that_lies_otherwise_is_read_as_it_lies(device, monkeypatch, odd) -> None:
    sooner(monkeypatch, True)
    backbone, x = halves(device)
    zeros = torch.zeros(48, device=device, dtype=x.dtype)[::2]
    bias = nn.Parameter(zeros if odd == "in steps" else torch._neg_view(zeros))
    backbone.last[0].bias = bias
    trunk = made(backbone, [], x)
    with torch.no_grad():
        bias.normal_()
    trunk.refresh()
    assert_same(trunk, backbone, [], x)


@TRITON
def test_a_batch_of_another_size_is_answered_too(device, monkeypatch) -> None:
    sooner(monkeypatch, True)
    backbone, x = halves(device)
    trunk = made(backbone, [], x)
    for size in (1, 5):
        assert_same(trunk, backbone, [], torch.randn(size, 8, 9, 6, device=device, dtype=x.dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_takes_longer_is_told_on_the_device() -> None:
    x = torch.empty(1, device="cuda")
    short, long = (lambda cycles=cycles: torch.cuda._sleep(cycles) for cycles in (100_000, 200_000))
    assert timed_convolutions.takes_no_longer(short, long, x) and not timed_convolutions.takes_no_longer(long, short, x)
    assert timed_convolutions.takes_no_longer(long, short, x, at_most=3.0)


class Reparametrised(nn.Module):
    """RepVGG's blocks: sums of norms and of convolutions with norms, in either order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order, self.stem = order, nn.Conv2d(8, 8, 1)
        self.conv, self.of_conv = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.first, self.second, self.fc = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        norm, conv = self.first(x), self.of_conv(self.conv(x))
        y = {"norm": norm + conv, "conv": conv + norm, "norms": norm + self.second(x)}[self.order]
        return self.fc(F.relu(y).mean((2, 3)))


@TRITON
@pytest.mark.parametrize("order", ["norm", "conv", "norms"])
def test_norms_keep_their_biases_in_sums(device, monkeypatch, order: str) -> None:
    """Where one gave its bias to another, or took one, that was added twice or not at all."""
    sooner(monkeypatch, True)
    torch.manual_seed(0)
    backbone = Reparametrised(order).to(device, torch.float16).to(memory_format=torch.channels_last).eval()
    x = torch.randn(2, 8, 6, 6, device=device, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    trunk = made(backbone, (), x)  # of fresh norms, which add nothing
    with_odd_norms(backbone)
    trunk.refresh()
    assert_same(trunk, backbone, (), x)
    assert_same(made(backbone, (), x), backbone, (), x)
    monkeypatch.setattr("auxhead.kernels.convolution.LARGEST_WINDOW", 0)
    assert_same(trunk, backbone, (), torch.cat([x, x]))


@TRITON
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_norm_of_a_large_mean_is_as_exact_as_itself(device, monkeypatch, dtype) -> None:
    sooner(monkeypatch, True)
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    backbone = with_odd_norms(nn.Sequential(norm, nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(288, 3)))
    norm.running_mean += 60
    backbone = backbone.to(device, dtype).to(memory_format=torch.channels_last)
    x = (torch.randn(2, 8, 6, 6, device=device) + 60).to(dtype).contiguous(memory_format=torch.channels_last)
    trunk = made(backbone, (), x)
    assert any("norms that run with what follows as one launch of Triton: 2" in note for note in trunk.notes)
    with torch.no_grad():
        scaling = next(each for each in trunk.module.modules() if isinstance(each, FusedConvolution) and each.scales)
        exact = F.relu(F.batch_norm(x.double(), *(each.double() for each in (
            norm.running_mean, norm.running_var, norm.weight, norm.bias)), eps=norm.eps))  # fmt: skip
        theirs = (F.relu(norm(x)).double() - exact).abs().max()
        assert scaling.weight.dtype == torch.float32 and (scaling(x).double() - exact).abs().max() <= 2 * theirs


@TRITON
@pytest.mark.parametrize("kind", ["depthwise", "norm"])
def test_maps_of_another_dtype_are_refused_as_by_the_layer(device, kind: str) -> None:
    """Factors of float32 go with maps of half precision where they are a norm's, and no others."""
    layer = nn.Conv2d(8, 8, 3, groups=8) if kind == "depthwise" else nn.BatchNorm2d(8).half()
    x = torch.randn(2, 8, 6, 6, device=device).contiguous(memory_format=torch.channels_last)
    x, other = (x, x.half()) if kind == "depthwise" else (x.half(), x.bfloat16())
    backbone = nn.Sequential(layer, nn.ReLU()).to(device).eval()
    module = made(backbone, (), x).module
    for each in (backbone, module):
        with torch.no_grad(), pytest.raises(RuntimeError):
            each(other)
