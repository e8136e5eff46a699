"""Inputs of a head, its answer in plain torch.nn modules, and the check that fused_head gives that answer."""

import math
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from auxhead.kernels import HeadOutput, fused_head
from auxhead.kernels.launch.arrival_counters import ArrivalCounters
from auxhead.kernels.launch.choose_config import overriding
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import head_view
from support.tolerance import assert_as_accurate_as_pytorch
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: Heads of each pool and rank, whose sizes no block divides: input, classes, pool and its windows.
POOLED_HEADS = {
    "one window": ((5, 11, 4, 3), 7, "avg", 1),
    "one maximum": ((5, 11, 4, 3), 7, "max", 1),
    "windows": ((2, 3, 7, 5), 19, "avg", (3, 2)),
    "maxima": ((2, 3, 7, 5), 19, "max", (3, 2)),
    "flattened": ((3, 4, 3, 5), 33, "none", 1),
    "tokens": ((3, 6, 10), 7, "avg", 1),
    "largest tokens": ((3, 6, 10), 7, "max", 1),
    "first token": ((3, 6, 10), 7, "first", 1),
    "vector": ((1, 33), 40, "none", 1),
}


def readable(value) -> str:
    """Test id of a parameter: 2x7x13x11 for a shape, fp16 for a dtype."""
    if isinstance(value, (tuple, list, torch.Size)):
        return "x".join(map(str, value))
    return {dtype: name for name, dtype in DTYPES.items()}.get(value, str(value))


def feature_count(shape, pool="avg", pool_size=1) -> int:
    height, width = (pool_size, pool_size) if isinstance(pool_size, int) else pool_size
    if pool == "none" or len(shape) == 2:
        return math.prod(shape[1:])
    return shape[1] * height * width if len(shape) == 4 else shape[2]


def make_input(shape, *, dtype=torch.float32, device="cpu", seed=0) -> Tensor:
    """Return noise whose mean differs by channel, so that pooled features are of order 1 however large the map."""
    generator = torch.Generator().manual_seed(seed)
    mean_shape = {2: shape, 3: (shape[0], 1, shape[-1]), 4: (*shape[:2], 1, 1)}[len(shape)]
    x = torch.randn(shape, generator=generator) + torch.randn(mean_shape, generator=generator)
    return x.to(device, dtype)


def make_linear(features, classes, *, dtype=torch.float32, device="cpu", bias=True, seed=1):
    """Return weight and bias that make logits of order 1 to 3."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, features, generator=generator) * 1.5 / math.sqrt(features)
    offset = torch.randn(classes, generator=generator) if bias else None
    return weight.to(device, dtype), None if offset is None else offset.to(device, dtype)


def make_head(shape, classes, *, pool="avg", pool_size=1, dtype=torch.float32, device="cpu", bias=True, seed=0):
    """Return x, weight and bias of a head."""
    x = make_input(shape, dtype=dtype, device=device, seed=seed)
    features = feature_count(shape, pool, pool_size)
    return x, *make_linear(features, classes, dtype=dtype, device=device, bias=bias, seed=seed + 1)


def head_logits(x, weight, bias, *, pool="avg", pool_size=1) -> Tensor:
    """Return the logits as people write the head, in the dtype of x."""
    if x.ndim == 2 or pool == "none":
        features = nn.Flatten()(x)
    elif x.ndim == 3:
        features = x[:, 0] if pool == "first" else x.mean(1) if pool == "avg" else x.max(1).values
    else:
        layer = nn.AdaptiveAvgPool2d if pool == "avg" else nn.AdaptiveMaxPool2d
        features = nn.Flatten()(layer(pool_size)(x))
    return F.linear(features, weight, bias)


def exact_logits(x, weight, bias, **pooling) -> Tensor:
    """Return the logits in float64."""
    return head_logits(x.double(), weight.double(), None if bias is None else bias.double(), **pooling)


def assert_output_form(out: HeadOutput, samples: int, classes: int, device: torch.device) -> None:
    """Assert shapes, dtypes and device of an answer, and that each label is a class."""
    wanted = {
        "probs": ((samples, classes), torch.float32),
        "label": ((samples,), torch.int64),
        "confidence": ((samples,), torch.float32),
        "exit": ((samples,), torch.bool),
    }
    for name, (shape, dtype) in wanted.items():
        tensor = getattr(out, name)
        if tensor is None and name == "probs":
            continue
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), name
        assert tensor.device == device and tensor.is_contiguous(), name
    assert ((out.label >= 0) & (out.label < classes)).all(), f"labels outside [0, {classes}): {out.label}"


def check_head(
    x, weight, bias=None, *, pool="avg", pool_size=1, temperature=1.0, threshold=0.5, return_probs=True, out=None
) -> HeadOutput:
    """Run ``fused_head`` (or take ``out``) and assert everything that its docstring promises of finite logits."""
    if out is None:
        out = fused_head(
            x, weight, bias, pool=pool, pool_size=pool_size, temperature=temperature, threshold=threshold,
            return_probs=return_probs,
        )  # fmt: skip
    assert_output_form(out, x.shape[0], weight.shape[0], x.device)
    assert (out.probs is not None) == return_probs
    heat, limit = float(temperature), float(threshold)
    exact = exact_logits(x, weight, bias, pool=pool, pool_size=pool_size) / heat
    probs = exact.softmax(-1)
    pytorch = (head_logits(x, weight, bias, pool=pool, pool_size=pool_size) / heat).softmax(-1)
    # Together: of one number alone PyTorch may be right by luck.
    chosen = probs.gather(1, out.label[:, None])
    said = probs if out.probs is None else out.probs.double()
    assert out.probs is None or torch.equal(out.confidence, out.probs.amax(-1)), "confidence: not the largest of probs"
    top, pytorch_top = probs.amax(-1, keepdim=True), pytorch.amax(-1, keepdim=True)
    assert_as_accurate_as_pytorch(
        torch.cat([said, out.confidence.double()[:, None], chosen], 1),
        torch.cat([probs, top, top], 1),
        torch.cat([pytorch, pytorch_top, pytorch_top], 1),
        magnitude=exact.abs().max().item(),
        what="probs, confidence, and what the label's probability should be",
    )
    assert torch.equal(out.exit, out.confidence > limit), "exit is not confidence > threshold"
    return out


@contextmanager
def launched_as(config, x, rows, pool, pool_size=(1, 1)):
    """Let a head with so many rows of the weight be launched as given."""
    view = head_view(tuple(x.shape), x.stride(), pool, pool_size)
    with overriding({HeadShape.of(view, rows, pool_max=pool == "max", dtype=x.dtype): config}):
        yield


def assert_same_bits(first: HeadOutput, second: HeadOutput) -> None:
    """Assert that two answers are the same bit for bit; NaN is the same as NaN."""
    for name, one, other in zip(HeadOutput._fields, first, second, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            assert torch.equal(bits(one), bits(other)), f"{name} differs"


def check_in_turn(heads, call, device):
    """Check answers of heads called in turn on two streams, beside other work: each is its own, bit for bit."""
    many = torch.randn(4096, 4096, dtype=torch.float16, device=device)
    streams = [torch.cuda.Stream() for _ in range(3)]
    wanted = [call(*head) for head in heads]
    torch.cuda.synchronize()
    said = []
    for request in range(40):
        with torch.cuda.stream(streams[0]):
            many @ many
        with torch.cuda.stream(streams[1 + request % 2]):
            said.append(call(*heads[request // 2 % 2]))
    torch.cuda.synchronize()
    for request, output in enumerate(said):
        assert_same_bits(output, wanted[request // 2 % 2])


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bits, with every NaN made the same one."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.masked_fill(tensor.isnan(), float("nan")).contiguous().view(torch.int32)


@contextmanager
def taken_counters():
    """What launches take from ``ArrivalCounters`` meanwhile."""
    taken, take = [], ArrivalCounters.take

    def spy(self, count):
        taken.append(take(self, count))
        return taken[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArrivalCounters, "take", spy)
        yield taken
