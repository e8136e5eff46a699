"""fused_head.py and cpu_head.py: float64 on the CPU is PyTorch's, with answers and gradients in float64."""

import pytest
import torch
from auxhead.kernels import CRITERIA, fused_head, fused_head_reference, runs_triton
from auxhead.kernels.repeat.head import cpu_head
from support.head_cases import assert_same_bits, head_logits, make_head
from torch._subclasses.fake_tensor import FakeTensorMode

HEADS = {
    "map": ((2, 6, 5, 4), {}),
    "grid of maxima": ((3, 2, 5, 4), {"pool": "max", "pool_size": (2, 3)}),
    "tokens": ((2, 4, 9), {}),
    "vectors": ((5, 9), {}),
}


@pytest.mark.parametrize("shape, pooling", HEADS.values(), ids=HEADS)
def test_answers_are_those_of_plain_modules_in_float64(shape, pooling):
    head = make_head(shape, 7, dtype=torch.float64, **pooling)
    out = fused_head(*head, **pooling, temperature=1.5, threshold=0.4)
    wanted = (head_logits(*head, **pooling) / 1.5).softmax(1)
    assert out.probs.dtype == out.confidence.dtype == torch.float64
    torch.testing.assert_close(out.probs, wanted, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(out.confidence, wanted.amax(1), rtol=1e-13, atol=1e-15)
    assert torch.equal(out.label, wanted.argmax(1)) and torch.equal(out.exit, out.confidence > 0.4)


def test_no_kernel_takes_it():
    x = torch.zeros(2, 3, 4, 4)
    assert not runs_triton(x.double()) and not runs_triton(x.long())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_the_short_way_on_a_cpu_is_the_reference_bit_for_bit(criterion, temperature):
    head = make_head((3, 5, 7, 9), 6, dtype=torch.float64)
    rule = {"temperature": torch.tensor(temperature), "threshold": torch.tensor(0.3)}
    options = {"pool": "avg", "pool_size": (1, 1), "criterion": criterion}
    wanted = fused_head_reference(*head, **rule, **options)
    found = cpu_head(*head, *rule.values(), **options, return_probs=True)
    assert found.probs.dtype == found.confidence.dtype == torch.float64
    assert_same_bits(found, wanted)


@pytest.mark.parametrize("return_probs", [True, False], ids=["probs", "no_probs"])
@pytest.mark.parametrize("samples", [3, 0])
def test_fake_tensors_have_the_form_of_real_ones(samples, return_probs):
    x, *linear = make_head((3, 4, 5, 5), 7, dtype=torch.float64)
    head = (x[:samples], *linear)
    real = fused_head(*head, return_probs=return_probs)
    with FakeTensorMode() as mode:
        fake = fused_head(*(mode.from_tensor(one) for one in head), return_probs=return_probs)
    meta = fused_head(*(one.to("meta") for one in head), return_probs=return_probs)
    for one, *others in zip(real, fake, meta, strict=True):
        for other in others:
            assert (one is None) == (other is None)
            assert one is None or (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_opcheck():
    head = [one.requires_grad_() for one in make_head((2, 6, 5, 4), 5, dtype=torch.float64)]
    arguments = (*head, None, None, 1.5, 0.5, "avg", (1, 1), "max_prob", True)
    torch.library.opcheck(torch.ops.auxhead.fused_head.default, arguments)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_gradcheck(criterion):
    for shape, pooling in HEADS.values():
        head = [one.requires_grad_() for one in make_head(shape, 4, dtype=torch.float64, **pooling)]

        def answer(*tensors, pooling=pooling):
            out = fused_head(*tensors, **pooling, criterion=criterion, temperature=1.5)
            return out.probs, out.confidence

        assert torch.autograd.gradcheck(answer, head)


def test_gradgradcheck():
    head = [one.requires_grad_() for one in make_head((2, 3, 2, 2), 3, dtype=torch.float64)]
    assert torch.autograd.gradgradcheck(lambda *tensors: fused_head(*tensors).probs, head)
