"""Autocast and inference mode around making, calling, training and ruling heads."""

from collections.abc import Callable

import pytest
import torch
from auxhead.model import EarlyExitNetwork, ExitRule, FusedAuxHead
from support.example_models import SmallNet, assert_as_exact, in_double, plain_heads, softmax_of
from support.head_sequentials import ALL, HIDDEN, MAP
from torch import nn


@pytest.mark.parametrize("mode", [torch.float16, torch.bfloat16], ids=["autocast to fp16", "autocast to bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [ALL["avg-2x3"], HIDDEN["all"]], ids=["linear", "hidden layers"])
def test_a_head_under_autocast_is_as_exact_as_the_sequential(
    make: Callable[[], nn.Sequential], dtype: torch.dtype, mode: torch.dtype, device: torch.device
) -> None:
    source = make().to(device)
    head, x = FusedAuxHead.from_module(source, rule=ExitRule(0.3)), torch.randn(MAP, device=device, dtype=dtype)
    exact = softmax_of(in_double(source), x.double())
    with torch.autocast(device.type, mode):
        wanted, found = softmax_of(source, x), head(x)
        assert head.logits(x).dtype == mode
        found.probs.sum().backward()
        with torch.autocast(device.type, enabled=False):
            assert torch.equal(head(x.float()).label, exact.argmax(1)), "in float32 again"
    assert_as_exact(found.probs, wanted, exact)
    assert found.probs.dtype == found.confidence.dtype == head.rule.threshold_tensor.dtype == torch.float32
    assert torch.equal(found.exit, found.confidence > 0.3)
    assert head.linear.weight.dtype == head.linear.weight.grad.dtype == torch.float32


@pytest.mark.usefixtures("without_interpreter")
def test_a_network_trains_and_answers_under_autocast(device: torch.device) -> None:
    """Gradients reach float32 parameters, and what autocast caches of a step is not what the next call answers with."""
    net, x = EarlyExitNetwork(SmallNet(), plain_heads(), 0.6).to(device), torch.randn(6, 3, 8, 8, device=device)
    net.check_taps(x)
    with torch.autocast(device.type, torch.bfloat16):
        loss = torch.stack(net.logits(x)).float().logsumexp(-1).sum()
        loss.backward()
        before = net(x)
        with torch.no_grad():
            for head in net.fused_heads:
                assert head.linear.weight.grad is not None and head.linear.weight.grad.dtype == torch.float32
                head.linear.weight.neg_()
        assert not torch.equal(net(x).probs, before.probs)


@pytest.mark.parametrize("made_inside", [False, True], ids=["made outside", "made inside"])
@pytest.mark.parametrize("called_inside", [False, True], ids=["called outside", "called inside"])
def test_inference_mode_around_making_calling_and_ruling(
    made_inside: bool, called_inside: bool, device: torch.device
) -> None:
    with torch.inference_mode(made_inside):
        head = FusedAuxHead(6, 5, rule=ExitRule(0.25, temperature=1.5), device=device).eval()
    x, other = torch.randn(3, 6, 4, 4, device=device), ExitRule(0.0, temperature=3.0)
    with torch.no_grad():
        wanted = torch.softmax(head.logits(x) / 1.5, 1)
    with torch.inference_mode(called_inside), torch.no_grad():
        torch.testing.assert_close(head(x).probs, wanted, rtol=1e-5, atol=1e-6)
        head.rule.assign(other)
    with torch.inference_mode(not called_inside), torch.no_grad():
        assert head(x).exit.all() and head.rule.threshold == 0.0
        head.rule.threshold = 1.0
    with torch.no_grad():
        assert not head(x).exit.any()
        head.to(torch.float16)
    assert head.rule.temperature_tensor.item() == 3.0 and not head.rule.temperature_tensor.is_inference()


def test_parameters_made_in_inference_mode_say_so_when_they_are_trained() -> None:
    """As those of every layer do: PyTorch cannot make them into others without a copy."""
    with torch.inference_mode():
        head = FusedAuxHead(6, 5)
    x = torch.randn(3, 6, requires_grad=True)
    for loss in (lambda: head.logits(x).sum(), lambda: head(x).confidence.sum()):
        with pytest.raises(RuntimeError, match="[Ii]nference tensor"):
            loss().backward()
