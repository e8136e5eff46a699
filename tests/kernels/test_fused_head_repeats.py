"""fused_head.py, repeated: the same bits, inputs unchanged, arrival counters back at zero."""

import pytest
import torch
from auxhead.kernels import fused_head, runs_triton
from auxhead.kernels.launch.arrival_counters import arrival_counters
from support.head_cases import DTYPES, assert_same_bits, check_head, make_head, readable

pytestmark = pytest.mark.usefixtures("tiles_from_7")

HEADS = {
    "map": ((2, 40, 5, 7), 10, {}),
    "map of a group and a sample": ((17, 20, 2, 2), 20, {}),
    "grid": ((2, 3, 5, 7), 10, {"pool_size": 3}),
    "flattened": ((3, 10, 4, 5), 17, {"pool": "none"}),
    "many classes": ((1, 70), 1030, {}),
    "tokens": ((3, 3, 50), 7, {"pool": "max"}),
}


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("shape, classes, pooling", HEADS.values(), ids=HEADS)
def test_repeats_bit_for_bit_and_writes_no_input(shape, classes, pooling, device):
    for dtype in DTYPES.values():
        inputs = [*make_head(shape, classes, dtype=dtype, device=device, **pooling)]
        inputs += [torch.tensor(1.5, device=device), torch.tensor(0.3, device=device)]
        before = [tensor.clone() for tensor in inputs]
        x, weight, bias, temperature, threshold = inputs
        first = fused_head(x, weight, bias, temperature=temperature, threshold=threshold, **pooling)
        for _ in range(2):
            again = fused_head(x, weight, bias, temperature=temperature, threshold=threshold, **pooling)
            assert_same_bits(first, again)
        for old, tensor in zip(before, inputs, strict=True):
            assert torch.equal(old, tensor)


def test_answers_share_no_memory_with_each_other(device):
    """A later call does not change what an earlier one returned."""
    x, weight, bias = make_head((3, 20), 10, device=device)
    first = fused_head(x, weight, bias)
    kept = [tensor.clone() for tensor in first]
    fused_head(-x, weight, bias)
    for old, tensor in zip(kept, first, strict=True):
        assert torch.equal(old, tensor)


@pytest.mark.usefixtures("poisoned_empty")
def test_many_sizes_in_turn(device):
    """Heads of all sizes share counters; none of them sees what another left."""
    heads = [
        (make_head(shape, classes, device=device, **pooling), pooling) for shape, classes, pooling in HEADS.values()
    ]
    answers = [check_head(*head, **pooling) for head, pooling in heads]
    for _ in range(3 if device.type == "cuda" else 1):
        for (head, pooling), answer in zip(reversed(heads), reversed(answers), strict=True):
            assert_same_bits(answer, fused_head(*head, threshold=0.5, **pooling))


@pytest.mark.parametrize("shape", [(1, 3), (5, 200), (9, 60), (3, 8, 5, 5)], ids=readable)
def test_counters_are_zero_after_a_launch(shape, device):
    head = make_head(shape, 10, device=device)
    if not runs_triton(head[0]):
        pytest.skip("the reference runs: no counters")
    for _ in range(3):
        fused_head(*head)
    assert not arrival_counters(device).take(1024).any()
