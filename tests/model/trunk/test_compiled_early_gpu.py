"""Compiled trunks whose launches begin while those before them end: each waits first, and the answers are the same."""

import re
from contextlib import nullcontext

import pytest
import torch
from auxhead.kernels import early_start
from auxhead.model import attach, make_trunk
from auxhead.model.runners.table import RUNNERS
from auxhead.model.trunk import inductor
from auxhead.model.trunk.compiled_part import CompiledPart
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache, run_and_get_code
from torchvision.models import mobilenet_v3_small

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a GPU that can"
    ),
]


class Written(nn.Module):
    """A launch that reads nothing, between one that writes and one that reads that."""

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.cumsum(1)
        full = torch.full_like(x, 3.0)
        return y, full, (y.roll(1, 0) @ weight).relu()


def kernels_of(part: nn.Module, *inputs: Tensor, begins_early: bool = True) -> list[str]:
    """The code of all kernels that Inductor makes of a part."""
    with fresh_cache(), torch.no_grad():
        compiled = CompiledPart(torch.fx.symbolic_trace(part), begins_early=begins_early)
        _, sources = run_and_get_code(compiled, *inputs)
    assert len(sources) == 1
    return re.findall(r"^def triton_.*?^'''", sources[0], re.DOTALL | re.MULTILINE)


def waits_first(kernel: str) -> bool:
    accesses = re.finditer(r"\b(load|store|atomic_\w+|bucketize_binary_search)\(", kernel)
    return 0 <= kernel.find("gdc_wait()") < min(each.start() for each in accesses)


def test_every_kernel_waits_before_it_reads_or_writes(monkeypatch) -> None:
    inputs = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    kernels = kernels_of(Written(), *inputs)
    assert len(kernels) > 2 and all(map(waits_first, kernels))
    assert not any("gdc" in kernel for kernel in kernels_of(Written(), *inputs, begins_early=False))
    monkeypatch.setattr(inductor, "beginning_early", nullcontext)
    monkeypatch.setattr(inductor, "OPTIONS", {"triton.enable_pdl": True})
    assert not all(map(waits_first, kernels_of(Written(), *inputs))), "by itself Inductor lets some read before"


def test_runners_answer_as_without_early_launches(monkeypatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 64, 64, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    backbone = mobilenet_v3_small(num_classes=10).cuda().half().to(memory_format=torch.channels_last).eval()
    network = attach(backbone, ["features.3", "features.8"], example_input=x).eval()
    for head in network.exit_heads:
        head.rule.threshold = 1.0
    early = make_trunk(backbone, network.taps, x, "inductor", network.reading)
    monkeypatch.setattr(early_start, "CAPABILITY", (99, 0))
    monkeypatch.setattr(inductor, "EARLY_TAG", "late")
    late = make_trunk(backbone, network.taps, x, "inductor", network.reading)
    for exits in ("overlapped", "polled", "gated"):
        kind = RUNNERS[exits].imported_class()
        expected = kind(network, x, batch_sizes=(4,), trunk=late)
        with monkeypatch.context() as patch:
            patch.setattr(early_start, "CAPABILITY", (9, 0))
            runner = kind(network, x, batch_sizes=(4,), trunk=early)
        with runner, expected:
            for _ in range(30):
                found, wanted = runner(x.normal_()), expected(x)
                assert found.probs.equal(wanted.probs) and found.confidence.equal(wanted.confidence)
