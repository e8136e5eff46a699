"""Heads under torch.func (grad, jvp, vmap, functional_call) and forward-mode derivatives: as plain PyTorch."""

import pytest
import torch
from auxhead.model import EarlyExitNetwork, ExitRule, FusedAuxHead
from support.example_models import SmallNet, plain_heads
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap


@pytest.fixture
def head(device: torch.device) -> FusedAuxHead:
    return FusedAuxHead(6, 5, pool="max", pool_size=(1, 2), rule=ExitRule(0.25, temperature=1.5)).to(device).eval()


@pytest.fixture
def head_of_means(device: torch.device) -> FusedAuxHead:
    head = FusedAuxHead(3, 5, rule=ExitRule(0.25, temperature=1.5)).to(device).eval().requires_grad_(False)
    head.linear.weight.mul_(8)  # for derivatives of order 0.1
    return head


def images(head: FusedAuxHead, samples: int = 3) -> Tensor:
    return torch.randn(samples, 3, 4, 4, device=head.linear.weight.device)


def plain(head: FusedAuxHead, x: Tensor) -> Tensor:
    """The probabilities without the operator."""
    return torch.softmax(head.logits(x) / head.rule.temperature, -1)


@pytest.mark.parametrize("transform", [jacrev, hessian], ids=["jacrev", "hessian"])
def test_derivatives_by_the_input(transform, head_of_means: FusedAuxHead) -> None:
    x = images(head_of_means)
    for answer in (lambda probs: probs, lambda probs: probs.amax(-1)):
        found = transform(lambda t, answer=answer: answer(head_of_means(t).probs))(x)
        torch.testing.assert_close(found, transform(lambda t, answer=answer: answer(plain(head_of_means, t)))(x))
    assert found.abs().max() > 1e-3


def test_gradients_by_functional_parameters_and_by_sample(head: FusedAuxHead) -> None:
    x, parameters = images(head), dict(head.named_parameters())

    def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(head, weights, (sample[None],)).confidence.sum()

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for index in range(len(x)):
        wanted = torch.autograd.grad(plain(head, x[index : index + 1]).amax(), list(head.parameters()))
        for name, one in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(found[name][index], one)


@pytest.mark.parametrize("trainable", [True, False])
def test_forward_mode_derivatives_are_not_silently_zero(trainable: bool, head_of_means: FusedAuxHead) -> None:
    """An operator that knows a backward pass alone says 0 where nothing asks for gradients."""
    head = head_of_means.requires_grad_(trainable)
    x, direction = images(head), images(head)
    wanted = jvp(lambda t: plain(head, t), (x,), (direction,))[1]
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(jvp(lambda t: head(t).probs, (x,), (direction,))[1], wanted)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(head(forward_ad.make_dual(x, direction)).probs).tangent
        torch.testing.assert_close(tangent, wanted)


def test_an_ensemble_of_heads_by_vmap(head: FusedAuxHead) -> None:
    others = [
        FusedAuxHead(6, 5, pool="max", pool_size=(1, 2), rule=head.rule).to(head.linear.weight).eval() for _ in range(2)
    ]
    x = images(head)
    found = vmap(lambda *state: functional_call(head, state, (x,)))(*stack_module_state([head, *others]))
    for index, one in enumerate((head, *others)):
        wanted = one(x)
        torch.testing.assert_close(found.probs[index], wanted.probs)
        assert torch.equal(found.label[index], wanted.label) and torch.equal(found.exit[index], wanted.exit)


@pytest.mark.usefixtures("without_interpreter")
def test_a_network_is_called_with_other_parameters(device: torch.device) -> None:
    networks = [EarlyExitNetwork(SmallNet(), plain_heads(), 0.6).to(device).eval() for _ in range(2)]
    x = torch.randn(4, 3, 8, 8, device=device)
    found = functional_call(networks[0], networks[1].state_dict(), (x,))
    assert all(torch.equal(one, other) for one, other in zip(found, networks[1](x), strict=True))
    assert not torch.equal(found.probs, networks[0](x).probs)
