"""fused_head.py, label, confidence and exit: temperature, threshold, ties, extreme logits, NaN and infinities."""

import importlib

import pytest
import torch
from auxhead.kernels import fused_head
from support.head_cases import (
    assert_output_form,
    assert_same_bits,
    bits,
    check_head,
    make_head,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty", "tiles_from_7")

NAN, INF = float("nan"), float("inf")
#: From 7 on they are multiplied in groups of samples.
BATCHES = [1, 7]


def head_of_logits(rows, **options):
    """Run a head whose logits are ``rows`` [N, K] to the bit: vectors times the identity."""
    return fused_head(rows, torch.eye(rows.shape[1], device=rows.device), **options)


def batch_of(row, samples, device):
    return torch.tensor([row], device=device).repeat(samples, 1)


@pytest.mark.parametrize("samples", [3, 7])
def test_temperature_and_threshold_as_numbers_and_tensors(samples, device):
    """Numbers, 0-dim tensors and tensors of one element give the same answer, bit for bit."""
    for temperature in (0.1, 1, 1.7, 1000.0):
        head = make_head((samples, 12), 5, device=device)
        first = check_head(*head, temperature=temperature, threshold=0.4)
        for shape in ((), (1,), (1, 1)) if device.type == "cuda" or samples == 3 else ((1,),):
            heat = torch.full(shape, temperature, dtype=torch.float32, device=device)
            limit = torch.full(shape, 0.4, device=device)
            assert_same_bits(first, fused_head(*head, temperature=heat, threshold=0.4))
            assert_same_bits(first, fused_head(*head, temperature=temperature, threshold=limit))
            assert_same_bits(first, fused_head(*head, temperature=heat, threshold=limit))


@pytest.mark.parametrize("samples", BATCHES)
def test_exit_is_strictly_greater(samples, device):
    for as_tensor in (False, True):
        head = make_head((samples, 12), 5, device=device)
        confidence = fused_head(*head).confidence
        at = confidence[samples // 2]
        limits = {"at": at, "below": at.nextafter(at.new_tensor(0)), "above": at.nextafter(at.new_tensor(1))}
        for limit in limits.values():
            out = fused_head(*head, threshold=limit if as_tensor else limit.item())
            assert torch.equal(out.confidence, confidence)
            assert torch.equal(out.exit, confidence > limit)
        assert not fused_head(*head, threshold=limits["at"]).exit[samples // 2]
        assert fused_head(*head, threshold=limits["below"]).exit[samples // 2]


@pytest.mark.parametrize("samples, classes", [(7, 300), (2, 1025)])
def test_threshold_one_never_exits_and_zero_always_does(samples, classes, device):
    """With one logit far above the others the probability is 1.0 to the bit."""
    x, weight, bias = make_head((samples, 16), classes, device=device)
    bias[classes // 2] += 200
    for one in (1, 1.0, torch.tensor(1.0, device=device)):
        out = fused_head(x, weight, bias, threshold=one)
        assert torch.equal(out.confidence, torch.ones_like(out.confidence)) and not out.exit.any()
    for zero in (0, 0.0, torch.tensor(0.0, device=device)):
        assert fused_head(x, weight, bias, threshold=zero).exit.all()
    assert not fused_head(x, weight, bias).exit.any(), "the default threshold exits"


@pytest.mark.parametrize("samples", BATCHES)
def test_ties_go_to_the_first_class(samples, device):
    for row, first in (([1, 1, 1], 0), ([0, 2, 2], 1), ([-5, -7, -5], 0), ([0.0, -0.0], 0), ([-1e30, -1e30], 0)):
        out = head_of_logits(batch_of([float(v) for v in row], samples, device))
        assert out.label.tolist() == [first] * samples


def test_a_negative_zero_is_no_less_than_zero(device):
    """A GPU's sum of negative zeros is one; NumPy's, in the interpreter, is not."""
    weight = torch.tensor([[-1.0], [1.0]], device=device).repeat(1, 16)
    out = fused_head(torch.zeros(1, 16, device=device), weight, pool="none")
    assert out.label.tolist() == [0] and out.confidence.tolist() == [0.5]


@pytest.mark.parametrize("samples", [1, 7])
def test_ties_across_blocks_of_classes(samples, device):
    """Classes 1,024 (or 256) apart are in different steps of the softmax."""
    for positions in ((5, 1100), (1023, 1024), (1024, 2047), (1030, 2050), (0, 2050)):
        bias = torch.zeros(2051, device=device)
        bias[list(positions)] = 3.0
        out = fused_head(torch.zeros(samples, 2, device=device), torch.ones(2051, 2, device=device), bias)
        assert out.label.tolist() == [positions[0]] * samples


@pytest.mark.parametrize(
    "row, temperature",
    [([1.9999997615814209, 1.9999998807907104], 1.3), ([1e30, 2e30], 1e-10), ([1e-20, 3e-20], 1e30)],
    ids=["rounded together", "overflow", "underflow"],
)
def test_the_label_does_not_depend_on_the_temperature(row, temperature, device):
    """The label is the class of the largest LOGIT, also where dividing by the temperature makes equals of two."""
    logits = batch_of(row, 1, device)
    assert logits[0, 1] > logits[0, 0]
    assert head_of_logits(logits, temperature=temperature).label.tolist() == [1]


@pytest.mark.parametrize("samples", [3, 7])
def test_large_logits_do_not_overflow(samples, device):
    """The softmax does not depend on what is added to all logits; 1,025 classes go through it in several steps."""
    for offset in (0.0, 88.0, 1000.0, -1000.0, 60000.0, -1e6):
        for classes in (4, 1025):
            steps = torch.linspace(0, 4, classes, device=device).round(decimals=2)
            bias = steps + offset  # rounds steps where the offset is large, and so the reference starts from the sum
            x, weight = torch.zeros(samples, 2, device=device), torch.ones(classes, 2, device=device)
            check_head(x, weight, bias, threshold=0.001)


@pytest.mark.parametrize("samples", [3, 7])
def test_a_temperature_on_the_device_that_is_no_positive_number_gives_no_answer(samples, monkeypatch):
    """The host does not read it, and so cannot refuse it; here it is made not to. The reference says the same."""
    for temperature in (0.0, -0.0, -1.0, NAN, -INF, INF):
        module = importlib.import_module("auxhead.kernels.fused_head")
        monkeypatch.setattr(module, "check_rule_tensors", lambda *_: None)
        head = make_head((samples, 40), 10)
        for by_kernel in (True, False):
            monkeypatch.setattr(module, "runs_triton", lambda _x, by_kernel=by_kernel: by_kernel)
            out = fused_head(*head, temperature=torch.tensor(temperature), threshold=0.0)
            assert_output_form(out, samples, 10, head[0].device)
            assert out.probs.isnan().all() and out.confidence.isnan().all() and not out.exit.any()
            assert torch.equal(out.label, fused_head(*head).label), "the label does not depend on the temperature"


def test_logits_too_large_for_half_precision(device):
    """The sums are float32: what overflows float16 still answers."""
    x = torch.full((2, 8), 300.0, device=device, dtype=torch.float16)
    weight = torch.tensor([[100.0], [101.0], [-100.0]], device=device).expand(3, 8).half()
    out = fused_head(x, weight, threshold=0.5)
    assert (
        out.label.tolist() == [1, 1] and out.exit.all() and torch.equal(out.probs[:, 1], torch.ones(2, device=device))
    )


@pytest.mark.parametrize("classes, banned", [(4, [0]), (4, [0, 1, 3]), (1030, list(range(1025))), (1030, [1024])])
@pytest.mark.parametrize("samples", [2, 7])
def test_a_bias_of_minus_infinity_bans_a_class(samples, classes, banned, device):
    """Its probability is 0; the others answer as ever, and exit."""
    x, weight, bias = make_head((samples, 9), classes, device=device)
    bias[banned] = -INF
    out = check_head(x, weight, bias, threshold=0.0)
    assert out.exit.all() and (out.probs[:, banned] == 0).all()
    assert not set(out.label.tolist()) & set(banned)


@pytest.mark.parametrize("samples", [2, 7])
def test_logits_that_are_no_numbers_never_exit(samples, device):
    """All of them the same, or one of many, wherever it stands."""
    for value in (-INF, INF, NAN):
        for classes, where in ((2, slice(None)), (1030, slice(None)), (1030, 3), (1030, 1029)):
            x, weight, bias = make_head((samples, 9), classes, device=device)
            bias[where] = value
            out = fused_head(x, weight, bias, threshold=0.0)
            assert_output_form(out, samples, classes, device)
            banned = value == -INF and where != slice(None)
            assert out.exit.all() if banned else not out.exit.any() and out.probs.isnan().all()


POOLINGS = {"avg1": ("avg", 1), "avg3": ("avg", 3), "max1": ("max", 1), "max2": ("max", 2), "none": ("none", 1)}


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("samples, classes", [(3, 10), (7, 60)])
def test_a_sample_that_is_not_finite_disturbs_no_other(samples, classes, value, device):
    for pooling in POOLINGS.values():
        pool, size = pooling
        if device.type == "cpu" and samples == 7 and pooling in (POOLINGS["avg3"], POOLINGS["none"]):
            continue  # both ways pool by the same code, and here many programs do
        x, weight, bias = make_head((samples, 3, 5, 4), classes, pool=pool, pool_size=size, device=device)
        options = {"pool": pool, "pool_size": size, "threshold": 0.0}
        clean = fused_head(x, weight, bias, **options)
        assert clean.exit.all()
        broken = samples // 2
        if pool == "max" and value == -INF:
            x[broken, 1] = value  # a maximum over less than the channel would not see it, here as in PyTorch
        else:
            x[broken, 1, 4, 2] = value
        out = fused_head(x, weight, bias, **options)
        assert_output_form(out, samples, classes, device)
        assert not out.exit[broken] and out.confidence[broken].isnan() and out.probs[broken].isnan().all()
        others = [n for n in range(samples) if n != broken]
        for name in ("probs", "label", "confidence", "exit"):
            assert torch.equal(bits(getattr(out, name)[others]), bits(getattr(clean, name)[others])), name


def test_first_token_reads_no_other(device):
    x, weight, bias = make_head((3, 4, 6), 5, pool="first", device=device)
    clean = fused_head(x, weight, bias, pool="first", threshold=0.0)
    x[:, 1:] = NAN
    assert_same_bits(clean, fused_head(x, weight, bias, pool="first", threshold=0.0))
