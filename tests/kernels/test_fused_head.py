"""fused_head.py and reference/: any shape, layout, dtype, pool, rule and odd number, as accurate as PyTorch, repeated.

What runs where Triton does not, the reference and the short way on a CPU, is held to the same.
"""

import math

import pytest
import torch
from auxhead.kernels import CRITERIA, HeadOutput, fused_head, runs_triton
from auxhead.kernels.launch.arrival_counters import arrival_counters
from auxhead.kernels.launch.check_arguments import MOST_WINDOWS
from auxhead.kernels.reference.fused_head import fused_head_reference
from auxhead.kernels.reference.hidden_layers import NO_LAYERS
from auxhead.model.heads.repeats import cpu_head
from hypothesis import given, seed, settings
from support.head_cases import (
    DTYPES,
    assert_same_bits,
    check_head,
    exact_logits,
    feature_count,
    make_head,
    make_input,
    make_linear,
    readable,
)
from support.head_fuzz import Bounds, Inputs, cases, check_answer, exact
from support.layouts import MAP_LAYOUTS, TOKEN_LAYOUTS, VECTOR_LAYOUTS
from torch import Tensor

pytestmark = pytest.mark.usefixtures("poisoned_empty")
tiles_from_7 = pytest.mark.usefixtures("tiles_from_7")

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
        numbers = [torch.tensor(value, device=device) for value in (case.temperature, case.threshold)]
        rule = [
            tensor if as_tensor else value
            for tensor, value, as_tensor in zip(numbers, (case.temperature, case.threshold), case.tensors, strict=True)
        ]
        pooling = {"pool": case.pool, "pool_size": case.pool_size}
        options = {**pooling, "temperature": rule[0], "threshold": rule[1]}
        out = fused_head(*inputs[:3], return_probs=case.return_probs, **options)
        assert (out.probs is not None) == case.return_probs
        interpreted_groups = device.type == "cpu" and len(inputs.x) >= 7
        check_answer(case, inputs, out, wanted, by_blas=interpreted_groups)
        assert_same_bits(out, fused_head(*inputs[:3], return_probs=case.return_probs, **options))
        if device.type == "cpu":  # what runs where Triton does not
            check_answer(case, inputs, fused_head_reference(*inputs[:3], **options), wanted, by_blas=True)
            assert_short_way(*inputs[:3], *numbers, return_probs=case.return_probs, **pooling)
        inputs.assert_unchanged(before)

    check()


def assert_short_way(
    x: Tensor, weight: Tensor, bias: Tensor | None, heat: Tensor, limit: Tensor, *, return_probs: bool = True,
    pool: str = "avg", pool_size: tuple[int, int] = (1, 1), criterion: str = "max_prob",
) -> HeadOutput:  # fmt: skip
    """The short way on a CPU is the reference bit for bit, in the same form; returns its answer."""
    options = {"pool": pool, "pool_size": pool_size, "criterion": criterion}
    wanted = fused_head_reference(x, weight, bias, temperature=heat, threshold=limit, **options)
    found = cpu_head(
        x, weight, bias, temperature=heat, threshold=limit, return_probs=return_probs, hidden=NO_LAYERS, **options
    )
    assert_same_bits(found, wanted if return_probs else wanted._replace(probs=None))
    for one, other in zip(found, wanted, strict=True):
        assert one is None or (one.dtype, one.stride(), one.requires_grad) == (other.dtype, other.stride(), False)
    return found


@tiles_from_7
@pytest.mark.parametrize("part", range(2))
def test_small_cases(part):
    run_cases(SMALL, part, 16, torch.device("cpu"))


def test_small_cases_of_many_classes():
    run_cases(MANY_CLASSES, 0, 3, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(10 * torch.cuda.is_available()))
def test_500_cases(part, request):
    """Every second part multiplies small batches in groups, too."""
    if part % 2:
        request.getfixturevalue("tiles_from_7")
    bounds = LARGE._replace(classes=CLASSES[part % len(CLASSES)])
    run_cases(bounds, part, 50, torch.device("cuda", torch.cuda.current_device()))


#: Shape, classes, pool and its size: single elements, windows that overlap or repeat, groups of samples, several blocks
#: of classes in product and softmax, more partial sums than a step reads, more features than a product takes in one.
NAMED = [
    ((1, 1, 1, 1), 10, "avg", 1),
    ((2, 7, 13, 11), 10, "max", 1),
    ((3, 5, 7, 9), 6, "avg", (4, 1)),
    ((1, 3, 2, 3), 5, "max", (5, 7)),
    ((7, 2, 1, 4), 5, "avg", (3, 2)),
    ((17, 33, 5, 3), 50, "avg", 1),
    ((2, 7, 33), 10, "avg", 1),
    ((7, 5, 9), 10, "max", 1),
    ((3, 12, 20), 10, "first", 1),
    ((33, 21), 10, "none", 1),
    ((2, 19), 2049, "avg", 1),
    ((7, 19), 257, "avg", 1),
    ((1, 16), 32000, "avg", 1),
    ((2, 10, 8, 8), 40, "none", 1),
    ((7, 3, 8, 8), 40, "none", 1),
]


@tiles_from_7
@pytest.mark.parametrize("shape, classes, pool, pool_size", NAMED, ids=readable)
def test_named_sizes(shape, classes, pool, pool_size, device):
    for dtype in DTYPES.values() if device.type == "cuda" or math.prod(shape) * classes < 20_000 else [torch.float16]:
        head = make_head(shape, classes, pool=pool, pool_size=pool_size, dtype=dtype, device=device)
        out = check_head(*head, pool=pool, pool_size=pool_size, threshold=0.5 if classes < 100 else 0.01)
    without = check_head(*head, pool=pool, pool_size=pool_size, return_probs=False)
    assert torch.equal(out.label, without.label) and torch.equal(out.confidence, without.confidence)
    check_head(head[0], head[1], None, pool=pool, pool_size=pool_size)


def test_many_features(device):
    """A flattened map in the size class of ResNet-18's first block; there on a GPU, a third of it here."""
    shape = (1, 64, 56, 56) if device.type == "cuda" else (1, 67, 32, 31)
    check_head(*make_head(shape, 10, pool="none", dtype=torch.float16, device=device), pool="none")


@pytest.mark.parametrize("windows", [3000, MOST_WINDOWS])
def test_a_long_map_in_many_windows(windows, device):
    """Products of a position and the map's size leave int32 here; those with the rest of a window just do not."""
    shape, pool_size = (1, 1, 1, 2 * MOST_WINDOWS - 1 if windows == MOST_WINDOWS else 2**20), (1, windows)
    x, weight, bias = make_head(shape, 2, pool_size=pool_size, device=device)
    x += torch.linspace(-1, 1, shape[-1], device=device)
    out = fused_head(x, weight, bias, pool_size=pool_size, threshold=0.5)
    # against the CPU: the products of PyTorch's own windows on a GPU leave int32, and it reads elsewhere
    out = HeadOutput(*(field.cpu() for field in out))
    check_head(x.cpu(), weight.cpu(), bias.cpu(), pool_size=pool_size, out=out)


@pytest.mark.parametrize("shape, pool", [((0, 3, 4, 5), "avg"), ((0, 3, 4, 5), "none"), ((0, 4, 6), "first")])
def test_no_samples(shape, pool, device):
    for return_probs in (True, False):
        weight = torch.ones(5, feature_count((1, *shape[1:]), pool), device=device)
        out = fused_head(torch.zeros(shape, device=device), weight, pool=pool, return_probs=return_probs)
        assert out.label.shape == out.confidence.shape == out.exit.shape == (0,)
        assert (out.label.dtype, out.confidence.dtype, out.exit.dtype) == (torch.int64, torch.float32, torch.bool)
        assert out.probs.shape == (0, 5) if return_probs else out.probs is None


# Memory: read in place, whatever the strides, and never written

LAYOUTS = {
    **{f"map {name}": (layout, (2, 3, 5, 4), ("avg", "max", "none")) for name, layout in MAP_LAYOUTS.items()},
    "many samples": (MAP_LAYOUTS["steps"], (7, 3, 5, 4), ("avg", "max")),
    "one column": (MAP_LAYOUTS["padded_rows"], (2, 5, 6, 1), ("avg", "none")),
    "one channel, one row": (MAP_LAYOUTS["channels_last"], (3, 1, 1, 7), ("avg", "none")),
    **{f"tokens {name}": (layout, (3, 5, 9), ("avg", "first", "none")) for name, layout in TOKEN_LAYOUTS.items()},
    **{f"vectors {name}": (layout, (7, 21), ("avg",)) for name, layout in VECTOR_LAYOUTS.items()},
}


@tiles_from_7
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, device):
    make, shape, pools = LAYOUTS[layout]
    for pool, dtype in zip(pools, (torch.float32, torch.bfloat16, torch.float16), strict=False):
        x = make(lambda s, dtype=dtype: make_input(s, dtype=dtype, device=device), *shape)
        assert tuple(x.shape) == shape
        before = x.clone()
        check_head(x, *make_linear(feature_count(shape, pool), 10, dtype=dtype, device=device), pool=pool)
        assert torch.equal(x, before), "an input was written"


PARAMETERS = {
    "transposed": lambda w, b: (w.t().contiguous().t(), torch.stack([b, b + 100], 1)[:, 0]),
    "steps": lambda w, b: (w.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3], torch.cat([b + 9, b])[11:]),
    "expanded": lambda w, b: (w[:1].expand_as(w), b[:1].expand(11)),
    "same columns": lambda w, b: (w[:, :1].expand_as(w), None),
}


@tiles_from_7
@pytest.mark.parametrize("layout", PARAMETERS.values(), ids=PARAMETERS)
def test_layouts_of_parameters(layout, device):
    for samples in (2, 7):
        x = make_input((samples, 6, 5, 5), device=device)
        check_head(x, *layout(*make_linear(24, 11, device=device)), pool_size=2)


def test_views_of_one_buffer(device):
    """x, weight and bias that share memory: nothing is written to any of them, and NaN around them is not read."""
    buffer = make_input((1, 400), device=device)[0]
    before = buffer.clone()
    check_head(buffer[:60].view(3, 20), buffer[40:240].view(10, 20), buffer[100:110])
    assert torch.equal(buffer, before)

    def framed(tensor):
        frame = torch.full([size + 2 for size in tensor.shape], math.nan, device=device)
        return frame[tuple(slice(1, 1 + size) for size in tensor.shape)].copy_(tensor)

    check_head(*map(framed, make_head((3, 5, 6, 7), 10, pool_size=3, device=device)), pool_size=3)


# Repeats

REPEATED = {
    "map": ((2, 40, 5, 7), 10, {}),
    "map of a group and a sample": ((17, 20, 2, 2), 20, {}),
    "grid": ((2, 3, 5, 7), 10, {"pool_size": 3}),
    "flattened": ((3, 10, 4, 5), 17, {"pool": "none"}),
    "many classes": ((1, 70), 1030, {}),
    "tokens": ((3, 3, 50), 7, {"pool": "max"}),
}


@tiles_from_7
def test_heads_of_many_sizes_in_turn_answer_the_same_bits_again(device):
    """They share counters, and none sees what another left; a later call does not change an earlier one's answer."""
    heads = [(make_head(*sizes, device=device, **pooling), pooling) for *sizes, pooling in REPEATED.values()]
    answers = [check_head(*head, **pooling) for head, pooling in heads]
    kept = [HeadOutput(*(part.clone() for part in answer)) for answer in answers]
    for _ in range(3 if device.type == "cuda" else 1):
        for (head, pooling), answer in zip(reversed(heads), reversed(kept), strict=True):
            assert_same_bits(answer, fused_head(*head, threshold=0.5, **pooling))
    for answer, one in zip(answers, kept, strict=True):
        assert_same_bits(answer, one)
    if runs_triton(heads[0][0][0]):
        assert not arrival_counters(device).take(1024).any()


# What runs where Triton does not

#: Logits of one sample.
ODD = {
    "NaN": [0.0, math.nan, 1.0, 2.0],
    "NaN behind inf": [0.0, math.inf, math.nan, 2.0],
    "all NaN": [math.nan] * 4,
    "inf twice": [0.0, math.inf, math.inf, 2.0],
    "all -inf": [-math.inf] * 4,
    "both": [-math.inf, math.inf, 0.0, 1.0],
    "equals": [1.0, 3.0, 3.0, 3.0],
    "signed zeros": [-0.0, 0.0, -0.0, 0.0],
    "far apart": [3e38, -3e38, 0.0, 1.0],
    "tiny": [1e-45, 2e-45, 0.0, -1e-45],
}
#: What a rule's tensor may hold, though nobody can assign all of it.
TEMPERATURES = [1.0, 0.3, 1e-30, 1e30, 1e-45, 0.0, -0.0, -1.0, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("logits", ODD.values(), ids=ODD)
def test_the_short_way_on_a_cpu_with_odd_logits_and_temperatures(logits):
    """Alone, where the whole batch is odd, and beside samples that are not; as biases they come as they are."""
    row, fine = torch.tensor([logits]), torch.tensor([[0.3, 0.1, -2.0, 4.0]])
    for temperature in TEMPERATURES:
        for x in (row, torch.cat([fine, row, fine])):
            heat, limit = torch.tensor(temperature), torch.tensor(0.25)
            for head in ((torch.zeros(len(x), 2), torch.zeros(4, 2), row[0]), (x, torch.eye(4), None)):
                assert assert_short_way(*head, heat, limit).label.min() >= 0


@pytest.mark.parametrize("criterion", CRITERIA)
def test_the_short_way_on_a_cpu_by_each_criterion(criterion):
    for dtype in (*DTYPES.values(), torch.float64):
        for temperature, limit in ((1.0, 0.3), (0.7, math.nan), (1.0, math.inf)):
            x, weight, bias = make_head((3, 5, 7, 9), 6, dtype=dtype)
            head = torch._neg_view(x), weight.t().contiguous().t(), torch._neg_view(bias)
            out = assert_short_way(*head, torch.tensor(temperature), torch.tensor(limit), criterion=criterion)
            assert out.probs.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize(("pool", "size"), [("avg", (2, 2)), ("max", (1, 1)), ("none", (1, 1))])
def test_float64_is_pytorchs_in_float64(pool, size):
    """Tests of the kernel measure its errors against this: float32 within would hide errors of that size."""
    head = make_head((4, 3, 6, 5), 7, pool=pool, pool_size=size, dtype=torch.float64)
    wanted = (exact_logits(*head, pool=pool, pool_size=size) / 1.3).softmax(-1)
    for call in (fused_head, fused_head_reference):
        out = call(*head, pool=pool, pool_size=size, temperature=1.3, threshold=0.4)
        assert out.probs.dtype == out.confidence.dtype == torch.float64
        torch.testing.assert_close(out.probs, wanted, rtol=1e-13, atol=0.0)
        assert torch.equal(out.label, wanted.argmax(1)) and torch.equal(out.exit, out.confidence > 0.4)
    assert not runs_triton(head[0]) and not runs_triton(head[0].long())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_narrower_dtypes_are_computed_in_float32(dtype):
    """Sums included, of which half precision would lose what single precision keeps."""
    x, weight, bias = make_head((4, 300, 6, 5), 7, dtype=dtype)
    options = {"pool": "avg", "pool_size": (1, 1), "temperature": 1.0, "threshold": 0.5}
    out = fused_head_reference(x, weight, bias, **options)
    exact = fused_head_reference(x.double(), weight.double(), bias.double(), **options)
    assert out.probs.dtype == torch.float32
    torch.testing.assert_close(out.probs.double(), exact.probs, rtol=1e-5, atol=1e-7)
