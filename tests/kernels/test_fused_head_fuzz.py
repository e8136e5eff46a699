"""fused_head.py, fuzzed: any shape, layout, dtype, pool, rule and place of NaN or infinity, against NumPy's float64."""

import pytest
import torch
from auxhead.kernels import fused_head
from auxhead.kernels.reference.fused_head import fused_head_reference
from hypothesis import given, seed, settings
from support.head_cases import assert_same_bits
from support.head_fuzz import Bounds, Inputs, cases, check_answer, exact

pytestmark = pytest.mark.usefixtures("poisoned_empty")

#: In the interpreter a program takes milliseconds.
SMALL = Bounds((3, 1, 2, 7), 5, 5, 3, (3, 2, 10, 17), 150, 2000)
#: From 7 samples on they are multiplied in groups where ``tiles_from_7`` is asked for.
MANY_CLASSES = Bounds((1, 2), 2, 3, 2, (1025,), 100, 40_000)
LARGE = Bounds((1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 64, 70), 300, 40, 7, (), 300_000, 3_000_000)
#: The number of classes is a constant of a compiled kernel, so that each part has few of them.
CLASSES = ((4, 10, 130), (2, 17, 1000), (3, 64, 257), (5, 100, 1025), (7, 128, 1500))


def run_cases(bounds: Bounds, part: int, count: int, device: torch.device) -> None:
    """Check so many cases, those of this part; a failure is printed with the smallest case that fails."""

    @seed(part)
    @settings(max_examples=count, deadline=None, database=None)
    @given(cases(bounds))
    def check(case):
        inputs = Inputs.of(case, device)
        before, wanted = inputs.copies(), exact(case, inputs)
        rule = [
            torch.tensor(value, device=device) if as_tensor else value
            for value, as_tensor in zip((case.temperature, case.threshold), case.tensors, strict=True)
        ]
        options = {"pool": case.pool, "temperature": rule[0], "threshold": rule[1]}

        options["pool_size"] = case.pool_size
        out = fused_head(*inputs[:3], return_probs=case.return_probs, **options)
        assert (out.probs is not None) == case.return_probs
        interpreted_groups = device.type == "cpu" and len(inputs.x) >= 7
        check_answer(case, inputs, out, wanted, by_blas=interpreted_groups)
        assert_same_bits(out, fused_head(*inputs[:3], return_probs=case.return_probs, **options))
        inputs.assert_unchanged(before)
        if device.type == "cpu":  # what runs where Triton does not
            check_answer(case, inputs, fused_head_reference(*inputs[:3], **options), wanted, by_blas=True)

    check()


@pytest.mark.usefixtures("tiles_from_7")
@pytest.mark.parametrize("part", range(2))
def test_small_cases(part):
    run_cases(SMALL, part, 16, torch.device("cpu"))


def test_small_cases_of_many_classes():
    run_cases(MANY_CLASSES, 0, 3, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("part", range(10))
def test_500_cases(part, request):
    """Every second part multiplies small batches in groups, too."""
    if part % 2:
        request.getfixturevalue("tiles_from_7")
    bounds = LARGE._replace(classes=CLASSES[part % len(CLASSES)])
    run_cases(bounds, part, 50, torch.device("cuda", torch.cuda.current_device()))
