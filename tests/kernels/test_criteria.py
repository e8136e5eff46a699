"""reference/criteria.py, jit/criteria.py: each criterion is its formula in float64, and decides by it."""

import math

import pytest
import torch
from auxhead.kernels import CRITERIA, decide, fused_head
from support.head_cases import assert_output_form, make_head
from support.tolerance import assert_as_accurate_as_pytorch

pytestmark = pytest.mark.usefixtures("poisoned_empty", "tiles_from_7")

NAN, INF = float("nan"), float("inf")


def by_definition(logits, temperature, criterion):
    """As papers write it, in the logits' dtype."""
    probs = torch.softmax(logits / temperature, -1)
    if criterion == "max_prob":
        return probs.max(-1).values
    if criterion == "entropy":
        entropy = -torch.xlogy(probs, probs).sum(-1)
        return 1 - entropy / math.log(logits.shape[-1]) if logits.shape[-1] > 1 else torch.ones_like(entropy)
    if criterion == "margin":
        ordered = probs.sort(-1, descending=True).values
        return ordered[:, 0] - ordered[:, 1] if logits.shape[-1] > 1 else ordered[:, 0]
    if criterion == "patience":  # of one head alone
        return 1 + 0 * probs.sum(-1)
    assert criterion == "energy"
    return temperature * torch.logsumexp(logits / temperature, -1)


@pytest.mark.parametrize("classes", [2, 33, 1500])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_the_confidence_is_the_formula(criterion, classes, device):
    samples = 1 if classes == 1500 else 7
    x, weight, bias = make_head((samples, 12), classes, device=device)
    logits = x.double() @ weight.double().T + bias.double()
    for temperature in (0.3, 1.0, 2.5):
        out = fused_head(x, weight, bias, criterion=criterion, temperature=temperature, threshold=0.25)
        assert_output_form(out, samples, classes, device)
        exact = by_definition(logits, temperature, criterion)
        pytorch = by_definition(torch.nn.functional.linear(x, weight, bias), temperature, criterion)
        # what is rounded on the way: logits divided by the temperature, and for energy times it again
        magnitude = logits.abs().max().item() / min(1.0, temperature) / max(exact.abs().max().item(), 1e-3)
        assert_as_accurate_as_pytorch(out.confidence, exact, pytorch, magnitude=magnitude, what=criterion)
        assert torch.equal(out.exit, out.confidence > 0.25)
        again = fused_head(x, weight, bias, criterion=criterion, temperature=temperature, threshold=0.25)
        assert torch.equal(again.confidence, out.confidence)


#: Rows of logits, and what each criterion says of them.
EXTREME = {
    "all equal": ([2.0, 2.0, 2.0, 2.0], {"max_prob": 0.25, "entropy": 0.0, "margin": 0.0, "energy": 2 + math.log(4)}),
    "two first": ([5.0, -INF, 5.0, -INF], {"max_prob": 0.5, "entropy": 0.5, "margin": 0.0, "energy": 5 + math.log(2)}),
    "one alone": ([-INF, 3.0, -INF, -INF], {"max_prob": 1.0, "entropy": 1.0, "margin": 1.0, "energy": 3.0}),
    "far apart": ([3e38, -3e38, 0.0, 1.0], {"max_prob": 1.0, "entropy": 1.0, "margin": 1.0, "energy": 3e38}),
    "beyond float32": ([3.4e38] * 4, {"max_prob": 0.25, "entropy": 0.0, "margin": 0.0, "energy": 3.4e38}),
    "all small": ([-1e30] * 4, {"max_prob": 0.25, "entropy": 0.0, "margin": 0.0, "energy": -1e30}),
    "a NaN": ([1.0, NAN, 0.0, 0.0], dict.fromkeys(CRITERIA, NAN)),
    "an infinity": ([1.0, INF, 0.0, 0.0], dict.fromkeys(CRITERIA, NAN)),
    "none": ([-INF] * 4, dict.fromkeys(CRITERIA, NAN)),
}


@pytest.mark.parametrize("row, wanted", EXTREME.values(), ids=EXTREME)
@pytest.mark.parametrize("criterion", CRITERIA)
def test_extreme_logits(criterion, row, wanted, device):
    low, high = CRITERIA[criterion].range
    head = torch.zeros(2, 1, device=device), torch.zeros(4, 1, device=device), torch.tensor(row, device=device)
    out = fused_head(*head, criterion=criterion, threshold=low)
    said = torch.full((2,), wanted.get(criterion, 1.0), device=device)  # under patience a head alone counts itself
    torch.testing.assert_close(out.confidence, said, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(out.exit, out.confidence > low)
    assert not fused_head(*head, criterion=criterion, threshold=high).exit.any()


@pytest.mark.parametrize("criterion", CRITERIA)
def test_gradients_are_those_of_the_formula(criterion, device):
    temperature = 0.7
    x, weight, bias = (one.requires_grad_() for one in make_head((3, 12), 5, device=device))
    seed = torch.tensor([1.0, -2.0, 0.5], device=device)
    out = fused_head(x, weight, bias, criterion=criterion, temperature=temperature)
    found = torch.autograd.grad(out.confidence, (x, weight, bias), seed)
    exact = [one.detach().double().requires_grad_() for one in (x, weight, bias)]
    logits = torch.nn.functional.linear(*exact)
    wanted = torch.autograd.grad(by_definition(logits, temperature, criterion), exact, seed.double())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_a_probability_of_0_has_no_say_in_the_gradient_of_the_entropy(device):
    bias = torch.tensor([0.0, 1.0, -1e9], device=device, requires_grad=True)
    out = fused_head(torch.zeros(1, 1, device=device), torch.zeros(3, 1, device=device), bias, criterion="entropy")
    (found,) = torch.autograd.grad(out.confidence.sum(), bias)
    assert found.isfinite().all() and found[0] != 0 and found[2] == 0


def test_a_criterion_that_there_is_not_is_refused_by_name():
    with pytest.raises(ValueError, match=r"criterion: got 'sureness', wants one of \['energy'"):
        decide(torch.zeros(2, 3), 1.0, 0.5, "sureness")
